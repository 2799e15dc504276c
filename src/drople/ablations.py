"""The ablation tables of the paper, and one of our default: each row a label, a method and options.

What the paper leaves open is our reading. Rows that it marks with "+" keep the baseline's L2 pull and have no
residual entropy; those below replace the pull. The weights of D_cos and of D_KL + L_1 are CoPrompt's and
PromptSRC's, from where the paper takes the terms; Dropblock drops as many tokens as Dropout 0.5. The unimodal
rows stand on the baseline, as their first row, Dropout, does: it has the numbers of Dropout 0.5.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class AblationRow(NamedTuple):
    label: str
    method: str
    options: Mapping[str, Any] = {}


PLAIN = "baseline"
DROPPED = "baseline+drople"
FULL = "drople"
NO_ENTROPY: Mapping[str, Any] = {"residual_entropy_visual": 0.0, "residual_entropy_text": 0.0}
VANILLA: Mapping[str, Any] = {"rate": "uniform", "p_max": 0.5, **NO_ENTROPY}
# What our default changes of what paper and released code share: their presets begin with it. Ablations stand on it
# without the paper's supplementary tokens, which cost novel classes. Here, since tables need no torch.
PAPER: Mapping[str, Any] = {
    "text_length": 4,
    "visual_depth": 6,
    "coupled": False,
    "prototypes": 0.0,
    "l2": 0.0,
}
LOW_RANK: Mapping[str, Any] = {"lora_rank": 2, "lora_towers": "both", "lora_from": 0, "lora_lr": 1.0}
BY_TEXT: Mapping[str, Any] = {"prototypes": 0.0}
NO_DROPOUT: Mapping[str, Any] = {"p_min": 0.0, "p_max": 0.0}

ABLATIONS: dict[str, Sequence[AblationRow]] = {
    # Table 3, its upper part.
    "components": (
        AblationRow("Baseline", PLAIN),
        AblationRow("+Dropout 0.5", DROPPED, VANILLA),
        AblationRow("+Dropout 0.3", DROPPED, {**VANILLA, "p_max": 0.3}),
        AblationRow("+Dropblock", DROPPED, {**VANILLA, "rate": "block"}),
        AblationRow("+IWTD", DROPPED, NO_ENTROPY),
        AblationRow("IWTD, D_cos", FULL, {**PAPER, **NO_ENTROPY, "cosine": 8.0}),
        AblationRow(
            "IWTD, D_KL+L_1", FULL, {**PAPER, **NO_ENTROPY, "kl": 1.0, "l1_text": 25.0, "l1_image": 10.0}
        ),
        AblationRow("IWTD, L_RE", FULL, PAPER),
    ),
    # Table 3, its lower part.
    "scores": (
        AblationRow("S_self", FULL, {**PAPER, "scores": ("self",)}),
        AblationRow("S_self,cls", FULL, {**PAPER, "scores": ("self", "class")}),
        AblationRow("S_self,cls,cross", FULL, {**PAPER, "scores": ("self", "class", "cross")}),
    ),
    # Table 4: (a), (b) and (c).
    "range": tuple(
        AblationRow(f"range {low}-{high}", FULL, {**PAPER, "p_min": low / 100, "p_max": high / 100})
        for low, high in ((0, 40), (5, 45), (10, 50), (20, 70))
    ),
    "bridge": tuple(
        AblationRow(f"xi {count}", FULL, {**PAPER, "bridge_tokens": count}) for count in (16, 32, 64, 128)
    ),
    "lambda": tuple(
        AblationRow(f"lambda0 {value:.2f}", FULL, {**PAPER, "lambda0": value})
        for value in (0.05, 0.1, 0.2, 0.4)
    ),
    # Appendices C and D.
    "residual": (
        AblationRow("Linear", FULL, {**PAPER, "residual": "linear"}),
        AblationRow("Non-linear", FULL, {**PAPER, "residual": "nonlinear"}),
    ),
    "unimodal": (
        AblationRow("Dropout", DROPPED, VANILLA),
        AblationRow("AD-DROP-Uni", DROPPED, {"rate": "attribution", **NO_ENTROPY}),
        AblationRow("Group-Wise-Uni", DROPPED, {"rate": "group", **NO_ENTROPY}),
        AblationRow("StandOut-Uni", DROPPED, {"rate": "standout", **NO_ENTROPY}),
        AblationRow("IWTD", FULL, PAPER),
    ),
    # What each part of our default is worth; prototypes change nothing of the training, so below them all go by text.
    "default": (
        AblationRow("default", FULL),
        AblationRow("no prototypes", FULL, BY_TEXT),
        AblationRow("no prototypes, no dropout", FULL, {**BY_TEXT, **NO_DROPOUT}),
        AblationRow("no prototypes, uniform dropout 0.3", FULL, {**BY_TEXT, "rate": "uniform", "p_max": 0.3}),
        AblationRow("no prototypes, no residual entropy", FULL, {**BY_TEXT, **NO_ENTROPY}),
        AblationRow("no prototypes, no L2 pull", FULL, {**BY_TEXT, "l2": 0.0}),
        AblationRow("the paper's prompts", FULL, {**PAPER, "prototypes": 1.0, "l2": 2.0}),
        AblationRow("the paper's prompts and LoRA, an L2 pull of 4", FULL, {**PAPER, **LOW_RANK, "l2": 4.0}),
    ),
}

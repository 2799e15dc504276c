"""The DroPLe paper's own baseline.

The same deep prompts with no token dropout and no residual entropy; an L2 pull of both branches'
embeddings to the frozen ones, as KgCoOp has it for text. Section "Component Ablation"; published
83.82 / 75.50 / 79.44 (base / novel / harmonic mean over 11 datasets, ViT-B/16).
"""

from dataclasses import dataclass

from torch import Tensor

from drople.losses import l2_consistency
from drople.methods.base import Batch, register
from drople.methods.drople import DeepPromptOptions, DeepPrompts
from drople.options import option
from drople.regulariser import Branches


@dataclass(frozen=True)
class BaselineOptions(DeepPromptOptions):
    consistency: float = option(8.0, "weight of the L2 pull on text and image features (KgCoOp 8)", low=0)


@register
class Baseline(DeepPrompts):
    name = "baseline"
    title = "Deep prompts with an L2 pull"
    kind = "prompt"
    citation = "Chen et al., AAAI 2026 (its baseline)"
    Options = BaselineOptions
    options: BaselineOptions

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        if not self.options.consistency:
            return {}
        pull = l2_consistency(branches.classes, branches.frozen_classes)
        pull = pull + l2_consistency(branches.images, branches.frozen_images)
        return {"consistency": self.options.consistency * pull}

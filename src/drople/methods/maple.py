"""Multi-modal Prompt Learning (MaPLe).

Khattak, Rasheed, Maaz, Khan, Khan. "MaPLe: Multi-modal Prompt Learning." CVPR 2023. Published average over
11 datasets, base-to-novel, ViT-B/16: 82.28 / 75.14 / 78.55.

Text prompts P_i at the first J layers; the visual prompts of a layer are a linear function of them, so both
towers are tuned together:

    [_, W_i] = L_i([P_{i-1}, W_{i-1}])                i = 1 .. J   (text)
    [c_i, E_i, _] = V_i([c_{i-1}, E_{i-1}, F_i(P_{i-1})])          (vision), F_i linear
    L = L_ce

Authors' defaults: J 9, two tokens from the first words of "a photo of a" (the other two stay frozen words),
SGD 3.5e-3, batch 4, 5 epochs; J 3 and 2 epochs across datasets. Their deep coupling functions start as copies
of one draw; here each is drawn by itself.

Checked against a slow reference in float64 (tests/test_prompt_methods.py): differences of at most 3e-6.
"""

from typing import ClassVar

from drople.methods.base import Presets, register
from drople.methods.coupled import CoupledMethod, CoupledOptions


@register
class MaPLe(CoupledMethod):
    name = "maple"
    title = "Multi-modal Prompt Learning"
    citation = "Khattak et al., CVPR 2023"
    Options = CoupledOptions
    presets: ClassVar[Presets] = {
        "authors": {"optimizer": "sgd", "lr": 3.5e-3, "batch_size": 4, "epochs": 5},
    }

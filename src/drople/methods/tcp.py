"""Textual-based Class-aware Prompt tuning (TCP).

Yao, Zhang, Xu. "TCP: Textual-based Class-aware Prompt tuning for Visual-Language Model." CVPR 2024. Published
average over 11 datasets, base-to-novel, ViT-B/16: 84.13 / 75.36 / 79.51.

A shared learnable context at the first layer; at one deep layer it is replaced by prompts of each class's
own, made out of the class's frozen text feature by the textual knowledge embedding (TKE):

    P_k = W_up QuickGELU(W_down w_k^clip)
    L = L_ce + 8 * 1/K sum_k (1 - cos(w_k, w_k^clip))

Authors' defaults: 4 tokens drawn at random, layer 8 (the ninth), weight 8, Adam 2e-3, batch 32, 50 epochs.
Their code keeps a tail in the sentences of most datasets (", a type of pet."), which is not there here.

Checked against a slow reference in float64 (tests/test_prompt_methods.py): differences of at most 1e-6.
"""

from typing import ClassVar

from drople.methods.base import Presets, register
from drople.methods.class_aware import ClassAwareMethod, ClassAwareOptions


@register
class TCP(ClassAwareMethod):
    name = "tcp"
    title = "Textual-based Class-aware Prompt tuning"
    citation = "Yao et al., CVPR 2024"
    Options = ClassAwareOptions
    presets: ClassVar[Presets] = {"authors": {"init": "", "lr": 2e-3, "batch_size": 32, "epochs": 50}}

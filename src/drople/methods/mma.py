"""MMA, the multi-modal adapter: bottlenecks in the later layers of both towers that share their middle.

Yang, Zhang, Wang, Xie. "MMA: Multi-Modal Adapter for Vision-Language Models." CVPR 2024.

    x_out = layer(x) + s W_up relu(W_shared relu(W_down norm(x)))        in the last 8 layers of both towers

norm: the layer's own first, frozen norm. W_down and W_up are a tower's and a layer's, W_shared [32, 32] joins
both towers at a layer, counted from the top here, so that towers of different depth can share. The learned
matrices get the gradient of s = 1, and what flows on to x gets s times it. The authors: width 32, s = 0.001,
layers 5 to 12 of 12, "a photo of a {}.", SGD 1.5e-3, batch 16, 5 epochs. The default s is 0.01: AdamW does
not see the size of a gradient, and in bf16 a thousandth is rounded away. Any class can be asked for.

Checked against a slow reference in tests/test_adapters.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.backbone.walk import Adapt
from drople.methods.base import Presets, Task, TowerMethod, register
from drople.options import option


@dataclass(frozen=True)
class MmaOptions:
    adapter_layers: int = option(8, "the last so many layers have adapters (authors 8)", low=1)
    adapter_dim: int = option(32, "width of the bottleneck (authors 32)", low=1)
    adapter_scale: float = option(0.01, "weight s of what is added (authors 0.001, with SGD)", low=1e-6)


class TowerAdapter(nn.Module):
    """The adapters of one tower; called by the walk at each layer with what enters it."""

    def __init__(self, layers: Any, shared: Sequence[nn.Linear], scale: float) -> None:
        super().__init__()
        count, dim, width = len(shared), shared[0].in_features, layers[0].layer_norm1.normalized_shape[0]
        self.down = nn.ModuleList(nn.Linear(width, dim) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(dim, width) for _ in range(count))
        # Lists of no kind that torch would look into: the norms are the backbone's, the middle the method's.
        self.frozen_and_shared = [layer.layer_norm1 for layer in layers[-count:]], list(shared)
        self.first, self.scale = len(layers) - count, scale

    def forward(self, layer: int, states: Tensor) -> Tensor | None:
        n = layer - self.first
        if n < 0:
            return None
        norms, shared = self.frozen_and_shared
        before = states.detach() + self.scale * (states - states.detach())
        middle = F.relu(shared[n](F.relu(self.down[n](norms[n](before).float()))))
        added = self.up[n](middle)
        return (self.scale * added.detach() + (added - added.detach())).to(states.dtype)


@register
class Mma(TowerMethod):
    name = "mma"
    title = "Multi-Modal Adapter"
    kind = "adapter"
    citation = "Yang et al., CVPR 2024"
    Options = MmaOptions
    presets: ClassVar[Presets] = {
        "authors": {
            "adapter_scale": 0.001,
            "optimizer": "sgd",
            "lr": 1.5e-3,
            "batch_size": 16,
            "epochs": 5,
            "warmup": 0.0,
            "clip_norm": 0.0,
        }
    }

    def __init__(self, backbone: Backbone, task: Task, options: MmaOptions) -> None:
        super().__init__(backbone, task, options)
        vision, text = (t.encoder.layers for t in (backbone.model.vision_model, backbone.model.text_model))
        count = min(options.adapter_layers, len(vision), len(text))
        if count < options.adapter_layers:
            self.notes.append(f"adapters asked for {options.adapter_layers} layers; {count} are used.")
        dim = options.adapter_dim
        middle = [nn.Linear(dim, dim) for _ in range(count)]
        self.shared = nn.ModuleList(middle)
        self.vision = TowerAdapter(vision, middle, options.adapter_scale)
        self.text = TowerAdapter(text, middle, options.adapter_scale)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def adapt_vision(self) -> Adapt:
        return self.vision

    def adapt_text(self) -> Adapt:
        return self.text

"""CLIPs that are only shapes: the towers of OpenAI's ViTs with weights that mean nothing.

For costs and parameter counts without a download. The tokenizer is pocket's, so the text tower's table has
its 12,288 words instead of 49,408: the table is frozen and only looked up, which changes no count and no
FLOP.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from drople.backbone.clip import Backbone, Sentences
from drople.backbone.loading import Checkpoint, load_checkpoint
from drople.errors import unknown

PREFIX = "shape:"
# vision width, layers, heads, patch, pixels; text width, heads; joint width (Radford et al. 2021, table 20)
SHAPES = {
    "vit-b-16": (768, 12, 12, 16, 224, 512, 8, 512),
    "vit-b-32": (768, 12, 12, 32, 224, 512, 8, 512),
    "vit-l-14": (1024, 24, 16, 14, 224, 768, 12, 768),
}
TEXT_LAYERS = 12


def shape_backbone(name: str, *, hollow: bool = False) -> Backbone:
    """`vit-b-16` (or `shape:vit-b-16`) with random weights.

    A hollow one has no memory for its weights and computes nothing: enough to count what a method learns.
    """
    plain = name.removeprefix(PREFIX)
    if plain not in SHAPES:
        raise unknown("shape", name, [PREFIX + known for known in SHAPES])
    width, layers, heads, patch, pixels, text_width, text_heads, joint = SHAPES[plain]
    pocket = _pocket()
    config = CLIPConfig(
        projection_dim=joint,
        vision_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "patch_size": patch,
            "image_size": pixels,
            "projection_dim": joint,
        },
        text_config={
            "vocab_size": pocket.tokenizer.vocab_size,
            "hidden_size": text_width,
            "intermediate_size": 4 * text_width,
            "num_hidden_layers": TEXT_LAYERS,
            "num_attention_heads": text_heads,
            "projection_dim": joint,
            "bos_token_id": pocket.tokenizer.bos,
            "eos_token_id": pocket.tokenizer.eos,
            "pad_token_id": pocket.tokenizer.eos,
        },
    )
    model = _hollow(config) if hollow else CLIPModel(config)
    shown = PREFIX + plain
    source = replace(pocket, name=shown, model=model, pixels=replace(pocket.pixels, size=pixels))
    return HollowBackbone(source) if hollow else Backbone(source)


class HollowBackbone(Backbone):
    """Gives zeros for features, at once."""

    def _fold(self) -> None:
        """There are no weights to fold anything into."""

    def _join(self) -> None:
        """Nor to join."""

    def encode_text(self, sentences: Sentences, **_: Any) -> Tensor:
        return torch.zeros(len(sentences), self.embed_dim)

    def encode_images(self, pixels: Tensor, **_: Any) -> Tensor:
        return torch.zeros(len(pixels), self.embed_dim)


@lru_cache(maxsize=1)
def _pocket() -> Checkpoint:
    return load_checkpoint("pocket")


def _hollow(config: CLIPConfig) -> CLIPModel:
    """Every weight is one zero, seen through a shape."""
    with torch.device("meta"):
        model = CLIPModel(config)
    zero = torch.zeros(())
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(zero.expand(weight.shape), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Positions, the only buffers of a CLIP.
            setattr(module, name, torch.arange(buffer.shape[-1]).expand(buffer.shape))
    return model

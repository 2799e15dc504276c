"""Learnable prompts: for text and vision, shallow (depth 1) or deep."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.errors import DropleError

PROMPT_STD = 0.02  # as CoOp, MaPLe and PromptSRC draw prompts that start from no words


class TextPrompts(nn.Module):
    """`P_t^(i)`: context before the class words and supplementary tokens after them, at each of the
    first `depth` layers. The context of layer 0 starts from words, and supplementary tokens may."""

    def __init__(
        self, backbone: Backbone, *, depth: int, length: int, supplementary: int, init: str, after: str = ""
    ) -> None:
        super().__init__()
        if depth < 1 or length + supplementary < 1:
            raise DropleError("text prompts need a depth of at least 1 and at least one token")
        self.length, self.supplementary = length, supplementary
        start = PROMPT_STD * torch.randn(depth, length + supplementary, backbone.text_width)
        for first, room, text in ((0, length, init), (length, supplementary, after)):
            words = backbone.word_embeddings(text)[:room].cpu()
            start[0, first : first + len(words)] = words
        self.prompts = nn.Parameter(start)

    def forward(self) -> Tensor:
        return self.prompts


class VisualPrompts(nn.Module):
    """`P_v^(i)`: prompts behind the patches at each of the first `depth` layers."""

    def __init__(self, backbone: Backbone, *, depth: int, length: int) -> None:
        super().__init__()
        if depth < 1 or length < 1:
            raise DropleError("visual prompts need a depth and a length of at least 1")
        self.prompts = nn.Parameter(PROMPT_STD * torch.randn(depth, length, backbone.vision_width))

    def forward(self) -> Tensor:
        return self.prompts


class CoupledPrompts(nn.Module):
    """Visual prompts [J, M, D_v] that a linear function of each of the first J layers makes out of its context:
    `P_v^(i) = F_i(P_t^(i))` (MaPLe). It has the text prompts, so that both towers learn them.

    Once learned the functions are of no more use: `fold` keeps what they make, a hundredth of the numbers, and that
    is saved and loaded in their place."""

    made: Tensor | None

    def __init__(self, backbone: Backbone, text: TextPrompts, depth: int) -> None:
        super().__init__()
        self.text = text
        bound = 1 / math.sqrt(backbone.text_width)
        self.weight = nn.Parameter(torch.empty(depth, backbone.text_width, backbone.vision_width))
        self.bias = nn.Parameter(torch.empty(depth, 1, backbone.vision_width))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        self.register_buffer("made", None)

    @torch.no_grad()
    def fold(self) -> None:
        self.made = self()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if self.made is None else ("weight", "bias"):
            del destination[prefix + name]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if prefix + "made" in state_dict:
            self.made = torch.empty_like(self.weight[:, : self.text.length])
            state_dict = {**state_dict, prefix + "weight": self.weight, prefix + "bias": self.bias}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self) -> Tensor:
        if self.made is not None:
            return self.made
        context = self.text()[: len(self.weight), : self.text.length]
        return torch.baddbmm(self.bias, context, self.weight)


def words_behind(init: str, length: int) -> str:
    """Those words of `init` that the prompts do not replace, to stand before a class: "[V] [V] of a {class}"."""
    return "".join(f"{word} " for word in init.split()[length:])


def deep_text(
    backbone: Backbone, options: Any, supplementary: int = 0, after: str = ""
) -> tuple[TextPrompts, list[str]]:
    """Text prompts no deeper than the tower, and the sentence that says where they are not as deep as asked."""
    depth, note = capped(options.text_depth, backbone.text_layers, "text prompts")
    length, init = options.text_length, options.init
    prompts = TextPrompts(
        backbone, depth=depth, length=length, supplementary=supplementary, init=init, after=after
    )
    return prompts, [note] if note else []


def deep_visual(backbone: Backbone, options: Any) -> tuple[VisualPrompts, list[str]]:
    """The same for images."""
    depth, note = capped(options.visual_depth, backbone.vision_layers, "visual prompts")
    return VisualPrompts(backbone, depth=depth, length=options.visual_length), [note] if note else []


def coupled_visual(backbone: Backbone, options: Any, text: TextPrompts) -> tuple[CoupledPrompts, list[str]]:
    """Visual prompts made of the text's: no deeper than these or the tower."""
    depth, note = capped(options.visual_depth, min(len(text()), backbone.vision_layers), "coupled prompts")
    return CoupledPrompts(backbone, text, depth), [note] if note else []


def deep_prompts(backbone: Backbone, options: Any) -> tuple[TextPrompts, VisualPrompts, list[str]]:
    """Independent prompts in both towers."""
    text, text_notes = deep_text(backbone, options)
    visual, visual_notes = deep_visual(backbone, options)
    return text, visual, text_notes + visual_notes


def capped(depth: int, layers: int, what: str) -> tuple[int, str | None]:
    """A depth no larger than the tower, and the sentence that says so where it was."""
    if depth <= layers:
        return depth, None
    return layers, f"{what} asked for {depth} layers; this backbone has {layers}, so {layers} are used."

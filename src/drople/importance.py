"""How important a token is: class, self and cross-modal attention scores, and their average.

Equations of the section "Multimodal Importance Metric". Scores only choose what drops, and drawing
passes no gradient, so nothing here but the alignment loss keeps a graph.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone.tokens import Tokens

Modality = Literal["vision", "text"]
Score = Literal["class", "self", "cross"]


def attention_map(query: Tensor, key: Tensor, scaling: float, mask: Tensor | None, causal: bool) -> Tensor:
    """`A_self` [N, H, L, L] as the layer computes it, in float32."""
    logits = (query * scaling).float() @ key.float().transpose(-2, -1)
    if mask is None and causal:
        length = logits.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1)


def class_score(attention: Tensor, tokens: Tokens) -> Tensor:
    """`S_cls(j)`: mean over heads of the attention from cls or eos to token j. [N, L]"""
    rows = attention[torch.arange(len(attention), device=attention.device), :, tokens.anchor]
    return rows.mean(1)


def self_score(attention: Tensor, tokens: Tokens) -> Tensor:
    """`S_self(j)`: mean over heads of the largest attention from j to a token k, k not j and no global
    token. 0 where there is no such k (bos sees only itself). [N, L]"""
    own = torch.eye(attention.shape[-1], dtype=torch.bool, device=attention.device)
    counted = tokens.content[:, None, None, :] & ~own
    return attention.masked_fill(~counted, 0.0).amax(-1).mean(1)


class Bridge(nn.Module):
    """Bridge tokens E [xi, d] and one projection a modality into their shared space.

    The projection is never applied to every token: `E (W x + b) = (E W) x + E b`, so xi bridge tokens
    are carried into the tower's width instead (E b is the same for every token: softmax cancels it), and
    pooled features are projected after pooling.
    """

    def __init__(self, vision_width: int, text_width: int, *, tokens: int, dim: int, scaled: bool) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(tokens, dim))
        nn.init.kaiming_uniform_(self.tokens, a=math.sqrt(5))
        self.project: Mapping[str, nn.Linear] = nn.ModuleDict(  # type: ignore[assignment]
            {"vision": nn.Linear(vision_width, dim), "text": nn.Linear(text_width, dim)}
        )
        self.scale = dim**-0.5 if scaled else 1.0

    def attention(self, modality: Modality, states: Tensor, real: Tensor) -> Tensor:
        """`A_cross` [N, xi, L]: softmax over tokens of E X' / sqrt(d); padding gets nothing."""
        bridge = self.scale * self.tokens @ self.project[modality].weight
        logits = (bridge.to(states.dtype) @ states.transpose(-2, -1)).float()
        return logits.masked_fill(~real[:, None], -torch.inf).softmax(-1)

    def pool(self, modality: Modality, states: Tensor, real: Tensor) -> Tensor:
        """What each bridge token gathers of a sequence: A_cross X' [N, xi, d]."""
        gathered = self.attention(modality, states, real).to(states.dtype) @ states
        return self.project[modality](gathered.float())

    def alignment(
        self, vision: Sequence[tuple[Tensor, Tensor]], text: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The alignment loss of the released code: (1 - cos)/2 between what a bridge token gathers of an
        image and of the text of its class, mean over bridge tokens, samples and layers.

        Each argument holds (states [B, L, D], real [B, L]) a layer.
        """
        losses = [
            (1 - F.cosine_similarity(self.pool("vision", *v), self.pool("text", *t), dim=-1)) / 2
            for v, t in zip(vision, text, strict=False)  # towers may differ in their number of dropout layers
        ]
        return torch.stack([loss.mean() for loss in losses]).mean()


def cross_score(bridge: Bridge, modality: Modality, tokens: Tokens) -> Tensor:
    """`S_cross(j)`: the largest attention that token j gets from any bridge token. [N, L]"""
    return bridge.attention(modality, tokens.states, tokens.real).amax(1)


def importance(scores: Sequence[Tensor], tokens: Tokens, *, sum_to_one: bool) -> Tensor:
    """The normalised importance in [0, 1] of every content token, 0 elsewhere. [N, L]

    The scores' average, min-max over the content tokens of each sequence. `sum_to_one` divides each
    score by its sum first (released code). Where all tokens are alike nothing is known: 1/2.
    """
    content = tokens.content
    if sum_to_one:
        scores = [s / s.masked_fill(~content, 0.0).sum(1, keepdim=True).clamp_min(1e-12) for s in scores]
    mean = torch.stack(list(scores)).mean(0)
    low = mean.masked_fill(~content, torch.inf).amin(1, keepdim=True)
    high = mean.masked_fill(~content, -torch.inf).amax(1, keepdim=True)
    spread = high - low
    alike = spread <= 0
    normalised = torch.where(alike, 0.5, (mean - low) / spread.masked_fill(alike, 1.0))
    return normalised.masked_fill(~content, 0.0)

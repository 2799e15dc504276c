"""How important a token is: class, self and cross-modal attention scores, and their average.

Equations of the section "Multimodal Importance Metric". Scores only choose what drops, and drawing
passes no gradient, so nothing here but the alignment loss keeps a graph.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone.tokens import Tokens, earlier, number, places
from drople.kernels import usable

Modality = Literal["vision", "text"]
Score = Literal["class", "self", "cross"]
Scale = Literal["raw", "sum", "rank"]


def attention_scores(
    query: Tensor, key: Tensor, scaling: float, mask: Tensor | None, causal: bool, tokens: Tokens
) -> dict[Score, Tensor]:
    """The scores that a layer's attention gives, each [N, L]."""
    if usable(query):
        from drople.kernels.attention_scores import attention_scores

        by_class, by_self = attention_scores(query, key, scaling, mask, causal, tokens.anchor)
        return {"class": by_class, "self": by_self}
    attention = attention_map(query, key, scaling, mask, causal)
    # In this order: the second writes into the map.
    return {"class": class_score(attention, tokens), "self": self_score(attention, tokens)}


def attention_map(query: Tensor, key: Tensor, scaling: float, mask: Tensor | None, causal: bool) -> Tensor:
    """`A_self` [N, H, L, L] as the layer computes it, in float32; `mask` is added to the logits."""
    logits = (query * scaling).float() @ key.float().transpose(-2, -1)
    if mask is not None:
        logits += mask
    elif causal:
        logits.masked_fill_(~earlier(logits.shape[-1], logits.device), -torch.inf)
    return logits.softmax(-1)


def class_score(attention: Tensor, tokens: Tokens) -> Tensor:
    """`S_cls(j)`: mean over heads of the attention from cls or eos to token j. [N, L]"""
    rows = attention[places(len(attention), attention.device), :, tokens.anchor]
    return rows.mean(1)


def self_score(attention: Tensor, tokens: Tokens) -> Tensor:
    """`S_self(j)`: mean over heads of the largest attention from j to a token k, k not j and no global
    token. 0 where there is no such k (bos sees only itself). [N, L]

    It writes zeros into the map where k does not count: a masked copy of it is half of all a score costs.
    Padding gets no attention, so it needs none.
    """
    device = attention.device
    attention.diagonal(dim1=-2, dim2=-1).zero_()
    attention[places(len(attention), device), :, :, tokens.anchor] = number(0.0, device)
    return attention.amax(-1).mean(1)


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

    def carried(self, modality: Modality) -> Tensor:
        """`E W / sqrt(d)` [xi, D]: the bridge tokens in the tower's width."""
        return self.scale * self.tokens @ self.project[modality].weight

    def pool(self, modality: Modality, states: Tensor, real: Tensor) -> Tensor:
        """What each bridge token gathers of a sequence: A_cross X' [N, xi, d]."""
        attention = cross_attention(self.carried(modality), states, real)
        project, dtype = self.project[modality], states.dtype
        gathered = attention.to(dtype) @ states
        return F.linear(gathered, project.weight.to(dtype), project.bias.to(dtype)).float()

    def alignment(
        self, vision: Sequence[tuple[Tensor, Tensor]], text: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The alignment loss of the released code: (1 - cos)/2 between what a bridge token gathers of an
        image and of the text of its class, mean over bridge tokens, samples and layers.

        Each argument holds (states [B, L, D], real [B, L]) a layer.
        """
        layers = min(len(vision), len(text))  # towers may differ in their number of dropout layers
        seen = self.pool("vision", *_one_batch(vision[:layers]))
        said = self.pool("text", *_one_batch(text[:layers]))
        return ((1 - F.cosine_similarity(seen, said, dim=-1)) / 2).mean()


def _one_batch(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sequences of all layers as if they were more samples: a handful of kernels instead of as many a layer.
    Where tokens were removed, layers differ in length."""
    states, real = zip(*padded(layers), strict=True)
    return torch.cat(states), torch.cat(real)


def padded(parts: Sequence[tuple[Tensor, Tensor]]) -> Sequence[tuple[Tensor, Tensor]]:
    """(states, real) of several batches, all as long as the longest."""
    lengths = [states.shape[1] for states, _ in parts]
    if len(set(lengths)) == 1:
        return parts
    short = [max(lengths) - length for length in lengths]
    return [(F.pad(s, (0, 0, 0, n)), F.pad(r, (0, n))) for (s, r), n in zip(parts, short, strict=True)]


def cross_attention(carried: Tensor, states: Tensor, real: Tensor) -> Tensor:
    """`A_cross` [N, xi, L]: softmax over tokens of E X' / sqrt(d); padding gets nothing."""
    # Tokens by bridge tokens: their number is a round one, and that of tokens is not, which products care for.
    logits = (states @ carried.to(states.dtype).T).float()
    return torch.where(real[..., None], logits, number(-torch.inf, logits.device)).softmax(1).transpose(1, 2)


def cross_score(carried: Tensor, tokens: Tokens) -> Tensor:
    """`S_cross(j)`: the largest attention that token j gets from any bridge token. [N, L]"""
    return cross_attention(carried, tokens.states, tokens.real).amax(1)


# What is done to each score before they are averaged. (score [N, L], content [N, L]) -> [N, L]


def raw(score: Tensor, content: Tensor) -> Tensor:
    return score


def over_sum(score: Tensor, content: Tensor) -> Tensor:
    return score / (score * content).sum(1, keepdim=True).clamp_min(1e-12)


def rank(score: Tensor, content: Tensor) -> Tensor:
    """How many content tokens of the sequence have a smaller score."""
    smaller = score[:, None, :] < score[:, :, None]
    return (smaller & content[:, None, :]).sum(-1, dtype=score.dtype)


SCALES: dict[Scale, Callable[[Tensor, Tensor], Tensor]] = {"raw": raw, "sum": over_sum, "rank": rank}


def importance(scores: Sequence[Tensor], tokens: Tokens, scale: Scale = "raw") -> Tensor:
    """The normalised importance in [0, 1] of every content token, 0 elsewhere. [N, L]

    The scores' average, min-max over the content tokens of each sequence. Where all tokens are alike nothing
    is known: 1/2.
    """
    content, device = tokens.content, tokens.real.device
    scores = [SCALES[scale](score, content) for score in scores]
    mean = torch.stack(scores).mean(0)
    low = torch.where(content, mean, number(torch.inf, device)).amin(1, keepdim=True)
    high = torch.where(content, mean, number(-torch.inf, device)).amax(1, keepdim=True)
    spread = high - low
    # A spread as good as none would make an infinite quotient, which no mask by a product takes away.
    normalised = torch.where(spread > 0, (mean - low) / spread.clamp_min(1e-30), number(0.5, device))
    return normalised * content

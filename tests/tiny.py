"""What the tests of the core share: a small random CLIP, and slow references written from the paper.

The references know one sequence at a time, loop over everything, compute in float64 and use nothing of
`drople`: they are what the fast code is measured against.
"""

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from drople.backbone import Backbone
from drople.backbone.loading import Checkpoint, load_checkpoint
from drople.backbone.tokenizer import Tokenizer
from drople.data.images import Pixels

# Tiny tensors: threads cost more than they bring, and sums keep one order.
torch.set_num_threads(1)


@functools.cache
def pocket_tokenizer() -> Tokenizer:
    return load_checkpoint("pocket").tokenizer


def tiny_backbone(
    *,
    seed: int = 0,
    text_width: int = 24,
    text_heads: int = 3,
    text_layers: int = 3,
    vision_width: int = 32,
    vision_heads: int = 2,
    vision_layers: int = 4,
    patch: int = 4,
    image: int = 12,
    embed: int = 20,
    positions: int = 77,
    activation: str = "quick_gelu",
    eos: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Backbone:
    """A CLIP of random weights: biases and norms are not trivial, and attention is far from uniform."""
    tokenizer = pocket_tokenizer()
    config = CLIPConfig(
        text_config={
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": text_width,
            "intermediate_size": 2 * text_width,
            "num_hidden_layers": text_layers,
            "num_attention_heads": text_heads,
            "max_position_embeddings": positions,
            "hidden_act": activation,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos if eos is None else eos,
            "pad_token_id": tokenizer.eos,
        },
        vision_config={
            "hidden_size": vision_width,
            "intermediate_size": 2 * vision_width,
            "num_hidden_layers": vision_layers,
            "num_attention_heads": vision_heads,
            "image_size": image,
            "patch_size": patch,
            "hidden_act": activation,
        },
        projection_dim=embed,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CLIPModel(config)
        for name, weight in model.named_parameters():
            if name == "logit_scale":
                continue
            drawn = torch.randn(weight.shape)
            if "norm" in name:
                drawn = 0.2 * drawn + name.endswith("weight")
            elif weight.ndim == 1:
                drawn = 0.3 * drawn
            elif "token_embedding" in name or "position_embedding" in name:
                drawn = 0.5 * drawn
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                drawn = gain * drawn / math.sqrt(weight[0].numel())
            weight.data = drawn
    model = model.to(dtype).eval()
    pixels = Pixels(image, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return Backbone(Checkpoint("tiny", model, tokenizer, pixels))


def random_images(backbone: Backbone, count: int, seed: int = 1) -> Tensor:
    side = backbone.pixels.size
    drawn = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return drawn.to(backbone.device, backbone.dtype)


def twin(backbone: Backbone, attention: str) -> CLIPModel:
    """The same weights in transformers' own hands."""
    model = copy.deepcopy(backbone.model)
    model.set_attn_implementation(attention)
    return model


# Slow references -----------------------------------------------------------------------------------


def slow_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + norm.eps) * norm.weight.double() + norm.bias.double()


def slow_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    out = x @ linear.weight.double().T
    return out if linear.bias is None else out + linear.bias.double()


def slow_layer(layer: Any, x: Tensor, may_look: Tensor) -> tuple[Tensor, Tensor]:
    """One encoder layer on one sequence [L, D]; `may_look[j, k]`: query j sees key k.

    Also the attention map [H, L, L], from an own softmax a head and a query.
    """
    x = x.double()
    attn, length = layer.self_attn, len(x)
    normed = slow_norm(layer.layer_norm1, x)
    q, k, v = (slow_linear(p, normed) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    heads, size = attn.num_heads, x.shape[1] // attn.num_heads
    attention = []
    mixed = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        rows = []
        for j in range(length):
            seen = [i for i in range(length) if may_look[j, i]]
            logits = torch.stack([q[j, part] @ k[i, part] / math.sqrt(size) for i in seen])
            weights = torch.exp(logits - logits.max())
            weights = weights / weights.sum()
            row = torch.zeros(length, dtype=torch.float64)
            rows.append(row.index_put((torch.tensor(seen),), weights))
        attention.append(torch.stack(rows))
        mixed.append(attention[-1] @ v[:, part])
    x = x + slow_linear(attn.out_proj, torch.cat(mixed, 1))
    hidden = slow_linear(layer.mlp.fc1, slow_norm(layer.layer_norm2, x))
    hidden = hidden / (1 + torch.exp(-hidden))  # quick_gelu, whose factors the backbone has in its weights
    return x + slow_linear(layer.mlp.fc2, hidden), torch.stack(attention)


def slow_class_score(attention: Tensor, anchor: int, j: int) -> float:
    """`S_cls(j)` of one sequence's map [H, L, L]."""
    return sum(float(head[anchor, j]) for head in attention) / len(attention)


def slow_self_score(attention: Tensor, anchor: int, length: int, j: int) -> float:
    """`S_self(j)`: k runs over the `length` real tokens but j and the global one."""
    total = 0.0
    for head in attention:
        total += max((float(head[j, k]) for k in range(length) if k not in (j, anchor)), default=0.0)
    return total / len(attention)


@torch.no_grad()
def slow_bridge_attention(
    tokens: Tensor, linear: Any, states: Tensor, *, scaled: bool
) -> tuple[Tensor, Tensor]:
    """`A_cross` [xi, L] of one sequence's real tokens [L, D], and X' [L, d]."""
    tokens = tokens.double()
    projected = torch.stack([linear.weight.double() @ x.double() + linear.bias.double() for x in states])
    scale = math.sqrt(tokens.shape[1]) if scaled else 1.0
    rows = []
    for e in tokens:
        weights = torch.exp(torch.stack([e @ x for x in projected]) / scale)
        rows.append(weights / weights.sum())
    return torch.stack(rows), projected


def slow_importance(scores: list[list[float]], content: list[int], scale: str = "raw") -> dict[int, float]:
    """The normalised importance of each content token j; `scores[s][j]`."""
    if not content:
        return {}
    if scale == "sum":
        totals = [sum(score[j] for j in content) for score in scores]
        scores = [[v / t for v in score] if t else score for score, t in zip(scores, totals, strict=True)]
    if scale == "rank":
        scores = [[float(sum(score[k] < v for k in content)) for v in score] for score in scores]
    mean = {j: sum(score[j] for score in scores) / len(scores) for j in content}
    low, high = min(mean.values()), max(mean.values())
    if high == low:
        return dict.fromkeys(content, 0.5)
    return {j: (value - low) / (high - low) for j, value in mean.items()}

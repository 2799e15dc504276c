"""Class and self scores of a layer's attention without its map.

The self score of token j is exp(max_k l_jk - lse_j), the class score of token k is exp(l_ck - lse_c), where c is the
global token: one pass over the logits gives both, and the [N, H, L, L] map never leaves the chip.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Smaller than any logit, and unlike -inf it has a difference to itself.
NEVER = tl.constexpr(-1e30)
TILE, SHORT = 64, 32


@triton.jit
def _logits(
    query, key, mask, rows, columns, dims, length, scaling,
    key_row, mask_row, HEAD: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Logits [rows, columns] of one head."""
    inside = columns < length
    keys = tl.load(
        key + columns[None, :] * key_row + dims[:, None],
        mask=inside[None, :] & (dims < HEAD)[:, None],
        other=0.0,
    )
    logits = tl.dot(query, keys) * scaling
    seen = inside[None, :] & (rows < length)[:, None]
    if MASKED:
        added = tl.load(mask + rows[:, None] * mask_row + columns[None, :], mask=seen, other=0.0)
        logits += added.to(tl.float32)
    elif CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    return tl.where(seen, tl.maximum(logits, NEVER), NEVER)


@triton.jit
def _scores(
    query, key, mask, anchor, by_self, by_class, heads, length, scaling,
    query_batch, query_head, query_row, key_batch, key_head, key_row, mask_batch, mask_row,
    HEAD: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of one sequence."""
    which = tl.program_id(1).to(tl.int64)
    sequence, head = which // heads, which % heads
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    query += sequence * query_batch + head * query_head
    key += sequence * key_batch + head * key_head
    mask += sequence * mask_batch
    within = (rows < length)[:, None] & (dims < HEAD)[None, :]
    asking = tl.load(query + rows[:, None] * query_row + dims[None, :], mask=within, other=0.0)
    globally = tl.load(anchor + sequence)
    top = tl.full([ROWS], NEVER, tl.float32)
    best = tl.full([ROWS], NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, length, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = _logits(
            asking, key, mask, rows, columns, dims, length, scaling, key_row, mask_row, HEAD, MASKED, CAUSAL
        )
        higher = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        top = higher
        counts = (columns[None, :] != rows[:, None]) & (columns != globally)[None, :]
        best = tl.maximum(best, tl.max(tl.where(counts, logits, NEVER), 1))
    tl.store(by_self + which * length + rows, tl.exp(best - top) / total, mask=rows < length)
    first = tl.program_id(0) * ROWS
    if (globally >= first) & (globally < first + ROWS):
        for start in range(0, length, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = _logits(
                asking, key, mask, rows, columns, dims, length, scaling, key_row, mask_row, HEAD, MASKED, CAUSAL
            )  # fmt: skip
            share = tl.exp(logits - top[:, None]) / total[:, None]
            own = tl.sum(tl.where((rows == globally)[:, None], share, 0.0), 0)
            tl.store(by_class + which * length + columns, own, mask=columns < length)


def attention_scores(
    query: Tensor, key: Tensor, scaling: float, mask: Tensor | None, causal: bool, anchor: Tensor
) -> tuple[Tensor, Tensor]:
    """Class and self score [N, L] of query and key [N, H, L, head]; `mask` [N, 1, L, L] is added to the logits."""
    count, heads, length, head = query.shape
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    by_self, by_class = torch.empty(2, count, heads, length, device=query.device)
    # One tile for a short sequence, which one warp does best.
    short = length <= SHORT
    rows = max(16, triton.next_power_of_2(length)) if short else TILE
    added = query if mask is None else mask.expand(count, 1, length, length)
    with torch.cuda.device_of(query):
        _scores[triton.cdiv(length, rows), count * heads](
            query, key, added, anchor, by_self, by_class, heads, length, scaling,
            *query.stride()[:3], *key.stride()[:3], added.stride(0), added.stride(2),
            HEAD=head, DIMS=max(16, triton.next_power_of_2(head)), ROWS=rows, BLOCK=rows,
            MASKED=mask is not None, CAUSAL=causal, num_warps=1 if short else 4,
        )  # fmt: skip
    return by_class.mean(1), by_self.mean(1)

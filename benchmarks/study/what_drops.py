"""Which tokens a trained DroPLe drops, and what its scores know: a line a layer, averages over test images and classes.

    python benchmarks/study/what_drops.py RUN DATA [--images 256]

For each dropout layer of the image tower: how the three scores agree (rank correlation over the patches of an image),
how far the drop probabilities of an image's patches lie apart, and how even the bridge tokens' attention is
(entropy over that of a uniform one: 1 knows nothing of any token). For the text tower: the drop probability of bos,
context and class words. Then the alignment loss by which bridge tokens learn, at first and at last. Prints Markdown.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drople import PromptLearner
from drople.data.images import decode, normalise
from drople.data.layouts import resolve
from drople.explain import _watching, importance_maps
from drople.importance import cross_attention


def ranks_agree(one: Tensor, other: Tensor) -> float:
    """Spearman's correlation over the last dimension, mean over the others."""
    a, b = (x.argsort(-1).argsort(-1).double() for x in (one, other))
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return float(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean())


def evenness(method: Any, images: Tensor) -> list[float]:
    """Of the bridge tokens' attention over the tokens of each layer."""
    dropout = _watching(method, "vision")
    found: list[float] = []

    def look(layer: int, tokens: Any) -> Any:
        if layer in dropout.drawing:
            attention = cross_attention(
                method.regulariser.bridge.carried("vision"), tokens.states, tokens.real
            )
            spread = -(attention * attention.clamp_min(1e-12).log()).sum(-1)
            found.append(float(spread.mean()) / math.log(attention.shape[-1]))
        return tokens

    dropout.drop = look
    method.encode_images(images, dropout)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=256)
    given = parser.parse_args()
    learner = PromptLearner.load(given.run)
    method: Any = learner.method_
    pixels = learner.backbone_.pixels
    test = resolve(given.data, Path("."))[0].test
    step = max(1, len(test) // given.images)
    squares, _, _ = decode([e.image for e in test[::step]][: given.images], pixels.size, pixels.resample)
    images = normalise(squares, pixels).to(learner.backbone_.device)
    maps = {name: value.flatten(2) for name, value in importance_maps(learner, images).items()}
    even = evenness(method, images)
    print("| image layer | class ~ self | class ~ cross | self ~ cross | p of patches | bridge evenness |")
    print("|--:|--:|--:|--:|--:|--:|")
    for i, p in enumerate(maps["probability"]):
        pairs = [("class", "self"), ("class", "cross"), ("self", "cross")]
        agree = " | ".join(f"{ranks_agree(maps[a][i], maps[b][i]):.2f}" for a, b in pairs)
        print(f"| {i + 1} | {agree} | {p.mean():.2f} ± {p.std(-1).mean():.2f} | {even[i]:.3f} |")
    sentences = method.sentences(learner.words_)
    dropout = _watching(method, "text")
    method.encode_text(sentences, dropout)
    words = sentences.words
    slots = sentences.slots.any(-1)
    start = torch.zeros_like(words)
    start[:, 0] = True
    print("\n| text layer | p of bos | context | class words |\n|--:|--:|--:|--:|")
    for i, seen in enumerate(dropout.seen):
        kinds = " | ".join(f"{seen.probability[kind].mean():.2f}" for kind in (start, slots, words))
        print(f"| {i + 1} | {kinds} |")
    log = [json.loads(line) for line in (given.run / "log.jsonl").read_text("utf-8").splitlines()]
    values = [row["alignment"] for row in log]
    gone = next((n for n, value in enumerate(values) if value < values[0] / 100), None)
    when = "never below a hundredth" if gone is None else f"below a hundredth after {gone} steps"
    print(f"\nalignment loss: {values[0]:.3f} at first, {values[-1]:.1e} at last; {when}")


if __name__ == "__main__":
    main()

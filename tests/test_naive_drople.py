"""The naive DroPLe of the benchmarks is DroPLe: its loss and gradients are ours, with the same draws.

A rival that computed something else would make any ratio meaningless.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_images, tiny_backbone
from torch import Tensor

from drople.ablations import PAPER
from drople.methods import Batch, Progress, Task, make

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from naive_drople import NaiveDroPLe

WORDS = ("cat", "a very long name of a bird", "red apple", "dog")


def setting(options: dict[str, Any]) -> tuple[Any, NaiveDroPLe, Batch, Tensor]:
    backbone = tiny_backbone()
    torch.manual_seed(3)
    given = {"text_depth": 2, "visual_depth": 3, "supplementary": 3, "lambda0": 0.4, "bridge_tokens": 5}
    method: Any = make("drople", backbone, Task(WORDS, ("a photo of a {}.",)), {**given, **PAPER, **options})
    method.advance(Progress(5, 10, 0, 1))
    images, plain = random_images(backbone, 3), random_images(backbone, 3, seed=2)
    with torch.no_grad():
        frozen = backbone.encode_images(plain)
    batch = Batch(images, torch.tensor([2, 0, 1]), frozen)
    return method, NaiveDroPLe(method, length=40), batch, plain


def gradients(method: Any, loss: Tensor) -> dict[str, Tensor]:
    method.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in method.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p_min": 0.0, "p_max": 0.0},
        {"p_min": 1.0, "p_max": 1.0},
        {"alignment_detached": False, "text_dropout_layers": 1, "residual_entropy_text": 1.0},
    ],
)
def test_loss_and_gradients_are_ours(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    method, naive, batch, plain = setting(options)
    drawn: list[Tensor] = []
    draw = torch.rand_like

    def recorded(like: Tensor) -> Tensor:
        drawn.append(draw(like))
        return drawn[-1]

    monkeypatch.setattr(torch, "rand_like", recorded)
    ours = torch.stack(list(method.training_step(batch).values())).sum()
    ours_gradients = gradients(method, ours)
    vision = method.regulariser.layers["vision"]  # the vision tower draws first
    assert len(drawn) == vision + method.regulariser.layers["text"]
    naive.uniform = lambda modality, layer, sample, places: drawn[layer + vision * (modality == "text")][
        sample, places
    ]
    theirs = naive.loss(batch.images, plain, batch.labels)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(method, theirs).items():
        torch.testing.assert_close(gradient, ours_gradients[name], rtol=2e-4, atol=2e-5, msg=name)
        assert gradient.abs().max() > 0, name


def test_the_draws_matter() -> None:
    """Else equal losses would say nothing of dropping."""
    _, naive, batch, plain = setting({})
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(naive.loss(batch.images, plain, batch.labels))
    assert losses[0] == losses[1]
    assert (losses[0] - losses[2]).abs() > 1e-3

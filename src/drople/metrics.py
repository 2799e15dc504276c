"""What a run is judged by: accuracy, overall and per class, calibration, the harmonic mean of base and novel.

Every share is a fraction in [0, 1], never a percentage. Whatever cannot be measured (the accuracy of a class
without images, of an empty bin) is None, never NaN, so that all of it can be written to JSON.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from drople.errors import DropleError

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Top-1 accuracy of scores [N, K], logits or probabilities."""
    _check(scores, labels)
    return (scores.argmax(dim=1) == labels).double().mean().item()


def confusion(scores: Tensor, labels: Tensor) -> Tensor:
    """Counts [K, K]: the row is the true class, the column the predicted one."""
    _check(scores, labels)
    classes = scores.shape[1]
    cells = labels * classes + scores.argmax(dim=1)
    return torch.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def per_class_accuracy(scores: Tensor, labels: Tensor) -> list[float | None]:
    """The share of each class's images that were recognised; None for a class without images."""
    counts = confusion(scores, labels)
    return _shares(counts.diagonal(), counts.sum(dim=1))


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error (Guo et al., 2017): |accuracy - confidence| a bin, weighted by images."""
    counts, confident, correct = _binned(probabilities, labels, bins)
    return ((correct - confident).abs().sum() / counts.sum()).item()


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> dict[str, list[Any]]:
    """The data of a reliability diagram: `edges` (bins + 1), `counts`, mean `confidence`, `accuracy`."""
    counts, confident, correct = _binned(probabilities, labels, bins)
    return {
        "edges": _edges(bins).tolist(),
        "counts": counts.long().tolist(),
        "confidence": _shares(confident, counts),
        "accuracy": _shares(correct, counts),
    }


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature T for which softmax(logits / T) gives the validation labels the least NLL (Guo et al.).

    It is bounded, as the NLL of images that are all recognised falls on as T nears 0. Without images it is 1.
    """
    if len(labels) == 0:
        return 1.0
    _check(logits, labels)
    low, high = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    # Logits are mostly made in inference mode, from which gradients need copies.
    with torch.inference_mode(False), torch.enable_grad():
        logits, labels = logits.detach().clone().double(), labels.clone()

        def nll(log_temperature: Tensor) -> Tensor:
            return cross_entropy(logits * (-log_temperature).exp(), labels)

        # The NLL is flat far from its minimum, where LBFGS would stop at once: a coarse grid gives the start.
        grid = torch.linspace(low, high, 17, dtype=torch.float64, device=logits.device)
        start = grid[torch.stack([nll(point) for point in grid]).argmin()]
        log_temperature = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [log_temperature], max_iter=100, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nll(log_temperature)
            loss.backward()
            return loss

        optimizer.step(closure)
        # A line search may leave the bounds or end in NaN: then the bound, or the grid's point, it is.
        found = log_temperature.detach().clamp(low, high)
        return (found if bool(nll(found) <= nll(start)) else start).exp().item()


def at_bound(temperature: float) -> bool:
    """Whether the images asked for a temperature beyond the bounds: all were recognised, or none told anything."""
    return not 1.001 * LOWEST_TEMPERATURE < temperature < 0.999 * HIGHEST_TEMPERATURE


def harmonic_mean(base: float, novel: float) -> float:
    """The H of the base-to-novel tables; 0 when either is 0."""
    return 2 * base * novel / (base + novel) if base > 0 and novel > 0 else 0.0


def evaluate(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """All that a record keeps of one evaluation, ready for JSON."""
    _check(logits, labels)
    if len(classes) != logits.shape[1]:
        raise DropleError(
            f"{len(classes)} class names, but {logits.shape[1]} columns of logits: give one name a column."
        )
    if not bool(logits.isfinite().all()):
        raise DropleError("the logits hold NaN or infinity: training diverged, try a smaller learning rate.")
    counts = confusion(logits, labels)
    # float64, since in float32 the logit scale of a CLIP (100) rounds many top probabilities to exactly 1.
    probabilities = logits.double().softmax(dim=1)
    accuracies = _shares(counts.diagonal(), counts.sum(dim=1))
    return {
        "accuracy": accuracy(logits, labels),
        "ece": ece(probabilities, labels),
        "per_class": {
            name: {"accuracy": share, "count": count}
            for name, share, count in zip(classes, accuracies, counts.sum(dim=1).tolist(), strict=True)
        },
        "confusion": counts.tolist(),
    }


def _check(scores: Tensor, labels: Tensor) -> None:
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise DropleError(
            f"scores of shape {list(scores.shape)} do not go with labels of shape {list(labels.shape)}: "
            "give scores [N, K] and labels [N]."
        )
    if len(labels) == 0:
        raise DropleError("there is no image to evaluate: check that the split is not empty.")
    if int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]:
        raise DropleError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but there are scores for "
            f"{scores.shape[1]} classes only: number the labels from 0 within the classes that are scored."
        )


def _edges(bins: int) -> Tensor:
    if bins < 1:
        raise DropleError(f"bins is {bins}: calibration needs at least 1 bin.")
    return torch.linspace(0, 1, bins + 1, dtype=torch.float64)


def _binned(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, summed confidence and correct images of each bin [low, high); the last bin also holds 1 itself.

    torchmetrics gives a confidence of exactly 1 a bin of its own; elsewhere the two agree.
    """
    _check(probabilities, labels)
    confidence, predicted = probabilities.double().max(dim=1)
    inner_edges = _edges(bins)[1:-1].to(confidence.device)
    bin_of = torch.bucketize(confidence, inner_edges, right=True)
    correct = (predicted == labels).double()
    weights = (torch.ones_like(confidence), confidence, correct)
    counts, confident, right = (torch.bincount(bin_of, weights=weight, minlength=bins) for weight in weights)
    return counts, confident, right


def _shares(parts: Tensor, counts: Tensor) -> list[float | None]:
    shares = (parts.double() / counts.double()).tolist()
    return [share if count else None for share, count in zip(shares, counts.tolist(), strict=True)]

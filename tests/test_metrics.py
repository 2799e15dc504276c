"""The metrics against torchmetrics and against references slow enough to be obvious."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
)

from drople import metrics
from drople.errors import DropleError

quick = settings(max_examples=40, deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits [N, K], from unsure to sharp, and labels that agree with them more often than chance."""
    count, classes = draw(st.integers(1, 80)), draw(st.integers(2, 9))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64) * scale
    noise = torch.randn(count, classes, generator=generator, dtype=torch.float64) * scale
    return logits, (logits + draw(st.sampled_from([0.0, 0.5, 3.0])) * noise).argmax(dim=1)


def slow_bins(probabilities: Tensor, labels: Tensor, bins: int) -> list[list[tuple[float, bool]]]:
    content: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True):
        top = max(row)
        content[min(int(top * bins), bins - 1)].append((top, row.index(top) == label))
    return content


@quick
@given(problems())
def test_accuracy_and_confusion_agree_with_torchmetrics(problem: tuple[Tensor, Tensor]) -> None:
    logits, labels = problem
    classes = logits.shape[1]
    assert metrics.accuracy(logits, labels) == pytest.approx(
        multiclass_accuracy(logits, labels, classes, average="micro").item()
    )
    assert torch.equal(
        metrics.confusion(logits, labels), multiclass_confusion_matrix(logits, labels, classes)
    )


@quick
@given(problems())
def test_per_class_accuracy_agrees_with_counting(problem: tuple[Tensor, Tensor]) -> None:
    logits, labels = problem
    for index, share in enumerate(metrics.per_class_accuracy(logits, labels)):
        rows = [row for row, label in zip(logits.tolist(), labels.tolist(), strict=True) if label == index]
        if rows:
            assert share == pytest.approx(sum(row.index(max(row)) == index for row in rows) / len(rows))
        else:
            assert share is None


@quick
@given(problems(), st.integers(1, 20))
def test_ece_agrees_with_torchmetrics_and_with_counting(problem: tuple[Tensor, Tensor], bins: int) -> None:
    logits, labels = problem
    probabilities = logits.softmax(dim=1)
    ours = metrics.ece(probabilities, labels, bins)
    theirs = multiclass_calibration_error(probabilities, labels, logits.shape[1], n_bins=bins, norm="l1")
    assert ours == pytest.approx(theirs.item(), abs=1e-6)
    slow = sum(
        abs(sum(top for top, _ in content) - sum(hit for _, hit in content))
        for content in slow_bins(probabilities, labels, bins)
    )
    assert ours == pytest.approx(slow / len(labels), abs=1e-9)


@quick
@given(problems(), st.integers(1, 20))
def test_reliability_agrees_with_counting_and_with_ece(problem: tuple[Tensor, Tensor], bins: int) -> None:
    logits, labels = problem
    probabilities = logits.softmax(dim=1)
    diagram = metrics.reliability(probabilities, labels, bins)
    assert diagram["edges"] == pytest.approx([index / bins for index in range(bins + 1)])
    contents = slow_bins(probabilities, labels, bins)
    assert diagram["counts"] == [len(content) for content in contents]
    gap = 0.0
    for index, content in enumerate(contents):
        if content:
            confidence = sum(top for top, _ in content) / len(content)
            share = sum(hit for _, hit in content) / len(content)
            assert diagram["confidence"][index] == pytest.approx(confidence)
            assert diagram["accuracy"][index] == pytest.approx(share)
            gap += abs(share - confidence) * len(content) / len(labels)
        else:
            assert diagram["confidence"][index] is None and diagram["accuracy"][index] is None
    assert metrics.ece(probabilities, labels, bins) == pytest.approx(gap, abs=1e-9)


def test_a_temperature_at_its_bound_says_that_images_told_nothing() -> None:
    logits = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    assert metrics.at_bound(metrics.fit_temperature(logits, torch.tensor([0, 1]))), "all were recognised"
    assert metrics.at_bound(metrics.fit_temperature(logits, torch.tensor([1, 0]))), "none was"
    assert not metrics.at_bound(metrics.fit_temperature(logits, torch.tensor([1, 1])))


def test_a_confidence_of_one_falls_in_the_last_bin() -> None:
    probabilities = torch.tensor([[1.0, 0.0], [0.95, 0.05]])
    diagram = metrics.reliability(probabilities, torch.tensor([1, 0]), bins=10)
    assert diagram["counts"] == [0] * 9 + [2]
    assert metrics.ece(probabilities, torch.tensor([1, 0]), bins=10) == pytest.approx((1.95 - 1) / 2)


@quick
@given(problems())
def test_no_temperature_on_a_fine_grid_beats_the_fitted_one(problem: tuple[Tensor, Tensor]) -> None:
    logits, labels = problem
    fitted = metrics.fit_temperature(logits, labels)
    assert metrics.LOWEST_TEMPERATURE * (1 - 1e-9) <= fitted <= metrics.HIGHEST_TEMPERATURE * (1 + 1e-9)
    temperatures = torch.logspace(-2, 2, 100, dtype=torch.float64).tolist()
    best = min(cross_entropy(logits / temperature, labels).item() for temperature in temperatures)
    assert cross_entropy(logits / fitted, labels).item() <= best + 1e-6


@pytest.mark.parametrize("temperature", [0.2, 1.0, 7.0])
def test_temperature_is_recovered_from_labels_drawn_from_the_model(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    assert metrics.fit_temperature(logits * temperature, labels) == pytest.approx(temperature, rel=0.05)
    with torch.inference_mode():
        assert metrics.fit_temperature(logits.double(), labels.clone()) == pytest.approx(1.0, rel=0.05)


def test_temperature_without_images_is_one() -> None:
    assert metrics.fit_temperature(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)) == 1.0


def test_harmonic_mean() -> None:
    assert metrics.harmonic_mean(0.8, 0.6) == pytest.approx(2 / (1 / 0.8 + 1 / 0.6))
    assert [metrics.harmonic_mean(*pair) for pair in [(0.0, 0.6), (0.6, 0.0), (0.0, 0.0)]] == [0.0, 0.0, 0.0]


def test_evaluate_is_ready_for_json() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    result = metrics.evaluate(logits, labels, ["cat", "dog", "owl"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["accuracy"] == 0.75
    assert result["ece"] == pytest.approx(math.exp(9) / (math.exp(9) + 2) - 0.75)
    assert result["per_class"] == {
        "cat": {"accuracy": 1.0, "count": 2},
        "dog": {"accuracy": 0.5, "count": 2},
        "owl": {"accuracy": None, "count": 0},
    }
    assert result["confusion"] == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("logits", "labels", "classes", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), ["a", "b"], "no image"),
        (torch.zeros(2, 2), torch.tensor([0, 2]), ["a", "b"], "number the labels"),
        (torch.zeros(2, 2), torch.tensor([0, -1]), ["a", "b"], "number the labels"),
        (torch.zeros(2, 2), torch.tensor([0]), ["a", "b"], "do not go with"),
        (torch.zeros(2, 2), torch.tensor([0, 1]), ["a"], "one name a column"),
        (torch.full((2, 2), math.nan), torch.tensor([0, 1]), ["a", "b"], "diverged"),
    ],
)
def test_mistakes_are_named(logits: Tensor, labels: Tensor, classes: list[str], message: str) -> None:
    with pytest.raises(DropleError, match=message):
        metrics.evaluate(logits, labels, classes)


def test_calibration_needs_a_bin() -> None:
    with pytest.raises(DropleError, match="at least 1 bin"):
        metrics.ece(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), bins=0)

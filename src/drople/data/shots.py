"""Which images a run trains on: few shots a class, base and novel classes, a long tail."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drople.data.dataset import Example, ImageData
from drople.errors import DropleError


def few_shot(examples: Iterable[Example], shots: int | None, seed: int) -> list[Example]:
    """`shots` random examples of each class, in class order; all of them with None.

    The draw of a class hangs on the seed and that class alone, and fewer shots are the beginning of more.
    """
    if shots is not None and shots < 1:
        raise DropleError(f"shots must be 1 or more, or all (in Python None), not {shots}.")
    return [
        example
        for label, members in by_label(examples).items()
        for example in (members if shots is None else _shuffled(members, label, seed)[:shots])
    ]


def shortfall(examples: Iterable[Example], shots: int | None, classes: Sequence[str]) -> list[str]:
    """One note for each class that has fewer examples than `shots`."""
    groups = by_label(examples)
    counts = [len(groups.get(label, ())) for label in range(len(classes))]
    return [
        f"class {name!r} has only {count} of the {shots} training images asked for"
        for name, count in zip(classes, counts, strict=True)
        if shots is not None and count < shots
    ]


def base_novel(classes: Sequence[str]) -> tuple[list[int], list[int]]:
    """The labels of the first half of the classes (the larger one when odd) and of the rest, as in CoOp."""
    middle = (len(classes) + 1) // 2
    return list(range(middle)), list(range(middle, len(classes)))


def long_tail(examples: Iterable[Example], ratio: float, seed: int) -> list[Example]:
    """Class k of K keeps n_max * ratio^(-k/(K-1)) random examples, at least one."""
    if ratio < 1:
        raise DropleError(f"the imbalance ratio is head over tail, so 1 or more, not {ratio}.")
    groups = by_label(examples)
    largest = max(map(len, groups.values()), default=0)
    last = max(len(groups) - 1, 1)
    return [
        example
        for k, (label, members) in enumerate(groups.items())
        for example in _shuffled(members, label, seed)[: max(1, round(largest * ratio ** (-k / last)))]
    ]


def by_label(examples: Iterable[Example]) -> dict[int, list[Example]]:
    """The examples of each label, labels in order."""
    groups: dict[int, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.label, []).append(example)
    return dict(sorted(groups.items()))


def _shuffled(members: list[Example], label: int, seed: int) -> list[Example]:
    return random.Random(f"{seed}/{label}").sample(members, len(members))


def only_classes(data: ImageData, labels: Sequence[int]) -> ImageData:
    """The data of some classes alone, numbered anew in the given order."""
    place = {label: number for number, label in enumerate(labels)}

    def part(examples: Iterable[Example]) -> tuple[Example, ...]:
        return tuple(replace(e, label=place[e.label]) for e in examples if e.label in place)

    return replace(
        data,
        classes=tuple(data.classes[label] for label in labels),
        words=tuple(data.words[label] for label in labels),
        train=part(data.train),
        val=part(data.val),
        test=part(data.test),
        extra={name: part(examples) for name, examples in data.extra.items()},
        notes=(),
    )

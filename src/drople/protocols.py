"""The five protocols: what a method is trained on, what it is tested on, and one JSON record a run.

Training gets data from which the test parts have been taken out. Records are written atomically; a
benchmark that was killed goes on inside the run it was in, and repeats none that is done.
"""

import contextlib
import hashlib
import json
import math
import platform
import random
import re
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from torch import Tensor

from drople import __version__, gla
from drople.ablations import ABLATIONS, AblationRow
from drople.backbone import Backbone
from drople.data.catalog import find as find_dataset
from drople.data.catalog import is_known
from drople.data.dataset import Example, ImageData
from drople.data.images import remember
from drople.data.layouts import check_name, resolve
from drople.data.shots import base_novel, by_label, few_shot, long_tail, only_classes
from drople.device import find_device, usual_dtype
from drople.errors import DropleError, OtherSettings, unknown
from drople.learner import Adjustment, PromptLearner, file_name
from drople.losses import class_log_prior
from drople.methods import find, option_groups, option_names
from drople.metrics import fit_temperature, harmonic_mean
from drople.options import names, typed, written
from drople.progress import Progress, Quiet
from drople.records import write_json
from drople.run_records import read_record
from drople.training import TrainingOptions

SCHEMA = 1
IMAGENET_VARIANTS = ("imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r")
SHOTS: dict[str, Sequence[int | None]] = {"few-shot": (1, 2, 4, 8, 16)}
# Of what is left when a fifth is held out for validation: with it, CoOp's half, a fifth and three tenths.
TEST_SHARE = 3 / 8
# The decoded pictures that a process keeps for the runs to come.
DECODED_BYTES = 1 << 30
# PACS has a test split a domain and none called test; its training images are photos.
PACS_SOURCE = "test_photo"


@dataclass(frozen=True)
class Run:
    """One training and its tests. Everything that decides the result, nothing about where it is written."""

    protocol: str
    dataset: str
    method: str
    seed: int
    shots: int | None
    backbone: str = "pocket"
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "auto"
    ratio: float | None = None
    post_hoc: str | None = None
    targets: tuple[str, ...] = ()
    row: str | None = None  # of an ablation table

    @property
    def label(self) -> str:
        """The run as a table names it: a row of the paper's, or the method with what differs from its defaults."""
        name = self.row or described(self.method, self.preset, self.options)
        return name + (f"+{self.post_hoc}" if self.post_hoc else "")

    @property
    def key(self) -> str:
        # Records that were there before rows had names keep their key.
        decides = {name: value for name, value in asdict(self).items() if name != "row" or value is not None}
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:10]

    @property
    def path(self) -> Path:
        """Where its record lies: readable, and unique by the key."""
        name = re.sub(
            r"[^\w.+=-]+", "_", f"{Path(self.dataset).name}-{self.label}-{self.shots}shots-seed{self.seed}"
        )
        return Path(self.protocol) / f"{name[:120]}-{self.key}.json"


def described(name: str, preset: str | None, options: Mapping[str, Any]) -> str:
    """A name, and in brackets what was changed; not the epochs, which are a matter of time."""
    changed = [
        f"{option}={written(value)}" for option, value in sorted(options.items()) if option != "epochs"
    ]
    inside = ", ".join(([] if preset is None else [preset]) + changed)
    return name + (f" ({inside})" if inside else "")


# A test: the name of the part, its data and the split. The data's own classes are the choices.
Test = tuple[str, ImageData, str]


def without_tests(data: ImageData) -> ImageData:
    """What training is given: no path from here leads to a test file."""
    return replace(data, test=(), extra={})


def find_data(name: str, root: Path) -> tuple[ImageData, str]:
    """The data with a test part, and its template. Where there is no test part it is drawn from train: the
    same images in every run, and a note in the record says so."""
    data, template = resolve(name, root)
    if data.test or not data.train:
        return data, template
    if PACS_SOURCE in data.extra:
        others = {split: found for split, found in data.extra.items() if split != PACS_SOURCE}
        return replace(data, test=data.extra[PACS_SOURCE], extra=others), template
    test: set[int] = set()
    for label, members in by_label(data.train).items():
        draw = random.Random(f"test/{data.classes[label]}")
        test.update(id(example) for example in draw.sample(members, round(TEST_SHARE * len(members))))
    note = f"no test part: {len(test)} of the training images drawn for it"
    return (
        replace(
            data,
            train=tuple(e for e in data.train if id(e) not in test),
            test=tuple(e for e in data.train if id(e) in test),
            notes=(*data.notes, note),
        ),
        template,
    )


def base_to_novel(data: ImageData, run: Run, root: Path) -> tuple[ImageData, list[Test]]:
    """The first half of the classes trains; both halves are tested, each among its own classes."""
    if len(data.classes) < 4:
        raise DropleError(
            f"{run.dataset} has {len(data.classes)} classes: {run.protocol} needs four or more, or a half has "
            "one class and nothing to tell it from."
        )
    base, novel = (only_classes(data, labels) for labels in base_novel(data.classes))
    return without_tests(base), [("base", base, "test"), ("novel", novel, "test")]


def few_shots(data: ImageData, run: Run, root: Path) -> tuple[ImageData, list[Test]]:
    """All classes, a few images of each."""
    return without_tests(data), [("test", data, "test")]


def cross_dataset(data: ImageData, run: Run, root: Path) -> tuple[ImageData, list[Test]]:
    """Train on all classes of one dataset; test on all classes of every other, untouched."""
    return without_tests(data), [("source", data, "test"), *_targets(run, root)]


def _targets(run: Run, root: Path) -> list[Test]:
    return [(Path(name).name, find_data(name, root)[0], "test") for name in run.targets]


def domain_shift(data: ImageData, run: Run, root: Path) -> tuple[ImageData, list[Test]]:
    """Train on a source, test on its variants: further test splits of the data, or datasets of its own."""
    targets: list[Test] = [(name.removeprefix("test_"), data, name) for name in data.extra]
    targets += _targets(run, root)
    if not targets:
        raise DropleError(
            f"{run.dataset} has no other domain to test on: it needs test_* splits, or --targets naming datasets "
            "with the same classes."
        )
    return without_tests(data), [("source", data, "test"), *targets]


def long_tailed(data: ImageData, run: Run, root: Path) -> tuple[ImageData, list[Test]]:
    """Base-to-novel with training images that thin out exponentially from class to class."""
    base, tests = base_to_novel(data, run, root)
    few = few_shot(base.train, run.shots, run.seed)
    return replace(base, train=tuple(long_tail(few, run.ratio or 10.0, run.seed))), tests


PROTOCOLS: dict[str, Callable[[ImageData, Run, Path], tuple[ImageData, list[Test]]]] = {
    "base-to-novel": base_to_novel,
    "few-shot": few_shots,
    "cross-dataset": cross_dataset,
    "domain-shift": domain_shift,
    "long-tail": long_tailed,
}


def plan(
    protocol: str,
    datasets: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    shots: Sequence[int | None] | None = None,
    *,
    source: str | None = None,
    targets: Sequence[str] = (),
    ratio: float = 10.0,
    ablation: str | None = None,
    preset: str | None = None,
    options: Mapping[str, Any] | None = None,
    **common: Any,
) -> list[Run]:
    """Every run of a benchmark, seeds outermost: a benchmark that is stopped early has whole rows.

    With an `ablation` the rows of that table of the paper stand in the place of the methods; what a row sets
    is set, whatever the `options` say.
    """
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if not 1 <= ratio < math.inf:
        raise DropleError(f"the imbalance ratio is head over tail, so a number of 1 or more, not {ratio}.")
    if ablation is not None and ablation not in ABLATIONS:
        raise unknown("ablation", ablation, ABLATIONS)
    if source is not None and protocol != "cross-dataset":
        raise DropleError(f"--source is for cross-dataset: {protocol} trains on each of --datasets.")
    if targets and protocol != "domain-shift":
        raise DropleError(f"--targets is for domain-shift: {protocol} tests on --datasets.")
    rows = [AblationRow("", method) for method in methods] if ablation is None else ABLATIONS[ablation]
    for row in rows:
        find(row.method)  # a name that nobody knows would stand in the tables as a row without results
    _check_options([row.method for row in rows], preset, options or {})
    given = {row.method: _typed(row.method, options or {}) for row in rows}
    names, targets = [_name(d) for d in datasets], [_name(d) for d in targets]
    if protocol == "cross-dataset":
        if source is None:
            raise DropleError("cross-dataset needs --source: the dataset to train on.")
        source = _name(source)
        targets, names = [n for n in names if n != source], [source]
        if not targets:
            raise DropleError("cross-dataset needs --datasets other than the --source: those to test on.")
    parts = ["source", *(Path(t).name for t in targets)]
    twice = sorted({part for part in parts if parts.count(part) > 1})
    if twice:
        raise DropleError(
            f"several tests would be called {' and '.join(twice)} in one record: give each target once, in a "
            "folder of its own name."
        )
    for name in (*names, *targets):
        check_name(name)  # a path may be one of another machine of a cluster
    numbers = shots or SHOTS.get(protocol, (16,))
    return [
        Run(
            protocol,
            dataset,
            row.method,
            seed,
            number,
            preset=preset,
            options={**given[row.method], **row.options},
            row=described(row.label, preset, given[row.method]) if row.label else None,
            ratio=ratio if protocol == "long-tail" else None,
            targets=tuple(
                targets or (IMAGENET_VARIANTS if (protocol, dataset) == ("domain-shift", "imagenet") else ())
            ),
            **common,
        )
        for seed in seeds
        for dataset in names
        for number in numbers
        for row in rows
    ]


def _check_options(methods: Sequence[str], preset: str | None, options: Mapping[str, Any]) -> None:
    """What none of the methods has is a mistake; what one of them lacks is left for its record to tell."""
    presets = ["none", "auto", *(name for method in methods for name in find(method)[0].presets)]
    if preset is not None and preset not in presets:
        raise unknown(f"preset of {' or '.join(methods)}", preset, presets)
    known = [name for method in methods for name in option_names(method)] + names(TrainingOptions)
    for name in options:
        if name not in known:
            raise unknown(f"option of {' or '.join(methods)}", name, known)


def _typed(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling for each option, so that a run has one key; a mistake is left for its record to tell."""
    return typed(options, *option_groups(method).values(), TrainingOptions)


def _name(dataset: str) -> str:
    """One spelling for each dataset of the catalog and each path, so that it has one column in a table."""
    if is_known(dataset) and not Path(dataset).exists():
        return find_dataset(dataset).name
    return str(Path(dataset))


def execute(
    run: Run, root: Path, work: Path, device: str = "auto", progress: Progress | None = None
) -> dict[str, Any]:
    """Train and test one run; the record, whether it went well or not."""
    begun = time.monotonic()
    remember(DECODED_BYTES)
    record = opening(run, device)
    try:
        record |= _measure(run, root, work, device, progress or Quiet())
    except Exception as error:
        # One run that cannot be done must not end a benchmark of hundreds.
        trace = "" if isinstance(error, DropleError) else traceback.format_exc(limit=-3)
        record |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "trace": trace,
            "results": {},
        }
    record["timing"] = {
        **record.get("timing", {}),
        "seconds": round(time.monotonic() - begun, 3),
        "finished": now(),
    }
    return record


def opening(run: Run, device: str) -> dict[str, Any]:
    """A record as far as it is known before the run."""
    return {
        "schema": SCHEMA,
        **asdict(run),
        "label": run.label,
        "key": run.key,
        "options": dict(run.options),
        "status": "done",
        "error": None,
        "environment": environment(device),
    }


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _measure(run: Run, root: Path, work: Path, device: str, progress: Progress) -> dict[str, Any]:
    data, template = find_data(run.dataset, root)
    train, tests = PROTOCOLS[run.protocol](data, run, root)
    kind, _ = find(run.method)
    learner = PromptLearner(
        _backbone(run.backbone, run.precision, device),
        run.method,
        preset=run.preset,
        # A preset that names its own sentences is compared with them.
        template=None if "templates" in kind.presets.get(run.preset or "", {}) else template,
        seed=run.seed,
        device=device,
        precision=run.precision,  # type: ignore[arg-type]
        progress=progress,
        **run.options,
    )
    begun = time.monotonic()
    # The tail has been cut to its shape already; few-shot drawing would straighten it.
    shots = None if run.protocol == "long-tail" else run.shots
    try:
        learner.fit(train, shots, out=work, resume=True)
    except OtherSettings:
        # Of a benchmark that was stopped before the data changed.
        shutil.rmtree(work)
        learner.fit(train, shots, out=work)
    fitted = time.monotonic()
    results = {}
    post_hoc = _post_hoc(run, learner, train)
    for part, images, split in tests:
        # Of classes that were not trained on no frequency is known, so they stay as they are.
        adjustment = post_hoc if images.classes == train.classes else None
        found = learner.evaluate(images, split, zero_shot=False, choices="data", adjustment=adjustment)
        results[part] = {name: value for name, value in found.items() if name != "confusion"}
    return {
        "results": results,
        "template": template,
        "data": {
            "classes": len(data.classes),
            "fingerprint": data_fingerprint(data),
            "notes": list(data.notes),
        },
        "samples": [[name, label] for name, label, _ in learner.config_["samples"]],
        "training": learner.config_["training"],
        "trainable_parameters": learner.trainable_,
        "validation": learner.metrics_,
        "timing": {"fit": round(fitted - begun, 3), "test": round(time.monotonic() - fitted, 3)},
    }


@lru_cache(maxsize=1)
def _backbone(name: str, precision: str, device: str) -> Backbone:
    """Runs of a benchmark share their frozen backbone; one that was rounded to bf16 serves no others."""
    shared = Backbone.load(name)
    return shared.to("cpu", usual_dtype(find_device(device))) if precision == "auto" else shared


def _post_hoc(run: Run, learner: PromptLearner, train: ImageData) -> Adjustment | None:
    """GLA for the classes trained on."""
    if run.post_hoc is None:
        return None
    if run.post_hoc != "gla":
        raise unknown("post-hoc method", run.post_hoc, ["gla"])
    examples = train.train if run.protocol == "long-tail" else few_shot(train.train, run.shots, run.seed)
    zero_shot, good = learner.zero_shot_logits([e.image for e in examples])
    # Training left out what cannot be read, so it has no part in the frequencies either.
    labels = torch.tensor([examples[i].label for i in good])
    prior = class_log_prior(labels, len(train.classes))
    bias = gla.estimate_label_bias(zero_shot, labels, prior)
    method = learner.method_
    removed = method.takes_prior and learner.config_["training"]["loss"] != "cross_entropy"
    # What was never shown the training images cannot have learned how frequent their classes are.
    unbiased = removed or method.kind == "zero-shot"

    def adjust(learned: Tensor, zero_shot: Tensor) -> Tensor:
        return gla.adjust(learned, zero_shot, None if unbiased else prior, bias)

    return Adjustment(adjust, _temperature(learner, adjust, train.val))


def _temperature(
    learner: PromptLearner, adjust: Callable[[Tensor, Tensor], Tensor], val: Sequence[Example]
) -> float:
    """That of the adjusted logits: a sum of two models' logits is as sure as both together."""
    learned, zero_shot, good = learner.both_logits([e.image for e in val])
    if not good:
        return 1.0
    return fit_temperature(adjust(learned, zero_shot), torch.tensor([val[i].label for i in good]))


def benchmark(
    runs: Sequence[Run],
    root: Path,
    out: Path,
    *,
    device: str = "auto",
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Iterator[tuple[Run, dict[str, Any], bool]]:
    """Go through the runs; yields each with its record and whether it was there already.

    Several processes may work on the same records: a run that another one is at comes last, to be done by it.
    """
    busy: list[Run] = []
    for run, seconds in chain(((run, 0) for run in runs), ((run, -1) for run in busy)):
        path, work = out / run.path, out / ".work" / run.key
        record = recorded(path, retry_failed)
        there = record is not None
        # A process that was killed right after it wrote the record has left its work behind.
        if record is None or work.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            if seconds and progress is not None:
                progress.say(f"waiting for {path.stem}, which another process does")
            try:
                held = lock.acquire(timeout=seconds)
            except Timeout:
                busy.append(run)
                continue
            with held:
                record = recorded(path, retry_failed)
                there = record is not None
                if record is None:
                    record = execute(run, root, work, device, progress)
                    write_json(path, record)
                shutil.rmtree(work, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)
        yield run, record, there
    # Another process may be at work on the same records.
    with contextlib.suppress(OSError):
        (out / ".work").rmdir()


def clear(out: Path, run: Run) -> None:
    """Remove what a killed benchmark left of a run; nothing of one that a benchmark is at."""
    work, lock = out / ".work" / run.key, _lock(out / run.path)
    if work.exists():
        with contextlib.suppress(Timeout), lock.acquire(timeout=0):
            shutil.rmtree(work, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)


def _lock(path: Path) -> FileLock:
    """Held by who does the run that is recorded in `path`."""
    return FileLock(path.with_name(f".{path.stem}.lock"))


def recorded(path: Path, retry_failed: bool) -> dict[str, Any] | None:
    """The record of a run that is not to be done again; None for one that is."""
    record = read_record(path) if path.exists() else None
    done = record is not None and (record.get("status") == "done" or not retry_failed)
    return record if done else None


def summary(record: Mapping[str, Any]) -> str:
    """A record in a line."""
    what = f"{Path(record['dataset']).name} {record['label']} {record['shots']} shots seed {record['seed']}"
    if record["status"] != "done":
        return f"{what}: failed, {record['error']}"
    shares = {name: part.get("accuracy") for name, part in record["results"].items()}
    parts = {name: 100 * share for name, share in shares.items() if share is not None}
    shown = "  ".join(f"{name} {value:.1f}" for name, value in parts.items())
    if {"base", "novel"} <= set(parts):
        shown += f"  H {harmonic_mean(parts['base'], parts['novel']):.1f}"
    return f"{what}: {shown}"


def data_fingerprint(data: ImageData) -> str:
    """A hash over every split's files (names and sizes) and classes: the same data, the same hash."""
    splits = {"train": data.train, "val": data.val, "test": data.test, **data.extra}
    rows = sorted(
        (name, data.classes[e.label], file_name(e.image, data.root) or "", _size(e.image))
        for name, examples in splits.items()
        for e in examples
    )
    return hashlib.sha256(json.dumps([data.classes, rows]).encode()).hexdigest()


def _size(image: Any) -> int:
    return image.stat().st_size if isinstance(image, Path) and image.exists() else 0


def environment(device: str) -> dict[str, Any]:
    """What ran: versions, processor, and the state of the source."""
    cuda = torch.cuda.is_available() and device != "cpu"
    return {
        "drople": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({torch.get_num_threads()} threads)",
        "git": git_state(Path(__file__).parent),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit the package runs from, and whether it was changed since; None outside a checkout."""
    try:
        call = ["git", "-C", str(folder)]
        commit = subprocess.run([*call, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changes = subprocess.run(
            [*call, "status", "--porcelain", "."], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(changes.stdout.strip())}

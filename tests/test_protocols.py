"""The five protocols on small image trees, and the record of each run."""

import dataclasses
import json
import shlex
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import COLOURS, contents, own_folder, picture, tiny_checkpoint
from checkpoints import pictures as coloured
from filelock import FileLock
from PIL import Image

from drople import PromptLearner
from drople.data.dataset import ImageData
from drople.data.shots import few_shot
from drople.errors import DropleError
from drople.protocols import (
    IMAGENET_VARIANTS,
    PROTOCOLS,
    Run,
    base_to_novel,
    benchmark,
    clear,
    cross_dataset,
    data_fingerprint,
    domain_shift,
    execute,
    few_shots,
    find_data,
    long_tailed,
    plan,
    without_tests,
)

BACKBONE = str(tiny_checkpoint())
ROOT = Path("no-data-here")
# In the order of their names, as a folder is read.
FIVE = ("blue", "green", "olive", "red", "yellow")


def pictures(folder: Path, names: Sequence[str], count: int, first: int = 0) -> Path:
    """The pictures of the other tests, and a fifth class between two of theirs: an odd number has two halves."""
    coloured(folder, [name for name in names if name in COLOURS], count, first)
    for number in range(first, first + count) if "olive" in names else ():
        (folder / "olive").mkdir(parents=True, exist_ok=True)
        Image.blend(picture("red", number), picture("green", number), 0.5).save(
            folder / "olive" / f"{number}.png"
        )
    return folder


def splits(folder: Path, names: Sequence[str], count: int) -> Path:
    for number, split in enumerate(("train", "val", "test")):
        pictures(folder / split, names, count, first=100 * number)
    return folder


@pytest.fixture(scope="module")
def five() -> Path:
    """Five classes: the first three are the base."""
    return splits(own_folder() / "five", FIVE, 6)


@pytest.fixture(scope="module")
def domains() -> Path:
    """Train, val and test, and two further domains: one of all classes, one of two."""
    folder = splits(own_folder() / "domains", FIVE, 4)
    pictures(folder / "test_dark", FIVE, 2, first=500)
    pictures(folder / "test_art", ("green", "red"), 3, first=600)
    return folder


def a_run(protocol: str, dataset: Path, method: str = "coop", **changed: Any) -> Run:
    common: dict[str, Any] = {"seed": 1, "shots": 2, "backbone": BACKBONE, "options": {"epochs": 1}}
    return Run(protocol, str(dataset), method, **{**common, **changed})


def go(run: Run, work: Path) -> dict[str, Any]:
    record = execute(run, ROOT, work)
    assert record["status"] == "done", record["error"]
    return record


def timeless(record: dict[str, Any]) -> str:
    """A record as it stands on disk, but for the time and the commit, which may change while tests run."""
    rest = {name: value for name, value in record.items() if name != "timing"}
    rest["environment"] = {name: value for name, value in rest["environment"].items() if name != "git"}
    return json.dumps(rest, indent=1)


def files(data: ImageData, split: str) -> set[str]:
    return {Path(str(e.image)).relative_to(data.root or "").as_posix() for e in data.split(split)}


# What trains and what is tested ---------------------------------------------------------------------


def test_base_to_novel_trains_the_first_half_and_tests_each_half_among_its_own(
    five: Path, tmp_path: Path
) -> None:
    run = a_run("base-to-novel", five)
    data, _ = find_data(str(five), ROOT)
    train, tests = base_to_novel(data, run, ROOT)
    assert train.classes == FIVE[:3], "the first half of five is three"
    assert {train.classes[e.label] for e in train.train} == set(FIVE[:3])
    assert {data.classes[e.label] for e in train.train} == set(FIVE[:3])
    assert [(part, images.classes, split) for part, images, split in tests] == [
        ("base", FIVE[:3], "test"),
        ("novel", FIVE[3:], "test"),
    ]
    novel = tests[1][1]
    assert {Path(str(e.image)).parent.name: novel.classes[e.label] for e in novel.test} == {
        "red": "red",
        "yellow": "yellow",
    }
    record = go(run, tmp_path / "work")
    assert list(record["results"]) == ["base", "novel"]
    assert list(record["results"]["base"]["per_class"]) == list(FIVE[:3])
    assert list(record["results"]["novel"]["per_class"]) == list(FIVE[3:]), "chosen among novel classes only"
    assert record["results"]["base"]["images"] == 18 and record["results"]["novel"]["images"] == 12
    assert {label for _, label in record["samples"]} == set(FIVE[:3])
    assert record["data"]["classes"] == 5


def test_halves_of_one_class_measure_nothing_and_are_refused(tmp_path: Path) -> None:
    three = splits(tmp_path / "three", ("red", "green", "blue"), 3)
    for protocol in ("base-to-novel", "long-tail"):
        record = execute(a_run(protocol, three), ROOT, tmp_path / protocol)
        assert record["status"] == "failed" and "four or more" in record["error"]
    splits(tmp_path / "four", tuple(COLOURS), 3)
    go(a_run("base-to-novel", tmp_path / "four"), tmp_path / "work")


def test_few_shot_trains_and_tests_all_classes(five: Path, tmp_path: Path) -> None:
    record = go(a_run("few-shot", five, shots=4), tmp_path / "work")
    assert list(record["results"]) == ["test"]
    assert list(record["results"]["test"]["per_class"]) == list(FIVE)
    assert record["results"]["test"]["images"] == 30
    assert Counter(label for _, label in record["samples"]) == dict.fromkeys(FIVE, 4)


def test_cross_dataset_tests_all_classes_of_each_target(five: Path, tmp_path: Path) -> None:
    other = splits(tmp_path / "other", ("yellow", "blue"), 3)
    third = splits(tmp_path / "third", ("red", "green", "blue"), 2)
    run = a_run("cross-dataset", five, targets=(str(other), str(third)))
    train, tests = cross_dataset(find_data(str(five), ROOT)[0], run, ROOT)
    assert train.classes == FIVE
    assert [part for part, *_ in tests] == ["source", "other", "third"]
    record = go(run, tmp_path / "work")
    results = record["results"]
    assert list(results["source"]["per_class"]) == list(FIVE)
    # Yellow and blue were trained on; still the target's own classes are the choices.
    assert list(results["other"]["per_class"]) == ["blue", "yellow"]
    assert list(results["third"]["per_class"]) == ["blue", "green", "red"]
    assert (results["other"]["images"], results["third"]["images"]) == (6, 6)
    assert all(name.startswith("train/") for name, _ in record["samples"])


def test_domain_shift_tests_the_further_splits(domains: Path, tmp_path: Path) -> None:
    record = go(a_run("domain-shift", domains), tmp_path / "work")
    results = record["results"]
    assert set(results) == {"source", "dark", "art"}
    assert {part: found["images"] for part, found in results.items()} == {"source": 20, "dark": 10, "art": 6}
    assert {part: found["split"] for part, found in results.items()} == {
        "source": "test",
        "dark": "test_dark",
        "art": "test_art",
    }
    assert list(results["art"]["per_class"]) == list(FIVE), "a split of a dataset has the dataset's classes"


def test_domain_shift_tests_targets_among_their_own_classes(five: Path, tmp_path: Path) -> None:
    """As ImageNet-A and -R do: another dataset, of a part of the classes."""
    variant = splits(tmp_path / "variant", ("green", "yellow"), 3)
    only_tests = pictures(tmp_path / "sketch" / "test", ("blue", "red", "green"), 2).parent
    record = go(a_run("domain-shift", five, targets=(str(variant), str(only_tests))), tmp_path / "work")
    results = record["results"]
    assert list(results) == ["source", "variant", "sketch"]
    assert list(results["variant"]["per_class"]) == ["green", "yellow"]
    assert list(results["sketch"]["per_class"]) == ["blue", "green", "red"]
    alone = execute(a_run("domain-shift", five), ROOT, tmp_path / "alone")
    assert alone["status"] == "failed" and "--targets" in alone["error"]


def test_pacs_tests_its_own_domain_as_the_source(tmp_path: Path) -> None:
    """No split called test: training images are photos, so test_photo is what was trained for."""
    folder = own_folder() / "pacs-like"
    for number, split in enumerate(("train", "val", "test_photo", "test_sketch")):
        pictures(folder / split, FIVE, 3, first=100 * number)
    shifted = go(a_run("domain-shift", folder), tmp_path / "shift")["results"]
    assert {part: found["images"] for part, found in shifted.items()} == {"source": 15, "sketch": 15}
    data, _ = find_data(str(folder), ROOT)
    assert files(data, "test") == {f"test_photo/{c}/{n}.png" for c in FIVE for n in (200, 201, 202)}
    assert list(data.extra) == ["test_sketch"]
    # And so it takes part in every protocol.
    assert go(a_run("base-to-novel", folder), tmp_path / "base")["results"]["novel"]["images"] == 6


@pytest.mark.parametrize(
    ("shots", "ratio", "counts"), [(6, 10.0, [6, 2, 1]), (6, 2.0, [6, 4, 3]), (5, 1.0, [5, 5, 5])]
)
def test_long_tail_thins_out_exponentially(
    five: Path, tmp_path: Path, shots: int, ratio: float, counts: list[int]
) -> None:
    run = a_run("long-tail", five, shots=shots, ratio=ratio)
    assert counts == [max(1, round(shots * ratio ** (-k / 2))) for k in range(3)]
    record = go(run, tmp_path / "work")
    found = Counter(label for _, label in record["samples"])
    assert [found[name] for name in FIVE] == [*counts, 0, 0]
    assert record["ratio"] == ratio and record["shots"] == shots
    assert list(record["results"]) == ["base", "novel"]
    data, _ = find_data(str(five), ROOT)
    train, _ = long_tailed(data, run, ROOT)
    assert {
        f"{split}/{c}" for split, c in ((Path(n).parts[0], Path(n).parts[1]) for n, _ in record["samples"])
    } == {f"train/{c}" for c in FIVE[:3]}
    assert len(train.train) == sum(counts)


# A folder or table without a test part ---------------------------------------------------------------


def test_a_plain_folder_gets_a_test_part_drawn_and_recorded(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "plain", FIVE, 10)
    data, _ = find_data(str(folder), ROOT)
    again, _ = find_data(str(folder), ROOT)
    assert data == again
    parts = [files(data, split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [25, 10, 15], "CoOp's half, a fifth, three tenths"
    assert not set.intersection(*parts) and len(set.union(*parts)) == 50
    assert Counter(e.label for e in data.test) == dict.fromkeys(range(5), 3)
    targets = splits(tmp_path / "target", ("red", "blue"), 2)
    for protocol in PROTOCOLS:
        run = a_run(
            protocol, folder, targets=(str(targets),) if protocol in ("cross-dataset", "domain-shift") else ()
        )
        record = go(replace(run, ratio=2.0 if protocol == "long-tail" else None), tmp_path / protocol)
        assert any("no test part: 15 of the training images" in note for note in record["data"]["notes"])
        assert {name for name, _ in record["samples"]} <= parts[0]


def test_a_table_takes_part(five: Path, tmp_path: Path) -> None:
    lines = ["path,label,split"]
    for split in ("train", "val", "test"):
        for image in sorted((five / split).rglob("*.png")):
            lines.append(f"{image},{image.parent.name},{split}")
    table = tmp_path / "five.csv"
    table.write_text("\n".join(lines), "utf-8")
    from_table = go(a_run("base-to-novel", table), tmp_path / "a")
    from_folder = go(a_run("base-to-novel", five), tmp_path / "b")
    assert from_table["results"] == from_folder["results"]


# No way from training to test files ------------------------------------------------------------------


def test_training_data_holds_no_test_image(domains: Path) -> None:
    data, _ = find_data(str(domains), ROOT)
    run = a_run("", domains, ratio=2.0, targets=(str(domains),))
    for protocol in (base_to_novel, few_shots, cross_dataset, domain_shift, long_tailed):
        train, tests = protocol(data, run, ROOT)
        assert train.test == () and not train.extra
        trained = {str(e.image) for e in (*train.train, *train.val)}
        tested = {str(e.image) for _, images, split in tests for e in images.split(split)}
        assert tested and not trained & tested
        assert not any("/test" in path for path in trained)
    assert without_tests(data).split("train") == data.train


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_training_is_the_same_when_every_test_file_is_rubbish(protocol: str, tmp_path: Path) -> None:
    """The bytes of what is learned, and what validation says, hang on no test file."""
    folder = splits(tmp_path / "data", FIVE, 4)
    pictures(folder / "test_art", FIVE, 2, first=700)
    other = splits(tmp_path / "other", ("red", "blue"), 2)
    run = a_run(protocol, folder, targets=(str(other),) if protocol == "cross-dataset" else ())
    run = replace(run, ratio=3.0 if protocol == "long-tail" else None, shots=4)
    before = execute(run, ROOT, tmp_path / "before")
    assert before["status"] == "done", before["error"]
    for image in [*folder.glob("test*/*/*"), *other.glob("*/*/*")]:
        image.write_bytes(b"no image")
    after = execute(run, ROOT, tmp_path / "after")
    assert after["status"] == "failed" and "can be read" in after["error"]
    assert contents(tmp_path / "before") == contents(tmp_path / "after")


# Few shots -----------------------------------------------------------------------------------------------


def test_every_method_of_a_row_sees_the_same_recorded_images(five: Path, tmp_path: Path) -> None:
    samples = {}
    for seed in (1, 2):
        for method in ("zero-shot", "coop", "drople", "tip-adapter", "linear-probe"):
            record = go(a_run("few-shot", five, method, seed=seed), tmp_path / f"{method}{seed}")
            samples[method, seed] = record["samples"]
    data, _ = find_data(str(five), ROOT)
    for seed in (1, 2):
        drawn = few_shot(data.train, 2, seed)
        expected = [[Path(str(e.image)).relative_to(five).as_posix(), data.classes[e.label]] for e in drawn]
        assert all(found == expected for (_, of), found in samples.items() if of == seed)
    assert samples["coop", 1] != samples["coop", 2]


# Planning --------------------------------------------------------------------------------------------------


def test_a_plan_has_seeds_outermost_and_its_protocols_shots() -> None:
    runs = plan("few-shot", ["x/a", "x/b"], ["zero-shot", "coop"], [1, 2])
    assert len(runs) == 2 * 2 * 5 * 2 and len({run.path for run in runs}) == len(runs)
    assert [run.seed for run in runs] == [1] * 20 + [2] * 20
    assert [run.shots for run in runs[:10:2]] == [1, 2, 4, 8, 16]
    assert {run.shots for run in plan("base-to-novel", ["x/a"], ["coop"], [1])} == {16}
    assert plan("long-tail", ["x/a"], ["coop"], [1])[0].ratio == 10.0
    assert plan("base-to-novel", ["x/a"], ["coop"], [1], ratio=5.0)[0].ratio is None


def test_names_of_the_catalog_have_one_spelling() -> None:
    runs = plan("cross-dataset", ["DTD", "EuroSAT", "imagenet"], ["coop"], [1], source="ImageNet")
    assert [(run.dataset, run.targets) for run in runs] == [("imagenet", ("dtd", "eurosat"))]
    shifted = plan("domain-shift", ["ImageNet"], ["coop"], [1])[0]
    assert shifted.targets == IMAGENET_VARIANTS
    given = plan("domain-shift", ["imagenet"], ["coop"], [1], targets=["ImageNet-A"])[0]
    assert given.targets == ("imagenet_a",)
    assert plan("few-shot", ["x/y/"], ["coop"], [1]) == plan("few-shot", ["x/y"], ["coop"], [1])


def test_an_option_has_one_spelling() -> None:
    text = {"epochs": "1", "p_max": "0.40", "lr": "1e-2", "scores": "self, class", "class_words_drop": "no"}
    values = {"epochs": 1, "p_max": 0.4, "lr": 0.01, "scores": ("self", "class"), "class_words_drop": False}
    (spelled,), (given,) = (
        plan("few-shot", ["x/a"], ["drople"], [1], [2], options=o) for o in (text, values)
    )
    assert spelled == given and spelled.key == given.key and dict(given.options) == values
    assert given.label == "drople (class_words_drop=false, lr=0.01, p_max=0.4, scores=self,class)"
    rows = [plan("few-shot", ["x/a"], [], [1], [2], ablation="range", options=o) for o in (text, values)]
    assert [run.path for run in rows[0]] == [run.path for run in rows[1]]
    # A mistake stays what it was, and its run fails by itself.
    wrong = {"epochs": "many", "lr": "nan"}
    with pytest.raises(DropleError, match="unknown method 'no-method'"):
        plan("few-shot", ["x/a"], ["drople", "no-method"], [1], [2])
    runs = plan("few-shot", ["x/a"], ["drople", "coop"], [1], [2], options=wrong)
    assert [dict(run.options) for run in runs] == [wrong, wrong]
    other, _ = plan("few-shot", ["x/a"], ["coop", "drople"], [1], [2], options={"p_max": "0.40"})
    assert other.options == {"p_max": "0.40"}, "coop has none"
    with pytest.raises(DropleError, match="unknown option of coop or maple 'p_max'"):
        plan("few-shot", ["x/a"], ["coop", "maple"], [1], [2], options={"p_max": "0.40"})
    with pytest.raises(DropleError, match=r"unknown preset of coop or maple 'author': did you mean authors"):
        plan("few-shot", ["x/a"], ["coop", "maple"], [1], [2], preset="author")
    with pytest.raises(DropleError, match=r"unknown dataset, and no file or folder 'eurosatt': did you mean"):
        plan("few-shot", ["eurosatt"], ["coop"], [1], [2])


def test_the_records_behind_the_docs_are_found_again() -> None:
    """Planned anew from what they say of themselves, with options as a command line gives them."""
    file = Path(__file__).parent.parent / "benchmarks" / "records.tar.gz"
    if not file.exists():
        pytest.skip("the records of docs/results.md are not here")
    found = 0
    with tarfile.open(file) as tar:
        for member in tar:
            if not member.name.endswith(".json"):
                continue
            record = json.load(tar.extractfile(member))  # type: ignore[arg-type]
            of_source = record["protocol"] == "cross-dataset"
            (run,) = plan(
                record["protocol"],
                record["targets"] if of_source else [record["dataset"]],
                [record["method"]],
                [record["seed"]],
                [record["shots"]],
                source=record["dataset"] if of_source else None,
                targets=() if of_source else record["targets"],
                ratio=record["ratio"] or 10.0,
                options={
                    name: ",".join(value) if isinstance(value, list) else str(value)
                    for name, value in record["options"].items()
                },
                **{name: record[name] for name in ("backbone", "preset", "precision", "post_hoc")},
            )
            run = dataclasses.replace(run, row=record.get("row"))
            assert run.key == record["key"] and member.name.endswith(run.path.as_posix())
            found += 1
    assert found > 900


def test_what_cannot_be_planned_is_refused() -> None:
    def words(*arguments: Any, **more: Any) -> str:
        with pytest.raises(DropleError) as refused:
            plan(*arguments, **more)
        return str(refused.value)

    assert "did you mean few-shot?" in words("fewshot", ["a"], ["coop"], [1])
    assert "--source" in words("cross-dataset", ["a"], ["coop"], [1])
    assert "other than the --source" in words("cross-dataset", ["a"], ["coop"], [1], source="a")
    # Two targets of one name would share a place in the record, and the later would silently win.
    assert "called x" in words("cross-dataset", ["one/x", "two/x"], ["coop"], [1], source="a")
    assert "called source" in words("domain-shift", ["a"], ["coop"], [1], targets=["my/source"])
    for protocol in ("base-to-novel", "few-shot", "domain-shift", "long-tail"):
        assert "--source is for cross-dataset" in words(protocol, ["a"], ["coop"], [1], source="b")
    for protocol in ("base-to-novel", "few-shot", "cross-dataset", "long-tail"):
        source = "b" if protocol == "cross-dataset" else None
        said = words(protocol, ["a"], ["coop"], [1], source=source, targets=["c"])
        assert "--targets is for domain-shift" in said
    for ratio in (0.5, float("inf"), float("nan")):
        assert "ratio" in words("long-tail", ["a"], ["coop"], [1], ratio=ratio)


# Records --------------------------------------------------------------------------------------------------


def test_two_runs_of_one_command_give_one_record(domains: Path, tmp_path: Path) -> None:
    runs = plan(
        "domain-shift",
        [str(domains)],
        ["zero-shot", "drople"],
        [1, 2],
        [2],
        backbone=BACKBONE,
        options={"epochs": 2},
    )
    for out in ("one", "two"):
        assert [there for *_, there in benchmark(runs, ROOT, tmp_path / out)] == [False] * 4
        assert not (tmp_path / out / ".work").exists()
    for run in runs:
        first, second = (json.loads((tmp_path / out / run.path).read_text("utf-8")) for out in ("one", "two"))
        assert timeless(first) == timeless(second)
        assert set(first["timing"]) == {"fit", "test", "seconds", "finished"}


def test_a_run_does_not_hang_on_those_before_it(five: Path, tmp_path: Path) -> None:
    """Runs share a backbone: one that changed it would change all that follow."""
    alone = timeless(go(a_run("few-shot", five), tmp_path / "alone"))
    for method in ("clip-lora", "drople", "mma"):
        go(a_run("few-shot", five, method), tmp_path / method)
    go(a_run("few-shot", five, precision="bf16"), tmp_path / "rounded")
    assert timeless(go(a_run("few-shot", five), tmp_path / "later")) == alone


def test_a_record_says_what_ran(five: Path, tmp_path: Path) -> None:
    run = a_run("base-to-novel", five, "drople", options={"epochs": 1, "p_max": 0.4}, precision="float32")
    record = go(run, tmp_path / "work")
    assert record["schema"] == 1 and record["key"] == run.key and record["error"] is None
    assert record["label"] == "drople (p_max=0.4)"
    assert record["options"] == {"epochs": 1, "p_max": 0.4} and record["training"]["epochs"] == 1
    assert record["template"] == "a photo of a {}."
    assert set(record["environment"]) == {"drople", "python", "torch", "transformers", "device", "git"}
    assert record["trainable_parameters"] > 0 and record["validation"]["temperature"] > 0
    part = record["results"]["base"]
    assert {"accuracy", "ece", "ece_uncalibrated", "per_class", "images", "split", "skipped"} <= set(part)
    assert sum(row["count"] for row in part["per_class"].values()) == part["images"]
    hits = sum(row["count"] * row["accuracy"] for row in part["per_class"].values())
    assert part["accuracy"] == pytest.approx(hits / part["images"])
    json.dumps(record, allow_nan=False)


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    folder = splits(tmp_path / "one", ("red", "blue"), 3)
    elsewhere = splits(tmp_path / "two", ("red", "blue"), 3)
    data = find_data(str(folder), ROOT)[0]
    assert data_fingerprint(data) == data_fingerprint(find_data(str(elsewhere), ROOT)[0])
    assert data_fingerprint(data) != data_fingerprint(replace(data, test=data.test[1:]))
    assert data_fingerprint(data) != data_fingerprint(replace(data, val=data.test, test=data.val))
    with (folder / "test" / "red" / "200.png").open("ab") as image:
        image.write(b"more")
    assert data_fingerprint(data) != data_fingerprint(find_data(str(elsewhere), ROOT)[0])


@pytest.fixture
def mixed(five: Path, tmp_path: Path) -> Iterator[tuple[list[Run], Path]]:
    """Four runs, of which the two on data of one class fail."""
    single = splits(tmp_path / "single", ("red",), 3)
    datasets = [str(single), str(five)]
    yield (
        plan("few-shot", datasets, ["zero-shot", "coop"], [1], [2], backbone=BACKBONE, options={"epochs": 1}),
        tmp_path / "records",
    )


def test_a_failed_run_is_recorded_and_the_rest_go_on(mixed: tuple[list[Run], Path]) -> None:
    runs, out = mixed
    records = [record for _, record, _ in benchmark(runs, ROOT, out)]
    assert [record["status"] for record in records] == ["failed", "failed", "done", "done"]
    assert "only one class" in records[0]["error"] and records[0]["results"] == {}
    written = [json.loads((out / run.path).read_text("utf-8")) for run in runs]
    assert [timeless(record) for record in written] == [timeless(record) for record in records]


def test_what_is_done_is_not_repeated_and_what_failed_only_when_asked(mixed: tuple[list[Run], Path]) -> None:
    runs, out = mixed
    list(benchmark(runs, ROOT, out))
    times = {run.key: (out / run.path).stat().st_mtime_ns for run in runs}
    again = list(benchmark(runs, ROOT, out))
    assert [there for *_, there in again] == [True] * 4
    assert {run.key: (out / run.path).stat().st_mtime_ns for run in runs} == times
    retried = list(benchmark(runs, ROOT, out, retry_failed=True))
    assert [there for *_, there in retried] == [False, False, True, True]
    # Once the cause is gone, the retry goes through.
    single = Path(runs[0].dataset)
    for number, split in enumerate(("train", "val", "test")):
        pictures(single / split, ("blue",), 3, first=100 * number)
    mended = list(benchmark(runs, ROOT, out, retry_failed=True))
    assert [record["status"] for _, record, _ in mended] == ["done"] * 4
    assert all((out / run.path).stat().st_mtime_ns == times[run.key] for run in runs[2:])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"method": "coopp"}, "did you mean coop"),
        ({"options": {"epochz": 1}}, "did you mean epochs?"),
        ({"options": {"epochs": 0}}, "epochs"),
        ({"dataset": "nowhere"}, "nowhere"),
        ({"backbone": "no/such/folder"}, "no/such/folder"),
        ({"preset": "mine"}, "mine"),
        ({"shots": 0}, "shots"),
        ({"seed": -1}, "seed"),
    ],
)
def test_each_mistake_is_a_failed_record_with_its_reason(
    five: Path, tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    run = replace(a_run("few-shot", five), **changed)
    record = execute(run, ROOT, tmp_path / "work")
    assert record["status"] == "failed" and says in record["error"]
    assert record["trace"] == "", "a mistake of the user is no crash"
    json.dumps(record, allow_nan=False)


def test_unreadable_images_are_skipped_and_named(tmp_path: Path) -> None:
    folder = splits(tmp_path / "data", FIVE, 3)
    (folder / "test" / "red" / "200.png").write_bytes(b"no image")
    record = go(a_run("few-shot", folder), tmp_path / "work")
    assert record["results"]["test"]["images"] == 14
    assert [Path(path).name for path in record["results"]["test"]["skipped"]] == ["200.png"]


@pytest.mark.parametrize("protocol", ["few-shot", "long-tail"])
def test_gla_counts_the_training_images_that_can_be_read(protocol: str, tmp_path: Path) -> None:
    """With a file that cannot be read a run ends as it does without that file."""
    records = []
    for name in ("broken", "without"):
        folder = splits(tmp_path / name / "data", FIVE, 3)
        bad = folder / "train" / "blue" / "1.png"
        bad.write_bytes(b"no image") if name == "broken" else bad.unlink()
        run = a_run(protocol, folder, "zero-shot", shots=3, ratio=1.0, post_hoc="gla")
        records.append(go(run, tmp_path / name / "work")["results"])
    assert records[0] == records[1]


def test_a_preset_s_own_sentences_are_used(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    class Watched(PromptLearner):
        def fit(self, *given: Any, **more: Any) -> PromptLearner:
            fitted = super().fit(*given, **more)
            used.append(len(self.templates_))
            return fitted

    monkeypatch.setattr("drople.protocols.PromptLearner", Watched)
    for preset in ("released", "paper"):
        go(a_run("few-shot", five, "drople", preset=preset), tmp_path / preset)
    assert used == [11, 1]


def test_work_left_of_other_data_is_begun_anew(five: Path, tmp_path: Path) -> None:
    run = a_run("few-shot", five)
    work = tmp_path / "work"
    go(run, work)
    config = json.loads((work / "config.json").read_text())
    (work / "config.json").write_text(json.dumps(config | {"samples": config["samples"][1:]}))
    assert timeless(go(run, work)) == timeless(go(run, tmp_path / "other"))


@pytest.mark.parametrize(
    "content", ["", "{}", '{"schema": 1}', "null", "label", "results", "accuracy", "status", "error"]
)
def test_a_damaged_record_is_named(content: str, five: Path, tmp_path: Path) -> None:
    run = a_run("few-shot", five, "zero-shot")
    list(benchmark([run], ROOT, tmp_path))
    file = tmp_path / run.path
    record = json.loads(file.read_text())
    if content in ("label", "results"):
        del record[content]
    elif content == "accuracy":
        record["results"]["test"]["accuracy"] = "high"
    elif content in ("status", "error"):
        record[content] = 7
    file.write_text(content if content[:1] in ("", "{", "n") else json.dumps(record))
    with pytest.raises(DropleError, match=r"delete it and run the benchmark again"):
        list(benchmark([run], ROOT, tmp_path))


def test_work_left_by_a_kill_after_the_record_is_cleared(five: Path, tmp_path: Path) -> None:
    run = a_run("few-shot", five)
    list(benchmark([run], ROOT, tmp_path))
    left = tmp_path / ".work" / run.key
    left.mkdir(parents=True)
    picture("red", 1).save(left / "anything.png")
    list(benchmark([run], ROOT, tmp_path))
    assert not (tmp_path / ".work").exists()


def test_work_that_a_benchmark_is_at_is_not_cleared(tmp_path: Path) -> None:
    run = a_run("few-shot", tmp_path)
    left, place = tmp_path / ".work" / run.key, tmp_path / run.path
    left.mkdir(parents=True)
    place.parent.mkdir(parents=True)
    with FileLock(place.with_name(f".{place.stem}.lock")):
        clear(tmp_path, run)
        assert left.exists()
    clear(tmp_path, run)
    assert not left.exists() and not [*place.parent.iterdir()]


def test_a_run_that_another_process_is_at_is_left_to_it(five: Path, tmp_path: Path) -> None:
    first, second = runs = [a_run("few-shot", five, seed=seed) for seed in (1, 2)]
    elsewhere = tmp_path / "elsewhere"
    list(benchmark(runs[:1], ROOT, elsewhere))
    out = tmp_path / "out"
    place = out / first.path
    place.parent.mkdir(parents=True)
    other = FileLock(place.with_name(f".{place.stem}.lock"))
    other.acquire()
    stream = benchmark(runs, ROOT, out)
    run, _, there = next(stream)
    assert run == second and not there, "its turn comes when all others are done"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, stream)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        place.write_bytes((elsewhere / first.path).read_bytes())
        other.release()
        run, record, there = waiting.result(60)
    assert run == first and there and record["status"] == "done"
    assert next(stream, None) is None


def test_two_processes_at_the_same_records_do_each_run_once(five: Path, tmp_path: Path) -> None:
    command = f"""{sys.executable} -m drople benchmark few-shot --datasets {five} --methods coop --seeds 1 2 3
        --shots 2 --set epochs=1 --device cpu --backbone {BACKBONE} --out {tmp_path}"""
    both = [subprocess.Popen(shlex.split(command), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    records = [json.loads(path.read_text()) for path in tmp_path.glob("few-shot/*.json")]
    assert [record["status"] for record in records] == ["done"] * 3
    assert sum(lines.count("was there") for lines in said) == 3, said
    assert not (tmp_path / ".work").exists()

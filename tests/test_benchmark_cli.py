"""`drople benchmark`, `drople table` and `drople data` as people and programs call them, killed ones included."""

import csv
import io
import json
import random
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    COLOURS,
    Answer,
    Command,
    contents,
    drople,
    own_folder,
    pictures,
    splits,
    tiny_checkpoint,
)

from drople.data.catalog import DATASETS
from drople.protocols import PROTOCOLS

QUICK = ("--backbone", tiny_checkpoint(), "--epochs", 1, "--shots", 2, "--seeds", 1)
COLUMNS = {"COLUMNS": "200"}


@pytest.fixture(scope="module")
def data() -> Path:
    return splits(own_folder() / "colours", tuple(COLOURS), 4)


def records(out: Path) -> dict[str, dict[str, Any]]:
    """Every record by its path, but for the timing and the commit, which may change while tests run."""
    found = {}
    for path in sorted(out.rglob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        del content["timing"], content["environment"]["git"]
        found[path.relative_to(out).as_posix()] = content
    return found


def paragraph(answer: Answer) -> str:
    """The one line that says what went wrong; lines of progress and notes may stand before it."""
    assert answer.code == 2, answer
    said = [line for line in answer.err.splitlines() if not line.startswith(("note: ", "["))]
    assert len(said) == 1 and said[0].startswith("drople: ") and "Traceback" not in answer.err, answer.err
    return said[0]


# benchmark ------------------------------------------------------------------------------------------


def test_a_benchmark_is_not_for_torchrun(data: Path, tmp_path: Path) -> None:
    arguments = (
        "benchmark",
        "few-shot",
        "--datasets",
        data,
        "--methods",
        "coop",
        "--out",
        tmp_path / "records",
    )
    answer = drople(*arguments, environment={"WORLD_SIZE": "2", "RANK": "0"})
    assert answer.code == 2 and "--cluster local:N" in answer.err
    assert not (tmp_path / "records").exists()


def test_a_benchmark_prints_its_table_and_goes_on_another_time(data: Path, tmp_path: Path) -> None:
    arguments = ("benchmark", "base-to-novel", "--datasets", data, *QUICK, "--out", tmp_path / "records")
    first = drople(*arguments, environment=COLUMNS)
    assert first.code == 0, first.err
    assert (
        first.out.startswith("Base-to-novel generalization")
        and "zero-shot" in first.out
        and "HM" in first.out
    )
    assert "[2/2]" in first.err and "was there" not in first.err
    kept = contents(tmp_path / "records", [str(p) for p in records(tmp_path / "records")])
    assert len(kept) == 2
    again = drople(*arguments, environment=COLUMNS)
    assert again.out == first.out and again.err.count("(was there)") == 2
    assert contents(tmp_path / "records", list(kept)) == kept
    # The same run in other words is the same run.
    at = arguments.index("--epochs")
    reworded = drople(*arguments[:at], "--set", "epochs=1", *arguments[at + 2 :], environment=COLUMNS)
    assert reworded.out == first.out and reworded.err.count("(was there)") == 2
    # Two more methods: what is there is not trained again.
    more = drople(*arguments, "--methods", "zero-shot", "coop", environment=COLUMNS)
    assert more.err.count("(was there)") == 1 and len(records(tmp_path / "records")) == 3


def test_json_is_all_that_stands_on_standard_output(data: Path, tmp_path: Path) -> None:
    flags = ("--methods", "zero-shot", "coop", "--out", tmp_path / "records", "--json")
    answer = drople("benchmark", "few-shot", "--data", data, *QUICK, *flags)
    assert answer.code == 0
    printed = answer.json
    assert [(r["method"], r["status"]) for r in printed] == [("zero-shot", "done"), ("coop", "done")]
    for record in printed:
        del record["timing"], record["environment"]["git"]
    on_disk = list(records(tmp_path / "records").values())
    assert sorted(printed, key=lambda r: r["key"]) == sorted(on_disk, key=lambda r: r["key"])


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_run_ends_in_a_paragraph_after_the_rest(data: Path, tmp_path: Path, as_json: bool) -> None:
    single = splits(tmp_path / "single", ("red",), 2)
    arguments: tuple[object, ...] = ("benchmark", "few-shot", "--datasets", single, data, *QUICK)
    arguments += ("--methods", "zero-shot", "coop", "--out", tmp_path / "records")
    answer = drople(*arguments, *["--json"] * as_json, environment=COLUMNS)
    said = paragraph(answer)
    assert "2 of 4 runs failed" in said and "only one class" in said and "--retry-failed" in said
    assert ".." not in said.replace(str(tmp_path), "")
    if as_json:
        assert [r["status"] for r in answer.json] == ["failed", "failed", "done", "done"]
    else:
        assert "Few-shot classification" in answer.out and "Failed: coop" in answer.out
    assert answer.err.count("failed, DropleError") == 2
    again = drople(*arguments)
    assert again.code == 2 and again.err.count("(was there)") == 4
    for number, split in enumerate(("train", "val", "test")):
        pictures(single / split, ("blue",), 2, first=100 * number)
    mended = drople(*arguments, "--retry-failed")
    assert mended.code == 0 and mended.err.count("(was there)") == 2


def test_a_mistake_is_recorded_for_each_run_and_said_once(data: Path, tmp_path: Path) -> None:
    answer = drople("benchmark", "few-shot", "--datasets", data, *QUICK, "--set", "lr=nan", "--out", tmp_path)
    assert answer.out == "" and "lr" in paragraph(answer)
    assert [r["status"] for r in records(tmp_path).values()] == ["failed", "failed"]


def test_what_no_method_knows_is_no_run(data: Path, tmp_path: Path) -> None:
    given = ("benchmark", "few-shot", "--datasets", data, *QUICK, "--out", tmp_path)
    assert "'p_maxx': did you mean" in paragraph(drople(*given, "--set", "p_maxx=0.4"))
    assert not records(tmp_path)
    named = drople("benchmark", "few-shot", "--datasets", "eurosatt", *QUICK, "--out", tmp_path / "b")
    assert "did you mean eurosat" in paragraph(named)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("long-tail", "--datasets", "x", "--ratio", "inf"), "ratio"),
        (("long-tail", "--datasets", "x", "--ratio", "0.5"), "ratio"),
        (("cross-dataset", "--datasets", "x"), "--source"),
        (("cross-dataset", "--datasets", "x", "--source", "x"), "--source"),
        (("few-shot", "--datasets", "x", "--set", "epochs"), "NAME=VALUE"),
    ],
)
def test_what_can_be_refused_at_once_leaves_no_record(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    answer = drople("benchmark", *arguments, "--out", tmp_path / "records")
    assert says in paragraph(answer) and answer.out == ""
    assert not (tmp_path / "records").exists()


def test_a_protocol_that_does_not_exist_is_refused() -> None:
    answer = drople("benchmark", "base-to-base", "--datasets", "x")
    assert answer.code == 2 and "base-to-novel" in answer.out + answer.err


def test_a_folder_a_table_and_a_named_dataset_stand_side_by_side(data: Path, tmp_path: Path) -> None:
    """A plain folder without splits, a table, and a name found under DROPLE_DATA."""
    plain = pictures(tmp_path / "plain", tuple(COLOURS), 8)
    table = tmp_path / "table.csv"
    lines = [f"{path},{path.parent.name},{path.parts[-3]}" for path in sorted(data.rglob("*.png"))]
    table.write_text("\n".join(["path,label,split", *lines]), "utf-8")
    root = tmp_path / "root"
    splits(root / "eurosat", tuple(COLOURS), 3)
    environment = {"DROPLE_DATA": str(root)}
    flags = ("--methods", "zero-shot", "--out", tmp_path / "records", "--json")
    answer = drople(
        "benchmark",
        "base-to-novel",
        "--datasets",
        plain,
        table,
        "EuroSAT",
        *QUICK,
        *flags,
        environment=environment,
    )
    assert answer.code == 0, answer.err
    assert [r["dataset"] for r in answer.json] == [str(plain), str(table), "eurosat"]
    assert [r["results"]["base"]["images"] for r in answer.json] == [4, 8, 6]
    assert answer.json[2]["template"] == "a centered satellite photo of {}."
    elsewhere = ("--root", tmp_path, "--methods", "zero-shot", "--out", tmp_path / "others")
    without = drople("benchmark", "base-to-novel", "--datasets", "eurosat", *QUICK, *elsewhere)
    assert "EuroSAT is not under" in paragraph(without)


def test_two_commands_give_the_same_records(data: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        answer = drople(
            "benchmark", "long-tail", "--datasets", data, *QUICK, "--post-hoc", "gla", "--out", tmp_path / out
        )
        assert answer.code == 0, answer.err
    assert records(tmp_path / "one") == records(tmp_path / "two") and len(records(tmp_path / "one")) == 2


# Killed ---------------------------------------------------------------------------------------------------


def test_a_benchmark_killed_again_and_again_gives_the_undisturbed_table(data: Path, tmp_path: Path) -> None:
    """`benchmarks/kill_benchmark.py` does this with more kills and a real backbone."""
    settings = ("--backbone", tiny_checkpoint(), "--epochs", 12, "--shots", 3, "--seeds", 1, 2, 3)
    arguments = (
        "benchmark",
        "base-to-novel",
        "--datasets",
        data,
        "--methods",
        "coop",
        "drople",
        *settings,
        "--out",
    )
    begun = time.monotonic()
    undisturbed = drople(*arguments, tmp_path / "undisturbed", environment=COLUMNS)
    seconds = time.monotonic() - begun
    assert undisturbed.code == 0, undisturbed.err
    out = tmp_path / "disturbed"
    moments, kills, inside, seen = random.Random(1), 0, 0, set()
    for _ in range(40):
        command = Command(*arguments, out)
        command.process.join(moments.uniform(0.05, 0.35) * seconds)
        if command.process.exitcode is not None:
            assert command.process.exitcode == 0
            break
        command.process.kill()
        command.process.join()
        kills += 1
        inside += (out / ".work").exists() and any((out / ".work").glob("*/*"))
        whole = {path: path.stat().st_mtime_ns for path in out.glob("*/[!.]*.json")}
        assert seen <= set(whole.items()), "a record that was written is never written again"
        seen = set(whole.items())
        if kills == 6:
            break
    assert kills >= 3 and inside >= 1, (kills, inside)
    last = drople(*arguments, out, environment=COLUMNS)
    assert last.code == 0, last.err
    assert last.out == undisturbed.out
    assert records(out) == records(tmp_path / "undisturbed") and len(records(out)) == 6
    assert not (out / ".work").exists()
    assert drople("table", out, environment=COLUMNS).out == undisturbed.out


# table ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(data: Path) -> Path:
    out = own_folder() / "records"
    arguments = ("--methods", "zero-shot", "coop", "--seeds", 1, 2, "--shots", 2, "--epochs", 1)
    answer = drople(
        "benchmark",
        "base-to-novel",
        "--datasets",
        data,
        "--backbone",
        tiny_checkpoint(),
        *arguments,
        "--out",
        out,
    )
    assert answer.code == 0, answer.err
    return out


def test_a_table_in_every_format(written: Path) -> None:
    shown = {
        form: drople("table", written, "--format", form) for form in ("text", "markdown", "latex", "csv")
    }
    assert all(answer.code == 0 and answer.err == "" for answer in shown.values())
    assert "| coop |" in shown["markdown"].out and shown["latex"].out.startswith(r"\begin{table*}")
    assert shown["text"].out == drople("table", written).out
    rows = list(csv.DictReader(io.StringIO(shown["csv"].out)))
    mine = records(written).values()
    for row in rows:
        of = [r["results"] for r in mine if r["label"] == row["method"]]
        if row["measure"] in ("base", "novel"):
            expected = sum(100 * r[row["measure"]]["accuracy"] for r in of) / 2
            assert float(row["mean"]) == pytest.approx(expected)
    assert {row["measure"] for row in rows} == {"base", "novel", "hm"} and len(rows) == 6
    by_rows = drople("table", written, "--by", "rows")
    assert by_rows.code == 0 and by_rows.out.splitlines()[2].startswith("Dataset")
    assert "paper" in drople("table", written, "--published").out


def test_a_table_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "no record" in paragraph(drople("table", tmp_path))
    assert "does not exist" in paragraph(drople("table", tmp_path / "nowhere"))
    assert drople("table", tmp_path, "--format", "html").code == 2


# data ---------------------------------------------------------------------------------------------------------


def test_data_list_shows_every_dataset_and_what_is_there(tmp_path: Path) -> None:
    splits(tmp_path / "eurosat", ("red", "blue"), 1)
    answer = drople("data", "list", "--root", tmp_path, "--json")
    rows = {row["name"]: row for row in answer.json}
    assert answer.code == 0 and list(rows) == [each.name for each in DATASETS]
    assert [name for name, row in rows.items() if row["found"]] == ["eurosat"]
    assert rows["imagenet"]["get"] == "by hand" and "untried" in rows["dtd"]["get"]
    assert all(row["licence"] and row["source"] and row["domain"] for row in rows.values())
    shown = drople("data", "list", environment={"DROPLE_DATA": str(tmp_path), "COLUMNS": "250"})
    assert shown.code == 0 and all(each.name in shown.out for each in DATASETS)
    assert str(tmp_path / "eurosat") in shown.out, "DROPLE_DATA is the root"


def test_data_check_says_what_is_wrong_and_exits_with_2(tmp_path: Path) -> None:
    absent = drople("data", "check", "dtd", "--root", tmp_path)
    assert absent.code == 2 and "nothing at" in absent.out and "robots.ox.ac.uk" in absent.out
    assert absent.out.rstrip().endswith("not whole")
    splits(tmp_path / "eurosat", ("red", "blue"), 1)
    (tmp_path / "eurosat" / "test" / "red" / "200.png").write_bytes(b"no image")
    part = drople("data", "check", "eurosat", "--root", tmp_path)
    assert part.code == 2 and "2 classes instead of 10" in part.out and "200.png" in part.out
    assert "did you mean eurosat" in paragraph(drople("data", "check", "eurosatt"))


def test_data_get_names_the_nearest_or_prints_the_steps(tmp_path: Path) -> None:
    assert "did you mean" in paragraph(drople("data", "get", "imagnet", "--root", tmp_path))
    by_hand = drople("data", "get", "ImageNet", "--root", tmp_path)
    assert by_hand.code == 2 and by_hand.err == ""
    assert "https://image-net.org" in by_hand.out and "drople data check imagenet" in by_hand.out
    assert str(tmp_path / "imagenet") in by_hand.out
    assert not any(tmp_path.iterdir()), "nothing is made for a dataset that cannot be fetched"


# Help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            ("benchmark",),
            (
                "--datasets",
                "--methods",
                "--seeds",
                "--shots",
                "--backbone",
                "--root",
                "--out",
                "--source",
                "--targets",
            )
            + ("--ratio", "--post-hoc", "--retry-failed", "--set", "--json", "DROPLE_DATA", *PROTOCOLS),
        ),
        (("table",), ("--format", "markdown", "latex", "csv", "--by", "--published")),
        (("data",), ("list", "check", "get")),
        (("data", "check"), ("--root", "--deep", "DROPLE_DATA")),
    ],
)
def test_help_lists_what_there_is(command: tuple[str, ...], flags: tuple[str, ...]) -> None:
    answer = drople(*command, "--help", environment={"COLUMNS": "160"})
    assert answer.code == 0 and answer.err == ""
    assert [flag for flag in flags if flag not in answer.out] == []


# Real data ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packs(shared: Path) -> Path:
    root = own_folder() / "data"
    for name in ("dtd10", "pacs"):
        with tarfile.open(shared / "data" / f"{name}.tar") as tar:
            tar.extractall(root, filter="data")
    return root


def test_the_packs_go_through_every_protocol(packs: Path, tmp_path: Path) -> None:
    targets = {"cross-dataset": ("--source", "dtd10")}
    datasets = {
        "cross-dataset": ("dtd10", "pacs"),
        "domain-shift": ("pacs",),
        "base-to-novel": ("dtd10", "pacs"),
    }
    settings = (
        "--backbone",
        tiny_checkpoint(),
        "--epochs",
        1,
        "--seeds",
        1,
        "--methods",
        "coop",
        "--root",
        packs,
    )
    parts: dict[str, dict[str, int]] = {}
    for protocol in PROTOCOLS:
        shots = 8 if protocol == "long-tail" else 1
        named = datasets.get(protocol, ("dtd10",))
        more = (*targets.get(protocol, ()), "--shots", shots, "--out", tmp_path, "--json")
        answer = drople("benchmark", protocol, "--datasets", *named, *settings, *more)
        assert answer.code == 0, answer.err
        parts[protocol] = {
            f"{r['dataset']} {part}": found["images"]
            for r in answer.json
            for part, found in r["results"].items()
        }
        assert all(0 <= p["accuracy"] <= 1 for r in answer.json for p in r["results"].values())
        if protocol == "long-tail":
            counts = Counter(label for _, label in answer.json[0]["samples"])
            assert [counts[name] for name in sorted(counts)] == [8, 4, 3, 1, 1]
    assert parts == {
        "base-to-novel": {"dtd10 base": 180, "dtd10 novel": 180, "pacs base": 160, "pacs novel": 120},
        "few-shot": {"dtd10 test": 360},
        "cross-dataset": {"dtd10 source": 360, "dtd10 pacs": 280},
        "domain-shift": {
            "pacs source": 280,
            "pacs art_painting": 280,
            "pacs cartoon": 280,
            "pacs sketch": 280,
        },
        "long-tail": {"dtd10 base": 180, "dtd10 novel": 180},
    }
    shown = drople("table", tmp_path)
    assert shown.code == 0 and all(
        title in shown.out for title in ("Domain shift", "Cross-dataset", "Long-tail")
    )
    assert drople("data", "check", "dtd10", "--root", packs).out.rstrip().endswith("\nwhole")

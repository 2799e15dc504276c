"""`drople benchmark --cluster`: real schedulers and workers, some of them killed, and the records of a serial run."""

import asyncio
import json
import os
import re
import runpy
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from checkpoints import COLOURS, Answer, Command, _server, drople, own_folder, splits, tiny_checkpoint

from drople import sweep as sweeping
from drople.cli import main
from drople.errors import DropleError
from drople.progress import Quiet, Update
from drople.protocols import plan
from drople.sweep import local_workers, sweep, visible_gpus

distributed = pytest.importorskip("distributed", reason="the cluster extra is not installed")
dask = pytest.importorskip("dask")
psutil = pytest.importorskip("psutil")

COLUMNS = {"COLUMNS": "200"}
# Long enough to be caught at work, also by a machine that does much else.
EPOCHS, SECONDS = 60, 180.0


@pytest.fixture(scope="module")
def data() -> Path:
    return splits(own_folder() / "colours", tuple(COLOURS), 4)


def settings(data: Path, *seeds: int) -> tuple[object, ...]:
    named = ("--datasets", data, "--methods", "zero-shot", "coop", "--backbone", tiny_checkpoint())
    return ("benchmark", "base-to-novel", *named, "--shots", 3, "--epochs", EPOCHS, "--seeds", *seeds)


@pytest.fixture(scope="module")
def undisturbed(data: Path) -> tuple[Path, Answer]:
    out = own_folder() / "records"
    answer = drople(*settings(data, 1, 2, 3), "--out", out, environment=COLUMNS)
    assert answer.code == 0, answer.err
    return out, answer


def records(out: Path) -> dict[str, dict[str, Any]]:
    """Every record by its path, but for the timing, the threads and the commit."""
    found = {}
    for path in sorted(out.rglob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        del content["timing"], content["environment"]
        found[path.relative_to(out).as_posix()] = content
    return found


def until(happened: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + SECONDS
    while not (answer := happened()):
        assert time.monotonic() < end, f"{what} did not happen in {SECONDS:g} s"
        time.sleep(0.005)
    return answer


def kill_inside_a_run(scratch: Path, workers: Callable[[], set[int]]) -> None:
    """SIGKILL to a worker that is in the middle of a run: it leaves the folder of that run behind."""

    def at_work() -> list[tuple[Path, int]]:
        logs = scratch.glob("dask-scratch-space*/*/drople-*/log.jsonl")
        found = [(log.parent, int(log.parent.name.split("-")[1])) for log in logs]
        return [(folder, pid) for folder, pid in found if pid in workers()]

    for _ in range(20):
        folder, pid = until(at_work, "a run on a worker")[0]
        process = psutil.Process(pid)
        process.kill()
        until(
            lambda p=process: not p.is_running() or p.status() == psutil.STATUS_ZOMBIE, "the end of a worker"
        )
        if folder.exists():
            return
    raise AssertionError("no worker was killed inside a run")


def with_forked_workers(arguments: list[str]) -> None:
    """`drople` whose Dask forks its workers from a server that has imported everything, as commands are forked
    here: importing torch anew, three times, would take most of the time of a test."""
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    # Dask says what its server imports when it is asked for it first, and never again.
    distributed.utils.get_mp_context().set_forkserver_preload(["distributed", "drople.protocols"])
    main(arguments)


# Workers that die ----------------------------------------------------------------------------------


def test_the_runs_of_a_killed_worker_move_to_another(
    data: Path, undisturbed: tuple[Path, Answer], tmp_path: Path
) -> None:
    out = tmp_path / "records"
    given = (*settings(data, 1, 2, 3), "--cluster", "local:2", "--out", out)
    command = Command(*given, environment=COLUMNS, main=with_forked_workers)
    scratch = Path(dask.config.get("temporary-directory", None) or tempfile.gettempdir())
    client = psutil.Process(command.process.pid)
    kill_inside_a_run(scratch, lambda: {process.pid for process in client.children(recursive=True)})
    answer = command.wait(SECONDS)
    assert answer.code == 0, answer.err
    assert records(out) == records(undisturbed[0]) and len(records(out)) == 6
    assert answer.out == undisturbed[1].out
    # A line a record that was written: six, each of another run; and nothing of Dask's own among them.
    lines = answer.err.splitlines()
    assert [line.split()[0] for line in lines] == [f"[{n}/6]" for n in range(1, 7)], answer.err
    assert len({line.partition("]")[2] for line in lines}) == 6
    assert not (out / ".work").exists()


# Clusters elsewhere --------------------------------------------------------------------------------


class Cluster:
    """A scheduler and workers in processes of their own, which can be killed one by one."""

    def __init__(self, folder: Path) -> None:
        self.file, self.scratch = folder / "scheduler.json", folder / "scratch"
        self.processes: list[BaseProcess] = []

    def start(self, target: Callable[..., None], *arguments: object) -> BaseProcess:
        process: BaseProcess = _server().Process(target=target, args=arguments)
        process.start()
        self.processes.append(process)
        return process

    def scheduler(self, allowed_failures: int = 3) -> BaseProcess:
        process = self.start(run_scheduler, str(self.file), allowed_failures)
        until(lambda: self.file.exists() and self.file.read_text("utf-8").endswith("}"), "a scheduler")
        return process

    def worker(self, threads: int = 1) -> BaseProcess:
        return self.start(run_worker, str(self.file), str(self.scratch), threads)


@contextmanager
def a_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        for process in cluster.processes:
            process.kill()
            process.join()


def run_scheduler(file: str, allowed_failures: int) -> None:
    async def run() -> None:
        given: dict[str, Any] = {"allowed_failures": allowed_failures, "scheduler_file": file}
        async with distributed.Scheduler(host="127.0.0.1", port=0, dashboard=False, **given) as scheduler:
            await scheduler.finished()

    hush()
    asyncio.run(run())


def run_worker(file: str, scratch: str, threads: int) -> None:
    async def run() -> None:
        given: dict[str, Any] = {"scheduler_file": file, "local_directory": scratch, "nthreads": threads}
        async with distributed.Worker(
            host="127.0.0.1", dashboard=False, memory_limit=None, **given
        ) as worker:
            await worker.finished()

    hush()
    asyncio.run(run())


def hush() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def test_a_cluster_that_disappears_leaves_what_is_done(
    data: Path, undisturbed: tuple[Path, Answer], tmp_path: Path
) -> None:
    out = tmp_path / "records"
    with a_cluster(tmp_path) as cluster:
        scheduler = cluster.scheduler()
        cluster.worker()
        command = Command(*settings(data, 1, 2, 3), "--cluster", cluster.file, "--out", out)
        until(lambda: list(out.glob("*/[!.]*.json")), "a record")
        scheduler.kill()
        answer = command.wait(SECONDS)
    done = len(records(out))
    last = answer.err.splitlines()[-1]
    assert answer.code == 2 and answer.out == "" and 0 < done < 6, answer.err
    assert last.startswith("drople: ") and "is gone" in last and f"{done} of 6 runs" in last
    assert [line for line in answer.err.splitlines()[:-1] if not line.startswith(("[", "note: "))] == []
    rest = drople(*settings(data, 1, 2, 3), "--out", out, environment=COLUMNS)
    assert rest.code == 0 and rest.err.count("(was there)") == done
    assert rest.out == undisturbed[1].out and records(out) == records(undisturbed[0])


def test_a_run_that_kills_its_workers_is_a_failed_run(
    data: Path, undisturbed: tuple[Path, Answer], tmp_path: Path
) -> None:
    out = tmp_path / "records"
    with a_cluster(tmp_path) as cluster:
        cluster.scheduler(allowed_failures=0)
        cluster.worker()
        command = Command(*settings(data, 1, 2, 3), "--cluster", cluster.file, "--out", out)
        kill_inside_a_run(cluster.scratch, lambda: {process.pid or 0 for process in cluster.processes})
        # Two threads in one process: runs that were done at the same time would spoil each other's draws.
        cluster.worker(threads=2)
        answer = command.wait(SECONDS)
        assert answer.code == 2 and "workers died" in answer.err.splitlines()[-1], answer.err
        failed = [r for r in records(out).values() if r["status"] == "failed"]
        assert failed and all("tcp://127.0.0.1" in r["error"] and r["results"] == {} for r in failed)
        assert set(failed[0]) <= set(next(iter(records(undisturbed[0]).values()))) | {"trace"}
        shown = drople("table", out, environment=COLUMNS)
        assert shown.code == 0 and "Failed: " in shown.out
        again = ("--cluster", cluster.file, "--out", out, "--retry-failed", "--json")
        mended = drople(*settings(data, 1, 2, 3), *again)
    assert mended.code == 0, mended.err
    assert [r["seed"] for r in mended.json] == [1, 1, 2, 2, 3, 3], "in the order of the plan"
    assert records(out) == records(undisturbed[0])


class Watching(Quiet):
    """Remembers what it is told, and does something when the first thing is said."""

    def __init__(self, at_first: Callable[[], object]) -> None:
        self.said: list[str] = []
        self.shown: list[tuple[int, str]] = []
        self.at_first = at_first

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Update]:
        yield lambda done, values=None, what="", **more: self.shown.append((done, what))

    def say(self, line: str) -> None:
        self.said.append(line)
        if len(self.said) == 1:
            self.at_first()


def test_a_cluster_without_workers_is_waited_for_and_a_worker_without_data_is_named(
    data: Path, tmp_path: Path
) -> None:
    runs = plan(
        "base-to-novel",
        [str(data), "nowhere/pictures"],
        ["zero-shot"],
        [1, 1],
        [2],
        backbone=str(tiny_checkpoint()),
    )
    with a_cluster(tmp_path) as cluster:
        cluster.scheduler()
        watching = Watching(cluster.worker)
        address = json.loads(cluster.file.read_text("utf-8"))["address"]
        found = list(sweep(runs, tmp_path / "data", tmp_path / "out", address, progress=watching))
        other = [replace(runs[0], seed=5)]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(DropleError, match=r"needs drople 0\.0\.9"):
            patch.setattr(sweeping, "__version__", "0.0.9")
            list(sweep(other, tmp_path, tmp_path / "out", address))
        assert not (tmp_path / "out" / other[0].path).exists()
    assert "no worker" in watching.said[0]
    assert watching.shown[0] == (0, "0 running on 0 workers, 0 failed")
    assert (1, "1 running on 1 worker, 0 failed") in watching.shown or (
        1,
        "1 running on 1 worker, 1 failed",
    ) in watching.shown
    assert Counter((run.dataset, there) for run, _, there in found) == {
        (str(data), False): 1,
        ("nowhere/pictures", False): 1,
        (str(data), True): 1,
        ("nowhere/pictures", True): 1,
    }
    for run, record, _ in found:
        assert record == json.loads((tmp_path / "out" / run.path).read_text("utf-8"))
        if run.dataset == str(data):
            assert record["status"] == "done" and "tcp://127.0.0.1" in record["timing"]["worker"]
        else:
            assert record["status"] == "failed" and "nowhere" in record["error"]
            assert re.search(r"\(on worker tcp://127.0.0.1:\d+ on .+\)$", record["error"])


# Refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["local", "local:", "local:0", "local:-1", "local:two", "local:2:3"])
def test_a_local_cluster_needs_a_number(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(DropleError, match="such as local:2"):
        list(sweep([], tmp_path, tmp_path, wrong))
    assert (local_workers("local:3"), local_workers("tcp://10.0.0.1:8786")) == (3, None)


@pytest.mark.parametrize("nobody", ["tcp://127.0.0.1:9", "nonsense://x"])
def test_a_scheduler_that_is_not_there_is_refused(
    nobody: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "CONNECT_SECONDS", 0.5)
    runs = plan("few-shot", [str(data)], ["zero-shot"], [1], [2])
    with pytest.raises(DropleError, match="no Dask scheduler answers"):
        list(sweep(runs, tmp_path, tmp_path / "out", nobody))
    assert not (tmp_path / "out").exists()


def test_what_is_there_needs_no_cluster(data: Path, undisturbed: tuple[Path, Answer]) -> None:
    out, first = undisturbed
    flags = ("--cluster", "tcp://127.0.0.1:9", "--out", out)
    again = drople(*settings(data, 1, 2, 3), *flags, environment=COLUMNS)
    assert again.code == 0 and again.out == first.out and again.err.count("(was there)") == 6


def test_without_dask_the_extra_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    runs = plan("few-shot", [str(data)], ["zero-shot"], [1], [2])
    with pytest.raises(DropleError, match=r"pip install drople\[cluster\]"):
        list(sweep(runs, tmp_path, tmp_path / "out", "local:1"))


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1a")
    assert visible_gpus() == ["5", "GPU-1a"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


# What a study costs --------------------------------------------------------------------------------


def test_the_minutes_of_a_study_come_from_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that take 10 ms a class and images that take 1 ms, so that every number can be told by hand."""
    files = []
    for classes in (5, 500):
        common = {"backbone": "b", "device": "cuda", "batch": 32, "classes": classes}
        rows = [
            {**common, "method": "coop", "step_seconds": 0.01 * classes, "images_per_second": 1000.0},
            {**common, "method": "zero-shot", "step_seconds": None, "images_per_second": 1000.0},
        ]
        files.append(tmp_path / f"{classes}.json")
        files[-1].write_text(json.dumps(rows), "utf-8")
    script = Path(__file__).parent.parent / "benchmarks" / "full_study.py"
    monkeypatch.setattr(sys, "argv", ["full_study.py", *map(str, files)])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    table = {row[0]: row[1:] for row in cells}
    # EuroSAT: 5 classes of 16 images are 3 batches, 30 times; 2,700 of val and 8,100 of test.
    eurosat = 3 * (30 * 3 * 0.05 + 10.8) / 60
    assert table["EuroSAT"] == ["5", "90", f"{eurosat:.1f}", f"{3 * 10.8 / 60:.1f}"]
    # ImageNet: 500 classes are 250 batches, 30 times; 25,000 of val and 50,000 of test.
    assert table["ImageNet"][:3] == ["500", "7,500", f"{3 * (7500 * 5 + 75) / 60:.1f}"]
    assert len(table) == 11 + 3 and "All 66 runs" in lines[-1]
    monkeypatch.setattr(sys, "argv", ["full_study.py", str(files[0])])
    with pytest.raises(SystemExit, match="measure it with 500 too"):
        runpy.run_path(str(script), run_name="__main__")

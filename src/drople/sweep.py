"""The runs of a benchmark on a Dask cluster, several at a time: the records are those of a benchmark run by run.

A run is one task. A worker trains and tests it in a folder of its own and sends back the record; the client
alone writes records, so workers need the data and the backbone but no folder for results. Whatever of the
cluster dies, records that were written stay, and a benchmark on any cluster or on none goes on from them.
"""

import contextlib
import json
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from drople import __version__
from drople.errors import DropleError
from drople.progress import Progress, Quiet
from drople.protocols import Run, clear, execute, now, opening, recorded
from drople.records import write_json
from drople.run_records import read_record

if TYPE_CHECKING:
    from distributed import Client, Future

LOCAL = "local:"
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 30
LOOK_SECONDS = 1.0
# A run seeds torch for the whole process, so a worker with several threads still does one run at a time.
_one_run = threading.Lock()


def sweep(
    runs: Sequence[Run],
    root: Path,
    out: Path,
    cluster: str,
    *,
    device: str = "auto",
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Iterator[tuple[Run, dict[str, Any], bool]]:
    """Go through the runs on a cluster: `local:N`, or the address or scheduler file of a Dask scheduler.

    Yields what `protocols.benchmark` yields: first the runs whose records are there, then the others as they
    finish.
    """
    count = local_workers(cluster)
    todo: dict[Path, Run] = {}
    repeated = []
    for run in runs:
        record = recorded(out / run.path, retry_failed)
        if record is not None:
            yield run, record, True
        elif run.path in todo:
            repeated.append(run)
        else:
            todo[run.path] = run
    if todo:
        with _connected(cluster, count, device) as client:
            # A cluster of this machine shares its cores; the workers of another have been given theirs.
            threads = max(1, torch.get_num_threads() // count) if count else None
            settings = (str(root), device, os.getcwd(), threads, __version__)
            for run, record in _results(client, list(todo.values()), settings, progress or Quiet()):
                if record is None:
                    raise DropleError(
                        f"the Dask scheduler at {cluster} is gone; {_written(runs, out)} of {len(runs)} runs are "
                        f"recorded in {out}. The same command goes on with the rest once there is a cluster again, "
                        "or without --cluster."
                    )
                write_json(out / run.path, record)
                clear(out, run)
                yield run, record, False
    for run in repeated:
        yield run, read_record(out / run.path), True
    with contextlib.suppress(OSError):
        (out / ".work").rmdir()


def _written(runs: Sequence[Run], out: Path) -> int:
    return sum((out / run.path).exists() for run in runs)


# The cluster ---------------------------------------------------------------------------------------


def local_workers(cluster: str) -> int | None:
    """The N of `local:N`; None for a cluster that is elsewhere."""
    if not cluster.startswith("local"):
        return None
    number = cluster.removeprefix(LOCAL)
    if not number.isdecimal() or int(number) < 1:
        raise DropleError(
            f"--cluster {cluster}: give local:N for N worker processes on this machine, such as local:2, or the "
            "address of a Dask scheduler, such as tcp://HOST:8786."
        )
    return int(number)


@contextlib.contextmanager
def _connected(cluster: str, count: int | None, device: str) -> Iterator["Client"]:
    """A client of the cluster; a local one lives as long as it is used."""
    try:
        import distributed
    except ImportError as error:
        raise DropleError(f"--cluster needs {error.name}: pip install drople[cluster]") from None
    # What becomes of workers and connections is said here, in the words of a benchmark.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        if count is not None:
            where: Any = stack.enter_context(_local(count, device))
            security = where.security
        else:
            where, security = cluster, None
        options: dict[str, Any] = {"security": security, "timeout": CONNECT_SECONDS, "set_as_default": False}
        if isinstance(where, str) and Path(where).is_file():
            where, options["scheduler_file"] = None, where
        try:
            client = stack.enter_context(distributed.Client(where, **options))
        except (OSError, ValueError, TypeError) as error:
            raise DropleError(
                f"no Dask scheduler answers at {cluster} ({error}): check that it runs, that this machine reaches "
                "it, and for tls:// that Dask is told the certificates. docs/cluster.md shows how to start one."
            ) from None
        yield client


def _local(count: int, device: str) -> Any:
    """A cluster of so many processes of this machine, on its GPUs in turn, that no one else can use."""
    from distributed import Nanny, Scheduler, Security, SpecCluster

    try:
        # On a machine of many users the loopback address is open to all of them, and whoever reaches a
        # scheduler can run code: certificates that only these processes know keep others out.
        security = Security.temporary()
    except ImportError:
        raise DropleError("--cluster local:N needs cryptography: pip install drople[cluster]") from None
    common = {
        "host": LOOPBACK,
        "protocol": "tls://",
        "security": security,
        "dashboard": False,
        "dashboard_address": None,
    }
    quiet = {"silence_logs": logging.CRITICAL}
    # Dask would pause or end a worker for the memory it takes; a training run takes what it needs.
    own = {"nthreads": 1, "memory_limit": None, **quiet}
    # Who names one GPU means it by its place among all.
    gpus = visible_gpus() if device in ("auto", "cuda") else []
    workers = {
        number: {
            "cls": Nanny,
            "options": {
                **common,
                **own,
                "env": {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {},
            },
        }
        for number in range(count)
    }
    scheduler = {"cls": Scheduler, "options": {**common, "port": 0}}
    return SpecCluster(workers, scheduler, security=security, **quiet)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = None if given is None else [name.strip() for name in given.split(",") if name.strip()]
    count = torch.cuda.device_count()
    return [str(number) for number in range(count)] if named is None else named[:count]


# The client ----------------------------------------------------------------------------------------


def _results(
    client: "Client", runs: Sequence[Run], settings: tuple[Any, ...], progress: Progress
) -> Iterator[tuple[Run, dict[str, Any] | None]]:
    """Each run with its record as it is finished; with None when the cluster is gone."""
    finished: SimpleQueue[Future] = SimpleQueue()
    waiting: dict[Any, tuple[Run, Future]] = {}
    root, device, *_ = settings
    for number, run in enumerate(runs):
        # The same run on the same data has the same key, and a scheduler computes a key once.
        key = ("drople", f"{run.path.as_posix()} {root} {device}")
        future = client.submit(work, asdict(run), *settings, key=key, priority=-number, pure=False)
        waiting[key] = run, future
        future.add_done_callback(finished.put)
    failed, workers = 0, -1
    with progress.task("benchmark", len(runs)) as update:
        while waiting:
            before, workers = workers, _workers(client, workers)
            if workers == 0 and before != 0:
                progress.say("the cluster has no worker at the moment: the runs wait for one")
            running = min(max(workers, 0), len(waiting))
            shown = f"{running} running on {workers} worker{'s' * (workers != 1)}, {failed} failed"
            update(len(runs) - len(waiting), what=shown)
            try:
                future = finished.get(timeout=LOOK_SECONDS)
            except Empty:
                continue
            run, _ = waiting.pop(future.key)
            answer = _answer(future, run, device)
            for note in answer["notes"] if answer is not None else ():
                progress.say(note)
            record = None if answer is None else answer["record"]
            failed += record is not None and record["status"] != "done"
            yield run, record


def _workers(client: "Client", before: int) -> int:
    """How many workers there are; what it was while the scheduler does not answer."""
    if client.status != "running":
        return before
    return int(client.scheduler_info(n_workers=0).get("n_workers", before))


def _answer(future: "Future", run: Run, device: str) -> dict[str, Any] | None:
    """The record of a run and what was said on the way; None when the cluster is gone."""
    from distributed import CancelledError, KilledWorker

    if future.status == "error":
        error = future.exception()
        if isinstance(error, KilledWorker):
            return {"record": _killed(run, device, error), "notes": []}
        # A run that fails comes back as a record; this one could not be begun, and no other could.
        raise DropleError(
            f"a worker cannot do {run.label} on {run.dataset} ({type(error).__name__}: {str(error).rstrip('.')}): "
            f"every worker needs drople {__version__} installed, with drople[cluster]."
        )
    try:
        return dict(json.loads(future.result()))
    except (CancelledError, OSError):
        return None


def _killed(run: Run, device: str, error: Any) -> dict[str, Any]:
    """The record of a run whose workers died again and again."""
    said = (
        f"{error.allowed_failures + 1} workers died while they had this run, the last {error.last_worker.address}: "
        "it may need more memory than they have."
    )
    failed = {"status": "failed", "error": f"KilledWorker: {said}", "trace": "", "results": {}}
    return opening(run, device) | failed | {"timing": {"finished": now()}}


# The worker ----------------------------------------------------------------------------------------


class Notes(Quiet):
    """Keeps what is said, for the client to say."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def work(
    facts: Mapping[str, Any], root: str, device: str, folder: str, threads: int | None, version: str
) -> str:
    """On a worker: do one run; its record and notes as JSON. `folder` is where relative paths begin."""
    from distributed import get_worker

    worker = get_worker()
    where = f"{worker.address} on {platform.node()}"
    if version != __version__:
        raise DropleError(f"worker {where} has drople {__version__}, the client {version}.")
    notes = Notes()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_run)
        # Below the worker's own folder, which Dask clears away after a worker that was killed.
        own = tempfile.TemporaryDirectory(
            prefix=f"drople-{os.getpid()}-", dir=worker.local_directory, ignore_cleanup_errors=True
        )
        place = Path(stack.enter_context(own)).absolute()
        if os.path.isdir(folder):
            stack.enter_context(contextlib.chdir(folder))
        if threads is not None:
            torch.set_num_threads(threads)
        record = execute(Run(**facts), Path(root), place, device, notes)
    record["timing"]["worker"] = where
    if record["status"] != "done":
        record["error"] = f"{record['error'].rstrip('.')} (on worker {where})"
    return json.dumps({"record": record, "notes": notes.lines})

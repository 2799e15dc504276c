"""A tiny random CLIP on disk, coloured images to learn from, and the command line in a process of its own.

The checkpoint has pocket's tokenizer and towers of two layers, so that a training run takes a fraction of a
second; the images differ by colour, which even random towers can tell apart.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

SIZE = 32
RUN_FILES = ("config.json", "prompts.safetensors", "metrics.json", "log.jsonl")
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 220), "yellow": (220, 210, 40)}
# Models this small only lose by threads, and on a busy machine they lose a hundredfold.
torch.set_num_threads(1)
# A folder of these tests lives as long as the process that made it.
_kept: list[tempfile.TemporaryDirectory[str]] = []


def own_folder() -> Path:
    _kept.append(tempfile.TemporaryDirectory(prefix="drople-tests-"))
    return Path(_kept[-1].name)


@functools.cache
def tiny_checkpoint() -> Path:
    """The folder of a random CLIP that `Backbone.load` takes."""
    folder = own_folder() / "tiny-clip"
    folder.mkdir()
    shared = {"bos_token_id": 12286, "eos_token_id": 12287, "pad_token_id": 12287}
    config = CLIPConfig(
        projection_dim=16,
        text_config={
            "vocab_size": 12288,
            "hidden_size": 24,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 77,
            "projection_dim": 16,
            **shared,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": 8,
            "projection_dim": 16,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    with resources.as_file(resources.files("drople") / "assets" / "pocket") as pocket:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pocket / name, folder / name)
        pixels = json.loads((pocket / "preprocessor_config.json").read_text("utf-8"))
    pixels["size"], pixels["crop_size"] = {"shortest_edge": SIZE}, {"height": SIZE, "width": SIZE}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels), "utf-8")
    return folder


def picture(colour: str, number: int) -> Image.Image:
    """A noisy picture of one colour, the same for the same arguments."""
    rng = np.random.default_rng([number, *COLOURS[colour]])
    noise = rng.normal(0, 40, (SIZE + 8, SIZE + 4, 3))
    return Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8))


def pictures(
    folder: Path, colours: Sequence[str] = ("red", "green", "blue"), count: int = 6, first: int = 0
) -> Path:
    """`count` pictures of each colour as `folder/COLOUR/N.png`."""
    for colour in colours:
        (folder / colour).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            picture(colour, number).save(folder / colour / f"{number}.png")
    return folder


def splits(folder: Path, colours: Sequence[str] = ("red", "green", "blue"), count: int = 6) -> Path:
    """The same in train, val and test."""
    for number, split in enumerate(("train", "val", "test")):
        pictures(folder / split, colours, count, first=100 * number)
    return folder


def contents(folder: Path, names: Sequence[str] = RUN_FILES) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


# The command line in a process of its own ----------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a finished command left."""

    code: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """`drople ARGUMENTS` in a fresh process, forked from a server that has imported everything.

    Another `main` than drople's own gets the arguments where one is given.
    """

    def __init__(
        self,
        *arguments: object,
        environment: dict[str, str] | None = None,
        main: Callable[[list[str]], object] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=_spool()))
        context = _server()
        texts = [str(a) for a in arguments]
        self.process: BaseProcess = context.Process(
            target=_child, args=(texts, str(self._folder), environment or {}, main)
        )
        self.process.start()

    def wait(self, seconds: float = 120) -> Answer:
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {seconds} s: {self._read('err')}")
        return Answer(self.process.exitcode, self._read("out"), self._read("err"))

    def _read(self, name: str) -> str:
        file = self._folder / name
        return file.read_text("utf-8") if file.exists() else ""


def drople(*arguments: object, environment: dict[str, str] | None = None) -> Answer:
    return Command(*arguments, environment=environment).wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranks(world: int) -> list[dict[str, str]]:
    """What a launcher tells each of some processes that train together."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    # As torchrun says it: where it is not said, accelerate takes the machine's cores, whoever else is at work.
    shared["OMP_NUM_THREADS"] = "1"
    return [{**shared, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(world)]


def in_processes(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """`work(*arguments)` in some processes that can reach each other, until all are done."""
    processes = [
        _server().Process(target=_worker, args=(work, arguments, environment)) for environment in ranks(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, codes


def _worker(work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments)


@functools.cache
def _spool() -> Path:
    return own_folder()


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drople.learner", "drople.answers", "drople.cli", "rich.table"])
    return context


def _child(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    main: Callable[[list[str]], object] | None,
) -> None:
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        target = os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(target, number)
    # The streams inherited from the server may hold another file's position and buffer.
    sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    torch.set_num_threads(1)
    from drople.cli import main as drople_main

    try:
        (main or drople_main)(arguments)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()

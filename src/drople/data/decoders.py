"""Picture files decoded in processes of their own, into memory that they share with this one.

Threads share Python's lock: on sixteen cores they wait for it longer than they decode, and who asks a GPU for its next
layers waits with them. So nobody here has a thread: a process is asked for its pictures long before they are wanted,
writes each where it is looked for, and says so. Who is done with more is asked for more. One that dies of a picture
costs that picture, not the run.
"""

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

import numpy as np

from drople.safe_image import ASKED, GREETING, SAID, BadImage, Shared, attempt

SERVE = "from drople.safe_image import serve; serve()"
# glibc gives the memory of each picture back and asks for it at the next: a fifth of the time of decoding. NumPy starts
# a thread a core for products that nobody asks for: 0.3 s of 0.7 s until sixteen processes are ready.
SETTINGS = {f"MALLOC_{what}_THRESHOLD_": str(32 << 20) for what in ("MMAP", "TRIM")} | {
    "OPENBLAS_NUM_THREADS": "1"
}


class Decoder:
    """One process, and what it was asked for: it answers in that order. Where none can be started, this one does it."""

    def __init__(self, number: int, shared: Shared, resample: int) -> None:
        self.number, self.shared, self.resample = number, shared, resample
        self.asked: deque[tuple[int, str | Path]] = deque()
        self._start()

    def _start(self) -> None:
        self.greeted, self.sent, self.shared.done[self.number] = False, 0, 0
        self.process: subprocess.Popen[bytes] | None = None
        given = (self.number, self.shared.memory, self.shared.size, self.resample)
        with suppress(OSError):
            self.process = subprocess.Popen(
                # -P: a file beside the pictures may have the name of a module.
                [sys.executable, "-P", "-c", SERVE, *map(str, given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(self.shared.memory,),
                env={**os.environ, **SETTINGS},
            )

    def ask(self, wanted: Sequence[tuple[int, str | Path]]) -> None:
        """For pictures, each in a place among the squares."""
        self.asked.extend(wanted)
        self._send(wanted)

    def waiting(self) -> int:
        """How many pictures it was asked for and has not come to yet."""
        return self.sent - int(self.shared.done[self.number])

    def answer(self) -> np.ndarray | BadImage:
        """The first picture that was asked for, or what is wrong with it."""
        place, path = self.asked[0]
        said = self._listen()
        if said is None and not self.greeted:
            self.asked.popleft()
            return attempt(path, self.shared.size, self.resample)
        if said is None:
            # Perhaps it was somebody else who ended it, so this picture is asked for twice.
            self._again()
            said = self._listen()
        self.asked.popleft()
        if said is None:
            self._again()
            said = "reading it ended the process that did: damaged, or made to do harm"
        return BadImage(str(path), said) if said else self.shared.squares[place]

    def _again(self) -> None:
        self.close()
        self._start()
        self._send(self.asked)

    def _send(self, wanted: Collection[tuple[int, str | Path]]) -> None:
        self.sent += len(wanted)
        if self.process is None:
            return
        assert self.process.stdin is not None
        names = [(place, os.fsencode(path)) for place, path in wanted]
        # Of one that has died, who waits for its answer will hear.
        with suppress(OSError):
            self.process.stdin.write(b"".join(ASKED.pack(place, len(name)) + name for place, name in names))
            self.process.stdin.flush()

    def _listen(self) -> str | None:
        """What is wrong with the next picture, nothing if it is there, None where there is no process, or no more."""
        if self.process is None:
            return None
        assert self.process.stdout is not None
        if not self.greeted:
            self.greeted = self.process.stdout.read(len(GREETING)) == GREETING
        head = self.process.stdout.read(SAID.size)
        if len(head) < SAID.size:
            return None
        (length,) = SAID.unpack(head)
        reason = self.process.stdout.read(length)
        return None if len(reason) < length else reason.decode("utf-8")

    def close(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()


class Decoders:
    """So many of them, and places for so many pictures."""

    def __init__(self, count: int, size: int, resample: int, places: int) -> None:
        self.memory = _memory(Shared.length(places, size))
        shared = Shared(self.memory, size)
        self.places = places
        self.all = [Decoder(number, shared, resample) for number in range(count)]
        self.begun: deque[list[Decoder]] = deque()
        self.next = 0

    def begin(self, paths: Sequence[Any]) -> None:
        """Ask for the files of `paths`; as many can be begun and not finished as there are places."""
        free = [(decoder.waiting(), number) for number, decoder in enumerate(self.all)]
        heapify(free)
        wanted: list[list[tuple[int, str | Path]]] = [[] for _ in self.all]
        asked = []
        for place, path in enumerate(paths, self.next):
            waiting, number = free[0]
            heapreplace(free, (waiting + 1, number))
            wanted[number].append((place % self.places, path))
            asked.append(self.all[number])
        for decoder, some in zip(self.all, wanted, strict=True):
            decoder.ask(some)
        self.next += len(paths)
        self.begun.append(asked)

    def finish(self) -> list[np.ndarray | BadImage]:
        """What was begun first, each as `attempt` gives it; to be used before anything else is begun."""
        return [decoder.answer() for decoder in self.begun.popleft()]

    def close(self) -> None:
        for decoder in self.all:
            decoder.close()
        os.close(self.memory)


def _memory(length: int) -> int:
    """A file without a name, in memory where a system has that."""
    if sys.platform == "linux":
        memory = os.memfd_create("drople")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.truncate(memory, length)
    return memory

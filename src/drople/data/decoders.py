"""Picture files decoded in processes of their own.

Threads share Python's lock: on sixteen cores they wait for it longer than they decode. Each process here is asked for
one picture at a time. One that dies of a picture costs that picture, not the run.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from drople.safe_image import GREETING, HEAD, BadImage, open_image, square

SERVE = "from drople.safe_image import serve; serve()"
PIPE_BYTES = 1 << 20  # a whole picture, so that nobody waits in the middle of one


class Decoder:
    """One process; it is there from the first, and greets when it is ready."""

    def __init__(self, size: int, resample: int) -> None:
        self.size, self.resample, self.greeted = size, resample, False
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(size), str(resample)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=PIPE_BYTES,
        )

    def ask(self, path: str | Path) -> np.ndarray | str:
        """A picture, or what is wrong with it; EOFError where the process has died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        name = os.fsencode(path)
        if not self.greeted:
            self.greeted = self.process.stdout.read(len(GREETING)) == GREETING
        try:
            self.process.stdin.write(HEAD.pack(len(name)) + name)
            self.process.stdin.flush()
        except OSError:
            raise EOFError from None
        head = self.process.stdout.read(HEAD.size)
        if len(head) < HEAD.size:
            raise EOFError
        (length,) = HEAD.unpack(head)
        if length < 0:
            return self.process.stdout.read(-length).decode("utf-8")
        content = self.process.stdout.read(length)
        if len(content) < length:
            raise EOFError
        return np.frombuffer(content, np.uint8).reshape(3, self.size, self.size)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()


class Decoders:
    """So many of them, for as many threads."""

    def __init__(self, count: int, size: int, resample: int) -> None:
        self.free: SimpleQueue[Decoder] = SimpleQueue()
        self.all = [Decoder(size, resample) for _ in range(count)]
        for decoder in self.all:
            self.free.put(decoder)

    def square(self, path: str | Path, size: int, resample: int) -> np.ndarray:
        """A picture, as `square(open_image(path), size, resample)` gives it."""
        decoder = self.free.get()
        try:
            # What killed a process may have been somebody else: a picture is asked for twice.
            for _ in range(2):
                try:
                    answer = decoder.ask(path)
                    break
                except EOFError:
                    if not decoder.greeted:
                        # No process can be started here; this one does it.
                        return square(open_image(path), size, resample)
                    decoder.close()
                    decoder = Decoder(size, resample)
                    self.all.append(decoder)
            else:
                raise BadImage(
                    str(path), "reading it ended the process that did: damaged, or made to do harm"
                )
        finally:
            self.free.put(decoder)
        if isinstance(answer, str):
            raise BadImage(str(path), answer)
        return answer

    def close(self) -> None:
        for decoder in self.all:
            decoder.close()

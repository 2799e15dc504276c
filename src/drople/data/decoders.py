"""Picture files decoded in processes of their own.

Threads share Python's lock: on sixteen cores they wait for it longer than they decode. Each process here is asked for
some pictures at a time, so that it decodes the next one while somebody comes for the last. One that dies of a picture
costs that picture, not the run.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from drople.safe_image import GREETING, HEAD, BadImage, open_image, square

SERVE = "from drople.safe_image import serve; serve()"
PIPE_BYTES = 1 << 20  # some pictures, so that nobody waits in the middle of one


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

    def ask(self, paths: Sequence[str | Path]) -> Iterator[np.ndarray | BadImage]:
        """Pictures in their order, or what is wrong with them; EOFError where the process has died."""
        assert self.process.stdin is not None and isinstance(self.process.stdout, BufferedReader)
        if not self.greeted:
            self.greeted = self.process.stdout.read(len(GREETING)) == GREETING
        names = [os.fsencode(path) for path in paths]
        try:
            self.process.stdin.write(b"".join(HEAD.pack(len(name)) + name for name in names))
            self.process.stdin.flush()
        except OSError:
            raise EOFError from None
        for path in paths:
            head = self.process.stdout.read(HEAD.size)
            if len(head) < HEAD.size:
                raise EOFError
            (length,) = HEAD.unpack(head)
            if length < 0:
                yield BadImage(str(path), self.process.stdout.read(-length).decode("utf-8"))
                continue
            pixels = np.empty((3, self.size, self.size), np.uint8)
            if self.process.stdout.readinto(pixels.data.cast("B")) < length:
                raise EOFError
            yield pixels

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

    def squares(self, paths: Sequence[str | Path]) -> list[np.ndarray | BadImage]:
        """Each picture as `square(open_image(path), size, resample)` gives it, or what is wrong with it."""
        decoder = self.free.get()
        answers: list[np.ndarray | BadImage] = []
        again = False
        try:
            while len(answers) < len(paths):
                try:
                    for answer in decoder.ask(paths[len(answers) :]):
                        answers.append(answer)
                        again = False
                except EOFError:
                    # Who killed it, perhaps; it may have been somebody else, so that one is asked for twice.
                    killer = paths[len(answers)]
                    if not decoder.greeted:
                        # No process can be started here; this one does it.
                        answers.append(in_this_process(killer, decoder.size, decoder.resample))
                        continue
                    if again:
                        why = "reading it ended the process that did: damaged, or made to do harm"
                        answers.append(BadImage(str(killer), why))
                    again = not again
                    decoder.close()
                    decoder = Decoder(decoder.size, decoder.resample)
                    self.all.append(decoder)
        finally:
            self.free.put(decoder)
        return answers

    def close(self) -> None:
        for decoder in self.all:
            decoder.close()


def in_this_process(path: str | Path, size: int, resample: int) -> np.ndarray | BadImage:
    try:
        return square(open_image(path), size, resample)
    except BadImage as error:
        return error

"""Progress for people: bars on a terminal, notes alone elsewhere, nothing when not wanted.

Everything here goes to standard error, so that standard output can carry results alone.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

Update = Callable[..., None]


def speaks() -> bool:
    """Of several processes that train together, the first alone speaks and writes."""
    return os.environ.get("RANK", "0") == "0"


class Progress(Protocol):
    """Who is told how far a long piece of work is."""

    def task(self, what: str, total: int) -> Any:
        """A context manager giving `update(done, values=None)`."""
        ...

    def say(self, line: str) -> None: ...


class Quiet:
    """Says nothing: the default of the Python interface."""

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Update]:
        yield lambda done, values=None, **more: None

    def say(self, line: str) -> None:
        pass


class Terminal:
    """Bars with the loss terms and the time left where standard error is a terminal; else only notes."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Update]:
        if not sys.stderr.isatty() or not speaks():
            yield lambda done, values=None, **more: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        # In a narrow terminal the values are cut, not the bar and the time left.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[shown]}", table_column=rest),
        )
        with Bars(*columns, console=self.console, transient=True, expand=True) as bars:
            bar = bars.add_task(what, total=total, shown="")

            def update(
                done: int, values: Mapping[str, float] | None = None, total: int | None = None, what: str = ""
            ) -> None:
                bars.update(bar, completed=done, total=total, shown=what or summary(values or {}))

            yield update

    def line(self, line: str) -> None:
        """How far work of many parts is: shown with or without a terminal."""
        if speaks():
            self.console.print(line, markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        if speaks():
            # Unwrapped, so that the name of a file can be copied, and found by a program.
            self.console.print(f"note: {line}", style="yellow", markup=False, soft_wrap=True)


def summary(values: Mapping[str, float]) -> str:
    """The terms of a step in a line, what most look for first."""
    short = {"cross_entropy": "ce", "residual_entropy_visual": "re_v", "residual_entropy_text": "re_t"}
    hidden, first = {"lr", "lambda"}, ("loss", "accuracy")
    ordered = sorted((n for n in values if n not in hidden), key=lambda n: n not in first)
    return "  ".join(f"{short.get(n, n)} {values[n]:.3g}" for n in ordered)

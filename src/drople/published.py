"""The numbers the paper prints, to be placed beside ours: `published.json`, one entry for each of its tables.

Everything is in percent and as printed, the paper's own slips included (tests/test_published.py lists them).
A table whose rows are methods is a "comparison", one whose rows are settings of DroPLe an "ablation". Names
of datasets are those of drople, and "average" is the paper's own average.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from drople.errors import unknown

# Names that people, and drople, use for what the paper calls otherwise.
ALIASES = {"promptsrc": "psrc"}


@dataclass(frozen=True)
class Row:
    """One printed row. `cells`: dataset, "source" or "average" -> base, novel, hm or accuracy -> percent."""

    table: str
    caption: str
    protocol: str
    kind: str
    backbone: str
    shots: int
    ratio: float | None
    source: str | None
    decimals: int
    note: str | None
    method: str
    cells: dict[str, dict[str, float]]


@cache
def datasets() -> dict[str, str]:
    """The paper's datasets in its order: drople's name -> the paper's."""
    return dict(_content()["datasets"])


@cache
def rows() -> tuple[Row, ...]:
    """Every row of every table; the ablations come last."""
    return tuple(_rows())


def lookup(protocol: str, method: str | None = None, *, kind: str | None = None) -> list[Row]:
    """The rows printed for a protocol, those of one method if it is named; [] where the paper prints none."""
    protocols = {row.protocol for row in rows()}
    if protocol not in protocols:
        raise unknown("protocol", protocol, protocols)
    return [
        row
        for row in rows()
        if row.protocol == protocol
        and (kind is None or row.kind == kind)
        and (method is None or _plain(row.method) == _plain(method))
    ]


def _rows() -> Iterator[Row]:
    for table in _content()["tables"]:
        facts = {"note": None} | {key: value for key, value in table.items() if key != "rows"}
        for method, cells in table["rows"].items():
            yield Row(method=method, cells=cells, **facts)


def _plain(method: str) -> str:
    parts = method.lower().replace(" ", "").replace("-", "").replace("_", "").split("+")
    return "+".join(ALIASES.get(part, part) for part in parts)


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files("drople").joinpath("published.json").read_text("utf-8"))
    return content

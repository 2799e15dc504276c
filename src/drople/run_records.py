"""The records of a benchmark, one JSON file a run: read, and refused in words where they are damaged."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drople.errors import DropleError, unknown

TITLES = {
    "base-to-novel": "Base-to-novel generalization",
    "few-shot": "Few-shot classification",
    "cross-dataset": "Cross-dataset evaluation",
    "domain-shift": "Domain shift",
    "long-tail": "Long-tail base-to-novel generalization",
}


def read_records(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The records in files, and in folders with all below; JSON files that are no records are skipped."""
    found: dict[Path, dict[str, Any]] = {}
    given = [Path(path) for path in paths]
    for path in given:
        if not path.exists():
            raise DropleError(f"{path} does not exist: give the folder that drople benchmark wrote to.")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            content = _content(file)
            if _is_record(content):
                _check(content, file)
                found[file.resolve()] = content
    if not found:
        places = ", ".join(map(str, given)) or "no path"
        raise DropleError(
            f"there is no record of a run in {places}: drople benchmark writes one JSON file a run."
        )
    return list(found.values())


def read_record(file: Path) -> dict[str, Any]:
    """The record in a file that has no other business than to be one."""
    content = _content(file)
    if not _is_record(content):
        raise DropleError(f"{file} is no record of a run: delete it and run the benchmark again.")
    _check(content, file)
    return content


def _is_record(content: Any) -> bool:
    return isinstance(content, dict) and {"schema", "protocol", "status"} <= content.keys()


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DropleError(
            f"{file} cannot be read ({error}): delete it and run the benchmark again."
        ) from None


def _check(record: dict[str, Any], file: Path) -> None:
    """What a table rests on; the rest of a record is not its business."""
    if record["schema"] != 1:
        raise DropleError(
            f"{file} has schema {record['schema']}, this drople reads 1: use the one that wrote it."
        )
    if record["protocol"] not in TITLES:
        raise unknown(f"protocol in {file}", str(record["protocol"]), TITLES)
    kinds: dict[str, Any] = {"dataset": str, "method": str, "label": str, "backbone": str, "seed": int}
    kinds |= {
        "status": str,
        "error": (str, type(None)),
        "shots": (int, type(None)),
        "ratio": (int, float, type(None)),
    }
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    if record["status"] not in ("done", "failed"):
        wrong.append("status")
    elif record["status"] == "done" and not _sound(record.get("results")):
        wrong.append("results")
    elif record["protocol"] == "few-shot" and record.get("shots") is None:
        wrong.append("shots")
    if wrong:
        raise DropleError(f"{file} is damaged ({', '.join(wrong)}): delete it and run the benchmark again.")


def _sound(results: Any) -> bool:
    if not isinstance(results, dict) or not all(isinstance(part, dict) for part in results.values()):
        return False
    shares = [part.get("accuracy") for part in results.values()]
    return all(share is None or (isinstance(share, int | float) and 0 <= share <= 1) for share in shares)

"""`drople report`: a run, or the records of a benchmark, as one HTML file that needs nothing else.

No script, no font, no address outside: the page's own policy forbids them, and everything shown is escaped.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from drople.answers import percent
from drople.errors import DropleError
from drople.learner import CONFIG
from drople.progress import Progress, Quiet
from drople.records import write_bytes
from drople.report.benchmark_report import benchmark_page
from drople.report.charts import swatch
from drople.report.run_report import run_page
from drople.run_records import read_records

__all__ = ["write_report"]


def write_report(
    source: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Path:
    """Write the report of a run folder, or of a folder (or file) of records, to `out`.

    With `data` (what the run was trained on) the run is evaluated anew, image by image, and the report has
    pictures; without it, it has what the run folder knows.
    """
    source, out = Path(source), Path(out)
    if not source.exists():
        raise DropleError(
            f"there is no {source}: give a run folder of drople fit, or the records of drople benchmark."
        )
    if out.is_dir():
        raise DropleError(f"{out} is a folder: give --out the name of a file, such as report.html.")
    if (source / CONFIG).exists():
        name, content = "run", run_page(source, data, device, progress or Quiet())
    elif data is not None:
        raise DropleError(
            f"{source} is no run folder, so --data cannot be used: records hold no model to show images."
        )
    else:
        name, content = "benchmark", benchmark_page(read_records([source]))
    # A class name read from a folder may hold lone surrogates, which are no UTF-8.
    write_bytes(out, render(name, content).encode("utf-8", "replace"))
    return out


def render(name: str, content: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("drople.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["swatch"] = swatch
    return environment.get_template(f"{name}.html.jinja").render(content)

"""The report of a benchmark: tables, few-shot curves, base against novel, cost, what failed, where it ran."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from drople.report.charts import Dot, Line, cost_chart, halves_chart, line_chart, number, whole
from drople.report.commands import benchmark_commands, public_name
from drople.tables import AVERAGE, HALVES, Table, curves, tables

Record = Mapping[str, Any]
# Numbers with their deviations that fit beside each other on a page, and on paper.
COLUMNS = 10
ENVIRONMENT = ("device", "drople", "python", "torch", "transformers")


def benchmark_page(given: Sequence[Record]) -> dict[str, Any]:
    """Everything the template of a benchmark shows."""
    records = [public(record, short_names(given)) for record in given]
    done = [record for record in records if record["status"] == "done"]
    found = tables(records)
    labels = dict.fromkeys(row.name for table in found for row in table.rows)
    colours = {label: colour for colour, label in enumerate(labels)}
    titles = {group: title for table in found for group, title in table.groups.items()}
    return {
        "title": f"Benchmark of {len(labels)} methods",
        "version": ", ".join(sorted({r.get("environment", {}).get("drople", "unknown") for r in records})),
        "facts": {
            "Runs": f"{len(done)} done, {len(records) - len(done)} failed",
            "Protocols": listed(r["protocol"] for r in records),
            "Datasets": listed(r["dataset"] for r in records),
            "Methods": listed(labels),
            "Backbones": listed(r["backbone"] for r in records),
            "Seeds": listed(str(seed) for seed in sorted({r["seed"] for r in records})),
        },
        "colours": colours,
        "tables": [(table, blocks(table)) for table in found],
        "heads": {"base": "Base", "novel": "Novel", "hm": "HM", "accuracy": "Accuracy"},
        "curves": few_shot_charts(records, colours, titles),
        "halves": [
            part for table in found if table.protocol in HALVES if (part := halves_part(table, colours))
        ],
        "costs": [part for table in found if (part := cost_part(table, done, colours))],
        "failed": [record for record in records if record["status"] == "failed"],
        "environments": environments(records),
        "commands": benchmark_commands(records),
    }


def short_names(records: Sequence[Record]) -> dict[str, str]:
    """Datasets given as paths by their last part, where that leaves them apart: a page is passed on."""
    given = {name for r in records for name in (r["dataset"], *(r.get("targets") or ()))}
    last = [Path(name).name for name in given]
    return {name: Path(name).name if last.count(Path(name).name) == 1 else name for name in given}


def public(record: Record, names: Mapping[str, str]) -> dict[str, Any]:
    """A record without the paths of the machine it comes from."""
    targets = [names[target] for target in record.get("targets") or ()]
    return {
        **record,
        "dataset": names[record["dataset"]],
        "targets": targets,
        "backbone": public_name(record["backbone"]),
    }


def listed(values: Any) -> str:
    return ", ".join(dict.fromkeys(values))


def blocks(table: Table) -> list[list[str]]:
    """The datasets of a table in blocks that a page can hold side by side, as in the paper."""
    names, step = list(table.groups), max(1, COLUMNS // len(table.heads))
    return [names[start : start + step] for start in range(0, len(names), step)]


def few_shot_charts(
    records: Sequence[Record], colours: Mapping[str, int], titles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A chart a dataset, the average first, for every backbone with runs of more than one number of shots."""
    few = [record for record in records if record["protocol"] == "few-shot"]
    parts = []
    for backbone in dict.fromkeys(record["backbone"] for record in few):
        own = curves([record for record in few if record["backbone"] == backbone])
        charts = []
        for dataset, methods in sorted(own.items(), key=lambda item: item[0] != "average"):
            lines = [
                Line(
                    label,
                    [point.shots for point in points],
                    [point.mean for point in points],
                    colours[label],
                    marks=True,
                    spread=[point.std for point in points],
                )
                for label, points in methods.items()
                if points
            ]
            if len({shots for line in lines for shots in line.x}) < 2:
                continue
            last = "; ".join(f"{line.name} {line.y[-1]:.1f}% at {line.x[-1]:g} shots" for line in lines)
            chart = line_chart(
                lines,
                about=f"Few-shot curves, {dataset}: {last}.",
                x_title="shots a class",
                y_format=whole,
                log_x=True,
            )
            charts.append({"title": titles.get(dataset, "Average"), "chart": chart})
        if charts:
            shown = [label for label in colours if any(label in methods for methods in own.values())]
            parts.append({"backbone": backbone, "charts": charts, "methods": shown})
    return parts


def halves_part(table: Table, colours: Mapping[str, int]) -> dict[str, Any] | None:
    """Base against novel: the average of the datasets first, then each."""
    charts = []
    for group, title in sorted(table.groups.items(), key=lambda item: item[0] != AVERAGE):
        dots = []
        for row in table.rows:
            base, novel, hm = (row.cells[group, head].mean for head in ("base", "novel", "hm"))
            if base is not None and novel is not None:
                name = f"{row.name}: base {base:.1f}, novel {novel:.1f}" + (
                    f", H {hm:.1f}" if hm is not None else ""
                )
                dots.append(Dot(name, base, novel, colours[row.name]))
        if dots:
            about = f"Base against novel accuracy, {title}. " + "; ".join(dot.name for dot in dots) + "."
            charts.append({"title": title, "chart": halves_chart(dots, about)})
    shown = [row.name for row in table.rows]
    return {"title": table.title, "charts": charts, "methods": shown} if charts else None


def cost_part(table: Table, done: Sequence[Record], colours: Mapping[str, int]) -> dict[str, Any] | None:
    """The accuracy of the whole table (HM, or the most shots) over parameters and seconds of training."""
    group = AVERAGE if AVERAGE in table.groups else next(iter(table.groups))
    head = "hm" if table.protocol in HALVES else table.heads[-1]
    own = [
        r
        for r in done
        if (r["protocol"], r["backbone"]) == (table.protocol, table.backbone) and in_table(r, table)
    ]
    rows: list[dict[str, Any]] = []
    for row in table.rows:
        runs = [r for r in own if " ".join(r["label"].split()) == row.name]
        accuracy = row.cells[group, head].mean
        seconds = [r["timing"]["fit"] for r in runs if "fit" in r.get("timing", {})]
        parameters = [r["trainable_parameters"] for r in runs if "trainable_parameters" in r]
        if accuracy is not None and seconds and parameters:
            # Classes differ from dataset to dataset, and with them the size of some methods.
            rows.append(
                {
                    "name": row.name,
                    "accuracy": accuracy,
                    "parameters": fmean(parameters),
                    "seconds": fmean(seconds),
                }
            )
    if not rows:
        return None
    measure = (
        "harmonic mean"
        if head == "hm"
        else f"accuracy at {head} shots"
        if table.shots is None
        else "accuracy"
    )
    charts = []
    for field, title in (("parameters", "trainable parameters"), ("seconds", "seconds to fit")):
        dots = [
            Dot(
                f"{r['name']}: {number(r[field])} {title}, {r['accuracy']:.1f}%",
                r[field],
                r["accuracy"],
                colours[r["name"]],
            )
            for r in rows
        ]
        about = f"{measure.capitalize()} over {title}. " + "; ".join(dot.name for dot in dots) + "."
        charts.append({"title": title.capitalize(), "chart": cost_chart(dots, about=about, x_title=title)})
    short = "HM" if head == "hm" else "Accuracy"
    return {"title": table.title, "measure": measure, "short": short, "rows": rows, "charts": charts}


def in_table(record: Record, table: Table) -> bool:
    """Whether a run stands in this table; of few-shot runs, those with the most shots are compared."""
    if table.protocol == "few-shot":
        return str(record["shots"]) == table.heads[-1]
    source = record["dataset"] if table.source is not None else None
    return (record["shots"], record.get("ratio"), source) == (table.shots, table.ratio, table.source)


def environments(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What the runs ran on, each once, with how many ran there."""
    counts: dict[str, int] = {}
    for record in records:
        key = json.dumps(record.get("environment") or {}, sort_keys=True)
        counts[key] = counts.get(key, 0) + 1
    rows = []
    for key, count in counts.items():
        seen = json.loads(key)
        git = seen.get("git")
        commit = "-" if not git else git["commit"][:10] + (" (changed)" if git["changed"] else "")
        rows.append({"runs": count, **{name: seen.get(name, "-") for name in ENVIRONMENT}, "commit": commit})
    return rows

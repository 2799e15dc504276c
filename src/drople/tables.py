"""From the records of a benchmark to the paper's tables, as text, Markdown, LaTeX or CSV.

A table holds one protocol with one backbone, and one number of shots, but few-shot has them as columns.
All numbers are percentages. How they are made:

- The harmonic mean (HM) is taken for each seed from that seed's base and novel accuracy, then averaged over
  the seeds. So its standard deviation means what the others mean.
- An average over datasets is taken for each seed, and its HM is the harmonic mean of that seed's average base
  and average novel, as in the paper, never the average of HMs. A seed that lacks a dataset has no average; a
  row that lacks a dataset altogether has none at all.
- The standard deviation is the sample's, over seeds; with one seed it is unknown and printed as "-".
- Best is what nobody exceeds after rounding to what is printed. The paper's rows do not compete: they come
  from another backbone.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, harmonic_mean, stdev
from typing import Any, Literal

from drople import published as paper
from drople.ablations import ABLATIONS
from drople.errors import DropleError, unknown
from drople.run_records import TITLES

Key = tuple[str, str]
Values = dict[Key, dict[int, float]]

HALVES = ("base-to-novel", "long-tail")
FORMATS = ("text", "markdown", "latex", "csv")
# No dataset can have the empty name, so the average cannot be taken for one.
AVERAGE, SOURCE = "", "source"
# The paper's width: four datasets of base, novel and HM side by side, the others in blocks below.
COLUMNS = 12
FIELDS = ("protocol", "backbone", "shots", "ratio", "method", "origin", "dataset", "measure")
MEASURED = ("mean", "std", "seeds", "complete")


@dataclass(frozen=True)
class Cell:
    """One number in percent; None where there is none. `short`: of fewer seeds than the table has."""

    mean: float | None = None
    std: float | None = None
    seeds: tuple[int, ...] = ()
    short: bool = False
    best: bool = False
    decimals: int = 2

    @property
    def printed(self) -> str:
        return "-" if self.mean is None else f"{self.mean:.{self.decimals}f}"

    @property
    def spread(self) -> str:
        """What follows the mean: nothing for a number of the paper, which has no seeds."""
        if not self.seeds:
            return ""
        return " ± -" if self.std is None else f" ± {self.std:.{self.decimals}f}"


@dataclass(frozen=True)
class Row:
    """A method's row: `cells` by (group, head). `incomplete`: a dataset or seed of the table is missing."""

    name: str
    backbone: str
    cells: dict[Key, Cell]
    incomplete: bool = False
    published: bool = False

    @property
    def title(self) -> str:
        """The name with its marks: whose it is, and whether all of it is there."""
        if self.published:
            return f"{self.name} (paper, {self.backbone})"
        return self.name + ("†" if self.incomplete else "")


@dataclass(frozen=True)
class Table:
    """`groups` are datasets (name -> title), each with `heads`: base, novel, hm; or shots; or accuracy."""

    title: str
    protocol: str
    backbone: str
    shots: int | None
    ratio: float | None
    source: str | None
    seeds: tuple[int, ...]
    groups: dict[str, str]
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    by: str = "columns"


@dataclass(frozen=True)
class Point:
    """One point of a few-shot curve, in percent."""

    shots: int
    mean: float
    std: float | None
    seeds: tuple[int, ...]


def tables(
    records: Sequence[Mapping[str, Any]],
    *,
    by: Literal["columns", "rows"] = "columns",
    published: bool = False,
) -> list[Table]:
    """Every table that the records hold."""
    bags: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        bags.setdefault(_table_of(record), []).append(record)
    ordered = sorted(bags, key=lambda key: (list(TITLES).index(key[0]), *map(str, key[1:])))
    return [make_table(bags[key], by=by, published=published) for key in ordered]


def make_table(
    records: Sequence[Mapping[str, Any]],
    *,
    by: Literal["columns", "rows"] = "columns",
    published: bool = False,
) -> Table:
    """The table of records that share protocol, backbone, shots (but for few-shot), ratio and source.

    Datasets are its columns, or its rows with `by="rows"`; `published` adds the paper's rows below ours.
    """
    if by not in ("columns", "rows"):
        raise unknown("layout", by, ["columns", "rows"])
    kinds = {_table_of(record) for record in records}
    if len(kinds) != 1:
        which = "; ".join(sorted(", ".join(str(fact) for fact in kind if fact is not None) for kind in kinds))
        raise DropleError(f"one table needs records of one kind, not {len(kinds)} ({which}): use tables().")
    protocol, backbone, shots, ratio, source = kinds.pop()

    runs = _runs(records)
    seeds = tuple(sorted({run["seed"] for run in runs}))
    measured: dict[str, Values] = {run["label"]: {} for run in sorted(runs, key=_method_order)}
    for run in runs:
        for key, value in _measures(run).items():
            measured[run["label"]].setdefault(key, {})[run["seed"]] = value
    heads = _heads(protocol, runs)
    members = _members(protocol, runs)
    groups = _groups(protocol, source, members)
    rows, missing = [], []
    for label, values in measured.items():
        if AVERAGE in groups:
            values |= _averages(values, members, heads, seeds)
        lacks = _missing(values, groups, heads, seeds)
        cells = {
            (group, head): _cell(values.get((group, head), {}), seeds) for group in groups for head in heads
        }
        rows.append(Row(label, backbone, cells, incomplete=bool(lacks)))
        if lacks:
            missing.append(f"† {label}: no {'; no '.join(lacks)}.")
    notes = [_unit(seeds)]
    if protocol in HALVES:
        notes.append("HM: harmonic mean of base and novel, for each seed; in the average, of their averages.")
    notes += [*_mixed(runs), *missing, *(_failure(run) for run in runs if run["status"] == "failed")]
    rows = _with_best(rows)
    if published:
        added, remarks = _published(protocol, shots, ratio, source, groups, members, heads)
        rows, notes = rows + added, notes + remarks
    facts = [backbone, f"{shots} shots" if shots is not None else None]
    facts += [f"imbalance ratio {ratio:g}" if ratio is not None else None]
    facts += [f"trained on {_title(source)}" if source is not None else None]
    title = f"{TITLES[protocol]} ({', '.join(fact for fact in facts if fact)})"
    return Table(
        title, protocol, backbone, shots, ratio, source, seeds, groups, heads, tuple(rows), tuple(notes), by
    )


def curves(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Point]]]:
    """The few-shot curves of one backbone: dataset, or "average" -> method -> points by rising shots."""
    few = [record for record in records if record["protocol"] == "few-shot"]
    if not few:
        raise DropleError("there is no few-shot run among the records: curves are drawn from few-shot runs.")
    table = make_table(few)
    lines: dict[str, dict[str, list[Point]]] = {}
    for group in table.groups:
        for row in table.rows:
            points = lines.setdefault(group or "average", {}).setdefault(row.name, [])
            for head in table.heads:
                cell = row.cells[group, head]
                if cell.mean is not None:
                    points.append(Point(int(head), cell.mean, cell.std, cell.seeds))
    return lines


def render(table: Table | Sequence[Table], format: str = "text", *, width: int = 120) -> str:
    """One table, or several, as text (blocks of datasets no wider than `width`), markdown, latex or csv."""
    several = [table] if isinstance(table, Table) else list(table)
    if format == "csv":
        return _csv(several)
    if format == "text":
        return "\n".join(_text(each, width) for each in several)
    if format == "markdown":
        return "\n".join(_markdown(each) for each in several)
    if format == "latex":
        return "\n".join(_latex(each) for each in several)
    raise unknown("format", format, FORMATS)


# From records to numbers


def _table_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    protocol = record["protocol"]
    shots = None if protocol == "few-shot" else record.get("shots")
    source = record["dataset"] if protocol in ("cross-dataset", "domain-shift") else None
    return protocol, record["backbone"], shots, record.get("ratio"), source


def _runs(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One record a run: what was done counts before what failed; two different results are an error."""
    runs: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for record in records:
        record = {**record, "label": " ".join(record["label"].split())}
        run = record["label"], record["dataset"], record["seed"], record.get("shots")
        known = runs.get(run)
        if known is None or known["status"] == "failed":
            runs[run] = record
        elif record["status"] == "done":
            if not _agree(record, known):
                differ = _differences(record, known)
                raise DropleError(
                    f"the records hold two different results for {run[0]} on {run[1]} with seed {run[2]}"
                    f"{f' ({differ})' if differ else ''}: they come from different benchmarks, so give each its own "
                    "--out, and make a table of each folder for itself."
                )
            # The same training, tested on other targets besides.
            runs[run] = {**known, "results": {**known["results"], **record["results"]}}
    return list(runs.values())


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records of a run may both be true: of what both measured they say the same."""
    first, second = _measures(one), _measures(other)
    return all(first[key] == second[key] for key in first.keys() & second.keys())


SETTINGS = ("epochs", "precision", "preset")


def _setting(run: Mapping[str, Any], name: str) -> str:
    """One of the settings that no label tells, in words."""
    value = (run.get("options") or {}).get(name, run.get(name))
    return "the usual" if value is None else str(value)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    both = {name: (_setting(other, name), _setting(one, name)) for name in SETTINGS}
    return "; ".join(f"{name} {' and '.join(two)}" for name, two in both.items() if two[0] != two[1])


def _mixed(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What makes runs of a row, or all of a dataset's, other than they seem."""
    for label in dict.fromkeys(run["label"] for run in runs):
        for name in SETTINGS:
            found = sorted({_setting(run, name) for run in runs if run["label"] == label})
            if len(found) > 1:
                yield f"! {label}: runs that differ in {name} ({', '.join(found)}) are in one row."
    for dataset in dict.fromkeys(run["dataset"] for run in runs):
        own = (run.get("data") or {} for run in runs if run["dataset"] == dataset)
        if len({data.get("fingerprint") for data in own if data.get("fingerprint")}) > 1:
            yield f"! {dataset}: its images changed between some of the runs: rows are not of the same data."


def _method_order(run: Mapping[str, Any]) -> tuple[bool, int, bool, str]:
    """As in the paper: what needs no training first, DroPLe last; the rows of an ablation as it has them."""
    rows = [row.label for table in ABLATIONS.values() for row in table]
    row = (run.get("row") or "").partition(" (")[0]  # without what --set changed
    place = rows.index(row) if row in rows else -1
    return run["method"] != "zero-shot", place, run["method"].endswith("drople"), run["label"]


def _measures(run: Mapping[str, Any]) -> dict[Key, float]:
    """What one run gives, as fractions by (group, head)."""
    if run["status"] == "failed":
        return {}
    shares = {
        name: part["accuracy"] for name, part in run["results"].items() if part.get("accuracy") is not None
    }
    if run["protocol"] in HALVES:
        halves = {name: shares[name] for name in ("base", "novel") if name in shares}
        if len(halves) == 2:
            halves["hm"] = harmonic_mean(list(halves.values()))
        return {(run["dataset"], name): share for name, share in halves.items()}
    if run["protocol"] == "few-shot":
        return {(run["dataset"], str(run["shots"])): shares["test"]} if "test" in shares else {}
    return {(part, "accuracy"): share for part, share in shares.items()}


def _heads(protocol: str, runs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    if protocol in HALVES:
        return ("base", "novel", "hm")
    if protocol == "few-shot":
        return tuple(str(shots) for shots in sorted({run["shots"] for run in runs}))
    return ("accuracy",)


def _members(protocol: str, runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The datasets that are averaged, the paper's first and in its order; those of failed runs count too."""
    if protocol in ("cross-dataset", "domain-shift"):
        names = {part for run in runs for part in run.get("results") or {}} - {SOURCE}
    else:
        names = {run["dataset"] for run in runs}
    order = list(paper.datasets())
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def _groups(protocol: str, source: str | None, members: Sequence[str]) -> dict[str, str]:
    groups = {} if source is None else {SOURCE: f"{_title(source)} (source)"}
    groups |= {name: _title(name) for name in members}
    if len(members) > 1:
        average = {AVERAGE: "OOD average" if protocol == "domain-shift" else "Average"}
        groups = average | groups if protocol in HALVES else groups | average
    return groups


def _title(dataset: str) -> str:
    return paper.datasets().get(dataset, dataset)


def _averages(values: Values, members: Sequence[str], heads: Sequence[str], seeds: Sequence[int]) -> Values:
    """For each seed that has all members."""
    averages: Values = {}
    for head in heads:
        columns = [values.get((name, head), {}) for name in members]
        averages[AVERAGE, head] = {
            seed: fmean(column[seed] for column in columns)
            for seed in seeds
            if all(seed in column for column in columns)
        }
    if "hm" in heads:
        base, novel = averages[AVERAGE, "base"], averages[AVERAGE, "novel"]
        averages[AVERAGE, "hm"] = {
            seed: harmonic_mean([base[seed], novel[seed]]) for seed in seeds if seed in base and seed in novel
        }
    return averages


def _cell(values: Mapping[int, float], seeds: Sequence[int]) -> Cell:
    if not values:
        return Cell()
    shares = [100 * value for value in values.values()]
    spread = stdev(shares) if len(shares) > 1 else None
    return Cell(fmean(shares), spread, tuple(sorted(values)), short=len(values) < len(seeds))


def _missing(
    values: Values, groups: Mapping[str, str], heads: Sequence[str], seeds: Sequence[int]
) -> list[str]:
    """What a row lacks, in words: a dataset, some shots of it, or seeds."""
    lacks = []
    for group, title in groups.items():
        if group == AVERAGE:
            continue
        gaps = {head: [seed for seed in seeds if seed not in values.get((group, head), {})] for head in heads}
        if all(len(gap) == len(seeds) for gap in gaps.values()):
            lacks.append(title)
        elif "hm" in heads:
            if gaps["hm"]:
                lacks.append(f"{title} with {_seeds(gaps['hm'])}")
        else:
            for head, gap in gaps.items():
                at = f"{title} at {_head(head)}" if head != "accuracy" else title
                if gap:
                    lacks.append(at if len(gap) == len(seeds) else f"{at} with {_seeds(gap)}")
    return lacks


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _unit(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"Accuracy in %, {_seeds(seeds)}: one run has no standard deviation."
    return f"Accuracy in %, mean ± sample standard deviation over {_seeds(seeds)}."


def _failure(run: Mapping[str, Any]) -> str:
    """One line, whatever the error looked like."""
    error = " ".join(str(run.get("error") or "no reason recorded").split())
    shots = f", {run['shots']} shots" if run["protocol"] == "few-shot" else ""
    shown = error if len(error) <= 160 else error[:157] + "..."
    return f"Failed: {run['label']} on {_title(run['dataset'])}{shots}, seed {run['seed']}: {shown}"


def _with_best(rows: list[Row]) -> list[Row]:
    """A row that stands alone has no rival and no best."""
    if len(rows) < 2:
        return rows
    highest: dict[Key, float] = {}
    for row in rows:
        for key, cell in row.cells.items():
            if cell.mean is not None:
                highest[key] = max(highest.get(key, -math.inf), float(cell.printed))
    return [
        replace(
            row,
            cells={
                key: replace(cell, best=cell.mean is not None and float(cell.printed) == highest[key])
                for key, cell in row.cells.items()
            },
        )
        for row in rows
    ]


def _published(
    protocol: str,
    shots: int | None,
    ratio: float | None,
    source: str | None,
    groups: Mapping[str, str],
    members: Sequence[str],
    heads: Sequence[str],
) -> tuple[list[Row], list[str]]:
    """The paper's rows for this table, and what must be said about them."""
    rows, remarks = [], []
    for printed in paper.lookup(protocol, kind="comparison"):
        if (printed.ratio, printed.source) != (ratio, source) or shots not in (None, printed.shots):
            continue
        cells = {(group, head): Cell() for group in groups for head in heads}
        for group, head in cells:
            # A few-shot row of the paper has one number, under the column of its shots.
            measure = {str(printed.shots): "accuracy"}.get(head, "") if protocol == "few-shot" else head
            number = _printed(printed, group, measure, members)
            cells[group, head] = Cell(number, decimals=printed.decimals)
        if any(cell.mean is not None for cell in cells.values()):
            rows.append(Row(printed.method, printed.backbone, cells, published=True))
            if printed.note and printed.note not in remarks:
                remarks.append(printed.note)
    if not rows:
        return [], ["The paper prints no numbers for this table."]
    where = (
        "(paper): as printed there, for its backbone and its full test sets, so not to be ranked with ours; "
        "an average over other datasets than its own is computed from its printed numbers."
    )
    return rows, [where, *(f"(paper): {remark}." for remark in remarks)]


def _printed(row: paper.Row, group: str, measure: str, members: Sequence[str]) -> float | None:
    """A number of the paper. Its own average counts only where the table has exactly its datasets."""
    if group != AVERAGE:
        return row.cells.get(group, {}).get(measure)
    own = set(row.cells) - {"average", SOURCE}
    if "average" in row.cells and own == set(members):
        return row.cells["average"].get(measure)
    if measure == "hm":
        halves = [_printed(row, AVERAGE, half, members) for half in ("base", "novel")]
        return harmonic_mean([half for half in halves if half is not None]) if None not in halves else None
    numbers = [row.cells.get(name, {}).get(measure) for name in members]
    return fmean(number for number in numbers if number is not None) if None not in numbers else None


# Layout: bundles of columns (datasets, or methods) side by side, entries (methods, or datasets) as lines


@dataclass(frozen=True)
class _Bundle:
    title: str
    heads: tuple[str, ...]
    columns: list[list[Cell]]


def _layout(table: Table) -> tuple[str, list[_Bundle], list[str], int | None]:
    """The corner's word, the bundles, the names of the entries, and the entry where the paper's begin."""
    names = [row.title for row in table.rows]
    heads = tuple(_head(head) for head in table.heads)
    if table.by == "rows":
        bundles = [
            _Bundle(name, heads, [[row.cells[group, head] for group in table.groups] for head in table.heads])
            for name, row in zip(names, table.rows, strict=True)
        ]
        return "Dataset", bundles, list(table.groups.values()), None
    bundles = [
        _Bundle(title, heads, [[row.cells[group, head] for row in table.rows] for head in table.heads])
        for group, title in table.groups.items()
    ]
    first = next((index for index, row in enumerate(table.rows) if row.published), None)
    return "Method", bundles, names, first


def _head(head: str) -> str:
    return {"base": "Base", "novel": "Novel", "hm": "HM", "accuracy": ""}.get(head, f"{head}-shot")


def _blocks(bundles: Sequence[_Bundle]) -> Iterator[list[_Bundle]]:
    step = max(1, COLUMNS // len(bundles[0].heads)) if bundles else 1
    for start in range(0, len(bundles), step):
        yield list(bundles[start : start + step])


# Rendering


def _text(table: Table, width: int) -> str:
    corner, bundles, names, first_published = _layout(table)
    stub = max(len(name) for name in [corner, *names])
    blocks: list[list[list[str]]] = []
    room = 0
    for bundle in bundles:
        strip = _strip(bundle)
        if not blocks or room < len(strip[0]) + 3:
            left = [corner, *[""] * (len(strip) - len(names) - 1), *names]
            blocks.append([[name.ljust(stub) for name in left]])
            room = width - stub
        blocks[-1].append(strip)
        room -= len(strip[0]) + 3
    lines = [table.title, ""]
    for block in blocks:
        body = ["   ".join(pieces).rstrip() for pieces in zip(*block, strict=True)]
        rule = "-" * max(map(len, body))
        begin = len(body) - len(names)
        body.insert(begin, rule)
        if first_published:
            body.insert(begin + 1 + first_published, rule)
        lines += [*body, ""]
    best = ["* best"] if any(cell.best for row in table.rows for cell in row.cells.values()) else []
    return "\n".join([*lines, *best, *table.notes]) + "\n"


def _strip(bundle: _Bundle) -> list[str]:
    """A bundle as lines of one length: its title, the heads if there are any, its cells."""
    columns = []
    for head, cells in zip(bundle.heads, bundle.columns, strict=True):
        left = [("*" if cell.best else "") + cell.printed for cell in cells]
        right = [cell.spread + ("†" if cell.short else "") for cell in cells]
        wide, tail = max(map(len, left)), max(map(len, right))
        numbers = [a.rjust(wide) + b.ljust(tail) for a, b in zip(left, right, strict=True)]
        full = max(len(head), wide + tail)
        columns.append([head.rjust(full), *(number.rjust(full) for number in numbers)])
    lines = ["  ".join(pieces) for pieces in zip(*columns, strict=True)]
    if not any(bundle.heads):
        lines = lines[1:]
    full = max(len(bundle.title), *map(len, lines))
    title = bundle.title.center(full) if any(bundle.heads) else bundle.title.rjust(full)
    return [title, *(line.rjust(full) for line in lines)]


def _markdown(table: Table) -> str:
    corner, bundles, names, _ = _layout(table)
    lines = [f"**{_escape_markdown(table.title)}**", ""]
    for block in _blocks(bundles):
        heads = [
            f"{_escape_markdown(bundle.title)} {head}".strip() for bundle in block for head in bundle.heads
        ]
        columns = [column for bundle in block for column in bundle.columns]
        lines += [f"| {' | '.join([corner, *heads])} |", f"|:--|{'--:|' * len(heads)}"]
        for index, name in enumerate(names):
            cells = [_mark(column[index], "**{}**", "†") for column in columns]
            lines.append(f"| {' | '.join([_escape_markdown(name), *cells])} |")
        lines.append("")
    # Two blanks at the end of a line keep the notes apart without a list.
    return "\n".join(lines + ["  \n".join(_escape_markdown(note) for note in table.notes)]) + "\n"


def _mark(cell: Cell, best: str, dagger: str) -> str:
    printed = best.format(cell.printed) if cell.best else cell.printed
    return printed + cell.spread + (dagger if cell.short else "")


def _escape_markdown(text: str) -> str:
    return "".join("\\" + letter if letter in "\\|*_`<[" else letter for letter in text)


def _latex(table: Table) -> str:
    """A table of its own; its preamble needs booktabs."""
    corner, bundles, names, first_published = _layout(table)
    blocks = list(_blocks(bundles))
    span = len(bundles[0].heads)
    total = max(len(block) for block in blocks) * span
    spec = "l" + ("c" * span + "|") * (total // span - 1) + "c" * span if span > 1 else "l" + "c" * total
    lines = [r"\begin{table*}[t]", r"\centering", rf"\caption{{{_escape_latex(table.title)}}}"]
    lines += [rf"\begin{{tabular}}{{{spec}}}", r"\toprule"]
    for number, block in enumerate(blocks):
        fill = [""] * (total - len(block) * span)
        titles = [_escape_latex(bundle.title) for bundle in block]
        if span > 1:
            titles = [rf"\multicolumn{{{span}}}{{c}}{{{title}}}" for title in titles]
        lines += [r"\midrule"] if number else []
        lines.append(_latex_row([corner, *titles, *fill]))
        if any(bundles[0].heads):
            lines.append(rf"\cmidrule{{2-{1 + len(block) * span}}}")
            lines.append(_latex_row(["", *(head for bundle in block for head in bundle.heads), *fill]))
        lines.append(r"\midrule")
        columns = [column for bundle in block for column in bundle.columns]
        for index, name in enumerate(names):
            lines += [r"\midrule"] if first_published and index == first_published else []
            cells = [
                _mark(column[index], r"\textbf{{{}}}", r"$^{\dagger}$").replace(" ± ", r" $\pm$ ")
                for column in columns
            ]
            lines.append(_latex_row([_escape_latex(name), *cells, *fill]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_escape_latex(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table*}"]) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


LATEX = {letter: "\\" + letter for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "†": r"$^{\dagger}$",
}


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)


def _csv(tables: Sequence[Table]) -> str:
    """One line a number, in percent and in full precision; what is missing is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(FIELDS + MEASURED)
    for table in tables:
        for row in table.rows:
            for (group, head), cell in row.cells.items():
                if row.published and cell.mean is None:
                    continue
                dataset = table.source if group == SOURCE and table.source else group or "average"
                shots = head if table.protocol == "few-shot" else table.shots
                measure = head
                if table.protocol == "few-shot":
                    measure = "accuracy"
                elif table.source is not None:
                    measure = "source" if group == SOURCE else "target"
                seeds = " ".join(map(str, cell.seeds))
                complete = cell.mean is not None and not cell.short
                writer.writerow(
                    [table.protocol, row.backbone, shots, table.ratio, row.name]
                    + ["paper" if row.published else "ours", dataset, measure, cell.mean, cell.std, seeds]
                    + ["yes" if complete else "no"]
                )
    return file.getvalue()

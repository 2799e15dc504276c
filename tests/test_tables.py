"""Tables from records: every number against one worked out by hand, and every rendering read back."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest

from drople import published
from drople.errors import DropleError
from drople.run_records import read_records
from drople.tables import Point, curves, make_table, render, tables


def record(protocol, dataset, label, seed, results, *, shots=16, ratio=None, backbone="pocket", method=None):
    return {
        "schema": 1,
        "protocol": protocol,
        "dataset": dataset,
        "method": method or label,
        "label": label,
        "seed": seed,
        "shots": shots,
        "ratio": ratio,
        "backbone": backbone,
        "status": "done",
        "error": None,
        "results": {part: {"accuracy": value, "ece": 0.1, "images": 9} for part, value in results.items()},
    }


def failed(*args, error="it broke", **kwargs):
    return record(*args, **kwargs) | {"status": "failed", "error": error, "results": {}}


def halves(dataset, label, seed, base, novel, protocol="base-to-novel", **more):
    return record(protocol, dataset, label, seed, {"base": base, "novel": novel}, **more)


def two_datasets():
    """Two methods, two datasets, two seeds."""
    return [
        halves("eurosat", "drople", 1, 0.80, 0.60),
        halves("eurosat", "drople", 2, 0.90, 0.50),
        halves("caltech101", "drople", 1, 0.90, 0.90),
        halves("caltech101", "drople", 2, 0.70, 0.80),
        halves("eurosat", "zero-shot", 1, 0.50, 0.50),
        halves("eurosat", "zero-shot", 2, 0.50, 0.50),
        halves("caltech101", "zero-shot", 1, 0.80, 0.95),
        halves("caltech101", "zero-shot", 2, 0.80, 0.95),
    ]


def cells(table, label):
    return next(row for row in table.rows if row.name == label).cells


def grid(text):
    """A text table's lines with the runs of blanks squeezed."""
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


class TestBaseToNovel:
    def test_mean_and_sample_deviation_over_seeds(self):
        cell = cells(make_table(two_datasets()), "drople")["eurosat", "base"]
        assert cell.mean == pytest.approx(85.0)
        # Of 80 and 90: sqrt(((5)^2 + (5)^2) / 1).
        assert cell.std == pytest.approx(50**0.5)
        assert cell.seeds == (1, 2)

    def test_hm_is_taken_for_each_seed(self):
        cell = cells(make_table(two_datasets()), "drople")["eurosat", "hm"]
        first, second = 2 * 80 * 60 / 140, 2 * 90 * 50 / 140
        assert cell.mean == pytest.approx((first + second) / 2)
        assert cell.std == pytest.approx(abs(first - second) / 2**0.5)
        assert cell.mean != pytest.approx(2 * 85 * 55 / 140, abs=0.1)

    def test_average_has_the_hm_of_the_averages(self):
        row = cells(make_table(two_datasets()), "drople")
        # Seed 1: base 85, novel 75; seed 2: base 80, novel 65.
        assert row["", "base"].mean == pytest.approx(82.5)
        assert row["", "novel"].mean == pytest.approx(70.0)
        first, second = 2 * 85 * 75 / 160, 2 * 80 * 65 / 145
        assert row["", "hm"].mean == pytest.approx((first + second) / 2)
        assert row["", "hm"].std == pytest.approx((first - second) / 2**0.5)
        of_hms = (row["eurosat", "hm"].mean + row["caltech101", "hm"].mean) / 2
        assert row["", "hm"].mean != pytest.approx(of_hms, abs=0.1)

    def test_one_seed_has_no_deviation(self):
        table = make_table([halves("eurosat", "drople", 7, 0.8, 0.6)])
        assert cells(table, "drople")["eurosat", "base"].std is None
        assert "80.00 ± - 60.00 ± - 68.57 ± -" in " ".join(grid(render(table)))

    def test_nothing_right_has_hm_zero(self):
        assert cells(make_table([halves("eurosat", "coop", 1, 0.0, 0.6)]), "coop")["eurosat", "hm"].mean == 0

    def test_order_is_the_papers(self):
        table = make_table(
            two_datasets() + [halves("my_own", name, 1, 0.5, 0.5) for name in ("coop", "drople")]
        )
        assert list(table.groups) == ["", "caltech101", "eurosat", "my_own"]
        assert list(table.groups.values()) == ["Average", "Caltech101", "EuroSAT", "my_own"]
        assert [row.name for row in table.rows] == ["zero-shot", "coop", "drople"]

    def test_text(self):
        lines = grid(render(make_table(two_datasets()), "text", width=200))
        assert lines[0] == "Base-to-novel generalization (pocket, 16 shots)"
        assert lines[2:4] == ["Method Average Caltech101 EuroSAT", "Base Novel HM " * 2 + "Base Novel HM"]
        assert any(line.startswith("drople *82.50 ± 3.54 70.00 ± 7.07 *75.71 ± 5.63") for line in lines)

    def test_text_is_plain_aligned_and_no_wider_than_asked(self):
        out = render(make_table(two_datasets()), "text", width=80)
        assert "\x1b" not in out
        blocks = [block.splitlines() for block in out.split("\n\n") if block.startswith("Method")]
        assert len(blocks) == 3
        for block in blocks:
            assert max(map(len, block)) <= 80
            signs = {
                tuple(match.start() for match in re.finditer("±", line)) for line in block if "±" in line
            }
            assert len(signs) == 1

    def test_datasets_as_rows(self):
        table = make_table(two_datasets(), by="rows")
        lines = grid(render(table, "text"))
        assert lines[2] == "Dataset zero-shot drople"
        assert [line.split()[0] for line in lines[5:8]] == ["Average", "Caltech101", "EuroSAT"]
        assert lines[7] == (
            "EuroSAT 50.00 ± 0.00 50.00 ± 0.00 50.00 ± 0.00 *85.00 ± 7.07 *55.00 ± 7.07 *66.43 ± 3.03"
        )
        assert lines[7].count("±") == 6
        with pytest.raises(DropleError, match="layout 'row': did you mean rows"):
            make_table(two_datasets(), by="row")  # type: ignore[arg-type]

    def test_eleven_datasets_stack_in_the_papers_three_blocks(self):
        names = list(published.datasets())[:11]
        table = make_table([halves(name, "drople", 1, 0.5, 0.5) for name in names])
        latex = render(table, "latex")
        assert r"\begin{tabular}{lccc|ccc|ccc|ccc}" in latex
        heads = [line for line in latex.splitlines() if line.startswith("Method")]
        assert [re.findall(r"\{c\}\{(\w+)\}", line) for line in heads] == [
            ["Average", "ImageNet", "Caltech101", "OxfordPets"],
            ["StanfordCars", "Flowers102", "Food101", "FGVCAircraft"],
            ["SUN397", "DTD", "EuroSAT", "UCF101"],
        ]


class TestBest:
    def test_ties_after_rounding_are_all_best(self):
        runs = [halves("eurosat", name, 1, base, 0.5) for name, base in
                (("a", 0.80001), ("b", 0.80004), ("c", 0.7999))]  # fmt: skip
        table = make_table(runs)
        assert [row.cells["eurosat", "base"].best for row in table.rows] == [True, True, False]
        assert all(row.cells["eurosat", "novel"].best for row in table.rows)
        assert render(table, "markdown").count("**80.00**") == 2

    def test_a_lone_row_is_not_called_best(self):
        out = render(make_table([halves("eurosat", "drople", 1, 0.8, 0.6)]), "markdown")
        assert "**80.00**" not in out

    def test_the_papers_rows_do_not_compete(self):
        table = make_table(two_datasets(), published=True)
        assert not any(cell.best for row in table.rows if row.published for cell in row.cells.values())
        assert cells(table, "drople")["eurosat", "base"].best


class TestIncomplete:
    def test_a_missing_dataset_leaves_no_average(self):
        runs = [run for run in two_datasets() if (run["label"], run["dataset"]) != ("drople", "caltech101")]
        table = make_table(runs)
        row = cells(table, "drople")
        assert row["", "base"].mean is row["", "hm"].mean is row["caltech101", "hm"].mean is None
        assert row["eurosat", "base"].mean == pytest.approx(85.0)
        assert cells(table, "zero-shot")["", "base"].mean == pytest.approx(65.0)
        out = render(table)
        assert "† drople: no Caltech101." in out
        assert re.search(r"^drople† +- +- +-", out, re.M)
        assert "zero-shot†" not in out

    def test_a_missing_seed_is_marked_and_left_out_of_the_average(self):
        runs = [
            run
            for run in two_datasets()
            if (run["label"], run["dataset"], run["seed"]) != ("drople", "eurosat", 2)
        ]
        table = make_table(runs)
        row = cells(table, "drople")
        assert row["eurosat", "base"].mean == pytest.approx(80) and row["eurosat", "base"].short
        assert row["caltech101", "base"].mean == pytest.approx(80) and not row["caltech101", "base"].short
        # Only seed 1 has both datasets.
        assert row["", "base"].mean == pytest.approx(85) and row["", "base"].seeds == (1,)
        assert row["", "base"].short
        assert "† drople: no EuroSAT with seed 2." in table.notes
        assert "**80.00** ± -†" in render(table, "markdown")

    def test_no_common_seed_no_average(self):
        runs = [halves("eurosat", "drople", 1, 0.8, 0.6), halves("caltech101", "drople", 2, 0.8, 0.6)]
        assert cells(make_table(runs), "drople")["", "base"].mean is None

    def test_a_failed_run_is_noted_in_one_line_and_its_dataset_is_missed(self):
        runs = two_datasets() + [
            failed("base-to-novel", "dtd", "drople", 1, {}, error="CUDA out of memory\n  at step 3"),
            halves("dtd", "zero-shot", 1, 0.5, 0.5),
            halves("dtd", "zero-shot", 2, 0.5, 0.5),
        ]
        table = make_table(runs)
        assert "Failed: drople on DTD, seed 1: CUDA out of memory at step 3" in table.notes
        assert "† drople: no DTD." in table.notes
        assert cells(table, "drople")["", "hm"].mean is None
        assert cells(table, "zero-shot")["", "base"].mean == pytest.approx((50 + 80 + 50) / 3)

    def test_all_runs_of_a_method_failed(self):
        table = make_table([*two_datasets(), failed("base-to-novel", "eurosat", "coop", 1, {}, error=None)])
        assert all(cell.mean is None for cell in cells(table, "coop").values())
        assert "Failed: coop on EuroSAT, seed 1: no reason recorded" in render(table)

    def test_a_run_done_again_after_it_failed_counts(self):
        again = [failed("base-to-novel", "eurosat", "drople", 2, {}), *two_datasets()]
        assert make_table(again) == make_table(two_datasets())
        assert make_table(again[::-1]).notes == make_table(two_datasets()).notes

    def test_the_same_run_twice_counts_once_and_two_results_are_refused(self):
        assert make_table(two_datasets() * 2) == make_table(two_datasets())
        with pytest.raises(DropleError, match="two different results for drople on eurosat with seed 1"):
            make_table([*two_datasets(), halves("eurosat", "drople", 1, 0.81, 0.6)])

    def test_runs_that_differ_in_what_no_label_tells_are_named(self):
        once = [halves("eurosat", "coop", seed, 0.5, 0.5) | {"options": {"epochs": 5}} for seed in (1, 2)]
        assert not any(note.startswith("!") for note in make_table(once).notes)
        once[1]["options"] = {"epochs": 50}
        assert "! coop: runs that differ in epochs (5, 50) are in one row." in make_table(once).notes
        other = [halves("eurosat", "maple", 1, 0.6, 0.5) | {"options": {}}]
        assert len([note for note in make_table(once + other).notes if note.startswith("!")]) == 1
        with pytest.raises(DropleError, match=r"with seed 2 \(epochs 50 and 5\)"):
            make_table([*once, halves("eurosat", "coop", 2, 0.6, 0.5) | {"options": {"epochs": 5}}])

    def test_data_that_changed_between_runs_are_named(self):
        runs = [
            halves("photos", label, 1, 0.5, 0.5) | {"data": {"fingerprint": mark}}
            for label, mark in (("coop", "a"), ("maple", "a"))
        ]
        assert not any(note.startswith("!") for note in make_table(runs).notes)
        runs[1]["data"] = {"fingerprint": "b"}
        assert any(note.startswith("! photos: its images changed") for note in make_table(runs).notes)

    def test_one_training_tested_on_more_targets_later_is_one_run(self):
        first = record("cross-dataset", "a", "coop", 1, {"source": 0.9, "b": 0.5})
        later = record("cross-dataset", "a", "coop", 1, {"source": 0.9, "c": 0.7})
        found = cells(make_table([first, later]), "coop")
        assert [found[group, "accuracy"].mean for group in ("source", "b", "c", "")] == pytest.approx(
            [90, 50, 70, 60]
        )
        later["results"]["source"]["accuracy"] = 0.8
        with pytest.raises(DropleError, match="two different results"):
            make_table([first, later])


class TestOtherProtocols:
    def few(self):
        values = {
            ("eurosat", 1): (0.4, 0.5),
            ("eurosat", 16): (0.8, 0.9),
            ("dtd", 1): (0.2, 0.4),
            ("dtd", 16): (0.6, 0.6),
        }
        return [
            record("few-shot", name, "drople", seed, {"test": value}, shots=shots)
            for (name, shots), pair in values.items()
            for seed, value in enumerate(pair, 1)
        ]

    def test_few_shot_has_shots_as_columns_and_the_average_last(self):
        table = make_table(self.few())
        assert table.heads == ("1", "16") and list(table.groups) == ["dtd", "eurosat", ""]
        row = cells(table, "drople")
        assert row["", "1"].mean == pytest.approx(37.5)
        # Seeds 1 and 2 average 30 and 45.
        assert row["", "1"].std == pytest.approx(15 / 2**0.5)
        assert "1-shot 16-shot" in " ".join(grid(render(table)))

    def test_curves(self):
        lines = curves([*self.few(), *two_datasets()])
        assert list(lines) == ["dtd", "eurosat", "average"]
        assert lines["dtd"]["drople"] == [
            Point(1, pytest.approx(30), pytest.approx(200**0.5), (1, 2)),
            Point(16, pytest.approx(60), pytest.approx(0), (1, 2)),
        ]
        with pytest.raises(DropleError, match="no few-shot run"):
            curves(two_datasets())

    def test_missing_shots_are_named(self):
        runs = [run for run in self.few() if (run["dataset"], run["shots"]) != ("dtd", 16)]
        table = make_table(runs)
        assert "† drople: no DTD at 16-shot." in table.notes
        assert cells(table, "drople")["", "16"].mean is None
        assert cells(table, "drople")["", "1"].mean == pytest.approx(37.5)

    def test_cross_dataset_averages_targets_only(self):
        parts = {"source": 0.7, "eurosat": 0.5, "dtd": 0.4}
        table = make_table([record("cross-dataset", "imagenet", "drople", 1, parts)])
        assert list(table.groups.values()) == ["ImageNet (source)", "DTD", "EuroSAT", "Average"]
        assert cells(table, "drople")["", "accuracy"].mean == pytest.approx(45)
        assert table.title == "Cross-dataset evaluation (pocket, 16 shots, trained on ImageNet)"

    def test_domain_shift(self):
        parts = {"sketch": 0.2, "art_painting": 0.4, "cartoon": 0.3, "source": 0.9}
        full = record("domain-shift", "pacs", "drople", 1, parts)
        partial = record(
            "domain-shift", "pacs", "zero-shot", 1, {"source": 0.8, "sketch": 0.1, "cartoon": 0.3}
        )
        table = make_table([full, partial])
        assert list(table.groups.values()) == [
            "pacs (source)",
            "art_painting",
            "cartoon",
            "sketch",
            "OOD average",
        ]
        assert cells(table, "drople")["", "accuracy"].mean == pytest.approx(30)
        assert cells(table, "zero-shot")["", "accuracy"].mean is None
        assert "† zero-shot: no art_painting." in table.notes

    def test_a_mixed_bag_is_split(self):
        bag = [
            *two_datasets(),
            *self.few(),
            halves("eurosat", "drople", 1, 0.8, 0.6, protocol="long-tail", ratio=10),
            halves("eurosat", "drople", 1, 0.7, 0.6, protocol="long-tail", ratio=50.0),
            halves("eurosat", "drople", 1, 0.7, 0.6, shots=4),
            halves("eurosat", "drople", 1, 0.7, 0.6, backbone="clip-b16-lit"),
            record("domain-shift", "pacs", "drople", 1, {"source": 0.9, "sketch": 0.3}),
            record("domain-shift", "imagenet", "drople", 1, {"source": 0.9, "imagenet_a": 0.3}),
        ]
        assert [table.title for table in tables(bag)] == [
            "Base-to-novel generalization (clip-b16-lit, 16 shots)",
            "Base-to-novel generalization (pocket, 16 shots)",
            "Base-to-novel generalization (pocket, 4 shots)",
            "Few-shot classification (pocket)",
            "Domain shift (pocket, 16 shots, trained on ImageNet)",
            "Domain shift (pocket, 16 shots, trained on pacs)",
            "Long-tail base-to-novel generalization (pocket, 16 shots, imbalance ratio 10)",
            "Long-tail base-to-novel generalization (pocket, 16 shots, imbalance ratio 50)",
        ]
        with pytest.raises(DropleError, match="one kind, not 8"):
            make_table(bag)


class TestPublished:
    def test_numbers_for_the_tables_datasets_and_an_average_over_them(self):
        table = make_table(two_datasets(), published=True)
        row = next(row for row in table.rows if row.title == "DroPLe (paper, CLIP ViT-B/16)")
        assert row.cells["caltech101", "novel"].printed == "96.06"
        base, novel = (98.72 + 94.73) / 2, (96.06 + 82.70) / 2
        assert row.cells["", "base"].mean == pytest.approx(base)
        assert row.cells["", "hm"].mean == pytest.approx(2 * base * novel / (base + novel))
        assert [row.published for row in table.rows] == [False] * 2 + [True] * 7

    def test_all_eleven_have_the_papers_own_average(self):
        runs = [halves(name, "drople", 1, 0.5, 0.5) for name in list(published.datasets())[:11]]
        row = make_table(runs, published=True).rows[-1]
        assert [row.cells["", head].printed for head in ("base", "novel", "hm")] == [
            "86.12",
            "78.44",
            "82.10",
        ]

    def test_a_dataset_the_paper_lacks_leaves_a_gap(self):
        row = make_table([*two_datasets(), halves("dtd10", "drople", 1, 0.5, 0.5)], published=True).rows[-1]
        assert row.cells["dtd10", "base"].mean is row.cells["", "base"].mean is None
        assert row.cells["eurosat", "base"].printed == "94.73"

    def test_only_what_is_alike_is_placed_beside(self):
        for run in (
            halves("eurosat", "drople", 1, 0.8, 0.6, shots=4),
            halves("eurosat", "drople", 1, 0.8, 0.6, protocol="long-tail", ratio=50),
            record("domain-shift", "pacs", "drople", 1, {"source": 0.9, "sketch": 0.3}),
        ):
            table = make_table([run], published=True)
            assert len(table.rows) == 1 and "The paper prints no numbers for this table." in table.notes

    def test_few_shot_numbers_stand_under_sixteen_shots(self):
        runs = [record("few-shot", "dtd", "drople", 1, {"test": 0.5}, shots=shots) for shots in (1, 16)]
        rows = {row.title: row for row in make_table(runs, published=True).rows}
        row = rows["DroPLe (paper, CLIP ViT-B/16)"]
        assert (row.cells["dtd", "1"].printed, row.cells["dtd", "16"].printed) == ("-", "76.38")
        assert rows["MMA (paper, CLIP ViT-B/32)"].cells["dtd", "16"].printed == "68.9"

    def test_domain_shift_has_the_papers_source_and_average(self):
        parts = dict.fromkeys(["source", "imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r"], 0.5)
        rows = {
            row.title: row
            for row in tables([record("domain-shift", "imagenet", "x", 1, parts)], published=True)[0].rows
        }
        assert rows["DroPLe (paper, CLIP ViT-B/16)"].cells["source", "accuracy"].printed == "71.94"
        assert rows["DroPLe (paper, CLIP ViT-B/16)"].cells["", "accuracy"].printed == "61.05"
        wrapped = rows["CoOp+DroPLe (paper, CLIP ViT-B/16)"].cells["", "accuracy"].mean
        assert wrapped == pytest.approx((64.23 + 49.06 + 50.93 + 77.04) / 4)


class TestRenderings:
    def test_markdown(self):
        runs = [halves("eurosat", name, 1, 0.8, 0.6) for name in ("drople, drop_range=0.1|0.5", "coop")]
        lines = render(make_table(runs), "markdown").splitlines()
        assert lines[2] == "| Method | EuroSAT Base | EuroSAT Novel | EuroSAT HM |"
        assert lines[3] == "|:--|--:|--:|--:|"
        assert lines[5].startswith(r"| drople, drop\_range=0.1\|0.5 | **80.00** ± - |")

    def test_latex_escapes_names_and_rows_have_as_many_cells_as_columns(self):
        nasty = r"a_b & 50% #1 {x} ~^ \end $5"
        names = ["caltech101", "eurosat", "dtd", "ucf101", "my_own"]
        runs = [halves(name, label, 1, 0.8, 0.6) for name in names for label in (nasty, "coop")]
        latex = render(make_table(runs, published=True), "latex")
        escaped = r"a\_b \& 50\% \#1 \{x\} \textasciitilde{}\textasciicircum{} \textbackslash{}end \$5"
        assert latex.count(escaped + " & ") == 2 and nasty not in latex
        assert r"my\_own" in latex and "±" not in latex and "†" not in latex
        assert [latex.count(rule) for rule in (r"\toprule", r"\bottomrule", r"\begin{tabular}")] == [1, 1, 1]
        for line in latex.splitlines():
            if line.endswith(r"\\"):
                wide = sum(int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", line))
                assert len(re.findall(r"(?<!\\)&", line)) + wide == 12, line

    def test_latex_without_heads_and_with_datasets_as_rows(self):
        parts = {"source": 0.7, "eurosat": 0.5, "dtd": 0.4}
        runs = [record("cross-dataset", "imagenet", name, 1, parts) for name in ("drople", "coop")]
        assert "Method & ImageNet (source) & DTD & EuroSAT & Average" in render(make_table(runs), "latex")
        turned = render(make_table(runs, by="rows"), "latex")
        assert r"DTD & \textbf{40.00} $\pm$ - & \textbf{40.00} $\pm$ - \\" in turned.splitlines()

    def test_csv_reads_back_in_full_precision(self):
        thirds = [
            halves("eurosat", 'drople, "x"', seed, value, 0.5) for seed, value in ((1, 1 / 3), (2, 2 / 3))
        ]
        bag = [*thirds, record("domain-shift", "pacs", "drople", 1, {"source": 0.9, "sketch": 0.3})]
        rows = list(csv.DictReader(io.StringIO(render(tables(bag, published=True), "csv"))))
        base = next(row for row in rows if row["measure"] == "base" and row["origin"] == "ours")
        assert float(base["mean"]) == pytest.approx(50, abs=1e-12)
        assert float(base["std"]) == pytest.approx(100 / 3 / 2**0.5, abs=1e-12)
        assert (base["method"], base["dataset"], base["seeds"], base["complete"]) == (
            'drople, "x"',
            "eurosat",
            "1 2",
            "yes",
        )
        source = next(row for row in rows if row["measure"] == "source")
        assert (source["dataset"], source["mean"], source["std"]) == ("pacs", "90.0", "")
        theirs = next(row for row in rows if row["origin"] == "paper" and row["method"] == "DroPLe")
        assert (theirs["backbone"], theirs["mean"]) == ("CLIP ViT-B/16", "94.73")

    def test_csv_says_what_is_missing(self):
        rows = list(csv.DictReader(io.StringIO(render(make_table(two_datasets()[1:]), "csv"))))
        gaps = {(row["method"], row["dataset"], row["measure"]) for row in rows if row["complete"] == "no"}
        assert gaps == {
            ("drople", name, head) for name in ("average", "eurosat") for head in ("base", "novel", "hm")
        }

    def test_text_of_targets_and_of_the_papers_rows(self):
        runs = [
            record("cross-dataset", "imagenet", name, 1, {"source": 0.7, "dtd": 0.4})
            for name in ("drople", "coop")
        ]
        lines = grid(render(make_table(runs, published=True), width=100))
        assert lines[2] == "Method ImageNet (source) DTD"
        assert lines[4:6] == ["coop *70.00 ± - *40.00 ± -", "drople *70.00 ± - *40.00 ± -"]
        assert set(lines[3]) == set(lines[6]) == {"-"}
        assert lines[14] == "DroPLe (paper, CLIP ViT-B/16) 71.94 47.45"

    def test_csv_of_few_shot_has_a_line_for_each_number_of_shots(self):
        runs = [
            record("few-shot", "dtd", "drople", 1, {"test": shots / 16}, shots=shots) for shots in (1, 2, 16)
        ]
        rows = csv.DictReader(io.StringIO(render(make_table(runs), "csv")))
        found = [(row["shots"], row["measure"], row["mean"]) for row in rows]
        assert found == [("1", "accuracy", "6.25"), ("2", "accuracy", "12.5"), ("16", "accuracy", "100.0")]

    def test_a_broken_run_of_every_method_still_gives_a_table(self):
        table = make_table([failed("domain-shift", "pacs", "drople", 1, {})], published=True)
        for form in ("text", "markdown", "latex", "csv"):
            assert "drople" in render(table, form)

    def test_unknown_format(self):
        with pytest.raises(DropleError, match="did you mean markdown"):
            render(make_table(two_datasets()), "markdwn")


class TestReading:
    def write(self, path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        return path

    def test_folders_are_read_to_the_bottom_and_other_json_is_skipped(self, tmp_path):
        runs = two_datasets()
        for index, run in enumerate(runs):
            self.write(tmp_path / f"deep/{run['dataset']}/{index}.json", run)
        self.write(tmp_path / "deep/config.json", {"shots": 16})
        self.write(tmp_path / "list.json", [1, 2])
        self.write(tmp_path / "notes.txt", "not JSON")
        read = read_records([tmp_path, tmp_path / "deep/eurosat/0.json"])
        assert len(read) == len(runs)
        assert make_table(read) == make_table(runs)

    def test_nothing_found(self, tmp_path):
        with pytest.raises(DropleError, match="does not exist"):
            read_records([tmp_path / "nowhere"])
        with pytest.raises(DropleError, match="no record of a run"):
            read_records([tmp_path])

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"schema": 2}, "schema 2"),
            ({"protocol": "base-to-nov"}, "did you mean base-to-novel"),
            ({"seed": "1"}, "damaged .seed"),
            ({"label": None}, "damaged .label"),
            ({"status": "running"}, "damaged .status"),
            ({"results": None}, "damaged .results"),
            ({"results": {"base": {"accuracy": 87.3}}}, "damaged .results"),
            ({"results": {"base": {"accuracy": float("nan")}}}, "damaged .results"),
            ({"protocol": "few-shot", "shots": None}, "damaged .shots"),
        ],
    )
    def test_a_damaged_record_is_named(self, tmp_path, change, says):
        file = self.write(tmp_path / "run.json", two_datasets()[0] | change)
        with pytest.raises(DropleError, match=says) as caught:
            read_records([tmp_path])
        assert str(file) in str(caught.value)

    @pytest.mark.parametrize("content", ['{"schema": 1, "proto', "", "\udcff"])
    def test_a_broken_file_is_named(self, tmp_path, content):
        (tmp_path / "run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(DropleError, match=r"run\.json cannot be read"):
            read_records([tmp_path])


def test_tables_need_no_torch():
    code = "import sys, drople.tables, drople.run_records; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"

"""Reports read back as a browser would: nothing from outside, nothing unescaped, the numbers of the run."""

import base64
import io
import json
import re
import shlex
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import own_folder, splits, tiny_checkpoint
from PIL import Image

from drople import PromptLearner
from drople.cli import app, read_settings
from drople.data import load_data
from drople.device import usual_dtype
from drople.errors import DropleError
from drople.protocols import benchmark, plan
from drople.report import write_report
from drople.report.charts import number, side_by_side, thin, ticks
from drople.report.commands import fit_command
from drople.report.run_report import wilson

VOID = {"meta", "img", "br", "link", "input", "hr"}
LIMIT = 3_000_000
HOSTILE = '<script>alert("1")</script>'


class Page(HTMLParser):
    """A page as lists of what matters here; every element must be closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.elements.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag, **wanted):
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted.items())]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def read(path):
    """A report, with all that every report must keep."""
    text = path.read_text("utf-8")
    assert len(text.encode()) < LIMIT
    page = Page(text)
    css = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in css and "url(" not in css
    for tag, attributes in page.elements:
        assert tag not in {"script", "iframe", "object", "embed", "link", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "srcset", "action", "poster", "data"}:
                inside = "#" if tag == "a" else "data:image/jpeg;base64,"
                assert value.startswith(inside), (tag, name, value[:80])
    assert "//" not in re.sub(r"data:image/jpeg;base64,[\w+/=]+", "", text)
    for link in page.of("a"):
        assert link["href"][1:] in page.ids
    assert len(page.ids) == len(set(page.ids))
    for image in page.of("img"):
        assert image["alt"].strip()
        shown = Image.open(io.BytesIO(base64.b64decode(image["src"].split(",", 1)[1])))
        assert max(shown.size) <= 160
    for chart in page.of("svg"):
        assert chart.get("aria-label") or chart.get("aria-hidden") == "true"
    for head in page.of("th"):
        assert head["scope"] in {"row", "col", "colgroup"}
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.of("html")[0]["lang"] == "en" and page.of("main") and page.of("title")
    return page


@cache
def data():
    return splits(own_folder() / "colours", ("red", "green", "blue", "yellow"), 5)


@cache
def run(method="drople", **options):
    """A run as drople fit leaves it; by text alone, so that it makes mistakes."""
    options = options | ({"prototypes": 0.0} if method == "drople" else {})
    folder = own_folder() / "run"
    images = load_data(data())
    learner = PromptLearner(tiny_checkpoint(), method, device="cpu", batch_size=8, **options)
    learner.fit(images, 3, out=folder)
    learner.metrics_["evaluation"] = learner.evaluate(images, "test")
    learner.save(folder)
    return folder


@cache
def with_images():
    return read(write_report(run(epochs=2), own_folder() / "report.html", data=data(), device="cpu"))


def altered(**config):
    """The run with another config, as if it had been trained so."""
    folder = own_folder() / "altered"
    folder.mkdir()
    for file in run(epochs=2).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(content | config), "utf-8")
    return folder


class TestRun:
    def test_the_numbers_are_those_of_the_run(self):
        found = json.loads((run(epochs=2) / "metrics.json").read_text("utf-8"))["evaluation"]
        words = with_images().words
        for name in ("accuracy", "zero_shot_accuracy", "ece", "ece_uncalibrated"):
            assert f"{100 * found[name]:.1f}%" in words
        gain = 100 * (found["accuracy"] - found["zero_shot_accuracy"])
        assert f"{gain:+.1f}".replace("-", "−") + " points against zero-shot" in words
        for name, row in found["per_class"].items():
            assert any(
                f"{100 * row['accuracy']:.1f}% of {row['count']} images, zero-shot" in bar["aria-label"]
                for bar in with_images().of("span", role="img")
            ), name

    def test_the_numbers_that_auto_was_are_named(self):
        used = str(usual_dtype(torch.device("cpu"))).removeprefix("torch.")
        assert f"Precision {used}" in with_images().words

    def test_what_validation_images_chose_is_said(self):
        assert "images; chose the temperature alone" in with_images().words
        searched = read(write_report(run("tip-adapter"), own_folder() / "tip.html"))
        assert "images; chose what was searched, and the temperature" in searched.words

    def test_every_term_of_the_log_has_a_curve(self):
        row = json.loads((run(epochs=2) / "log.jsonl").read_text("utf-8").splitlines()[0])
        labels = [chart.get("aria-label", "") for chart in with_images().of("svg")]
        assert len([label for label in labels if "steps:" in label]) == len(set(row) - {"step", "epoch"})
        for heading in ("Total loss", "Cross-entropy", "λ", "Mean drop rate, image tokens"):
            assert any(label.startswith(f"{heading} over 4 steps") for label in labels)

    def test_mistakes_have_three_pictures_and_samples_one(self):
        found = json.loads((run(epochs=2) / "metrics.json").read_text("utf-8"))["evaluation"]
        wrong = found["images"] - sum(row[k] for k, row in enumerate(found["confusion"]))
        assert wrong
        images = with_images().of("img")
        assert len([i for i in images if i["alt"].startswith("Grad-CAM for ")]) == 2 * min(6, wrong)
        assert len([i for i in images if "taken for" in i["alt"]]) == min(6, wrong) + min(18, found["images"])

    def test_confusion_has_a_title_for_every_pair(self):
        found = json.loads((run(epochs=2) / "metrics.json").read_text("utf-8"))["evaluation"]
        classes, words = list(found["per_class"]), with_images().words
        for r, row in enumerate(found["confusion"]):
            for c, count in enumerate(row):
                if count and r != c:
                    assert f"{classes[r]} taken for {classes[c]}: {count} of {sum(row)}" in words

    def test_sections_and_contents(self):
        page = with_images()
        sections = [section["id"] for section in page.of("section")]
        assert sections == [link["href"][1:] for link in page.of("a")][1:]
        assert {"result", "training", "dropout", "confusion", "calibration", "images"} <= {*sections}

    def test_without_data_it_has_all_that_needs_no_image_and_says_so(self):
        page = read(write_report(run(epochs=2), own_folder() / "report.html"))
        assert not page.of("img")
        assert "This report was made without the images" in page.words
        assert "The reliability diagram needs the images" in page.words
        assert {"classes", "confusion", "training", "dropout"} <= {s["id"] for s in page.of("section")}
        shared = [c["aria-label"] for c in page.of("svg") if "steps:" in c["aria-label"]]
        assert shared == [c["aria-label"] for c in with_images().of("svg") if "steps:" in c["aria-label"]]

    def test_a_run_that_was_never_measured(self):
        folder = altered()
        saved = json.loads((folder / "metrics.json").read_text("utf-8"))
        del saved["evaluation"]
        (folder / "metrics.json").write_text(json.dumps(saved), "utf-8")
        page = read(write_report(folder, own_folder() / "report.html"))
        assert "never measured on test images" in page.words
        assert f"{100 * saved['validation']['accuracy']:.1f}%" in page.words

    def test_a_method_that_learns_nothing(self):
        page = read(write_report(run("zero-shot"), own_folder() / "r.html", data=data(), device="cpu"))
        assert "0 parameters" in page.words and "+0.0 points" in page.words
        assert not {"training", "dropout"} & {s["id"] for s in page.of("section")}

    def test_hostile_names_are_words(self):
        folder = altered()
        for name in ("config.json", "metrics.json"):
            text = (folder / name).read_text("utf-8")
            (folder / name).write_text(text.replace('"red"', json.dumps(HOSTILE)), "utf-8")
        out = write_report(folder, own_folder() / "report.html")
        assert HOSTILE in read(out).words
        assert "<script" not in out.read_text("utf-8")

    def test_no_path_of_this_machine(self):
        out = write_report(run(epochs=2), own_folder() / "report.html", data=data(), device="cpu")
        text = out.read_text("utf-8")
        assert str(data()) not in text and str(tiny_checkpoint()) not in text
        assert "tiny-clip" in text

    @pytest.mark.parametrize("count", [100, 400])
    def test_many_classes_stay_small_and_named(self, count):
        rng = np.random.default_rng(0)
        classes = [f"class of things {k}" for k in range(count)]
        counts = rng.poisson(0.2, (count, count)) + 12 * np.eye(count, dtype=int)
        folder = altered(classes=classes, words=classes)
        saved = json.loads((folder / "metrics.json").read_text("utf-8"))
        saved["evaluation"] |= {
            "confusion": counts.tolist(),
            "images": int(counts.sum()),
            "per_class": {
                name: {"accuracy": counts[k, k] / counts[k].sum(), "count": int(counts[k].sum())}
                for k, name in enumerate(classes)
            },
        }
        (folder / "metrics.json").write_text(json.dumps(saved), "utf-8")
        page = read(write_report(folder, own_folder() / "report.html"))
        matrix = page.of("svg", **{"class": "confusion"})[0]
        # At 100 classes a name every ten pixels; at 400 names would be a blur.
        assert page.text.count("class of things 57") == (3 if count == 100 else 1)
        assert float(matrix["viewbox"].split()[2]) < 1180
        shades = [path for path in page.of("path") if re.match("hit|miss", path["class"])]
        assert sum(path["d"].count("M") for path in shades) == np.count_nonzero(counts)

    def test_errors_name_what_to_do(self, tmp_path):
        with pytest.raises(DropleError, match="give a run folder"):
            write_report(tmp_path / "none", tmp_path / "r.html")
        with pytest.raises(DropleError, match="is a folder"):
            write_report(run(epochs=2), tmp_path)
        with pytest.raises(DropleError, match="no record"):
            write_report(tmp_path, tmp_path / "r.html")
        other = splits(tmp_path / "data", ("red", "blue"), 2)
        (other / "test" / "blue").rename(other / "test" / "mauve")
        with pytest.raises(DropleError, match="never saw the class 'mauve'"):
            write_report(run(epochs=2), tmp_path / "r.html", data=other, device="cpu")
        folder = altered()
        (folder / "metrics.json").unlink()
        with pytest.raises(DropleError, match="not finished"):
            write_report(folder, tmp_path / "r.html")
        with pytest.raises(DropleError, match="damaged"):
            write_report(altered(samples=None), tmp_path / "r.html")


class TestCommand:
    @pytest.mark.parametrize(
        "options",
        [
            {"epochs": 1},
            {"epochs": 1, "p_max": 0.4, "scores": ("class", "self"), "class_words_drop": False},
            {"epochs": 1, "preset": "released", "l1_text": 3.0, "augmentation": "none"},
            {"epochs": 1, "template": "a sketch of a {}.", "seed": 7, "precision": "float32"},
        ],
    )
    def test_it_makes_the_same_config(self, options):
        """The command is parsed by the real command line, and the learner it makes has the config again."""
        images = load_data(data())
        first = PromptLearner(tiny_checkpoint(), "drople", device="cpu", batch_size=8, **options)
        config = first.fit(images, 2).config_
        words = shlex.split(fit_command({**config, "backbone": "pocket"}))
        assert words[:5] == ["drople", "fit", "DATA", "--out", "RUN"]
        function, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
        given = bound.arguments
        assert function.__name__ == "fit" and given["shots"] == 2
        own = {n: given[n] for n in ("preset", "template", "seed", "precision") if n in given}
        settings = read_settings(given.get("set_")) | {"epochs": given["epochs"]}
        again = PromptLearner(tiny_checkpoint(), given["method"], device="cpu", **own, **settings)
        of_method, training = again._split_options()
        chosen = [e for e in images.train if e.label < 0]
        made = again._config(images, 2, chosen, of_method, training)
        assert {**made, "samples": config["samples"]} == config

    def test_other_words_are_asked_for(self):
        config = json.loads((run(epochs=2) / "config.json").read_text("utf-8"))
        assert "--classnames" not in fit_command(config)
        assert "--classnames NAMES" in fit_command({**config, "words": ["crimson", *config["words"][1:]]})


def record(protocol, dataset, label, seed, results, *, shots=16, parameters=1000, seconds=3.0, **more):
    return {
        "schema": 1,
        "protocol": protocol,
        "dataset": dataset,
        "method": label,
        "label": label,
        "seed": seed,
        "shots": shots,
        "ratio": None,
        "backbone": "pocket",
        "status": "done",
        "error": None,
        "results": {part: {"accuracy": value, "ece": 0.1, "images": 9} for part, value in results.items()},
        "trainable_parameters": parameters,
        "timing": {"fit": seconds, "test": 1.0},
        "environment": {
            "drople": "0.1.0",
            "device": "CPU",
            "git": {"commit": "0123456789ab", "changed": True},
        },
        **more,
    }


def written(records):
    folder = own_folder()
    for index, content in enumerate(records):
        (folder / f"{index}.json").write_text(json.dumps(content), "utf-8")
    return read(write_report(folder, own_folder() / "report.html"))


@pytest.fixture(scope="module")
def page():
    """Two protocols, two datasets, one of them given as a folder, and a run that failed."""
    records = [
        record("few-shot", name, label, seed, {"test": base + 0.03 * shots + 0.02 * seed}, shots=shots)
        for name in ("/data/of/mine/pets", "eurosat")
        for label, base in (("zero-shot", 0.1), ("drople", 0.2))
        for seed in (1, 2)
        for shots in (1, 4, 16)
    ]
    records += [
        record("base-to-novel", name, label, 1, {"base": base, "novel": 0.5}, parameters=parameters)
        for name in ("/data/of/mine/pets", "eurosat")
        for label, base, parameters in (("zero-shot", 0.4, 0), ("drople", 0.8, 126208))
    ]
    broken = {"status": "failed", "error": "DropleError: <b>it broke</b>", "results": {}}
    records += [record("base-to-novel", "eurosat", "coop", 1, {}) | broken]
    return written(records)


class TestBenchmark:
    def test_tables_hold_the_means(self, page):
        # Seeds 1 and 2 at 16 shots: 0.2 + 0.48 + 0.02 and + 0.04.
        assert "71.00" in page.words and "± 1.41" in page.words
        heads = [h for h in page.of("th") if h.get("scope") == "colgroup"]
        assert {h["colspan"] for h in heads} == {"3"}

    def test_curves_scatter_and_cost(self, page):
        labels = [chart.get("aria-label", "") for chart in page.of("svg")]
        assert any("Few-shot curves, pets" in x and "drople 71.0% at 16 shots" in x for x in labels)
        h = 2 * 80 * 50 / 130
        point = f"drople: base 80.0, novel 50.0, H {h:.1f}"
        assert any("Base against novel" in x and point in x for x in labels)
        assert page.of("path", **{"class": "contour"}) and re.search(r"\bH \d", page.words)
        assert any("drople: 126k trainable" in x and "zero-shot: 0 trainable" in x for x in labels)

    def test_failures_environment_and_commands(self, page):
        assert "DropleError: <b>it broke</b>" in page.words and not page.of("b")
        assert "0123456789 (changed)" in page.words
        assert "drople benchmark few-shot --datasets pets eurosat --methods zero-shot drople" in page.words
        assert "--shots 1 4 16" in page.words
        assert "/data/of/mine" not in page.words

    def test_real_records(self):
        folder = own_folder() / "records"
        runs = plan(
            "base-to-novel",
            [str(data())],
            ["zero-shot", "coop", "drople"],
            [1],
            [2],
            backbone=str(tiny_checkpoint()),
            options={"epochs": 1},
        )
        records = [done for _, done, _ in benchmark(runs, data().parent, folder, device="cpu")]
        assert all(done["status"] == "done" for done in records), records
        page = read(write_report(folder, own_folder() / "report.html"))
        for done in records:
            for part in ("base", "novel"):
                assert f"{100 * done['results'][part]['accuracy']:.2f}" in page.words
        with pytest.raises(DropleError, match="no run folder"):
            write_report(folder, folder / "r.html", data=data())

    def test_only_failures(self):
        failed = {"status": "failed", "error": "no", "results": {}}
        page = written([record("few-shot", "pets", "drople", 1, {}) | failed])
        assert "0 done, 1 failed" in page.words


class TestCharts:
    def test_ticks_are_round_and_inside(self):
        assert ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
        assert ticks(13, 87, 4) == [20, 40, 60, 80]
        assert ticks(2, 2, 4) == [2]

    def test_numbers_are_short(self):
        given = {0: "0", 0.05: "0.05", -0.0903: "−0.0903", 126208: "126k", 2e-5: "2e-05", 31: "31"}
        assert [number(value) for value in given] == list(given.values())

    def test_thinning_keeps_the_mean_and_the_order(self):
        x, y = thin(list(range(1000)), [float(v) for v in range(1000)])
        assert len(x) == 180 and x == sorted(x)
        # Runs of 6 steps, then of 5: the means of the first and of the last.
        assert x == y and (x[0], x[-1]) == (2.5, 997.0)

    def test_confused_classes_stand_side_by_side(self):
        """Three groups, shuffled: within the order found each is a run."""
        groups = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
        counts = 5 * (groups[:, None] == groups[None]) + 10 * np.eye(9, dtype=int)
        found = groups[side_by_side(counts)]
        assert np.count_nonzero(np.diff(found)) == 2

    def test_wilson_covers_the_share(self):
        """Against the quadratic it solves: (p - x)^2 = z^2 x (1 - x) / n."""
        low, high = wilson(0.3, 50)
        for edge in (low, high):
            assert (0.3 - edge) ** 2 == pytest.approx(1.96**2 * edge * (1 - edge) / 50)
        assert wilson(0.0, 10)[0] == 0 and wilson(1.0, 10)[1] == pytest.approx(1)


def test_logits_are_those_behind_the_probabilities():
    learner = PromptLearner.load(run(epochs=2), device="cpu")
    files = sorted((data() / "test" / "red").iterdir())
    (data().parent / "not.png").write_text("no image", "utf-8")
    logits, good, bad = learner.logits([*files, data().parent / "not.png"])
    assert good == list(range(len(files))) and len(bad) == 1
    expected = torch.tensor(learner.predict_proba(files))
    torch.testing.assert_close((logits / learner.temperature_).softmax(1), expected)

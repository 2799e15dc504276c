"""`PromptLearner` from fit to load, with data of every kind, and test images out of its reach."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import COLOURS, contents, drople, picture, pictures, splits, tiny_checkpoint
from PIL import Image

from drople import PromptLearner
from drople.backbone import Backbone
from drople.data import load_data
from drople.errors import DropleError
from drople.learner import as_sources, fingerprint
from drople.methods.drople import DroPLe
from drople.report.commands import fit_command
from drople.templates import ELEVEN, read_template

BASE = ("red", "green", "blue")
RUN_OF_TRAINING = ("prompts.safetensors", "log.jsonl", "config.json")


class Listener:
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: dict[str, list[int]] = {}

    def task(self, what: str, total: int) -> "Listener":
        self.now = self.tasks.setdefault(what, [])
        return self

    def __enter__(self) -> Any:
        return lambda done, values=None: self.now.append(done)

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)


def learner(**options: Any) -> PromptLearner:
    return PromptLearner(tiny_checkpoint(), **{"epochs": 2, "batch_size": 6, **options})


def pairs(colours: tuple[str, ...] = BASE, count: int = 6, first: int = 0) -> list[tuple[Image.Image, str]]:
    return [(picture(c, n), c) for c in colours for n in range(first, first + count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours")


@pytest.fixture(scope="module")
def fitted(data: Path) -> PromptLearner:
    return learner(epochs=25, lr=0.02).fit(data)


@pytest.fixture(scope="module")
def unseen() -> list[Image.Image]:
    return [picture(c, 900 + n) for c in BASE for n in range(3)]


# Fit and answer ------------------------------------------------------------------------------------


def test_a_fitted_learner_answers(fitted: PromptLearner, data: Path, unseen: list[Image.Image]) -> None:
    probabilities = fitted.predict_proba(unseen)
    assert probabilities.shape == (9, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert fitted.classes_ == ("blue", "green", "red")
    assert fitted.predict(unseen) == [fitted.classes_[k] for k in probabilities.argmax(1)]
    right = [c for c in BASE for _ in range(3)]
    assert sum(p == r for p, r in zip(fitted.predict(unseen), right, strict=True)) >= 7
    assert fitted.score(data) == fitted.evaluate(data)["accuracy"] > 0.85


def test_saved_and_loaded_it_answers_the_same(
    fitted: PromptLearner, data: Path, unseen: list[Image.Image], tmp_path: Path
) -> None:
    fitted.save(tmp_path / "run")
    again = PromptLearner.load(tmp_path / "run")
    np.testing.assert_array_equal(again.predict_proba(unseen), fitted.predict_proba(unseen))
    np.testing.assert_array_equal(
        again.predict_proba(unseen, ["yellow", "red"]), fitted.predict_proba(unseen, ["yellow", "red"])
    )
    assert again.evaluate(data) == fitted.evaluate(data)
    assert again.classes_ == fitted.classes_ and again.temperature_ == fitted.temperature_
    again.save(tmp_path / "copy")
    for name in ("config.json", "prompts.safetensors", "metrics.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_a_loaded_learner_can_be_fitted_as_it_was(data: Path, tmp_path: Path) -> None:
    learner(method="coop", template="a picture of {}", lr=0.01, length=3).fit(data, out=tmp_path / "first")
    PromptLearner.load(tmp_path / "first").fit(data, out=tmp_path / "second")
    assert contents(tmp_path / "first", RUN_OF_TRAINING) == contents(tmp_path / "second", RUN_OF_TRAINING)


def test_manners_of_scikit_learn() -> None:
    made = PromptLearner("pocket", "coop", seed=3, epochs=5, lr=0.1)
    params = made.get_params()
    assert params["seed"] == 3 and params["epochs"] == 5 and params["method"] == "coop"
    assert PromptLearner(**params).get_params() == params
    assert made.set_params(epochs=7, method="drople", p_max=0.4) is made
    assert made.get_params()["epochs"] == 7 and made.method == "drople" and made.options["p_max"] == 0.4
    assert "p_max" not in params, "a copy, not the learner's own"
    base = pytest.importorskip("sklearn.base")
    clone = base.clone(made)
    assert clone is not made and clone.get_params() == made.get_params()


def test_before_fit_there_is_nothing_to_ask(tmp_path: Path) -> None:
    new = PromptLearner()
    image = [picture("red", 0)]
    for ask in (new.predict, new.predict_proba, lambda _: new.score(pairs()), lambda _: new.save(tmp_path)):
        with pytest.raises(DropleError, match="learned nothing"):
            ask(image)


def test_many_batches_with_bad_ones_among_them_say_what_single_images_do(
    fitted: PromptLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are decoded ahead and fetched late: none may be lost, doubled or out of order."""
    monkeypatch.setattr("drople.learner.ENCODE_BATCH", 3)
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    images = [picture(colour, number) for number in range(4) for colour in BASE]
    # A bad one inside a batch, then two batches of nothing else, the last one of all among them.
    mixed: list[Any] = [images[0], tmp_path / "bad.jpg", *images[1:], *[tmp_path / "bad.jpg"] * 5]
    good, rows = fitted.readable_proba(mixed)
    assert good == [0, *range(2, 13)]
    alone = np.concatenate([fitted.predict_proba([image]) for image in images])
    np.testing.assert_allclose(rows, alone, rtol=1e-4, atol=1e-6)


def test_predictions_take_paths_pictures_arrays_and_one_alone(
    fitted: PromptLearner, data: Path, tmp_path: Path
) -> None:
    file = next((data / "test/red").iterdir())
    image = Image.open(file)
    row = fitted.predict_proba(file)
    assert row.shape == (1, 3)
    many = (iter([file]), np.array([str(file)]), np.asarray(image)[None], (data / "test/red").glob(file.name))
    for same in (str(file), image, np.asarray(image), [file], (image,), [str(file)], *many):
        np.testing.assert_array_equal(fitted.predict_proba(same), row)
    assert fitted.predict_proba([]).shape == (0, 3) and fitted.predict([]) == []
    assert as_sources(file) == [file]
    assert fitted.predict(file, (c for c in ("zebra", "red"))) == fitted.predict(file, ["zebra", "red"])
    with pytest.raises(DropleError, match="classes is one text, 'zebra'"):
        fitted.predict(file, "zebra")
    (tmp_path / "bad.jpg").write_text("no image", "utf-8")
    with pytest.raises(DropleError, match=r"bad\.jpg"):
        fitted.predict([file, tmp_path / "bad.jpg"])
    good, rows = fitted.readable_proba([tmp_path / "bad.jpg", file])
    assert good == [1] and np.array_equal(rows, row)


def test_copies_of_training_images_among_the_test_images_are_counted(tmp_path: Path) -> None:
    folder, heard = splits(tmp_path / "colours"), Listener()
    one = learner(progress=heard, epochs=1).fit(folder)
    one.evaluate(folder)
    assert not any("trained on" in line for line in heard.lines)
    copies = list((folder / "train/red").iterdir())[:2]
    for file in copies:
        (folder / "test/red" / f"copy-{file.name}").write_bytes(file.read_bytes())
    images = one.evaluate(folder)["images"]
    assert any(f"2 of the {images} images of test were trained on" in line for line in heard.lines)


def test_the_run_s_own_classes_are_asked_for_in_their_words(data: Path) -> None:
    words = {"red": "a tomato", "green": "some grass", "blue": "the sea"}
    one = PromptLearner(tiny_checkpoint(), epochs=1).fit(data, classnames=words)
    images = [picture(colour, 70) for colour in BASE]
    np.testing.assert_array_equal(one.predict_proba(images, one.classes_), one.predict_proba(images))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_on_a_backbone_that_was_given_loads_in_its_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    given = Backbone.load(tiny_checkpoint()).to("cpu", dtype)
    one = PromptLearner(given, epochs=1, device="cpu").fit(pairs(count=2))
    one.save(tmp_path)
    again = PromptLearner.load(tmp_path, device="cpu")
    assert again.backbone_.dtype == dtype
    probe = [picture("red", 60)]
    np.testing.assert_array_equal(again.predict_proba(probe), one.predict_proba(probe))


def test_temperature_calibrates_probabilities_and_changes_no_answer(
    fitted: PromptLearner, unseen: list[Image.Image]
) -> None:
    assert fitted.temperature_ != 1.0
    calibrated = fitted.predict_proba(unseen)
    temperature, fitted.temperature_ = fitted.temperature_, 1.0
    try:
        plain = fitted.predict_proba(unseen)
    finally:
        fitted.temperature_ = temperature
    expected = (torch.tensor(plain).log() / temperature).softmax(-1).numpy()
    np.testing.assert_allclose(calibrated, expected, atol=1e-4)
    assert (plain.argmax(1) == calibrated.argmax(1)).all()
    assert not np.allclose(plain, calibrated)


# New classes ---------------------------------------------------------------------------------------


def test_other_classes_at_prediction(fitted: PromptLearner, unseen: list[Image.Image]) -> None:
    rows = fitted.predict_proba(unseen, ["zebra", "okapi", "tapir", "quagga"])
    assert rows.shape == (9, 4)
    assert set(fitted.predict(unseen, ["zebra", "okapi"])) <= {"zebra", "okapi"}
    own = fitted.predict_proba(unseen, ["red", "green", "blue"])
    np.testing.assert_allclose(own[:, ::-1], fitted.predict_proba(unseen), atol=1e-5)
    with pytest.raises(DropleError, match="two or more"):
        fitted.predict(unseen, ["zebra"])


def test_evaluation_on_classes_never_seen(fitted: PromptLearner, tmp_path: Path) -> None:
    novel = pictures(tmp_path / "novel", ("yellow", "red"), 4, first=500)
    result = fitted.evaluate(novel)
    assert set(result["per_class"]) == {"yellow", "red"}
    assert np.array(result["confusion"]).shape == (2, 2) and np.sum(result["confusion"]) == 8
    assert result["images"] == 8 and result["split"] == "all images"


def test_evaluation_on_some_of_the_classes_keeps_the_choice_of_all(
    fitted: PromptLearner, tmp_path: Path
) -> None:
    some = pictures(tmp_path / "some", ("red", "blue"), 4, first=500)
    result = fitted.evaluate(some)
    assert list(result["per_class"]) == ["blue", "green", "red"]
    assert result["per_class"]["green"] == {"accuracy": None, "count": 0}
    json.dumps(result, allow_nan=False)


def test_evaluation_on_one_class(fitted: PromptLearner, tmp_path: Path) -> None:
    result = fitted.evaluate(pictures(tmp_path / "some", ("red",), 4, first=500))
    assert list(result["per_class"]) == ["blue", "green", "red"] and result["images"] == 4
    assert result["accuracy"] == result["per_class"]["red"]["accuracy"]
    with pytest.raises(DropleError, match="'yellow' is the only class to choose from"):
        fitted.evaluate(pictures(tmp_path / "other", ("yellow",), 2))


def test_evaluation_says_that_a_class_is_strange(
    fitted: PromptLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fitted.progress, "say", said.append)
    result = fitted.evaluate(pictures(tmp_path / "mixed", ("red", "yellow", "green"), 2, first=500))
    assert list(result["per_class"]) == ["green", "red", "yellow"]
    assert said == [
        "class 'yellow' is not one of the run's (1 of 3 are not): choosing among the 3 of this data"
    ]
    said.clear()
    others = [(picture("red", 1), "sunset"), (picture("blue", 2), "sea")]
    fitted.evaluate(others)
    assert not said, "other classes altogether are meant"


# Data ----------------------------------------------------------------------------------------------


def test_the_same_images_as_folder_table_and_pairs(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos")
    rows = sorted((p.relative_to(tmp_path).as_posix(), p.parent.name) for p in folder.rglob("*.png"))
    with open(tmp_path / "table.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    opened = [(Image.open(tmp_path / path), label) for path, label in rows]
    kinds = {"folder": folder, "table": tmp_path / "table.csv", "pairs": opened}
    learned = {}
    for name, source in kinds.items():
        one = learner().fit(source)
        assert one.classes_ == ("blue", "green", "red")
        learned[name] = dict(one.method_.named_parameters())
    for name in learned["folder"]:
        assert torch.equal(learned["folder"][name], learned["table"][name])
        assert torch.equal(learned["folder"][name], learned["pairs"][name])


def test_a_flat_folder_is_evaluated_without_the_images_trained_on(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", count=10)
    one = learner().fit(folder, shots=3)
    result = one.evaluate(folder)
    assert result["images"] == 30 - 9 and result["split"] == "all but the 9 images trained on"
    # Known by their bytes, so a copy under another name is left out too.
    copied = tmp_path / "elsewhere"
    for file in folder.rglob("*.png"):
        (copied / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied / file.parent.name / f"copy-{file.name}")
    assert one.evaluate(copied)["images"] == 21
    one.save(tmp_path / "run")
    assert PromptLearner.load(tmp_path / "run").evaluate(folder)["images"] == 21
    # Three of each class for validation, so all the rest of eight are trained on.
    everything = learner().fit(folder, shots=None)
    assert everything.evaluate(folder)["images"] == 6
    trained = [e for e in load_data(folder).train]
    with pytest.raises(DropleError, match="every image of this data was trained on"):
        everything.evaluate([(e.image, str(e.label)) for e in trained])


def test_fingerprints_are_of_the_content(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        picture("red", 1).save(tmp_path / name)
    assert fingerprint(tmp_path / "a.png") == fingerprint(str(tmp_path / "b.png"))
    image = picture("red", 1)
    assert fingerprint(image) == fingerprint(np.asarray(image)) != fingerprint(picture("red", 2))
    assert fingerprint(tmp_path / "none.png").startswith("unreadable")


def test_shots_are_taken_and_a_shortfall_is_said(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "photos", ("red", "green"), 12)
    pictures(folder, ("blue",), 3)
    listener = Listener()
    one = PromptLearner(tiny_checkpoint(), epochs=1, progress=listener).fit(folder, shots=4)
    counts = {c: sum(label == c for _, label, _ in one.config_["samples"]) for c in BASE}
    assert counts == {"red": 4, "green": 4, "blue": 2}
    said = "\n".join(listener.lines)
    assert "class 'blue' has only 2 of the 4 training images" in said and "'red'" not in said
    assert "held out" in said and "text prompts asked for 9 layers; this backbone has 2" in said
    assert listener.tasks["training drople"][-1] == 1 and listener.tasks["reading images"][-1] == 10


def test_bad_training_images_are_skipped_named_and_counted(tmp_path: Path) -> None:
    folder = splits(tmp_path / "photos")
    for number in range(12):
        (folder / "train/red" / f"bad{number}.jpg").write_text("no image", "utf-8")
    listener = Listener()
    PromptLearner(tiny_checkpoint(), epochs=1, progress=listener).fit(folder, shots=None)
    skipped = [line for line in listener.lines if line.startswith("skipped")]
    assert len(skipped) == 10 and all("bad" in line for line in skipped)
    assert "12 images skipped in all" in listener.lines
    with pytest.raises(DropleError, match="bad"):
        PromptLearner(tiny_checkpoint(), epochs=1, strict=True).fit(folder, shots=None)


def test_training_never_touches_test_images(data: Path, tmp_path: Path) -> None:
    """Garbage in their place, or nothing: the same bytes are learned."""
    learner().fit(data, out=tmp_path / "clean")
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for file in (copy / "test").rglob("*.png"):
        file.write_bytes(b"garbage")
    learner().fit(copy, out=tmp_path / "garbage")
    shutil.rmtree(copy / "test")
    learner().fit(copy, out=tmp_path / "gone")
    names = (*RUN_OF_TRAINING, "metrics.json")
    assert contents(tmp_path / "clean", names) == contents(tmp_path / "garbage", names)
    assert contents(tmp_path / "clean", names) == contents(tmp_path / "gone", names)


def test_validation_images_choose_nothing_but_the_temperature(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    shutil.rmtree(copy / "val")
    pictures(copy / "val", BASE, 2, first=700)
    learner().fit(data, out=tmp_path / "one")
    learner().fit(copy, out=tmp_path / "two")
    assert contents(tmp_path / "one", RUN_OF_TRAINING) == contents(tmp_path / "two", RUN_OF_TRAINING)


# Words ---------------------------------------------------------------------------------------------


def test_class_names_and_templates_reach_the_text_tower(data: Path) -> None:
    one = learner().fit(data, classnames={"red": "bright scarlet"}, shots=2)
    assert one.classes_ == ("blue", "green", "red") and one.words_ == ("blue", "green", "bright scarlet")
    plain = learner(method="zero-shot").fit(data)
    other = learner(method="zero-shot", template="the colour {}").fit(data)
    eleven = learner(method="zero-shot", template="eleven").fit(data)
    rows = [one.predict_proba([picture("red", 9)]) for one in (plain, other, eleven)]
    assert not np.allclose(rows[0], rows[1]) and not np.allclose(rows[0], rows[2])
    assert tuple(eleven.config_["templates"]) == ELEVEN and len(set(ELEVEN)) == 11


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "{name}", "{", "{}}", ""])
def test_a_template_needs_one_place_for_the_class(template: str, data: Path) -> None:
    with pytest.raises(DropleError, match="once"):
        read_template(template)
    with pytest.raises(DropleError, match="once"):
        learner(template=template).fit(data)


def test_zero_shot_learns_nothing_and_equals_the_frozen_model(data: Path, tmp_path: Path) -> None:
    one = learner(method="zero-shot").fit(data, out=tmp_path / "run")
    assert one.method_.trainable == 0
    result = one.evaluate(data)
    assert result["accuracy"] == result["zero_shot_accuracy"]
    assert PromptLearner.load(tmp_path / "run").evaluate(data) == result


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "low_rank"),
        ({"epochs": 3, "lr": 0.1}, "low_rank"),
        ({"preset": "none"}, None),
        ({"preset": None}, None),
        ({"preset": "paper"}, "paper"),
        ({"text_length": 3}, None),
        ({"method": "coop"}, None),
        ({"method": "coop+drople"}, None),
        ({"backbone": tiny_checkpoint()}, None),
    ],
)
def test_a_backbone_has_the_preset_that_suits_it(given: dict[str, Any], wanted: str | None) -> None:
    """Unless a preset, or an option of the method, is asked for."""
    one = PromptLearner(**{"backbone": "pocket", "method": "drople", **given})
    options, _ = one._split_options()
    assert one.preset_ == wanted
    assert wanted is None or options == DroPLe.presets[wanted]


def test_a_backbone_that_is_given_has_its_preset_too() -> None:
    assert PromptLearner(Backbone.load("pocket"))._split_options()[0] == DroPLe.presets["low_rank"]


def test_the_preset_that_was_taken_is_said_and_kept(data: Path, tmp_path: Path) -> None:
    answer = drople("fit", data, "--out", tmp_path / "run", "--shots", 1, "--epochs", 1)
    assert answer.code == 0 and "preset low_rank, which suits pocket" in " ".join(answer.err.split())
    config = json.loads((tmp_path / "run/config.json").read_text("utf-8"))
    assert config["preset"] == "low_rank" and config["options"] == DroPLe.presets["low_rank"]
    assert "--preset low_rank" in fit_command(config)
    assert "--preset none" in fit_command({**config, "preset": None, "options": {}})
    assert "--preset" not in fit_command({**config, "preset": None, "options": {}, "backbone": "elsewhere"})
    again = drople("fit", data, "--out", tmp_path / "run", "--shots", 1, "--epochs", 1, "--resume")
    assert again.code == 0 and "finished already" in again.err
    assert PromptLearner.load(tmp_path / "run").preset == "low_rank"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "papers"}, "paper"),
        ({"preset": "paper", "method": "coop"}, "coop has no presets, so no .paper."),
        ({"p_mx": 0.3}, "p_max"),
        ({"epoch": 3}, "epochs"),
        ({"device": "cdua"}, "cannot be used"),
        ({"precision": "float23"}, "float32"),
        ({"seed": -1}, "seed"),
        ({"optimizer": "adam"}, "adamw"),
        ({"method": "drupal"}, "drople"),
        ({"method": "zero-shot+drople"}, "wraps what learns inside the towers"),
        ({"backbone": tiny_checkpoint().parent / "nowhere"}, "no folder"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_nothing(
    given: dict[str, Any], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DropleError, match=said):
        PromptLearner(**{"backbone": tiny_checkpoint(), "epochs": 1, **given}).fit(data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_pocket_backbone_learns_colours(tmp_path: Path) -> None:
    """The real thing once: fit, save, load on the embedded backbone."""
    one = PromptLearner(epochs=6, batch_size=8, lr=0.01).fit(pairs(tuple(COLOURS), 5))
    assert one.score(pairs(tuple(COLOURS), 3, first=50)) > 0.9
    one.save(tmp_path / "run")
    probe = [picture("yellow", 77)]
    again = PromptLearner.load(tmp_path / "run")
    np.testing.assert_array_equal(again.predict_proba(probe), one.predict_proba(probe))
    assert (tmp_path / "run/prompts.safetensors").stat().st_size < 4_000_000

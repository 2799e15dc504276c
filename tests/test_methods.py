"""Every registered method, plain and wrapped by DroPLe, and every option: they train, save and load."""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import picture, pictures, splits, tiny_checkpoint

from drople.backbone import Backbone
from drople.errors import DropleError
from drople.learner import PromptLearner
from drople.methods import REGISTRY, Batch, Method, Progress, Task, find, make, option_groups, option_names
from drople.methods.base import TowerMethod, TrainingData
from drople.regulariser import RELEASED
from drople.training import TrainingOptions

WORDS = ("red", "green", "blue")
TASK = Task(WORDS, ("a photo of a {}.",))


def wrappable() -> Iterator[str]:
    for name, kind in sorted(REGISTRY.items()):
        prompts = issubclass(kind, TowerMethod) and not getattr(kind, "wrapped", False)
        if prompts or getattr(kind, "takes_prompts", False):
            yield f"{name}+drople"


NAMES = [*sorted(REGISTRY), *wrappable()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = splits(tmp_path_factory.mktemp("data") / "colours", count=4)
    pictures(folder / "train", ("red",), 3, first=50)
    return folder


def learners() -> list[str]:
    towers = Backbone.load(tiny_checkpoint())
    return [name for name in NAMES if any(True for _ in make(name, towers, TASK, {}).parameters())]


LEARNERS = learners()


def backbone(dtype: torch.dtype = torch.float32) -> Backbone:
    return Backbone.load(tiny_checkpoint()).to("cpu", dtype)


def batch(of: Backbone, count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 3, of.pixels.size, of.pixels.size, generator=generator)
    images += torch.arange(count).view(-1, 1, 1, 1) % 3
    frozen = of.encode_images(images.to(of.dtype))
    return Batch(images.to(of.dtype), torch.arange(count) % 3, frozen)


def prepared(name: str, towers: Backbone) -> Method:
    """A new method that has been shown its training images, as training does before the first step."""
    torch.manual_seed(0)
    method = make(name, towers, TASK, {})
    side = towers.pixels.size
    images = torch.randint(256, (6, 3, side, side), dtype=torch.uint8)
    method.prepare(TrainingData(images, torch.arange(6) % 3, batch(towers).frozen))
    assert method.trainable
    return method


def train(method: Method, of: Batch, steps: int, lr: float = 1e-2) -> list[float]:
    """The loss of the same batch and the same draws, step after step."""
    optimizer = torch.optim.AdamW(method.parameter_groups(lr), lr=lr)
    losses = []
    for _ in range(steps):
        torch.manual_seed(11)
        method.advance(Progress(1, 10, 0, 1))
        total = torch.stack(list(method.training_step(of).values())).sum()
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def test_the_registry_has_what_the_issue_names() -> None:
    assert {"drople", "coop", "baseline", "zero-shot"} <= set(REGISTRY)
    for name, kind in REGISTRY.items():
        assert kind.name == name and kind.title and kind.kind and kind.citation
        assert all(f.metadata.get("help") for f in dataclasses.fields(kind.Options)), f"{name} lacks help"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_few_steps_lower_the_loss_and_move_nothing_frozen(name: str, dtype: torch.dtype) -> None:
    towers = backbone(dtype)
    before = {n: t.clone() for n, t in towers.model.state_dict().items()}
    method = prepared(name, towers)
    started = {n: p.detach().clone() for n, p in method.named_parameters()}
    losses = train(method, batch(towers), 8)
    assert all(math.isfinite(loss) for loss in losses)
    assert min(losses[1:3]) < losses[0] and losses[-1] < losses[0]
    after = towers.model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert all(p.dtype == torch.float32 for p in method.parameters())
    unmoved = [n for n, p in method.named_parameters() if torch.equal(started[n], p)]
    assert not unmoved, f"never trained: {unmoved}"


@pytest.mark.parametrize("name", LEARNERS)
def test_the_same_draws_give_the_same_loss(name: str) -> None:
    results = []
    for _ in range(2):
        towers = backbone()
        results.append(train(prepared(name, towers), batch(towers), 2))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
def test_trained_saved_and_loaded_it_predicts_the_same(name: str, data: Path, tmp_path: Path) -> None:
    one = PromptLearner(tiny_checkpoint(), name, epochs=2).fit(data, out=tmp_path / "run")
    again = PromptLearner.load(tmp_path / "run")
    probe = [picture(c, 50 + n) for c in WORDS for n in range(2)]
    np.testing.assert_array_equal(one.predict_proba(probe), again.predict_proba(probe))
    novel = ["zebra", "okapi", "blue"]
    try:
        expected = one.predict_proba(probe, novel)
    except DropleError as error:
        # A classifier over its own classes may say that it knows no others; prompts serve them all.
        assert str(error) and not issubclass(find(name)[0], TowerMethod)
    else:
        np.testing.assert_array_equal(expected, again.predict_proba(probe, novel))
    stored = sum(p.numel() for p in again.method_.parameters())
    assert one.method_.trainable == again.method_.trainable == stored


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_refused_with_the_nearest_name(name: str) -> None:
    known = option_names(name)
    with pytest.raises(DropleError, match="unknown option") as caught:
        make(name, backbone(), TASK, {"no_such_thing_at_all": 1})
    assert name in str(caught.value)
    if known:
        with pytest.raises(DropleError, match=re.escape(known[0])):
            make(name, backbone(), TASK, {known[0] + "x": 1})


@pytest.mark.parametrize("name", NAMES)
def test_inference_draws_nothing(name: str) -> None:
    towers = backbone()
    method = make(name, towers, TASK, {})
    images = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    method.prepare(TrainingData(images, torch.arange(3), batch(towers, 3).frozen))
    method.eval()
    images = batch(towers).images
    rows = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        rows.append(method.logits(images, method.class_weights(WORDS)))
    assert torch.equal(*rows)


def test_only_prompt_learners_and_adapters_on_prompts_are_wrapped() -> None:
    assert {"tip-adapter+drople", "tip-adapter-f+drople", "dac-v+drople", "dac-vt+drople"} <= set(wrappable())
    for name in REGISTRY:
        if f"{name}+drople" in NAMES:
            assert find(f"{name}+drople")[1]
        else:
            with pytest.raises(
                DropleError, match=r"wraps what learns inside the towers|already drops tokens"
            ):
                find(f"{name}+drople")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("dropel", "drople"),
        ("DROPLE", "drople"),
        ("coop+dropple", "coop+drople"),
        ("zeroshot", "zero-shot"),
        ("koop", "coop"),
    ],
)
def test_an_unknown_method_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(DropleError, match=re.escape(right)):
        find(wrong)


# Presets and options -------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["paper", "released", "low_rank"])
def test_presets_train_to_a_run_that_loads(preset: str, data: Path, tmp_path: Path) -> None:
    one = PromptLearner(tiny_checkpoint(), preset=preset, epochs=1).fit(data, out=tmp_path / "run")
    again = PromptLearner.load(tmp_path / "run")
    probe = [picture("red", 60)]
    np.testing.assert_array_equal(one.predict_proba(probe), again.predict_proba(probe))
    assert again.config_["preset"] == preset
    if preset == "released":
        assert again.method_.options.supplementary == 24 and again.method_.options.lora_rank == 8  # type: ignore[attr-defined]
        assert again.config_["training"]["batch_size"] == 4 and len(again.config_["templates"]) == 11
        regulariser = again.method_.regulariser  # type: ignore[attr-defined]
        assert all(getattr(regulariser.options, n) == v for n, v in RELEASED.items())


def test_what_is_given_overrides_a_preset(data: Path) -> None:
    given: dict[str, Any] = {"epochs": 1, "supplementary": 3, "template": "a {}", "alignment": 2}
    one = PromptLearner(tiny_checkpoint(), preset="released", **given).fit(data)
    assert one.method_.options.supplementary == 3 and one.config_["templates"] == ["a {}"]  # type: ignore[attr-defined]
    assert one.config_["options"]["alignment"] == 2.0 and one.config_["options"]["l1_text"] == 25.0


OTHER: dict[str, tuple[Any, ...]] = {
    # of the prompts
    "text_depth": (1,),
    "text_length": (4, 0),
    "supplementary": (3,),
    "init": ("a sketch of", "", "template"),
    "visual_depth": (1, 0),
    "visual_length": (2,),
    "coupled": (False,),
    "prototypes": (0.5, 0.0),
    "lora_rank": (3,),
    "lora_towers": ("both",),
    "lora_from": (1,),
    "lora_lr": (0.5,),
    # of dropout and its terms
    "vision_dropout_layers": (1, 0),
    "text_dropout_layers": (1, 0),
    "p_min": (0.2, 0.0),
    "p_max": (0.9, 0.1, 1.0),
    "range_schedule": ("rising", "falling"),
    "operation": ("zero", "zero_scaled", "noise", "remove"),
    "noise": (0.5,),
    "draw": ("shared", "one_layer"),
    "rate": ("uniform", "block", "group", "standout", "attribution"),
    "scores": (("class",), ("self",), ("cross",), ("class", "cross")),
    "score_scale": ("sum", "rank"),
    "class_words_drop": (False,),
    "bridge_tokens": (5,),
    "bridge_dim": (7,),
    "bridge_scaled": (False,),
    "alignment": (0.0, 3.0),
    "alignment_detached": (False,),
    "lambda0": (0.5, 0.0),
    "lambda_by": ("epoch",),
    "residual": ("nonlinear",),
    "residual_on": ("unit",),
    "residual_entropy_visual": (1.0, 0.0),
    "residual_entropy_text": (1.0, 0.0),
    "l1_text": (2.0,),
    "l1_image": (2.0,),
    "kl": (2.0,),
    "l2": (3.0,),
    "cosine": (2.0,),
}
# An option that shows only together with another.
WITH: dict[str, dict[str, Any]] = {
    "noise": {"operation": "noise"},
    "bridge_scaled": {"bridge_dim": 4},
    "visual_length": {"coupled": False},
    "lora_rank": {"lora_from": 0},
    "lora_towers": {"lora_rank": 2, "lora_from": 0},
    "lora_from": {"lora_rank": 2},
    "lora_lr": {"lora_rank": 2, "lora_from": 0},
    "text_length": {"supplementary": 2},
}
CASES = [(name, value) for name, values in OTHER.items() for value in values]


def defaults(method: str) -> dict[str, Any]:
    return {f.name: f.default for k in option_groups(method).values() for f in dataclasses.fields(k)}


def test_every_option_is_exercised() -> None:
    fields = defaults("drople")
    assert set(OTHER) == set(fields), "name the new option in OTHER"
    assert all(v != fields[name] for name, values in OTHER.items() for v in values)


def one_epoch(
    towers: Backbone, options: dict[str, Any], name: str = "drople"
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Six steps with draws of their own, the prompts' share in them, and what was learned and comes of it."""
    torch.manual_seed(0)
    method = make(name, towers, TASK, options)
    size = towers.pixels.size
    images = torch.randint(0, 256, (6, 3, size, size), dtype=torch.uint8)
    data = TrainingData(images, torch.arange(6) % len(TASK.words), batch(towers).frozen)
    method.prepare(data)
    optimizer = torch.optim.AdamW(method.parameter_groups(1e-2), lr=1e-2)
    rows = []
    for step in range(6):
        torch.manual_seed(step)
        method.advance(Progress(step, 6, step // 3, 2))
        losses = method.training_step(batch(towers))
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        shown = {name: loss.detach() for name, loss in losses.items()} | method.monitor
        rows.append({name: float(value) for name, value in shown.items()})
    learned = {n: p.detach().clone() for n, p in method.named_parameters()}
    method.eval().finish(data)
    weights = [method.class_weights(words) for words in (("red", "grey"), TASK.words)]
    return rows, learned | {"class weights": torch.cat(weights)}


# DroPLe itself, and what it is put under: an adapter that stands on its prompts, and towers without any.
ON = [
    (method, name, value)
    for method in ("drople", "tip-adapter+drople", "mma+drople")
    for name, value in CASES
    if value != defaults(method).get(name, value)
]


@pytest.mark.parametrize(("method", "name", "value"), ON, ids=[f"{m}-{n}={v}" for m, n, v in ON])
def test_an_option_trains_and_makes_a_difference(method: str, name: str, value: Any) -> None:
    towers, known = backbone(), defaults(method)
    given = {n: v for n, v in WITH.get(name, {}).items() if n in known}
    rows, learned = one_epoch(towers, {**given, name: value}, method)
    assert all(math.isfinite(v) for row in rows for v in row.values())
    assert all(bool(t.isfinite().all()) for t in learned.values())
    assert len({tuple(row) for row in rows}) == 1, "the log needs the same columns at each step"
    usual, default = one_epoch(towers, given, method)
    moved = learned.keys() != default.keys() or any(not torch.equal(learned[n], default[n]) for n in learned)
    assert moved or rows != usual, f"{name}={value} changes nothing"


TRAINING: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 5,
    "optimizer": "sgd",
    "lr": 0.05,
    "weight_decay": 0.5,
    "warmup": 0.6,
    "clip_norm": 0.01,
    "crop_scale": 0.9,
    "augmentation": "none",
    "loss": "logit_adjusted",
}


# Sharding makes a difference with several processes only: tests/test_processes.py.
ALONE = [f.name for f in dataclasses.fields(TrainingOptions) if f.name != "shard_classes"]


@pytest.mark.parametrize("name", ALONE)
def test_a_training_option_makes_a_difference(name: str, data: Path) -> None:
    usual = {"epochs": 2, "batch_size": 4, "optimizer": "adamw", "lr": 0.01}
    learned = []
    for options in (usual, {**usual, name: TRAINING[name]}):
        one = PromptLearner(tiny_checkpoint(), "drople", **options).fit(data)
        learned.append(dict(one.method_.named_parameters()))
    assert any(not torch.equal(learned[0][n], learned[1][n]) for n in learned[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"p_min": 0.6, "p_max": 0.3}, "larger than p_max"),
        ({"p_max": 1.5}, "from 0 to 1"),
        ({"p_max": math.nan}, "finite"),
        ({"alignment": math.inf}, "finite"),
        ({"lambda0": -0.1}, "from 0 to 1"),
        ({"operation": "zer0"}, "zero"),
        ({"operation": "zero_scaled", "p_max": 1.0}, "below 1"),
        ({"scores": ()}, "at least one"),
        ({"scores": ("clas",)}, "class"),
        ({"bridge_tokens": 0}, "at least 1"),
        ({"text_length": 0}, "at least one token"),
        ({"visual_length": 0}, "at least 1"),
        ({"lambda_by": "itertion"}, "iteration"),
        ({"supplementary": 100}, "77 positions"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DropleError, match=said):
        PromptLearner(tiny_checkpoint(), epochs=1, **options).fit(data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()

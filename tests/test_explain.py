"""Grad-CAM and importance maps against slow references, and the pictures that show them."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import picture, pictures, splits, tiny_checkpoint
from PIL import Image
from tiny import (
    random_images,
    slow_bridge_attention,
    slow_class_score,
    slow_importance,
    slow_layer,
    slow_linear,
    slow_norm,
    slow_self_score,
    tiny_backbone,
)
from torch import Tensor

from drople import PromptLearner
from drople.data.images import normalise
from drople.errors import DropleError
from drople.explain import class_index, explain, gradcam, importance_maps, overlay, places, word_importance
from drople.progress import Quiet
from drople.safe_image import square

BASE = ("red", "green", "blue")


def fit(backbone: Any, method: str = "drople", **options: Any) -> PromptLearner:
    pairs = [(picture(c, n), c) for c in BASE for n in range(2)]
    # Where the slow references are.
    given = {"epochs": 1, "batch_size": 6, "precision": "float32", "device": "cpu", **options}
    return PromptLearner(backbone, method, **given).fit(pairs, None)


@pytest.fixture(scope="module")
def tiny() -> PromptLearner:
    """On a backbone that the slow references know, whose weights stay; lr is large so that prompts have moved."""
    options = {"text_length": 4, "visual_depth": 2, "vision_dropout_layers": 2, "supplementary": 16}
    return fit(tiny_backbone(vision_layers=3, image=12), lr=0.05, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours", count=3)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    PromptLearner(tiny_checkpoint(), epochs=1, batch_size=6).fit(data, out=out)
    return out


# Slow references -----------------------------------------------------------------------------------


def slow_start(learner: PromptLearner, image: Tensor, prompts: Tensor | None) -> Tensor:
    tower = learner.backbone_.model.vision_model
    x = tower.embeddings(image[None])[0].double()
    if prompts is not None:
        x = torch.cat([x, prompts[0].double()])
    return slow_norm(tower.pre_layrnorm, x)


def enter(x: Tensor, prompts: Tensor | None, layer: int) -> Tensor:
    if prompts is None or not 0 < layer < len(prompts):
        return x
    return torch.cat([x[: -prompts.shape[1]], prompts[layer].double()])


def slow_gradcam(
    learner: PromptLearner, image: Tensor, direction: Tensor, prompts: Tensor | None
) -> list[float]:
    """Of one image and one class, in float64: the last layer from its normed input on, written out."""
    model, side = learner.backbone_.model, learner.backbone_.patch_grid
    layers = model.vision_model.encoder.layers
    with torch.no_grad():
        x = slow_start(learner, image, prompts)
        everywhere = torch.ones(len(x), len(x), dtype=torch.bool)
        for i, layer in enumerate(layers[:-1]):
            x, _ = slow_layer(layer, enter(x, prompts, i), everywhere)
        last = layers[-1]
        x = enter(x, prompts, len(layers) - 1)
        normed = slow_norm(last.layer_norm1, x)
    normed.requires_grad_()
    attn = last.self_attn
    q, k, v = (slow_linear(p, normed) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    size = x.shape[1] // attn.num_heads
    mixed = []
    for h in range(attn.num_heads):
        part = slice(h * size, (h + 1) * size)
        weights = torch.softmax(k[:, part] @ q[0, part] / math.sqrt(size), 0)
        mixed.append(weights @ v[:, part])
    cls = x[0] + slow_linear(attn.out_proj, torch.cat(mixed))
    hidden = slow_linear(last.mlp.fc1, slow_norm(last.layer_norm2, cls))
    cls = cls + slow_linear(last.mlp.fc2, hidden * torch.sigmoid(hidden))
    feature = slow_linear(model.visual_projection, slow_norm(model.vision_model.post_layernorm, cls))
    logit = learner.backbone_.logit_scale * (feature / feature.norm()) @ direction.double()
    (gradient,) = torch.autograd.grad(logit, normed)
    normed = normed.detach()
    heat = []
    for patch in range(1, 1 + side * side):
        total = 0.0
        for channel in range(x.shape[1]):
            weight = sum(float(gradient[p, channel]) for p in range(1, 1 + side * side)) / side**2
            total += weight * float(normed[patch, channel])
        heat.append(max(total, 0.0))
    low = min(heat)
    high = max(value - low for value in heat)
    return [(value - low) / high if high else 0.0 for value in heat]


# Grad-CAM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [True, False])
def test_gradcam_against_the_slow_reference(tiny: PromptLearner, learned: bool) -> None:
    images, targets = random_images(tiny.backbone_, 3), torch.tensor([0, 2, 1])
    ours = gradcam(tiny, images, targets, learned=learned)
    assert ours.shape == (3, 3, 3) and not ours.requires_grad
    weights = tiny.class_weights(tiny.words_, learned=learned)
    prompts = tiny.method_.visual_prompts().detach() if learned else None
    for n in range(3):
        slow = slow_gradcam(tiny, images[n], weights[targets[n]], prompts)
        np.testing.assert_allclose(ours[n].flatten().numpy(), slow, atol=2e-4)
    assert len({tuple(heat.flatten().tolist()) for heat in ours}) == 3


def test_gradcam_leaves_no_trace(tiny: PromptLearner) -> None:
    images = random_images(tiny.backbone_, 2)
    before = tiny.method_.logits(images, tiny.class_weights(tiny.words_))
    gradcam(tiny, images, torch.tensor([0, 1]))
    assert not tiny.backbone_.model.vision_model.encoder.layers[-1].layer_norm1._forward_hooks
    assert all(p.grad is None for p in tiny.method_.parameters())
    torch.testing.assert_close(tiny.method_.logits(images, tiny.class_weights(tiny.words_)), before)


def test_gradcam_of_many_is_gradcam_of_each(tiny: PromptLearner) -> None:
    images, targets = random_images(tiny.backbone_, 19), torch.arange(19) % 3
    together = gradcam(tiny, images, targets)
    for n in (0, 15, 16, 18):
        alone = gradcam(tiny, images[n : n + 1], targets[n : n + 1])
        torch.testing.assert_close(together[n : n + 1], alone, atol=1e-4, rtol=1e-4)


def test_gradcam_of_other_classes_than_the_run_s(tiny: PromptLearner) -> None:
    images = random_images(tiny.backbone_, 1)
    heat = gradcam(tiny, images, torch.tensor([1]), ["zebra", "okapi"])
    turned = gradcam(tiny, images, torch.tensor([0]), ["okapi", "zebra"])
    torch.testing.assert_close(heat, turned, atol=1e-5, rtol=1e-4)


METHODS = ("zero-shot", "cocoop", "mma", "clip-lora", "tip-adapter-f", "linear-probe", "gallop", "tcp+drople")


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_has_a_gradcam(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands between the tower and the logits: the heat is the gradient of what `logits` gives."""
    learner = fit(tiny_backbone(vision_layers=2, text_layers=2, image=8), method)
    images, targets = random_images(learner.backbone_, 2), torch.tensor([0, 2])
    heat = gradcam(learner, images, targets)
    assert heat.shape == (2, 2, 2) and heat.isfinite().all()
    assert heat.min() >= 0 and heat.max() <= 1 and (heat.flatten(1).amax(1) > 0).any()
    # The gradient that the heat is made of must say how the logit moves when the normed patches grow.
    norm: Any = learner.backbone_.model.vision_model.encoder.layers[-1].layer_norm1
    weights = learner.class_weights(learner.words_)
    seen: list[Tensor] = []

    def moved(step: float) -> Tensor:
        calls: list[int] = []

        def shift(module: Any, given: Any, output: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) > 1:
                return output
            seen.append(output.detach())
            scale = torch.ones(output.shape[1])
            scale[1:5] += step
            return output * scale[:, None]

        hook = norm.register_forward_hook(shift)
        logits = learner.method_.logits(images, weights).gather(1, targets[:, None])
        hook.remove()
        return logits[:, 0].double()

    caught: list[Tensor] = []
    real = torch.autograd.grad

    def spy(*given: Any, **more: Any) -> Any:
        caught.append(real(*given, **more)[0])
        return (caught[-1],)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    gradcam(learner, images, targets)
    slope = (moved(1e-2) - moved(-1e-2)) / 2e-2
    expected = (caught[0][:, 1:5] * seen[0][:, 1:5]).sum((1, 2)).double()
    torch.testing.assert_close(slope, expected, rtol=0.05, atol=5e-3)


# Importance ----------------------------------------------------------------------------------------


def test_importance_maps_against_the_slow_scores(tiny: PromptLearner) -> None:
    images = random_images(tiny.backbone_, 2)
    state = torch.get_rng_state()
    maps = importance_maps(tiny, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(maps) == {"class", "self", "cross", "importance", "probability"}
    assert all(value.shape == (2, 2, 3, 3) for value in maps.values())
    method: Any = tiny.method_
    prompts, bridge = method.visual_prompts().detach(), method.regulariser.bridge
    layers = tiny.backbone_.model.vision_model.encoder.layers
    for n in range(2):
        with torch.no_grad():
            x = slow_start(tiny, images[n], prompts)
        length = len(x)
        for i in range(2):
            with torch.no_grad():
                everywhere = torch.ones(length, length, dtype=torch.bool)
                x, attention = slow_layer(layers[i], enter(x, prompts, i), everywhere)
                cross, _ = slow_bridge_attention(bridge.tokens, bridge.project["vision"], x, scaled=True)
            scores = {
                "class": [slow_class_score(attention, 0, j) for j in range(length)],
                "self": [slow_self_score(attention, 0, length, j) for j in range(length)],
                "cross": [max(cross[:, j].tolist()) for j in range(length)],
            }
            slow = slow_importance(list(scores.values()), list(range(1, length)))
            scores["importance"] = [0.0, *slow.values()]
            scores["probability"] = [0.5 - 0.4 * value for value in scores["importance"]]
            for name, values in scores.items():
                ours = maps[name][i, n].flatten().tolist()
                assert ours == pytest.approx(values[1:10], abs=1e-3), (name, i)


def test_maps_do_not_hang_on_what_dropping_does(tiny: PromptLearner) -> None:
    """Nothing drops while maps are made, so a run that removes tokens is drawn whole."""
    removing = fit(tiny_backbone(vision_layers=3, image=12), operation="remove", draw="one_layer")
    maps = importance_maps(removing, random_images(removing.backbone_, 2))
    assert maps["importance"].shape == (3, 2, 3, 3)
    shared = fit(tiny_backbone(vision_layers=3, image=12), draw="shared")
    assert importance_maps(shared, random_images(shared.backbone_, 2))["class"].shape == (1, 2, 3, 3)
    vanilla = fit(tiny_backbone(vision_layers=3, image=12), rate="uniform")
    only = importance_maps(vanilla, random_images(vanilla.backbone_, 1))
    assert set(only) == {"probability"} and (only["probability"] == 0.5).all()
    assert word_importance(vanilla, "red") == ()


def test_methods_without_dropout_have_no_importance() -> None:
    learner = fit(tiny_backbone(vision_layers=2, text_layers=2, image=8), "coop")
    assert importance_maps(learner, random_images(learner.backbone_, 1)) == {}
    assert word_importance(learner, "red") == ()


def test_an_adapter_shows_what_drops_in_the_prompts_it_stands_on(tmp_path: Path) -> None:
    learner = fit(tiny_backbone(vision_layers=2, text_layers=2, image=8), "tip-adapter+drople")
    maps = importance_maps(learner, random_images(learner.backbone_, 1))
    assert {"class", "self", "cross", "importance", "probability"} == set(maps)
    assert len(word_importance(learner, "red")) == len(learner.backbone_.tokenizer.words("of a red")) + 4


def test_words_are_those_of_the_sentence(tiny: PromptLearner) -> None:
    words = word_importance(tiny, "abyssinian cat")
    pieces = [w for w in words if not w.special]
    assert "".join(w.text if w.joined else f" {w.text}" for w in pieces) == " abyssinian cat"
    assert len(pieces) == len(tiny.backbone_.tokenizer.words("abyssinian cat"))
    prompts = [*(f"[P{n}]" for n in range(1, 5)), *(f"[S{n}]" for n in range(1, 17))]
    assert [w.text for w in words if w.special] == ["bos", *prompts, "eos"]
    assert all(
        len(w.importance) == 3 and 0 <= min(w.importance) <= max(w.importance) <= 1 for w in words[:-1]
    )
    assert words[-1].mean is None
    # At each layer the most important token has 1 and the least 0.
    layers = np.array([w.importance for w in words[:-1]])
    assert layers.max(0) == pytest.approx(1) and layers.min(0) == pytest.approx(0)


def test_words_that_a_method_keeps_are_shown() -> None:
    learner = fit(tiny_backbone(vision_layers=2, text_layers=2, image=8), "maple+drople")
    assert [w.text for w in word_importance(learner, "red")] == [
        "bos",
        "[P1]",
        "[P2]",
        "of",
        "a",
        "red",
        "eos",
    ]


# Pictures ------------------------------------------------------------------------------------------


def test_overlay_colours_what_is_hot_and_nothing_else() -> None:
    photo = picture("green", 1).resize((64, 48))
    plain = np.asarray(overlay(photo, np.zeros((4, 4)))).astype(int)
    assert (plain.max(2) == plain.min(2)).all()
    heat = np.zeros((4, 4))
    heat[1, 2] = 1
    hot = overlay(photo, heat, smooth=False)
    assert hot.size == (64, 48)
    values = np.asarray(hot).astype(int)
    redness = values[..., 0] - values[..., 2]
    assert (redness[12:24, 32:48] > 40).all()
    redness[12:24, 32:48] = 0
    assert (redness == 0).all()


def test_a_picture_an_image(run: Path, data: Path, tmp_path: Path) -> None:
    images = [data / "test" / c / "200.png" for c in BASE[:2]]
    rows = explain(run, images, out=tmp_path)
    names = [f"{c}-200-explained.png" for c in BASE[:2]]
    assert [row["picture"] for row in rows] == [str(tmp_path / name) for name in names]
    learner = PromptLearner.load(run)
    assert [row["class"] for row in rows] == learner.predict(images)
    np.testing.assert_allclose(
        [r["probability"] for r in rows], learner.predict_proba(images).max(1), atol=1e-4
    )
    for name in names:
        with Image.open(tmp_path / name) as drawn:
            assert drawn.width == 1680 and drawn.height > 1000
            # A page: mostly white, and with colour on it.
            pixels = np.asarray(drawn.convert("RGB")).astype(int)
        assert 0.3 < (pixels == 255).all(2).mean() < 0.9 and (np.ptp(pixels, axis=2) > 60).mean() > 0.02


def test_svg_is_sound_and_the_same_every_time(run: Path, data: Path, tmp_path: Path) -> None:
    image = data / "test" / "red" / "200.png"
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    (row,) = explain(run, [image], out=one, class_name=" GREEN ")
    explain(run, [image], out=two, class_name="green")
    assert row["class"] == "green" and row["picture"] == str(one)
    assert one.read_bytes() == two.read_bytes()
    assert ElementTree.parse(one).getroot().tag.endswith("svg")
    assert len(one.read_bytes()) < 3_000_000


def test_methods_without_dropout_are_drawn_with_gradcam_alone(tmp_path: Path) -> None:
    learner = fit(tiny_checkpoint(), "coop")
    image = tmp_path / "$odd_$ – \u732b.png"
    picture("red", 1).save(image)
    (row,) = explain(learner, [image], out=tmp_path / "out")
    with Image.open(row["picture"]) as drawn:
        assert drawn.height < 800


def test_comparison_of_zero_shot_a_run_and_another(run: Path, data: Path, tmp_path: Path) -> None:
    vanilla = tmp_path / "vanilla"
    given = {"epochs": 1, "batch_size": 6, "rate": "uniform"}
    PromptLearner(tiny_checkpoint(), **given).fit(data, out=vanilla)
    rows = explain(run, [data / "test"], out=tmp_path / "two", compare=True)
    assert len(rows) == 9
    assert {row["picture"] for row in rows} == {
        str(tmp_path / "two" / n) for n in ("comparison.png", "comparison-2.png")
    }
    more = explain(run, [data / "test" / "red"], out=tmp_path / "three.png", compare_with=[vanilla])
    sizes = [Image.open(rows[-1]["picture"]).size, Image.open(more[0]["picture"]).size]
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]
    assert [row["class"] for row in more] == PromptLearner.load(run).predict([r["image"] for r in more])


def test_bad_images_are_skipped_and_named(run: Path, data: Path, tmp_path: Path) -> None:
    class Listener(Quiet):
        lines: list[str] = []  # noqa: RUF012

        def say(self, line: str) -> None:
            self.lines.append(line)

    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    good = data / "test" / "red" / "200.png"
    rows = explain(run, [bad, good], out=tmp_path / "out", progress=Listener())
    assert [row["image"] for row in rows] == [str(good)]
    assert any("bad.jpg" in line for line in Listener.lines)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["200-explained.png"]
    with pytest.raises(DropleError, match=r"none of the images.*bad\.jpg"):
        explain(run, [bad], out=tmp_path / "out")
    with pytest.raises(DropleError, match=r"bad\.jpg"):
        explain(run, [bad, good], out=tmp_path / "out", strict=True)


def test_what_is_asked_wrongly_is_said(run: Path, data: Path, tmp_path: Path) -> None:
    image = data / "test" / "red" / "200.png"
    with pytest.raises(DropleError, match="unknown class 'gren': did you mean green"):
        explain(run, [image], out=tmp_path, class_name="gren")
    with pytest.raises(DropleError, match="there is no image"):
        explain(run, [tmp_path / "none.png"], out=tmp_path)
    with pytest.raises(DropleError, match="is one picture, but 3"):
        explain(run, [data / "test" / "red"], out=tmp_path / "all.png")
    with pytest.raises(DropleError, match="is the image itself"):
        explain(run, [image], out=image)
    with pytest.raises(DropleError, match="learned nothing yet"):
        explain(PromptLearner(tiny_checkpoint()), [image], out=tmp_path)
    with pytest.raises(DropleError, match="unknown picture format 'jpg'"):
        explain(run, [image], out=tmp_path, format="jpg")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(DropleError, match="is a file"):
        explain(run, [image], out=tmp_path / "file")


def test_no_picture_is_written_over_another_or_over_an_image(tmp_path: Path) -> None:
    files = [tmp_path / "x" / "a.jpg", tmp_path / "x" / "A.png", tmp_path / "x" / "b.png"]
    named = places(tmp_path / "x", files, "png", compare=False)
    assert [p.name for p in named] == ["x-a-explained.png", "x-A-explained-2.png", "b-explained.png"]


def test_classes_are_found_by_folder_or_words(tmp_path: Path) -> None:
    learner = PromptLearner(tiny_checkpoint(), "zero-shot").fit(
        pictures(tmp_path / "d"), classnames={"red": "dark rose"}
    )
    assert class_index(learner, "Dark Rose") == class_index(learner, "RED") == learner.classes_.index("red")


def test_gradcam_finds_the_patch_that_differs() -> None:
    """On real weights and pixels: a drawing on an empty page lights up where it is, not elsewhere."""
    learner = fit("pocket", "zero-shot", precision="auto")
    page = np.full((128, 128, 3), 255, np.uint8)
    page[16:64, 64:112] = (220, 30, 30)
    pixels = learner.backbone_.pixels
    image = torch.from_numpy(square(Image.fromarray(page), pixels.size, pixels.resample))[None]
    heat = gradcam(learner, normalise(image, pixels), torch.tensor([learner.classes_.index("red")]))[0]
    inside = heat[1:4, 4:7].mean()
    assert inside > 2 * (heat.sum() - heat[1:4, 4:7].sum()) / 55

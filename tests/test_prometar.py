"""ProMetaR against a slow reference in float64: its losses, the gated gradient, and the gradient through the inner
step, which the reference finds by central differences, so by no gradient of a gradient."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from PIL import Image
from test_prompt_methods import (
    TASK,
    TEMPLATE,
    WORDS,
    by_layer,
    close,
    frozen_text,
    made,
    slow_cross_entropy,
    slow_image,
    slow_logits,
    slow_text,
    training,
    unit,
)
from tiny import random_images, tiny_backbone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drople.backbone import Backbone
from drople.learner import PromptLearner
from drople.methods import Batch, make
from drople.methods import prometar as module
from drople.methods.prometar import Gates, MetaTask, draw_task
from drople.templates import ELEVEN

LABELS = (2, 0, 2, 1)
# The images of class 2 are held out; each has a partner among the others.
EPISODE = MetaTask(
    torch.tensor([True, False, True, False]), torch.tensor([3, 1, 1, 3]), torch.tensor([0.3, 0.5, 0.9, 0.5])
)


def batch_of(backbone: Backbone, labels: Sequence[int] = LABELS) -> Batch:
    plain = backbone.encode_images(random_images(backbone, len(labels), seed=8))
    return Batch(random_images(backbone, len(labels)), torch.tensor(labels), plain)


def gradients(method: Any, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    method.zero_grad()
    losses = method.training_step(batch)
    torch.stack(list(losses.values())).sum().backward()
    return losses, {n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None}


class Slow:
    """One image and one class at a time; the prompts and gates are handed in, in float64."""

    def __init__(self, backbone: Backbone, batch: Batch, inner_lr: float, view: str) -> None:
        self.backbone, self.batch, self.inner_lr = backbone, batch, inner_lr
        sentences = dict.fromkeys([TEMPLATE, *ELEVEN])
        self.frozen = [torch.zeros(backbone.embed_dim, dtype=torch.float64) for _ in WORDS]
        for template in sentences:
            for k, feature in enumerate(frozen_text(backbone, template=template)):
                self.frozen[k] = self.frozen[k] + unit(feature) / len(sentences)
        same = [slow_image(backbone, image) for image in batch.images]
        self.seen = same if view == "same" else [x.double() for x in batch.frozen]

    def features(self, theta: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        text, visual = (by_layer(prompts) for prompts in theta)
        classes = [slow_text(self.backbone, w, text, len(text[0])) for w in WORDS]
        return classes, [slow_image(self.backbone, image, visual) for image in self.batch.images]

    def terms(self, theta: Sequence[Tensor], which: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy and both pulls on some images."""
        classes, images = self.features(theta)
        logits = [slow_logits(self.backbone, images[n], classes) for n in which]
        text = torch.stack([(unit(c) - unit(f)).abs() for c, f in zip(classes, self.frozen, strict=True)])
        image = torch.stack([(unit(images[n]) - unit(self.seen[n])).abs() for n in which])
        return slow_cross_entropy(logits, self.batch.labels[list(which)]), 50 * text.mean(), 20 * image.mean()

    def gated(
        self, theta: Sequence[Tensor], gates: Sequence[Tensor], which: Sequence[int]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """`g + sigma(W_2 W_1 [g; r]) * r` for both towers; `gates` are W_1, W_2 of text, then of vision."""
        theta = [prompts.detach().requires_grad_() for prompts in theta]
        own, *pulls = self.terms(theta, which)
        found = []
        for tower, prompts in enumerate(theta):
            (g,) = torch.autograd.grad(own, prompts, retain_graph=True)
            (r,) = torch.autograd.grad(pulls[tower], prompts, retain_graph=True)
            layers = []
            for i in range(len(prompts)):
                read = torch.cat([g[i].reshape(-1), r[i].reshape(-1)])
                hidden = gates[2 * tower + 1][i].T @ (gates[2 * tower][i].T @ read)
                gate = [1 / (1 + torch.exp(-hidden[n // 8])) for n in range(r[i].numel())]
                layers.append(g[i] + torch.stack(gate).view_as(r[i]) * r[i])
            found.append(torch.stack(layers))
        return found, (own, pulls[0], pulls[1])

    def meta(self, theta: Sequence[Tensor], gates: Sequence[Tensor]) -> float:
        """The loss of the mixed, held-out images after the inner step."""
        steps, _ = self.gated(theta, gates, [n for n, held in enumerate(EPISODE.query) if not held])
        moved = [prompts - self.inner_lr * step for prompts, step in zip(theta, steps, strict=True)]
        classes, images = self.features(moved)
        rows = []
        for n in EPISODE.query.nonzero()[:, 0].tolist():
            other, share = int(EPISODE.partner[n]), float(EPISODE.share[n])
            logits = slow_logits(self.backbone, share * images[n] + (1 - share) * images[other], classes)
            for k, weight in ((n, share), (other, 1 - share)):
                rows.append(weight * slow_cross_entropy([logits], self.batch.labels[[k]]))
        return float(torch.stack(rows).sum().detach()) / int(EPISODE.query.sum())


@pytest.mark.parametrize("view", ["same", "plain"])
def test_the_step_and_the_gradient_through_the_inner_step(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draw_task", lambda *_: EPISODE)
    backbone = tiny_backbone(text_layers=2, vision_layers=2, image=8)
    given = {"text_depth": 2, "visual_depth": 2, "text_length": 2, "visual_length": 2, "frozen_view": view}
    # An inner step large enough to matter, and a weight that makes its gradient as large as the direct one.
    method = made("prometar", backbone, inner_lr=0.05, meta=1.0, init="", **given)
    batch = batch_of(backbone)
    slow = Slow(backbone, batch, 0.05, view)
    theta = [p.detach().double() for p in method._prompts]
    gates = [p.detach().double() for p in method.gates.parameters()]
    step, (own, pull_text, pull_image) = slow.gated(theta, gates, range(len(LABELS)))
    losses, found = gradients(method, batch)
    assert list(losses) == ["cross_entropy", "pull_text", "pull_image", "meta"]
    close(losses["cross_entropy"], own)
    close(losses["pull_text"], pull_text)
    close(losses["pull_image"], pull_image)
    close(losses["meta"], torch.tensor(slow.meta(theta, gates)))

    method.options = module.ProMetaROptions(**given, inner_lr=0.05, meta=0.0)
    _, direct = gradients(method, batch)
    names = ["text_prompts.prompts", "visual_prompts.prompts"]
    for name, wanted in zip(names, step, strict=True):
        close(direct[name], wanted)
    assert all(not direct[n].any() for n in direct if n.startswith("gates"))

    names += [n for n in found if n.startswith("gates")]
    values = [*theta, *gates]
    for n, name in enumerate(names):
        meta = (found[name] - direct[name]).double()
        assert meta.abs().max() > 0
        # Along the gradient itself: its length. A wrong one is longer than the slope that it claims.
        along, size = meta / meta.norm(), 1e-4 if n < 2 else 1e-3
        ends = []
        for sign in (1, -1):
            there = [v + sign * size * along if k == n else v for k, v in enumerate(values)]
            ends.append(slow.meta(there[:2], there[2:]))
        assert (ends[0] - ends[1]) / (2 * size) == pytest.approx(float(meta.norm()), rel=5e-4), name


def test_the_gradient_is_that_of_the_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the inner step does to itself the gradient would be another one."""
    monkeypatch.setattr(module, "draw_task", lambda *_: EPISODE)
    backbone = tiny_backbone()
    batch = batch_of(backbone)
    found = []
    for inner_lr in (0.0, 0.05):
        method = made("prometar", backbone, inner_lr=inner_lr, meta=1.0)
        _, given = gradients(method, batch)
        found.append(given)
    assert not found[0]["gates.0.first"].any(), "without an inner step the gates have nothing to learn from"
    assert all(found[1][n].any() for n in found[1])
    name = "visual_prompts.prompts"
    assert (found[0][name] - found[1][name]).norm() > 0.1 * found[0][name].norm()


def test_a_batch_of_one_class_is_a_plain_step() -> None:
    backbone = tiny_backbone()
    batch = batch_of(backbone, (1, 1, 1, 1))
    method = made("prometar", backbone, meta=1.0)
    losses, found = gradients(method, batch)
    assert not losses["meta"].any() and all(not g.any() for n, g in found.items() if n.startswith("gates"))
    method = made("prometar", backbone, meta=0.0)
    _, direct = gradients(method, batch)
    assert all(torch.equal(found[n], direct[n]) for n in found)
    assert found["text_prompts.prompts"].any() and found["visual_prompts.prompts"].any()


def test_tasks_are_drawn_from_what_is_there() -> None:
    labels = torch.tensor([7, 3, 3, 3, 5])
    torch.manual_seed(0)
    drawn = [draw_task(labels, 9, 0.5) for _ in range(3000)]
    held = torch.stack([t.query for t in drawn]).float().mean(0)
    # Each of the three classes a third of the time, however many images it has.
    torch.testing.assert_close(held, torch.full((5,), 1 / 3), atol=0.04, rtol=0)
    assert all(not bool(t.query[t.partner].any()) and bool(t.exists) for t in drawn)
    partners = torch.stack([t.partner for t in drawn if bool(t.query[0])])
    counts = torch.bincount(partners.flatten(), minlength=5) / partners.numel()
    torch.testing.assert_close(counts, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), atol=0.02, rtol=0)
    shares = torch.stack([t.share for t in drawn])
    assert shares.min() >= 0 and shares.max() <= 1
    assert abs(float(shares.mean()) - 0.5) < 0.02 and abs(float(shares.var()) - 0.125) < 0.01
    assert not bool(draw_task(torch.tensor([2, 2]), 4, 0.5).exists)


def test_eight_neighbours_share_a_gate_and_a_rest_has_its_own() -> None:
    prompts = torch.randn(3, 2, 10)
    torch.manual_seed(1)
    gates = Gates(prompts)
    assert gates.first.shape == (3, 40, 3) and gates.second.shape == (3, 3, 3)
    found = gates(prompts, 2 * prompts).flatten(1)
    for row in found:
        assert [len(set(part.tolist())) for part in row.split(8)] == [1, 1, 1] and len(set(row.tolist())) == 3
    assert len(set(found.flatten().tolist())) == 9, "every layer has its own"
    close(gates(0 * prompts, 0 * prompts), torch.full((3, 2, 10), 0.5))


def test_the_gates_are_as_large_as_the_authors() -> None:
    """ViT-B/16, depth 9, length 4: 2MD x MD/8 and (MD/8)^2 a layer, MD 2048 for text and 3072 for vision."""
    widths = {"text_width": 512, "text_heads": 8, "vision_width": 768, "vision_heads": 12}
    method = make("prometar", tiny_backbone(text_layers=9, vision_layers=9, **widths), TASK, {})
    layer = 4096 * 256 + 256**2 + 6144 * 384 + 384**2
    assert method.trainable == 9 * (layer + 4 * (512 + 768)) == 32_633_856


def test_chunks_of_classes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draw_task", lambda *_: EPISODE)
    found = []
    for activation_bytes in (1 << 30, 1):
        backbone = tiny_backbone()
        backbone.activation_bytes = activation_bytes
        method = made("prometar+drople", backbone, meta=1.0, inner_lr=0.05, p_min=0.0, p_max=0.0)
        assert method.fixed_shapes == (activation_bytes > 1)
        found.append(gradients(method, batch_of(backbone))[1])
    assert all(g.any() for g in found[0].values())
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-5)


def test_wrapped_without_a_drop_it_is_the_plain_method() -> None:
    backbone = tiny_backbone()
    batch = batch_of(backbone)
    plain, wrapped = made("prometar", backbone), made("prometar+drople", backbone, p_min=0.0, p_max=0.0)
    wrapped.load_state_dict(plain.state_dict(), strict=False)
    torch.manual_seed(0)
    wanted = plain.training_step(batch)
    torch.manual_seed(0)
    got = wrapped.training_step(batch)
    assert set(got) > set(wanted)
    for name in ("cross_entropy", "pull_text", "pull_image"):
        torch.testing.assert_close(got[name], wanted[name])
    dropped = made("prometar+drople", backbone, p_min=0.9, p_max=0.9)
    dropped.load_state_dict(plain.state_dict(), strict=False)
    other = dropped.training_step(batch)
    assert all(abs(float(other[n] - wanted[n])) > 1e-3 for n in ("cross_entropy", "pull_text", "pull_image"))


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host read the device, or a shape hang on data: a CUDA graph has neither."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "masked_select", "unique", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(name.strip("_").startswith(w.strip("_")) for w in self.WAITS), f"{func} waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["prometar", "prometar+drople", "tac", "tac+drople"])
def test_a_step_waits_for_nothing(name: str) -> None:
    backbone = tiny_backbone()
    method, batch = made(name, backbone), batch_of(backbone)
    assert method.fixed_shapes
    with NoWaiting():
        torch.stack(list(method.training_step(batch).values())).sum().backward()
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        batch.labels.unique()


def test_a_long_tail_adjusts_every_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draw_task", lambda *_: EPISODE)
    backbone = tiny_backbone()
    method, batch = made("prometar", backbone, inner_lr=0.0, meta=1.0), batch_of(backbone)
    prior = torch.tensor([0.7, 0.1, 0.15, 0.05]).log()
    classes, images = method.class_features(WORDS).double(), method.image_features(batch.images).double()
    adjusted = [slow_logits(backbone, x, list(classes)) + prior for x in images]
    mixed = []
    for n in EPISODE.query.nonzero()[:, 0].tolist():
        other, share = int(EPISODE.partner[n]), float(EPISODE.share[n])
        row = slow_logits(backbone, share * images[n] + (1 - share) * images[other], list(classes)) + prior
        for k, weight in ((n, share), (other, 1 - share)):
            mixed.append(weight * slow_cross_entropy([row], batch.labels[[k]]))
    method.log_prior = prior
    losses = method.training_step(batch)
    close(losses["cross_entropy"], slow_cross_entropy(adjusted, batch.labels))
    close(losses["meta"], torch.stack(mixed).sum() / 2)


def test_gates_learn_slower_and_are_not_kept() -> None:
    backbone = tiny_backbone()
    method = made("prometar", backbone, gate_lr=0.25)
    prompts, gates = method.parameter_groups(0.4)
    assert prompts["lr"] == 0.4 and gates["lr"] == pytest.approx(0.1)
    assert {id(p) for p in gates["params"]} == {id(p) for p in method.gates.parameters()}
    both = [id(p) for p in [*prompts["params"], *gates["params"]]]
    assert sorted(both) == sorted(id(p) for p in method.parameters())
    unfinished = {n: t.clone() for n, t in method.state_dict().items()}
    method.finish(None)
    assert set(method.state_dict()) == {"text_prompts.prompts", "visual_prompts.prompts"}
    again = make("prometar", backbone, TASK, {})
    again.load_learned(method.state_dict())
    assert again.trainable == method.trainable
    torch.testing.assert_close(again.class_features(WORDS), method.class_features(WORDS))
    resumed = make("prometar", backbone, TASK, {})
    resumed.load_learned(unfinished)
    assert all(torch.equal(t, unfinished[n]) for n, t in resumed.state_dict().items())


def test_cut_and_resumed_a_run_ends_the_same(tmp_path: Path) -> None:
    for part in ("whole", "cut"):
        (tmp_path / part).mkdir()
    whole, cut = training("prometar", tmp_path / "whole"), training("prometar", tmp_path / "cut")
    whole.run()
    take = cut._step

    def until(indices: Tensor) -> dict[str, Any]:
        if cut.step == 4:
            raise InterruptedError
        return take(indices)

    cut._step = until  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        cut.run()
    resumed = training("prometar", tmp_path / "cut")
    resumed.run(resume=True)
    ends = [t.method.state_dict() for t in (whole, resumed)]
    assert "gates.0.first" in ends[0]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_what_serves_training_alone_is_counted_and_not_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (data / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), colour).save(data / name / f"{number}.png")
    learner = PromptLearner(str(tiny_checkpoint()), "prometar", epochs=1)
    learner.fit(data, out=tmp_path / "run")
    kept = learner.method_.trainable
    assert learner.trainable_ > 2 * kept
    again = PromptLearner.load(tmp_path / "run")
    assert again.trainable_ == learner.trainable_ and again.method_.trainable == kept


def test_the_authors_settings_are_taken() -> None:
    options, settings = PromptLearner("pocket", "prometar", preset="authors")._split_options()
    assert not options and settings.optimizer == "sgd" and settings.lr == 2.5e-3
    assert settings.batch_size == 4 and settings.epochs == 10

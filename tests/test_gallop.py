"""GalLoP against loops in float64: patches that see only themselves, top-k cosines, both losses, the logits.

The references know one image, one class and one prompt at a time and are handed the numbers learned.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import picture, splits, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prompt_methods import slow_cross_entropy, slow_image, slow_text, unit
from tiny import random_images, slow_layer, slow_linear, slow_norm, tiny_backbone
from torch import Tensor

from drople.backbone import Backbone
from drople.errors import DropleError
from drople.export.classifier import trace
from drople.learner import PromptLearner
from drople.methods import REGISTRY, Batch, Task, make

WORDS = ("cat", "grand piano", "zebra crossing", "okapi")
RTOL, ATOL = 1e-5, 2e-5  # float32 against float64, through towers and a logit scale of 14

Cosines = list[list[float]]  # of a class, then of a prompt


def made(backbone: Backbone, words: Sequence[str] = WORDS, **options: Any) -> Any:
    """Learned numbers that are all away from where they start, so that each one counts."""
    torch.manual_seed(5)
    method = make("gallop", backbone, Task(tuple(words), ("a photo of a {}.",)), options)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return method


def batch_of(backbone: Backbone, classes: int = len(WORDS), count: int = 3) -> Batch:
    images = random_images(backbone, count)
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(count))
    return Batch(images, labels, backbone.encode_images(images))


# Slow references -------------------------------------------------------------------------------------


def slow_patches(method: Any, image: Tensor) -> list[Tensor]:
    backbone = method.backbone
    tower = backbone.model.vision_model
    states = slow_norm(tower.pre_layrnorm, tower.embeddings(image[None])[0].double())
    look, alone = torch.ones(len(states), len(states)).bool(), torch.eye(len(states)).bool()
    *before, last = tower.encoder.layers
    for layer in before:
        states, _ = slow_layer(layer, states, look)
    states, _ = slow_layer(last, states, alone)
    learned = [method.local_projection.double() @ slow_norm(tower.post_layernorm, x) for x in states[1:]]
    return [slow_linear(backbone.model.visual_projection, x) for x in learned]


def slow_classes(method: Any, prompts: Tensor, words: Sequence[str]) -> list[list[Tensor]]:
    return [[slow_text(method.backbone, w, {0: p}, len(p)) for p in prompts] for w in words]


def slow_whole(image: Tensor, classes: list[list[Tensor]]) -> Cosines:
    return [[float(unit(image) @ unit(g)) for g in own] for own in classes]


def slow_local(patches: Sequence[Tensor], classes: list[list[Tensor]], top_k: Sequence[int]) -> Cosines:
    rows = []
    for own in classes:
        row = []
        for prompt, k in zip(own, top_k, strict=True):
            nearest = sorted((float(unit(f) @ unit(prompt)) for f in patches), reverse=True)[:k]
            row.append(sum(nearest) / len(nearest))
        rows.append(row)
    return rows


@torch.no_grad()
def slow_cosines(method: Any, image: Tensor, words: Sequence[str], top_k: Sequence[int]) -> Any:
    whole = slow_whole(slow_image(method.backbone, image), slow_classes(method, method.global_prompts, words))
    local = slow_classes(method, method.local_prompts, words)
    return whole, slow_local(slow_patches(method, image), local, top_k)


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def slow_logits(scale: float, whole: Cosines, local: Cosines) -> list[float]:
    return [scale * (mean(g) + mean(x)) / 2 for g, x in zip(whole, local, strict=True)]


def row(numbers: Sequence[float], prior: Tensor | None = None) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64) + (0 if prior is None else prior.double())


def close(ours: Tensor, slow: Any) -> None:
    torch.testing.assert_close(ours.detach().double(), torch.as_tensor(slow).double(), rtol=RTOL, atol=ATOL)


# Against them ----------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    grid=st.integers(1, 3),
    prompts=st.integers(1, 4),
    top_k=st.lists(st.integers(1, 10), min_size=1, max_size=3),
    length=st.integers(1, 5),
    classes=st.integers(2, 4),
    dropout=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
    prior=st.booleans(),
)
def test_losses_and_logits_against_loops(
    grid: int, prompts: int, top_k: list[int], length: int, classes: int, dropout: float, prior: bool
) -> None:
    backbone = tiny_backbone(image=4 * grid, vision_layers=2, text_layers=2)
    words, scale = WORDS[:classes], backbone.logit_scale
    given = {"global_prompts": prompts, "top_k": top_k, "length": length, "prompt_dropout": dropout}
    method, batch = made(backbone, words, **given), batch_of(backbone, classes)
    if prior:
        method.log_prior = torch.arange(1.0, 1 + classes).log()
    slow = [slow_cosines(method, image, words, top_k) for image in batch.images]
    torch.manual_seed(3)
    kept = method._kept(batch.labels)
    dropped, each = [], []
    for (whole, local), weights in zip(slow, kept, strict=True):
        mine = [j for j in range(prompts) if weights[j] > 0]
        assert len(mine) == max(prompts - int(dropout * prompts), 1)
        dropped.append(row([scale * mean([of[j] for j in mine]) for of in whole], method.log_prior))
        each += [row([scale * of[j] for of in local], method.log_prior) for j in range(len(top_k))]
    torch.manual_seed(3)
    losses = method.training_step(batch)
    assert list(losses) == ["global_cross_entropy", "local_cross_entropy"]
    close(losses["global_cross_entropy"], slow_cross_entropy(dropped, batch.labels))
    labels = torch.tensor([int(y) for y in batch.labels for _ in top_k])
    close(losses["local_cross_entropy"], slow_cross_entropy(each, labels))
    logits = [slow_logits(scale, *both) for both in slow]
    close(method.logits(batch.images, method.class_weights(words)), logits)
    right = [int(np.argmax(r)) == int(y) for r, y in zip(logits, batch.labels, strict=True)]
    assert float(method.monitor["accuracy"]) == pytest.approx(mean(right))


def test_classes_never_trained_on_have_their_own_features() -> None:
    backbone = tiny_backbone()
    method, images, unseen = made(backbone), random_images(backbone, 2), ("fire engine", "cat", "soup")
    slow = [slow_cosines(method, image, unseen, (5, 10, 15, 20)) for image in images]
    logits = [slow_logits(backbone.logit_scale, *both) for both in slow]
    close(method.logits(images, method.class_weights(unseen)), logits)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    images=st.integers(1, 3),
    patches=st.integers(1, 12),
    classes=st.integers(1, 4),
    top_k=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
)
def test_cosines_against_loops(
    images: int, patches: int, classes: int, top_k: list[int], seed: int, coarse: bool
) -> None:
    """Any features, with many equal cosines where they are coarse."""
    backbone = tiny_backbone(vision_layers=1, text_layers=1, embed=3)
    method: Any = make("gallop", backbone, Task(WORDS, ("{}",)), {"top_k": top_k, "global_prompts": 2})
    top_k = method.top_k = [min(k, patches) for k in top_k]
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, 1 + patches, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(classes, 2 + len(top_k), 3, generator=generator, dtype=torch.float64)
    if coarse:
        features, weights = features.sign(), weights.sign()
    whole, local = method.cosines(features.flatten(1), weights.flatten(1))
    for n in range(images):
        own = [list(c) for c in weights]
        close(whole[n], slow_whole(features[n, 0], [c[:2] for c in own]))
        close(local[n], slow_local(list(features[n, 1:]), [c[2:] for c in own], top_k))


def test_with_all_patches_it_is_the_plain_mean() -> None:
    backbone = tiny_backbone()
    patches = backbone.patch_grid**2
    method, batch = made(backbone, top_k=[patches, 2]), batch_of(backbone)
    features, weights = method.image_features(batch.images), method.class_weights(WORDS)
    images, classes = (x.unflatten(1, (-1, backbone.embed_dim)) for x in (features, weights))
    every = torch.nn.functional.cosine_similarity(images[:, 1:, None], classes[None, None, :, 4], dim=-1)
    _, local = method.cosines(features, weights)
    close(local[..., 0], every.mean(1).detach())
    assert (local[..., 1] > local[..., 0]).any() and every.shape[1] == patches


def test_it_starts_from_zero_shot() -> None:
    backbone = tiny_backbone()
    method: Any = make("gallop", backbone, Task(WORDS, ("a photo of a {}",)), {})
    words = backbone.word_embeddings("a photo of a")
    assert all(torch.equal(p, words) for p in (*method.global_prompts, *method.local_prompts))
    images = random_images(backbone, 3)
    whole, _ = method.cosines(method.image_features(images), method.class_weights(WORDS))
    plain = method.similarity(backbone.encode_images(images), method.frozen_classes)
    for prompt in whole.unbind(-1):
        close(backbone.logit_scale * prompt, plain)


# Prompt dropout --------------------------------------------------------------------------------------


def losses_of(method: Any, batch: Batch, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [loss.detach() for loss in method.training_step(batch).values()]


def test_without_dropout_a_step_is_the_same_whatever_is_drawn() -> None:
    backbone = tiny_backbone()
    batch = batch_of(backbone)
    method, dropping = made(backbone, prompt_dropout=0.0), made(backbone)
    one, two = (losses_of(method, batch, seed) for seed in (1, 2))
    assert all(map(torch.equal, one, two))
    drawn = [losses_of(dropping, batch, seed) for seed in range(6)]
    assert len({float(whole) for whole, _ in drawn}) > 1
    assert len({float(local) for _, local in drawn}) == 1 and torch.equal(drawn[0][1], one[1])


@pytest.mark.parametrize(("dropout", "keep"), [(0.0, 4), (0.3, 3), (0.5, 2), (0.75, 1), (1.0, 1)])
def test_each_image_keeps_its_own_prompts_and_all_have_their_turn(dropout: float, keep: int) -> None:
    method = made(tiny_backbone(vision_layers=1, text_layers=1), prompt_dropout=dropout)
    torch.manual_seed(0)
    kept = method._kept(torch.zeros(4000, dtype=torch.long))
    assert ((kept > 0).sum(1) == keep).all() and ((kept == 0) | (kept == 1 / keep)).all()
    torch.testing.assert_close((kept > 0).float().mean(0), torch.full((4,), keep / 4), atol=0.03, rtol=0)


def test_only_kept_prompts_learn() -> None:
    backbone = tiny_backbone()
    method, batch = made(backbone), batch_of(backbone, count=1)
    torch.manual_seed(0)
    kept = method._kept(batch.labels)[0] > 0
    torch.manual_seed(0)
    torch.stack(list(method.training_step(batch).values())).sum().backward()
    learns = method.global_prompts.grad.flatten(1).abs().amax(1) > 0
    assert torch.equal(learns, kept) and int(kept.sum()) == 1
    assert (method.local_prompts.grad.flatten(1).abs().amax(1) > 0).all()
    assert method.local_projection.grad.abs().max() > 0


# Around it -------------------------------------------------------------------------------------------


def test_chunks_change_nothing() -> None:
    logits = []
    for activation_bytes in (1 << 30, 1):
        backbone = tiny_backbone()
        backbone.activation_bytes = activation_bytes
        method, batch = made(backbone), batch_of(backbone)
        assert method.fixed_shapes == (activation_bytes > 1)
        torch.manual_seed(0)
        torch.stack(list(method.training_step(batch).values())).sum().backward()
        logits.append((method.logits(batch.images, method.class_weights(WORDS)), method.local_prompts.grad))
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("top_k", [[], [5, 0], [-1]])
def test_a_local_prompt_needs_a_patch(top_k: list[int]) -> None:
    with pytest.raises(DropleError, match=r"top_k is .*at least 1"):
        made(tiny_backbone(), top_k=top_k)


def test_it_says_where_there_are_fewer_patches() -> None:
    assert any("20 patches; an image has 9" in note for note in made(tiny_backbone()).notes)
    assert not made(tiny_backbone(), top_k="3,9").notes


def test_the_authors_preset_is_taken() -> None:
    given = REGISTRY["gallop"].presets["authors"]
    options, training = PromptLearner("pocket", "gallop", preset="authors")._split_options()
    assert all(options.get(n, getattr(training, n, None)) == value for n, value in given.items())


def test_its_weights_fold_into_an_exported_program(tmp_path: Path) -> None:
    learner = PromptLearner(tiny_checkpoint(), "gallop", epochs=1, device="cpu").fit(
        splits(tmp_path / "colours")
    )
    images = [np.asarray(picture(c, 7).crop((0, 0, 32, 32))) for c in ("red", "green", "blue")]
    probabilities, _ = trace(learner).module()(torch.from_numpy(np.stack(images)))
    assert np.abs(probabilities.numpy() - learner.predict_proba(images)).max() < 1e-5

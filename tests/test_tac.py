"""TAC against loops in float64: clusters, the pre-context and its mask, both losses, the logits, the mean of epochs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from checkpoints import picture, splits, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prompt_methods import by_layer, slow_cross_entropy, slow_logits, slow_text, unit
from tiny import random_images, slow_layer, slow_linear, slow_norm, tiny_backbone
from torch import Tensor

from drople.backbone import Backbone
from drople.cost import trainable_on
from drople.export.classifier import trace
from drople.learner import PromptLearner
from drople.methods import Batch, Progress, Task, make
from drople.methods.tac import MaskedTokens, cluster_centres
from drople.templates import ELEVEN

WORDS = ("cat", "grand piano", "zebra crossing", "okapi", "red", "blue house")
TEMPLATE = "a photo of a {}."
RTOL, ATOL = 1e-5, 2e-5  # float32 against float64, through towers and a logit scale of 14


def made(name: str, backbone: Backbone, words: Sequence[str] = WORDS, **options: Any) -> Any:
    """Learned numbers that are all away from where they start, so that each one counts."""
    torch.manual_seed(5)
    method = make(name, backbone, Task(tuple(words), (TEMPLATE,)), options)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return method


def batch_of(backbone: Backbone, classes: int = len(WORDS), count: int = 3) -> Batch:
    """The plain images have features of their own, so that a loss which mixes up the views shows."""
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(count))
    plain = backbone.encode_images(random_images(backbone, count, seed=8))
    return Batch(random_images(backbone, count), labels, plain)


def close(ours: Tensor, slow: Any) -> None:
    torch.testing.assert_close(ours.detach().double(), torch.as_tensor(slow).double(), rtol=RTOL, atol=ATOL)


# Slow references -------------------------------------------------------------------------------------


def slow_prompts(part: Any) -> Tensor:
    """[depth, C + M, D] of one tower: each centre through the projection, then the layer's own prompts."""
    weight, bias = part.projection.weight.double(), part.projection.bias.double()
    context = [weight @ centre.double() + bias for centre in part.centres]
    return torch.stack([torch.stack([*context, *own.double()]) for own in part.prompts.prompts])


def slow_image(backbone: Backbone, image: Tensor, prompts: dict[int, Tensor], clusters: int) -> Tensor:
    tower = backbone.model.vision_model
    states = tower.embeddings(image[None])[0].double()
    first = len(states)  # the place of the first prompt
    states = slow_norm(tower.pre_layrnorm, torch.cat([states, prompts[0]]))
    look = torch.ones(len(states), len(states)).bool()
    for patch in range(1, first):
        for context in range(first, first + clusters):
            look[patch, context] = False
    for i, layer in enumerate(tower.encoder.layers):
        if i and i in prompts:
            states = torch.cat([states[:first], prompts[i]])
        states, _ = slow_layer(layer, states, look)
    return slow_linear(backbone.model.visual_projection, slow_norm(tower.post_layernorm, states[0]))


def slow_frozen(backbone: Backbone, word: str) -> Tensor:
    sentences = dict.fromkeys([TEMPLATE, *ELEVEN])
    rows = [unit(slow_text(backbone, sentence.format(word))) for sentence in sentences]
    return torch.stack(rows).sum(0) / len(rows)


def slow_centres(rows: Sequence[Tensor], first: Sequence[int], rounds: int = 100) -> tuple[Tensor, list[int]]:
    """Centres and the cluster of each row, from these rows as the first centres; no cluster may run empty."""
    rows, nearest = [unit(row.double()) for row in rows], [-1]
    centres = [rows[n] for n in first]
    for _ in range(rounds):
        before = nearest
        nearest = []
        for row in rows:
            cosines = [float(row @ unit(centre)) for centre in centres]
            nearest.append(cosines.index(max(cosines)))
        if nearest == before:
            break
        for c in range(len(centres)):
            own = [row for row, n in zip(rows, nearest, strict=True) if n == c]
            assert own, "empty"
            centres[c] = unit(torch.stack(own).sum(0) / len(own))
    return torch.stack(centres), nearest


# Against them ----------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    grid=st.integers(1, 3),
    clusters=st.integers(1, 5),
    lengths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    depths=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    classes=st.integers(2, 6),
    drop=st.sampled_from([0.0, 0.3, 0.8]),
    prior=st.booleans(),
)
def test_losses_and_logits_against_loops(
    grid: int,
    clusters: int,
    lengths: tuple[int, int],
    depths: tuple[int, int],
    classes: int,
    drop: float,
    prior: bool,
) -> None:
    backbone = tiny_backbone(text_layers=2, vision_layers=3, image=4 * grid)
    words = WORDS[:classes]
    options: dict[str, Any] = {
        "clusters": clusters,
        "feature_drop": drop,
        "text_depth": depths[0],
        "visual_depth": depths[1],
    }
    options |= {"text_length": lengths[0], "visual_length": lengths[1]}
    method = made("tac", backbone, words, **options)
    batch, used = batch_of(backbone, classes), min(clusters, classes)
    with torch.no_grad():
        text, visual = slow_prompts(method.text_prompts.prompts), slow_prompts(method.visual_prompts.prompts)
        close(method.text_states(), text)
        close(method.visual_prompts(), visual)
        assert text.shape[:2] == (depths[0], used + lengths[0])
        sentences = [f"a photo of a {w}." for w in words]
        seen = [slow_text(backbone, s, by_layer(text), text.shape[1]) for s in sentences]
        frozen = [slow_frozen(backbone, w) for w in words]
        images = [slow_image(backbone, image, by_layer(visual), used) for image in batch.images]

        torch.manual_seed(3)
        # What is left of a number that does not drop is larger, so that its mean stays.
        kept = [F.dropout(torch.ones(batch.frozen.shape), drop).double() for _ in range(2)]
        thinned = [z * k for z, k in zip(images, kept[0], strict=True)]
        plain = [z.double() * k for z, k in zip(batch.frozen, kept[1], strict=True)]
        method.log_prior = torch.arange(1.0, classes + 1).log() if prior else None
        added = torch.zeros(classes) if method.log_prior is None else method.log_prior
        logits = [slow_logits(backbone, z, seen) + added for z in thinned]
        apart = [(unit(a) - unit(b)).abs() for a, b in zip(seen, frozen, strict=True)]
        image_apart = [(unit(a) - unit(b)).abs() for a, b in zip(thinned, plain, strict=True)]

    torch.manual_seed(3)
    losses = method.training_step(batch)
    assert list(losses) == ["cross_entropy", "pull_text", "pull_image"]
    close(losses["cross_entropy"], slow_cross_entropy(logits, batch.labels))
    close(losses["pull_text"], 20 * torch.stack(apart).mean())
    close(losses["pull_image"], 25 * torch.stack(image_apart).mean())

    method.eval()
    found = method.logits(batch.images, method.class_weights(words))
    close(found, torch.stack([slow_logits(backbone, z, seen) for z in images]))


def test_every_learned_number_gets_its_gradient() -> None:
    backbone = tiny_backbone()
    method = made("tac", backbone)
    torch.stack(list(method.training_step(batch_of(backbone)).values())).sum().backward()
    assert all(p.grad is not None and p.grad.abs().amax() > 0 for p in method.parameters())


# The mask --------------------------------------------------------------------------------------------


def tokens_of(count: int, patches: int, clusters: int, length: int) -> MaskedTokens:
    places = 1 + patches + clusters + length
    real = torch.ones(count, places, dtype=torch.bool)
    return MaskedTokens(
        states=torch.randn(count, places, 8),
        anchor=torch.zeros(count, dtype=torch.long),
        real=real,
        target=real & (torch.arange(places) > 0),
        slots=F.pad(torch.eye(clusters + length), (0, 0, 1 + patches, 0)),
        stays=(torch.arange(places) < 1 + patches).float()[:, None],
        clusters=clusters,
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 3),
    patches=st.integers(1, 9),
    clusters=st.integers(1, 5),
    length=st.integers(1, 3),
    how=st.sampled_from(["plain", "hide", "remove", "both"]),
    seed=st.integers(0, 1000),
)
def test_patches_alone_do_not_see_the_pre_context(
    count: int, patches: int, clusters: int, length: int, how: str, seed: int
) -> None:
    torch.manual_seed(seed)
    tokens: Any = tokens_of(count, patches, clusters, length)
    kind = ["cls", *["patch"] * patches, *["context"] * clusters, *["prompt"] * length]
    kinds = [kind] * count
    if how in ("remove", "both"):
        kept = ~tokens.target | (torch.rand(tokens.target.shape) < 0.6)
        tokens = tokens.keep(kept)
        kinds = [[k for k, stays in zip(kind, row, strict=True) if stays] for row in kept.tolist()]
    if how in ("hide", "both"):
        tokens = replace(tokens, hidden=tokens.target & (torch.rand(tokens.target.shape) < 0.4))
    mask = tokens.visible(False)
    assert isinstance(tokens, MaskedTokens) and mask.stride(-2) % 8 == 0
    mask = mask.expand(count, 1, *mask.shape[2:])
    for n, own in enumerate(kinds):
        for j, query in enumerate(own):
            for k, key in enumerate(own):
                hidden = tokens.hidden is not None and bool(tokens.hidden[n, k]) and j != k
                unseen = hidden or (query == "patch" and key == "context")
                assert float(mask[n, 0, j, k]) == (-math.inf if unseen else 0.0)
        assert bool(mask[n, 0].isneginf().all(-1).logical_not().all()), "a token that sees nothing is NaN"
        assert bool(mask[n, 0, : len(own), len(own) :].isneginf().all()), "padding is seen by none"


def test_the_first_layer_keeps_the_pre_context_from_the_patches() -> None:
    """What leaves the first layer: other centres change cls and the learnable prompts, and no patch."""
    backbone = tiny_backbone()
    method = made("tac", backbone).eval()
    images, left = random_images(backbone, 2), []

    class Kept:
        def reaches(self, layer: int) -> bool:
            return layer == 0

        def watch(self, layer: int, tokens: Any) -> None:
            return None

        def drop(self, layer: int, tokens: Any) -> Any:
            if layer == 0:
                left.append(tokens.states)
            return tokens

    for _ in range(2):
        method.encode_images(images, Kept())
        with torch.no_grad():
            method.visual_prompts.prompts.centres.add_(1.0)
    before, after = left
    patches = backbone.patch_grid**2
    same = (before == after).flatten(2).all(-1)
    assert bool(same[:, 1 : 1 + patches].all()) and not bool(same[:, 0].any())
    assert not bool(same[:, 1 + patches :].any())


# Clusters --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), share=st.floats(0, 1), width=st.integers(2, 12), seed=st.integers(0, 10_000))
def test_clusters_against_loops_and_their_invariants(rows: int, share: float, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, width, generator=generator) + torch.randn(width, generator=generator)
    count = max(1, round(share * rows))
    torch.manual_seed(seed)
    first = torch.randperm(rows)[:count].tolist()
    torch.manual_seed(seed)
    centres = cluster_centres(features, count)
    assert centres.shape == (count, width) and centres.dtype == torch.float32
    torch.testing.assert_close(centres.norm(dim=-1), torch.ones(count))
    unit_rows = F.normalize(features, dim=-1)
    nearest = (unit_rows @ centres.T).argmax(1)
    assert set(nearest.tolist()) == set(range(count)), "no cluster is empty"
    for c in range(count):
        close(centres[c], unit(unit_rows[nearest == c].double().sum(0)))
    try:
        wanted, clusters = slow_centres(list(features), first)
    except AssertionError:
        return  # one ran empty on the way: there the loops know no more
    assert clusters == nearest.tolist()
    close(centres, wanted)
    start = (unit_rows @ unit_rows[first].T).amax(1).sum()
    assert float((unit_rows @ centres.T).amax(1).sum()) >= float(start) - 1e-4, "no farther than it began"
    torch.manual_seed(seed)
    rescaled = features * (0.1 + torch.rand(rows, 1, generator=generator))
    close(cluster_centres(rescaled, count), centres)


def test_a_cluster_of_each_class_is_the_class_itself() -> None:
    features = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    found = cluster_centres(features, 6)
    cosines = F.normalize(features, dim=-1) @ found.T
    torch.testing.assert_close(cosines.amax(1), torch.ones(6))
    assert sorted(cosines.argmax(1).tolist()) == list(range(6))


def test_clusters_far_apart_are_found_even_from_a_bad_start() -> None:
    """Copies leave clusters empty at the start: an empty one takes the row that is farthest."""
    corners = torch.eye(4)
    features = corners.repeat_interleave(torch.tensor([20, 1, 1, 1]), 0)
    for seed in range(20):
        torch.manual_seed(seed)
        found = cluster_centres(features, 4)
        torch.testing.assert_close((corners @ found.T).amax(1), torch.ones(4))
    assert bool(cluster_centres(torch.ones(5, 3), 4).isfinite().all())
    assert bool(cluster_centres(torch.zeros(5, 3), 4).isfinite().all())


def test_centres_are_those_of_the_frozen_classes_and_stay() -> None:
    backbone = tiny_backbone()
    torch.manual_seed(1)
    method: Any = make("tac", backbone, Task(WORDS, (TEMPLATE,)), {"clusters": 3})
    parts = method.text_prompts.prompts, method.visual_prompts.prompts
    torch.manual_seed(1)
    wanted = cluster_centres(torch.stack([slow_frozen(backbone, w).detach() for w in WORDS]), 3)
    for part in parts:
        close(part.centres, wanted)
    optimizer = torch.optim.AdamW(method.parameter_groups(0.1), lr=0.1)
    torch.stack(list(method.training_step(batch_of(backbone)).values())).sum().backward()
    optimizer.step()
    method.eval().class_features(("heron", "lamp"))
    for part in parts:
        close(part.centres, wanted)


def test_few_classes_are_clusters_of_their_own_and_it_is_said() -> None:
    method: Any = make("tac", tiny_backbone(), Task(("a", "b"), (TEMPLATE,)), {})
    assert method.clusters == 2 and any("5 clusters" in note and "2 classes" in note for note in method.notes)
    method = make("tac", tiny_backbone(), Task(WORDS, (TEMPLATE,)), {})
    assert method.clusters == 5 and not any("clusters" in note for note in method.notes)


# The run ---------------------------------------------------------------------------------------------


def test_all_epochs_count_the_same() -> None:
    """In the end it predicts as with the mean of the parameters at the ends of the epochs."""
    backbone = tiny_backbone()
    method, epochs, ends = made("tac", backbone), 4, []
    for step in range(3 * epochs):
        method.advance(Progress(step, 3 * epochs, step // 3, epochs))
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if step % 3 == 2:
            ends.append({n: p.detach().clone() for n, p in method.named_parameters()})
    other = made("tac", backbone)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(torch.stack([end[name] for end in ends]).mean(0))
    images = random_images(backbone, 2)
    for part in (method.eval(), other.eval()):
        part.found = part.class_features(WORDS), part.image_features(images)
    for ours, wanted in zip(method.found, other.found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_saved_run_brings_its_centres() -> None:
    backbone = tiny_backbone()
    method = made("tac", backbone, clusters=3).eval()
    for seed in range(4):
        torch.manual_seed(100 + seed)
        again: Any = make("tac", backbone, Task(WORDS, (TEMPLATE,)), {"clusters": 3})
        again.load_learned(method.state_dict())
        again.eval()
        for words in (WORDS, ("heron", "lamp")):
            assert torch.equal(again.class_features(words), method.class_features(words))


def test_features_drop_in_training_alone() -> None:
    backbone = tiny_backbone()
    method, images = made("tac", backbone, feature_drop=0.5), random_images(backbone, 20)
    whole = method.eval().image_features(images)
    assert torch.equal(whole, method.image_features(images))
    thinned = method.train().image_features(images)
    dropped = thinned == 0
    torch.testing.assert_close(thinned[~dropped], 2 * whole[~dropped])
    assert abs(float(dropped.float().mean()) - 0.5) < 0.1


def test_wrapped_without_a_drop_it_is_the_plain_method() -> None:
    backbone = tiny_backbone()
    batch, plain = batch_of(backbone), made("tac", backbone, feature_drop=0.0)
    wanted = plain.training_step(batch)
    for p, same in ((0.0, True), (0.9, False)):
        for operation in ("hide", "remove"):
            options: dict[str, Any] = {"feature_drop": 0.0, "p_min": p, "p_max": p, "operation": operation}
            wrapped = made("tac+drople", backbone, **options)
            wrapped.load_state_dict(plain.state_dict(), strict=False)
            got = wrapped.training_step(batch)
            assert set(got) > set(wanted)
            for name in wanted:
                apart = float((got[name] - wanted[name]).detach())
                assert math.isfinite(apart) and (abs(apart) < 1e-4) == same


def test_chunks_of_classes_change_nothing() -> None:
    found = []
    for activation_bytes in (1 << 30, 1):
        backbone = tiny_backbone()
        backbone.activation_bytes = activation_bytes
        method = made("tac", backbone, feature_drop=0.0)
        torch.stack(list(method.training_step(batch_of(backbone)).values())).sum().backward()
        found.append([p.grad for p in method.parameters()])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-5)


def test_it_becomes_an_exported_program(tmp_path: Path) -> None:
    learner = PromptLearner(tiny_checkpoint(), "tac", epochs=1, device="cpu").fit(
        splits(tmp_path / "colours")
    )
    images = [np.asarray(picture(c, 7).crop((0, 0, 32, 32))) for c in ("red", "green", "blue")]
    probabilities, _ = trace(learner).module()(torch.from_numpy(np.stack(images)))
    assert np.abs(probabilities.numpy() - learner.predict_proba(images)).max() < 1e-5


def test_what_it_learns_on_vit_b_16() -> None:
    """12 layers of 5 prompts in both towers, and a linear map of the centres into each."""
    projections = 512 * 512 + 512 + 512 * 768 + 768
    assert trainable_on("tac", "vit-b-16") == 12 * 5 * (512 + 768) + projections == 733_440


def test_the_authors_settings_are_taken() -> None:
    options, training = PromptLearner("pocket", "tac", preset="authors")._split_options()
    assert not options and (training.optimizer, training.lr) == ("sgd", 2.5e-3)
    # 20 epochs of 8 images in 4 views each.
    assert training.batch_size == 8 * 4 and training.epochs == 20 * 4 and training.crop_scale == 0.4
    options, training = PromptLearner("pocket", "tac", preset="authors-cross-dataset")._split_options()
    assert options == {"text_length": 10, "visual_length": 10} and training.epochs == 5 * 4

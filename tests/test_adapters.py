"""Adapters and probes against slow references: float64 loops over one image and one class at a time."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import contents, splits, tiny_checkpoint
from tiny import random_images, slow_layer, slow_linear, slow_norm, tiny_backbone
from torch import Tensor

from drople.backbone import Backbone
from drople.cache_model import ALPHAS, BETAS
from drople.data.images import normalise
from drople.errors import DropleError
from drople.learner import PromptLearner
from drople.lora import LoRA
from drople.methods import Batch, Method, Progress, Task, make
from drople.methods.adapter import CacheAdapter
from drople.methods.base import PromptMethod, TrainingData, frozen_classes
from drople.methods.drople import DeepPromptOptions, DeepPrompts
from drople.progress import Quiet
from drople.templates import ELEVEN

WORDS = ("cat", "golden retriever", "soup bowl")
TASK = Task(WORDS, ("a photo of a {}.",))
LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 2])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def training_data(backbone: Backbone) -> TrainingData:
    side = backbone.pixels.size + 2
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (len(LABELS), 3, side, side), dtype=torch.uint8, generator=generator)
    return TrainingData(images, LABELS, backbone.encode_images(random_images(backbone, len(LABELS))))


def ready(name: str, **options: Any) -> tuple[Method, TrainingData, Batch]:
    """A method shown its training images and moved off its starting point, and a batch."""
    backbone = tiny_backbone()
    method = make(name, backbone, TASK, options)
    data = training_data(backbone)
    method.prepare(data)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images = random_images(backbone, 4, seed=5)
    return method.eval(), data, Batch(images, torch.tensor([2, 0, 1, 1]), data.frozen[:4])


def unit(x: Tensor) -> Tensor:
    return x.double() / x.double().square().sum().sqrt()


def slow_cosine_logits(method: Method, features: Tensor, classes: Tensor) -> Tensor:
    scale = method.backbone.logit_scale
    rows = [[scale * float(unit(f) @ unit(w)) for w in classes] for f in features]
    return torch.tensor(rows, dtype=torch.float64)


def slow_cross_entropy(logits: Tensor, labels: Tensor) -> float:
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        top = max(row)
        total -= row[label] - top - math.log(sum(math.exp(x - top) for x in row))
    return total / len(labels)


def slow_votes(f: Tensor, keys: Tensor, labels: Tensor, alpha: float, beta: float) -> list[float]:
    votes = [0.0] * len(WORDS)
    for key, label in zip(keys.double(), labels.tolist(), strict=True):
        votes[label] += alpha * math.exp(-beta * (1 - float(f.double() @ key)))
    return votes


def frozen(method: Method, images: Tensor) -> tuple[Tensor, Tensor]:
    """Frozen features of images and of the classes."""
    sentences = [f"a photo of a {word}." for word in WORDS]
    backbone = method.backbone
    return backbone.encode_images(images), backbone.encode_text(backbone.sentences(sentences))


def check(method: Method, batch: Batch, logits: Tensor, losses: dict[str, float]) -> None:
    """The method's own logits and losses are these; its losses reach all it learns."""
    torch.testing.assert_close(
        method.logits(batch.images, method.class_weights(WORDS)).double(), logits, atol=2e-4, rtol=1e-4
    )
    found = method.training_step(batch)
    assert {name: float(loss.detach()) for name, loss in found.items()} == pytest.approx(losses, abs=2e-4)
    torch.stack(list(found.values())).sum().backward()
    for name, parameter in method.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().max() > 0), name


# On frozen features --------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["zero", "text"])
def test_linear_probe(start: str) -> None:
    method, _, batch = ready("linear-probe", start=start)
    features, classes = frozen(method, batch.images)
    weight, bias = (p.detach().double() for p in method.parameters())
    scale = method.backbone.logit_scale
    rows = [[scale * float(unit(f) @ w + b) for w, b in zip(weight, bias, strict=True)] for f in features]
    logits = torch.tensor(rows, dtype=torch.float64)
    check(method, batch, logits, {"cross_entropy": slow_cross_entropy(logits, batch.labels)})
    # Some of the training classes in another order are its own; with a stranger among them it is zero-shot.
    turned = method.logits(batch.images, method.class_weights(WORDS[::-1][:2]))
    torch.testing.assert_close(turned.double(), logits[:, [2, 1]], atol=2e-4, rtol=1e-4)
    stranger = method.logits(batch.images, method.class_weights(("cat", "zebra")))
    zero_shot = slow_cosine_logits(method, features, classes[:1])
    torch.testing.assert_close(stranger[:, :1].double(), zero_shot, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("start", ["zero", "text"])
def test_where_a_probe_starts(start: str) -> None:
    backbone = tiny_backbone()
    method = make("linear-probe", backbone, TASK, {"start": start})
    images = random_images(backbone, 3)
    features, classes = frozen(method, images)
    zero_shot = slow_cosine_logits(method, features, classes)
    expected = zero_shot if start == "text" else torch.zeros_like(zero_shot)
    found = method.logits(images, method.class_weights(WORDS))
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


def test_clip_adapter() -> None:
    method, _, batch = ready("clip-adapter", ratio=0.3)
    features, classes = frozen(method, batch.images)
    down, up = (p.detach().double() for p in method.parameters())
    assert down.shape == (5, 20), "a quarter of the width"
    adapted = []
    for f in features.double():
        hidden = [max(0.0, float(row @ f)) for row in down]
        out = [max(0.0, sum(float(w) * h for w, h in zip(row, hidden, strict=True))) for row in up]
        adapted.append(0.3 * torch.tensor(out, dtype=torch.float64) + 0.7 * f)
    logits = slow_cosine_logits(method, torch.stack(adapted), classes)
    check(method, batch, logits, {"cross_entropy": slow_cross_entropy(logits, batch.labels)})


@pytest.mark.parametrize("name", ["tip-adapter", "tip-adapter-f"])
def test_tip_adapter(name: str) -> None:
    method, data, batch = ready(name, cache_views=0, cache_alpha=2.0, cache_beta=3.0)
    features, classes = frozen(method, batch.images)
    keys = torch.stack([unit(f) for f in data.frozen])
    learned = list(method.parameters())
    if learned:
        keys = learned[0].detach().double()
        assert keys.shape == (len(LABELS), 20) and method.trainable == keys.numel()
    votes = [slow_votes(unit(f), keys, LABELS, 2.0, 3.0) for f in features]
    logits = slow_cosine_logits(method, features, classes) + torch.tensor(votes, dtype=torch.float64)
    if learned:
        check(method, batch, logits, {"cross_entropy": slow_cross_entropy(logits, batch.labels)})
    found = method.logits(batch.images, method.class_weights(WORDS)).double()
    torch.testing.assert_close(found, logits, atol=2e-4, rtol=1e-4)
    # A class that the cache has never seen has its zero-shot logit; those it knows keep their votes.
    mixed = method.logits(batch.images, method.class_weights(("zebra", "soup bowl"))).double()
    zebra = method.backbone.encode_text(method.backbone.sentences(["a photo of a zebra."]))
    torch.testing.assert_close(
        mixed[:, 0], slow_cosine_logits(method, features, zebra)[:, 0], atol=2e-4, rtol=1e-4
    )
    torch.testing.assert_close(mixed[:, 1], logits[:, 2], atol=2e-4, rtol=1e-4)


def test_keys_are_means_over_views_and_the_same_every_time() -> None:
    keys = [ready("tip-adapter", cache_views=views)[0].state_dict()["cache.keys"] for views in (3, 3, 1)]
    assert torch.equal(keys[0], keys[1]) and not torch.allclose(keys[0], keys[2])
    torch.testing.assert_close(keys[0].norm(dim=1), torch.ones(len(LABELS)))


def test_alpha_and_beta_are_those_best_on_validation_images() -> None:
    method, _, _ = ready("tip-adapter", cache_views=0, largest_alpha=8.0, largest_beta=9.0)
    backbone = method.backbone
    images, labels = random_images(backbone, 24, seed=8), torch.arange(24) % 3

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield images[:10], labels[:10]
        yield images[10:], labels[10:]

    def accuracy() -> float:
        guess = method.logits(images, method.class_weights(WORDS)).argmax(1)
        return float((guess == labels).double().mean())

    cache: Any = method.get_submodule("cache")
    before = accuracy()
    method.select(batches)
    found, chosen = accuracy(), (float(cache.alpha), float(cache.beta))
    assert found > before, "the draw of images leaves nothing to search"
    best = 0.0
    for beta in [0.1 + 8.9 * n / BETAS for n in range(0, BETAS, 5)]:
        for alpha in [0.1 + 7.9 * n / ALPHAS for n in range(ALPHAS)]:
            cache.alpha.fill_(alpha)
            cache.beta.fill_(beta)
            best = max(best, accuracy())
    assert found >= best
    cache.alpha.fill_(chosen[0])
    cache.beta.fill_(chosen[1])
    method.select(batches)
    assert (float(cache.alpha), float(cache.beta)) == pytest.approx(chosen), "a tie moves nothing"
    method.select(lambda: iter(()))


@pytest.mark.parametrize("name", ["dac-v", "dac-vt"])
def test_domain_aligned_clip(name: str) -> None:
    method, data, batch = ready(name, cache_views=0, contrast=0.5, cache_alpha=2.0, cache_beta=3.0)
    features, classes = frozen(method, batch.images)
    state = {n: t.double() for n, t in method.state_dict().items()}

    def aligned(f: Tensor) -> Tensor:
        return unit(torch.stack([row @ unit(f) for row in state["adapter"]]))

    text = torch.stack([unit(w) for w in classes])
    if name == "dac-vt":
        text = text + state["modulation"]
    inter = slow_cosine_logits(method, features, text)
    keys = torch.stack([aligned(f) for f in data.frozen])
    votes = [slow_votes(aligned(f), keys, LABELS, 2.0, 3.0) for f in features]
    others = [*data.frozen, *batch.frozen]
    of = [*LABELS.tolist(), *batch.labels.tolist()]
    intra = 0.0
    for f, label in zip(features, batch.labels.tolist(), strict=True):
        weights = [math.exp(float(aligned(f) @ aligned(k)) / 0.5) for k in others]
        alike = sum(w for w, y in zip(weights, of, strict=True) if y == label)
        intra -= math.log(alike / sum(weights)) / len(features)
    losses = {"intra_modal": intra}
    if name == "dac-vt":
        losses["inter_modal"] = slow_cross_entropy(inter, batch.labels)
    check(method, batch, inter + torch.tensor(votes, dtype=torch.float64), losses)
    zebra = method.backbone.encode_text(method.backbone.sentences(["a photo of a zebra."]))
    mixed = method.logits(batch.images, method.class_weights(("cat", "zebra")))[:, 1:].double()
    torch.testing.assert_close(mixed, slow_cosine_logits(method, features, zebra), atol=2e-4, rtol=1e-4)


def test_linear_feature_alignment() -> None:
    method, _, batch = ready("lfa", neighbours=2, margin_scale=3.0)
    features, classes = frozen(method, batch.images)
    w = method.state_dict()["map"].double()
    mapped = torch.stack([unit(unit(f) @ w) for f in features])
    texts = torch.stack([unit(c) for c in classes])
    total = 0.0
    for f, label in zip(mapped, batch.labels.tolist(), strict=True):
        distance = [float((f - p).norm()) for p in texts]
        for k in sorted(range(3), key=lambda k: distance[k])[:2]:
            margin = (1 - float(texts[label] @ texts[k])) / 3
            total += max(0.0, distance[label] + margin - distance[k]) / (2 * len(mapped))
    check(method, batch, slow_cosine_logits(method, mapped, texts), {"reranking": total})


def test_alignment_starts_between_procrustes_and_the_identity() -> None:
    backbone = tiny_backbone()
    method = make("lfa", backbone, TASK, {})
    turn = torch.linalg.qr(torch.randn(20, 20)).Q
    labels = torch.arange(60) % 3
    classes = F.normalize(method.frozen_classes, dim=-1)
    # Images that are their class's text, turned: Procrustes alone answers all of them.
    images = classes[labels] @ turn.T + 0.02 * torch.randn(60, 20)
    method.prepare(TrainingData(torch.zeros(60, 3, 4, 4, dtype=torch.uint8), labels, images))
    found = method.state_dict()["map"]
    source, target = F.normalize(images, dim=-1), classes[labels]
    product = source.double().T @ target.double()
    # Three classes leave most of the rotation free: it is known by being one, and by its trace being largest.
    rotations = []
    for beta in (n / 24 for n in range(24)):
        rotation = (found.double() - beta * torch.eye(20)) / (1 - beta)
        if torch.allclose(rotation @ rotation.T, torch.eye(20).double(), atol=1e-4):
            rotations.append(rotation)
    assert rotations, "no mixture of a rotation and the identity"
    largest = float(torch.linalg.svdvals(product).sum())
    assert float((rotations[0] * product).sum()) == pytest.approx(largest, rel=1e-4)
    assert ((source @ found @ classes.T).argmax(1) == labels).all()
    assert not ((source @ classes.T).argmax(1) == labels).all(), "nothing was to be aligned"


def test_template_ensemble() -> None:
    backbone = tiny_backbone()
    method = make("zero-shot-ensemble", backbone, Task(WORDS, ("a {} drawn by a child.",)), {})
    sentences = ["a {} drawn by a child.", *ELEVEN]
    for k, word in enumerate(WORDS):
        rows = [unit(backbone.encode_text(backbone.sentences([s.format(word)]))[0]) for s in sentences]
        expected = unit(torch.stack(rows).mean(0))
        torch.testing.assert_close(method.class_weights(WORDS)[k].double(), expected, atol=1e-5, rtol=1e-4)


# Inside the towers ---------------------------------------------------------------------------------


def test_clip_lora_is_a_clip_of_other_weights() -> None:
    method, _, batch = ready("clip-lora", rank=3, lora_alpha=2.0, lora_dropout=0.0)
    backbone, merged = method.backbone, copy.deepcopy(method.backbone)
    state = method.state_dict()
    towers = {"vision": merged.model.vision_model, "text": merged.model.text_model}
    changed = 0
    for side, tower in towers.items():
        for i, layer in enumerate(tower.encoder.layers):
            for n, p in enumerate("qkv"):
                a, b = state[f"{side}.a"][i, n].double(), state[f"{side}.b"][i, n].double()
                weight = layer.get_submodule(f"self_attn.{p}_proj").weight
                weight.data.copy_(weight.double() + 2 / math.sqrt(3) * b @ a)
                changed += 1
    assert changed == 3 * (backbone.vision_layers + backbone.text_layers)
    texts = merged.encode_text(merged.sentences([f"a photo of a {word}." for word in WORDS]))
    logits = slow_cosine_logits(method, merged.encode_images(batch.images), texts)
    check(method, batch, logits, {"cross_entropy": slow_cross_entropy(logits, batch.labels)})


def test_dropout_of_low_rank_updates() -> None:
    lora = LoRA(24, [1], rank=2, alpha=1.0, on="q", dropout=0.4)
    torch.nn.init.normal_(lora.b)
    lora.eval()
    whole = lora(torch.float32)[1][:24]
    lora.train()
    drawn = torch.stack([lora(torch.float32)[1][:24] for _ in range(400)])
    gone = (drawn == 0).all(1)  # an input feature is there for all outputs, or for none
    assert float(gone.double().mean()) == pytest.approx(0.4, abs=0.02)
    kept = drawn[0][:, ~gone[0]]
    torch.testing.assert_close(kept, (whole / 0.6)[:, ~gone[0]], atol=1e-5, rtol=1e-4)


def slow_tower(backbone: Backbone, method: Method, side: str, states: Tensor, causal: bool) -> Tensor:
    """One sequence [L, D] through a tower with MMA's adapters, layer by layer."""
    tower = backbone.model.vision_model if side == "vision" else backbone.model.text_model
    layers, length = tower.encoder.layers, len(states)
    look = torch.ones(length, length).tril().bool() if causal else torch.ones(length, length).bool()
    count, scale = len(method.get_submodule("shared")), method.options.adapter_scale  # type: ignore[arg-type]
    for i, layer in enumerate(layers):
        out, _ = slow_layer(layer, states, look)
        n = i - (len(layers) - count)
        if n >= 0:
            parts = [method.get_submodule(f"{path}.{n}") for path in (f"{side}.down", "shared", f"{side}.up")]
            x = slow_norm(layer.layer_norm1, states)
            x = slow_linear(parts[0], x).clamp_min(0)  # type: ignore[arg-type]
            x = slow_linear(parts[1], x).clamp_min(0)  # type: ignore[arg-type]
            out = out + scale * slow_linear(parts[2], x)  # type: ignore[arg-type]
        states = out
    return states


def test_multi_modal_adapter() -> None:
    method, _, batch = ready("mma", adapter_layers=2, adapter_dim=6, adapter_scale=0.3)
    backbone = method.backbone
    vision, text = backbone.model.vision_model, backbone.model.text_model
    images = []
    for pixels in batch.images:
        states = slow_norm(vision.pre_layrnorm, vision.embeddings(pixels[None])[0].double())
        last = slow_tower(backbone, method, "vision", states, causal=False)[0]
        images.append(slow_linear(backbone.model.visual_projection, slow_norm(vision.post_layernorm, last)))
    classes = []
    for word in WORDS:
        one = backbone.sentences([f"a photo of a {word}."])
        last = slow_tower(backbone, method, "text", one.base[0].double(), causal=True)[int(one.anchor)]
        classes.append(slow_linear(backbone.model.text_projection, slow_norm(text.final_layer_norm, last)))
    with torch.no_grad():
        logits = slow_cosine_logits(method, torch.stack(images), torch.stack(classes))
    check(method, batch, logits, {"cross_entropy": slow_cross_entropy(logits, batch.labels)})
    without = backbone.encode_images(batch.images)
    assert not torch.allclose(without, method.image_features(batch.images), atol=1e-3)


def test_the_adapters_gradient_is_that_of_scale_one() -> None:
    """Forward s times, backward once; what flows on to the layer's input is s times it."""
    method, _, _ = ready("mma", adapter_layers=1, adapter_dim=6, adapter_scale=0.01)
    tower: Any = method.get_submodule("vision")
    states = torch.randn(2, 5, 32, requires_grad=True)
    up = tower.up[0].weight

    def gradients() -> tuple[Tensor, ...]:
        added = tower(3, states)
        return torch.autograd.grad(added.square().sum() / added.detach().norm(), (up, states))

    small, tower.scale = gradients(), 1.0
    whole = gradients()
    torch.testing.assert_close(small[0], whole[0])
    torch.testing.assert_close(small[1], 0.01 * whole[1])
    assert tower(2, states) is None


@pytest.mark.parametrize("side", ["vision", "text"])
def test_what_the_walk_adds_to_a_layer(side: str) -> None:
    """`adapt` sees each layer's input and what it returns is added to the output, chunked text or not."""
    backbone = tiny_backbone()
    asked: list[tuple[int, Tensor]] = []

    def adapt(layer: int, states: Tensor) -> Tensor | None:
        asked.append((layer, states))
        return states.flip(-1) if layer == 1 else None

    def encode(**given: Any) -> Tensor:
        if side == "vision":
            return backbone.encode_images(random_images(backbone, 2), **given)
        return backbone.encode_text(backbone.sentences(["a cat", "two golden retrievers"]), **given)

    layers: list[Any] = backbone.vision if side == "vision" else backbone.text
    found = encode(adapt=adapt)
    assert [layer for layer, _ in asked] == list(range(len(layers)))
    backbone.activation_bytes = 1
    torch.testing.assert_close(encode(adapt=adapt), found)
    plain = layers[1]
    layers[1] = lambda states, *given: plain(states, *given) + states.flip(-1)
    expected = encode()
    layers[1] = plain
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, encode())


# All of them ---------------------------------------------------------------------------------------

ALL = [
    "linear-probe",
    "clip-adapter",
    "tip-adapter",
    "tip-adapter-f",
    "dac-v",
    "dac-vt",
    "lfa",
    "clip-lora",
    "mma",
]


@pytest.mark.parametrize("name", ALL)
def test_what_was_learned_travels(name: str) -> None:
    method, _, batch = ready(name)
    again = make(name, tiny_backbone(), TASK, {}).eval()
    again.load_learned({n: t.clone() for n, t in method.state_dict().items()})
    for words in (WORDS, ("cat", "zebra", "okapi")):
        one, other = (m.logits(batch.images, m.class_weights(words)) for m in (method, again))
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("tip-adapter", "dac-v", "lfa")])
def test_a_long_tail_enters_the_loss(name: str) -> None:
    method, _, batch = ready(name)
    plain = sum(float(loss.detach()) for loss in method.training_step(batch).values())
    method.log_prior = torch.tensor([0.9, 0.05, 0.05]).log()
    assert sum(float(loss.detach()) for loss in method.training_step(batch).values()) != pytest.approx(plain)


def test_options_have_help() -> None:
    for name in ALL:
        for field in dataclasses.fields(type(make(name, tiny_backbone(), TASK, {}).options)):
            assert field.metadata["help"]


# On DroPLe's prompts -------------------------------------------------------------------------------

ON_PROMPTS = ["tip-adapter", "tip-adapter-f", "dac-v", "dac-vt"]


def on_prompts(name: str, **options: Any) -> tuple[Any, TrainingData, Batch]:
    return ready(f"{name}+drople", **options)


def prompts_of(method: Method) -> PromptMethod:
    assert isinstance(method, CacheAdapter) and method.prompts is not None
    return method.prompts


@pytest.mark.parametrize("name", ON_PROMPTS)
def test_with_prompts_the_features_are_the_prompted_ones(name: str) -> None:
    method, _, batch = on_prompts(name)
    prompts = prompts_of(method)
    images = prompts.image_features(batch.images)
    torch.testing.assert_close(method.image_features(batch.images), images)
    assert not torch.allclose(images, method.backbone.encode_images(batch.images), atol=1e-3)
    for words in (WORDS, ("zebra", "okapi")):
        own = F.normalize(prompts.class_features(words), dim=-1)
        if name == "dac-vt":
            own = F.normalize(own + method.seen(words) @ method.modulation, dim=-1)
        torch.testing.assert_close(method.class_weights(words)[:, : own.shape[1]], own)
    # A class that the cache knows nothing of gets what the prompts alone say of it.
    strangers = ("zebra", "okapi")
    alone = prompts.logits(batch.images, prompts.class_weights(strangers))
    torch.testing.assert_close(method.logits(batch.images, method.class_weights(strangers)), alone)


@pytest.mark.parametrize("name", ON_PROMPTS)
def test_one_pass_trains_prompts_and_adapter(name: str) -> None:
    """All of DroPLe's losses as they are without an adapter, and the adapter's own on the same features."""
    method, _, batch = on_prompts(name)
    prompts = prompts_of(method)
    for each in (method, prompts):
        each.advance(Progress(1, 10, 0, 1))
    torch.manual_seed(7)
    alone = {n: float(loss.detach()) for n, loss in prompts.training_step(batch).items()}
    torch.manual_seed(7)
    with torch.no_grad():
        branches = prompts.forward_branches(batch)
    torch.manual_seed(7)
    joint = method.training_step(batch)
    assert alone == {n: float(loss.detach()) for n, loss in joint.items() if not n.startswith("adapter_")}
    assert {"cross_entropy", "residual_entropy_visual", "residual_entropy_text", "alignment"} <= set(alone)
    cache = method.cache
    own: dict[str, float] = {}
    if name == "tip-adapter-f":
        logits = slow_cosine_logits(method, branches.images, branches.classes)
        for row, f in zip(logits, branches.images, strict=True):
            votes = slow_votes(
                unit(f), cache.keys.detach(), cache.labels, float(cache.alpha), float(cache.beta)
            )
            row += torch.tensor(votes, dtype=torch.float64)
        own["adapter_cross_entropy"] = slow_cross_entropy(logits, batch.labels)
    if name in ("dac-v", "dac-vt"):
        adapter = method.adapter.detach().double()
        keys = [unit(adapter @ unit(key)) for key in cache.keys]
        total = 0.0
        for f, label in zip(branches.images, batch.labels.tolist(), strict=True):
            close = [math.exp(float(unit(adapter @ unit(f)) @ key) / 0.1) for key in keys]
            alike = [c for c, of in zip(close, cache.labels.tolist(), strict=True) if of == label]
            total -= math.log(sum(alike) / sum(close)) / len(batch.labels)
        own["adapter_intra_modal"] = total
    if name == "dac-vt":
        rows = zip(branches.classes, method.modulation.detach().double(), strict=True)
        text = torch.stack([unit(w) + r for w, r in rows])
        logits = slow_cosine_logits(method, branches.images, text)
        own["adapter_inter_modal"] = slow_cross_entropy(logits, batch.labels)
    found = {n: float(loss.detach()) for n, loss in joint.items() if n.startswith("adapter_")}
    assert found == pytest.approx(own, abs=2e-4)
    torch.stack(list(joint.values())).sum().backward()
    for label, parameter in method.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().max() > 0), label
    assert {"lambda", "drop_rate_vision", "drop_rate_text", "accuracy"} <= set(method.monitor)


@pytest.mark.parametrize("views", [0, 2])
@pytest.mark.parametrize("name", ON_PROMPTS)
def test_a_cache_that_does_not_learn_is_built_on_what_was_learned(name: str, views: int) -> None:
    method, data, _ = on_prompts(name, cache_views=views)
    before = method.cache.keys.detach().clone()
    method.finish(data)
    after = method.cache.keys.detach()
    if name == "tip-adapter-f":
        assert torch.equal(before, after), "learned keys stay"
        return
    assert not torch.allclose(before, after, atol=1e-3)
    if views == 0:
        pixels = method.backbone.pixels
        side = (pixels.size, pixels.size)
        plain = F.interpolate(data.images.float(), size=side, mode="bilinear", antialias=True)
        features = prompts_of(method).image_features(normalise(plain, pixels, method.backbone.dtype))
        torch.testing.assert_close(after, F.normalize(features, dim=-1))
    torch.manual_seed(99)
    method.finish(data)
    assert torch.equal(after, method.cache.keys), "nothing drops and nothing is drawn"


@pytest.mark.parametrize("name", ON_PROMPTS)
def test_prompts_without_effect_leave_the_adapter_as_it_is(name: str) -> None:
    """On prompts that give the frozen features, the adapter is the plain one."""

    class Nothing(DeepPrompts):
        """Prompts that leave both towers as they are."""

        def image_features(self, images: Tensor) -> Tensor:
            return self.backbone.encode_images(images)

        def class_features(self, words: Sequence[str]) -> Tensor:
            return frozen_classes(self.backbone, words, self.task.templates)

    backbone = tiny_backbone()
    plain, prompted = (make(name, backbone, TASK, {}) for _ in range(2))
    assert isinstance(prompted, CacheAdapter)
    prompted.stand_on(Nothing(backbone, TASK, DeepPromptOptions()))
    data = training_data(backbone)
    plain.prepare(data)
    prompted.prepare(data)
    images = random_images(backbone, 4, seed=5)
    for words in (WORDS, ("cat", "zebra")):
        one, other = (m.logits(images, m.class_weights(words)) for m in (plain, prompted))
        torch.testing.assert_close(one, other)


def test_options_of_prompts_and_of_drople_reach_them() -> None:
    given = {
        "visual_length": 2,
        "lora_rank": 2,
        "lora_from": 1,
        "lora_lr": 0.1,
        "p_max": 0.3,
        "cache_beta": 2.0,
    }
    method: Any = make("dac-v+drople", tiny_backbone(), TASK, given)
    prompts: Any = prompts_of(method)
    assert prompts.options.visual_length == 2 and method.options.cache_beta == 2.0
    assert prompts.regulariser is not None and prompts.regulariser.options.p_max == 0.3
    rates = {id(p): g["lr"] for g in method.parameter_groups(1.0) for p in g["params"]}
    assert set(rates) == {id(p) for p in method.parameters()}
    assert {rates[id(p)] for p in prompts.lora.parameters()} == {0.1}, "LoRA keeps its rate"
    assert rates[id(method.adapter)] == 1.0
    with pytest.raises(DropleError, match="visual_length"):
        make("dac-v", tiny_backbone(), TASK, {"visual_length": 2})
    with pytest.raises(DropleError, match="positions"):
        make("dac-v+drople", tiny_backbone(), Task(("cat", "very " * 90), TASK.templates), {})


@pytest.mark.parametrize("name", ["tip-adapter-f", *(f"{name}+drople" for name in ON_PROMPTS)])
def test_cut_and_resumed_a_run_ends_the_same(name: str, tmp_path: Path) -> None:
    class Cut(Quiet):
        """Stops the process, as it were, in the second epoch."""

        @contextmanager
        def task(self, what: str, total: int) -> Iterator[Any]:
            def update(done: int, values: Any = None, **more: Any) -> None:
                if what.startswith("training") and done > total / 3:
                    raise KeyboardInterrupt

            yield update

    data = splits(tmp_path / "data", count=3)
    given: dict[str, Any] = {"epochs": 3, "batch_size": 4, "cache_views": 1}
    with pytest.raises(KeyboardInterrupt):
        PromptLearner(tiny_checkpoint(), name, progress=Cut(), **given).fit(data, out=tmp_path / "cut")
    assert (tmp_path / "cut" / "checkpoint.safetensors").exists()
    PromptLearner(tiny_checkpoint(), name, **given).fit(data, out=tmp_path / "cut", resume=True)
    PromptLearner(tiny_checkpoint(), name, **given).fit(data, out=tmp_path / "whole")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")

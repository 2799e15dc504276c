"""The prompt learners of the field against slow references written from their papers.

A reference takes one image and one class at a time, in float64, and knows nothing of the methods: it is
handed the numbers they learned. The plain images have features of their own, so that a loss which mixes up
the views shows.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_images, slow_layer, slow_linear, slow_norm, tiny_backbone
from torch import Tensor

from drople.aggregate import last_share
from drople.backbone import Backbone
from drople.learner import PromptLearner
from drople.methods import REGISTRY, Batch, Progress, Task, make
from drople.methods import cocoop as cocoop_module
from drople.methods.base import TrainingData
from drople.methods.prograd import project
from drople.templates import ELEVEN
from drople.training import Training, TrainingOptions

WORDS = ("cat", "grand piano", "zebra crossing", "okapi")
TEMPLATE = "a photo of a {}."
TASK = Task(WORDS, (TEMPLATE,))
NAMES = ["cocoop", "coprompt", "dekgtcp", "kgcoop", "maple", "prograd", "promptsrc", "tcp"]
CLOSE = {"rtol": 1e-5, "atol": 2e-5}  # float32 against float64, through towers and a logit scale of 14

Prompts = Mapping[int, Tensor]


def slow_text(backbone: Backbone, text: str, prompts: Prompts | None = None, length: int = 0) -> Tensor:
    """One sentence: `length` prompts before its words; `prompts[i]` [M, D] take their places at layer i."""
    prompts = prompts or {}
    tower = backbone.model.text_model
    words = backbone.tokenizer.words(text)
    ids = [backbone.tokenizer.bos, *[0] * length, *words, backbone.tokenizer.eos]
    table = tower.embeddings.token_embedding.weight.double()
    x = [table[i] for i in ids]
    for m in range(length):
        x[1 + m] = prompts[0][m].double()
    states = torch.stack(x) + tower.embeddings.position_embedding.weight[: len(x)].double()
    look = torch.ones(len(x), len(x)).tril().bool()
    for i, layer in enumerate(tower.encoder.layers):
        if i and i in prompts:
            states = torch.cat([states[:1], prompts[i].double(), states[1 + length :]])
        states, _ = slow_layer(layer, states, look)
    return slow_linear(backbone.model.text_projection, slow_norm(tower.final_layer_norm, states[-1]))


def slow_image(backbone: Backbone, image: Tensor, prompts: Prompts | None = None) -> Tensor:
    """One image; `prompts[i]` [M, D] stand behind the patches before layer i."""
    prompts = prompts or {}
    tower = backbone.model.vision_model
    states = tower.embeddings(image[None])[0].double()
    patches = len(states)
    if 0 in prompts:
        states = torch.cat([states, prompts[0].double()])
    states = slow_norm(tower.pre_layrnorm, states)
    look = torch.ones(len(states), len(states)).bool()
    for i, layer in enumerate(tower.encoder.layers):
        if i and i in prompts:
            states = torch.cat([states[:patches], prompts[i].double()])
        states, _ = slow_layer(layer, states, look)
    return slow_linear(backbone.model.visual_projection, slow_norm(tower.post_layernorm, states[0]))


def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum().sqrt()


def number(x: Tensor) -> float:
    return float(x.detach())


def slow_logits(backbone: Backbone, image: Tensor, classes: Sequence[Tensor]) -> Tensor:
    return torch.stack([backbone.logit_scale * (unit(image) @ unit(c)) for c in classes])


def slow_cross_entropy(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    rows = [-(row[y] - torch.logsumexp(row, 0)) for row, y in zip(logits, labels.tolist(), strict=True)]
    return torch.stack(rows).sum() / len(rows)


def by_layer(prompts: Tensor) -> dict[int, Tensor]:
    return dict(enumerate(prompts))


def batch_of(backbone: Backbone, count: int = 3, labels: Sequence[int] = (2, 0, 1)) -> Batch:
    plain = random_images(backbone, count, seed=8)
    return Batch(random_images(backbone, count), torch.tensor(labels), backbone.encode_images(plain))


def made(name: str, backbone: Backbone, **options: Any) -> Any:
    """A method whose learned numbers are all away from where they start, so that each one counts."""
    torch.manual_seed(5)
    method = make(name, backbone, TASK, options)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return method


def frozen_text(backbone: Backbone, words: Sequence[str] = WORDS, template: str = TEMPLATE) -> list[Tensor]:
    return [slow_text(backbone, template.format(w)) for w in words]


def close(ours: Tensor, slow: Tensor) -> None:
    torch.testing.assert_close(ours.double(), slow.double(), **CLOSE)


# Prompts of each sentence's own ---------------------------------------------------------------------


@pytest.mark.parametrize("activation_bytes", [1 << 30, 30_000, 1])
def test_each_sentence_may_have_its_own_prompts(activation_bytes: int) -> None:
    backbone = tiny_backbone()
    backbone.activation_bytes = activation_bytes
    torch.manual_seed(0)
    every = torch.randn(2, 2 * len(WORDS), 3, backbone.text_width, requires_grad=True)  # two layers
    sentences = backbone.prompted(WORDS, context=3)
    assert backbone.fits_at_once(sentences.repeated(2)) == (activation_bytes == 1 << 30)
    features = backbone.encode_text(sentences.repeated(2), prompts=every)
    for n in range(2 * len(WORDS)):
        word = WORDS[n % len(WORDS)]
        close(features[n], slow_text(backbone, word, by_layer(every[:, n]), 3))
        alone = backbone.encode_text(backbone.prompted([word], context=3), prompts=every[:, n])
        torch.testing.assert_close(features[n], alone[0])
    (gradient,) = torch.autograd.grad(features[-1].square().sum(), every)
    assert not gradient[:, :-1].any() and gradient[:, -1].abs().min() > 0


def test_prompts_of_all_are_those_of_each() -> None:
    backbone = tiny_backbone()
    prompts = torch.randn(2, 3, backbone.text_width, generator=torch.Generator().manual_seed(1))
    sentences = backbone.prompted(WORDS, context=3)
    shared = backbone.encode_text(sentences, prompts=prompts)
    torch.testing.assert_close(
        backbone.encode_text(sentences, prompts=prompts[:, None].expand(-1, len(WORDS), -1, -1)), shared
    )
    thrice = backbone.encode_text(sentences.repeated(3), prompts=prompts)
    torch.testing.assert_close(thrice, shared.repeat(3, 1))


# CoCoOp ----------------------------------------------------------------------------------------------


def slow_cocoop(method: Any, backbone: Backbone, image: Tensor, words: Sequence[str]) -> Tensor:
    seen = slow_image(backbone, image)
    first, _, second = method.meta_net
    hidden = torch.stack([h if h > 0 else 0 * h for h in slow_linear(first, unit(seen))])
    shift = slow_linear(second, hidden)
    context = torch.stack([v.double() + shift for v in method.text_prompts.prompts[0]])
    return slow_logits(backbone, seen, [slow_text(backbone, w, {0: context}, len(context)) for w in words])


def test_cocoop_conditions_the_context_on_each_image() -> None:
    backbone = tiny_backbone(embed=32)
    method, batch = made("cocoop", backbone, reduction=4), batch_of(backbone)
    slow = [slow_cocoop(method, backbone, image, WORDS) for image in batch.images]
    assert (slow[0] - slow[1]).abs().max() > 0.1
    with torch.no_grad():
        method.meta_net[2].weight.zero_()
        unconditional = method.logits(batch.images, method.class_weights(WORDS))
    assert (unconditional - torch.stack(slow)).abs().max() > 1e-2, "the meta-net must matter here"
    method = made("cocoop", backbone, reduction=4)
    close(method.logits(batch.images, method.class_weights(WORDS)), torch.stack(slow))
    losses = method.training_step(batch)
    assert list(losses) == ["cross_entropy"]
    close(losses["cross_entropy"], slow_cross_entropy(slow, batch.labels))
    assert method.meta_net[0].weight.shape == (8, 32)


def test_cocoop_finds_the_classes_of_earlier_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone(embed=32)
    method, images = made("cocoop", backbone, reduction=4).eval(), random_images(backbone, 3)
    base, novel = ("cat", "okapi"), ("zebra", "cat", "a long name of a class")
    weights = [torch.nn.functional.normalize(method.class_weights(words), dim=-1) for words in (base, novel)]
    assert [len(w) for w in weights] == [2, 3]
    rows = [method.logits(images, w) for w in (weights[0], weights[1], weights[0])]
    assert torch.equal(rows[0], rows[2])
    for row, words in zip(rows, (base, novel), strict=False):
        close(row, torch.stack([slow_cocoop(method, backbone, image, words) for image in images]))
    monkeypatch.setattr(cocoop_module, "SENTENCES_AT_ONCE", 3)
    torch.testing.assert_close(method.logits(images, weights[1]), rows[1])


# KgCoOp ----------------------------------------------------------------------------------------------


def test_kgcoop_pulls_to_the_frozen_classes() -> None:
    backbone = tiny_backbone()
    method, batch = made("kgcoop", backbone, knowledge=3.0), batch_of(backbone)
    context = by_layer(method.text_prompts.prompts)
    classes = [slow_text(backbone, w, context, 4) for w in WORDS]
    logits = [slow_logits(backbone, slow_image(backbone, image), classes) for image in batch.images]
    frozen = frozen_text(backbone)
    distance = sum(number((unit(c) - unit(f)).square().sum()) for c, f in zip(classes, frozen, strict=True))
    losses = method.training_step(batch)
    close(losses["cross_entropy"], slow_cross_entropy(logits, batch.labels))
    close(losses["knowledge"], torch.tensor(3.0 * distance / len(WORDS)))
    close(method.logits(batch.images, method.class_weights(WORDS)), torch.stack(logits))


# ProGrad ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation_bytes", [1 << 30, 1], ids=["at_once", "chunked"])
@pytest.mark.parametrize("conflict", [True, False])
def test_prograd_projects_the_gradient(conflict: bool, activation_bytes: int) -> None:
    backbone = tiny_backbone()
    backbone.activation_bytes = activation_bytes
    method, images = made("prograd", backbone, projection=0.8, temperature=2.0), random_images(backbone, 3)
    context = method.text_prompts.prompts.detach().double().requires_grad_()
    seen = [slow_image(backbone, image) for image in images]
    classes = [slow_text(backbone, w, {0: context[0]}, 4) for w in WORDS]
    logits = [slow_logits(backbone, x, classes) for x in seen]
    zero_shot = [slow_logits(backbone, x, frozen_text(backbone)).detach() for x in seen]
    general = torch.zeros((), dtype=torch.float64)
    for row, z in zip(logits, zero_shot, strict=True):
        p = torch.exp(z / 2 - torch.logsumexp(z / 2, 0))
        for k in range(len(WORDS)):
            general = general - 4 * p[k] * (row[k] / 2 - torch.logsumexp(row / 2, 0)) / 3
    (g_g,) = torch.autograd.grad(general, context, retain_graph=True)
    # The labels that agree the most, or the least, with what CLIP says of these images.
    labels = torch.zeros(3, dtype=torch.long)
    for n, row in enumerate(logits):
        agree = []
        for k in range(len(WORDS)):
            loss = slow_cross_entropy([row], torch.tensor([k]))
            (towards,) = torch.autograd.grad(loss, context, retain_graph=True)
            agree.append(float((towards * g_g).sum()))
        labels[n] = agree.index(min(agree) if conflict else max(agree))
    own = slow_cross_entropy(logits, labels)
    (g_d,) = torch.autograd.grad(own, context)
    product = float((g_d * g_g).sum())
    assert (product < 0) == conflict, "the case is not what its name says"
    wanted = g_d - 0.8 * product / float((g_g * g_g).sum()) * g_g if conflict else g_d
    losses = method.training_step(Batch(images, labels, backbone.encode_images(images.flip(0))))
    assert list(losses) == ["cross_entropy"]
    close(losses["cross_entropy"], own)
    close(method.monitor["general"], general)
    losses["cross_entropy"].backward()
    close(method.text_prompts.prompts.grad, wanted)


def test_a_projected_gradient_never_works_against_the_general_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        own, general = torch.randn(2, 3, 5, generator=generator)
        kept = project(own, general, 1.0)
        product = float((own * general).sum())
        assert float((kept * general).sum()) == pytest.approx(max(product, 0.0), abs=1e-5)
        assert torch.equal(kept, own) == (product >= 0)
    assert torch.equal(project(own, torch.zeros_like(own), 1.0), own)


# MaPLe -----------------------------------------------------------------------------------------------


def slow_coupled(prompts: Any) -> dict[int, Tensor]:
    """The visual prompts: one linear function a layer."""
    return {
        i: torch.stack([p.double() @ prompts.weight[i].double() + prompts.bias[i, 0].double() for p in layer])
        for i, layer in enumerate(prompts.text.prompts)
    }


def test_maple_couples_the_visual_prompts_to_the_text_prompts() -> None:
    backbone = tiny_backbone()
    method, batch = made("maple", backbone, depth=2), batch_of(backbone)
    coupled = method.visual_prompts
    text, visual = by_layer(coupled.text.prompts), slow_coupled(coupled)
    # Two prompts for "a photo"; "of a" stay words.
    classes = [slow_text(backbone, f"of a {w}", text, 2) for w in WORDS]
    logits = [slow_logits(backbone, slow_image(backbone, image, visual), classes) for image in batch.images]
    losses = method.training_step(batch)
    assert list(losses) == ["cross_entropy"]
    close(losses["cross_entropy"], slow_cross_entropy(logits, batch.labels))
    close(method.logits(batch.images, method.class_weights(WORDS)), torch.stack(logits))
    losses["cross_entropy"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in method.parameters())


def test_maple_is_as_large_as_its_authors_say() -> None:
    """3.55 M parameters on ViT-B/16 (its paper's table): 9 couplings of 512 x 768 and 9 x 2 prompts."""
    backbone = tiny_backbone(
        text_width=512, text_heads=8, text_layers=9, vision_width=768, vision_heads=12, vision_layers=9
    )
    assert make("maple", backbone, TASK, {}).trainable == 9 * (512 * 768 + 768 + 2 * 512) == 3_555_072


# PromptSRC -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["same", "plain"])
def test_promptsrc_regularises_features_and_predictions(view: str) -> None:
    backbone = tiny_backbone()
    method = made("promptsrc", backbone, text_depth=2, visual_depth=3, frozen_view=view)
    batch = batch_of(backbone)
    text, visual = (by_layer(p.prompts.prompts) for p in (method.text_prompts, method.visual_prompts))
    classes = [slow_text(backbone, w, text, 4) for w in WORDS]
    images = [slow_image(backbone, image, visual) for image in batch.images]
    logits = [slow_logits(backbone, x, classes) for x in images]
    sentences = dict.fromkeys([TEMPLATE, *ELEVEN])
    frozen = [torch.zeros(backbone.embed_dim, dtype=torch.float64) for _ in WORDS]
    for template in sentences:
        for k, feature in enumerate(frozen_text(backbone, template=template)):
            frozen[k] = frozen[k] + unit(feature) / len(sentences)
    plain = [x.double() for x in batch.frozen]
    seen = [slow_image(backbone, image) for image in batch.images] if view == "same" else plain
    l1_text = sum(number((unit(c) - unit(f)).abs().sum()) for c, f in zip(classes, frozen, strict=True))
    l1_image = sum(number((unit(x) - unit(f)).abs().sum()) for x, f in zip(images, seen, strict=True))
    kl = 0.0
    for row, x in zip(logits, seen, strict=True):
        z = slow_logits(backbone, x, frozen)
        for k in range(len(WORDS)):
            log_q, log_o = row[k] - torch.logsumexp(row, 0), z[k] - torch.logsumexp(z, 0)
            kl += number(torch.exp(log_o) * (log_o - log_q))
    losses = method.training_step(batch)
    width = backbone.embed_dim
    close(losses["cross_entropy"], slow_cross_entropy(logits, batch.labels))
    close(losses["scl_text"], torch.tensor(25 * l1_text / (len(WORDS) * width)))
    close(losses["scl_image"], torch.tensor(10 * l1_image / (len(images) * width)))
    close(losses["scl_logits"], torch.tensor(kl / (len(images) * len(WORDS))))
    close(method.logits(batch.images, method.class_weights(WORDS)), torch.stack(logits))


def normal(x: float, mean: float, std: float) -> float:
    return math.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))


@torch.no_grad()
def move(method: Any, step: int) -> None:
    """A step of training as far as aggregation sees it."""
    for parameter in method.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))


def epochs_of_prompts(method: Any, epochs: int, steps: int) -> list[Tensor]:
    """The prompts at each epoch's end."""
    ends = []
    for step in range(epochs * steps):
        method.advance(Progress(step, epochs * steps, step // steps, epochs))
        move(method, step)
        if (step + 1) % steps == 0:
            ends.append(method.visual_prompts.prompts.prompts.detach().double().clone())
    return ends


@pytest.mark.parametrize(
    ("epochs", "mean", "std"), [(20, 15, 1), (5, 3, 3), (4, 3.6, 0.4), (1, 0.75, 0.05), (50, 45, 0.1)]
)
def test_promptsrc_aggregates_the_prompts_of_the_epochs(epochs: int, mean: float, std: float) -> None:
    method = make("promptsrc", tiny_backbone(), TASK, {"gpa_mean": mean / epochs, "gpa_std": std / epochs})
    ends = epochs_of_prompts(method, epochs, steps=3)
    weights = [normal(e, mean, std) for e in range(1, epochs + 1)]
    wanted = sum(w / sum(weights) * end for w, end in zip(weights, ends, strict=True))
    torch.testing.assert_close(method.visual_prompts().double(), ends[-1])  # what goes on training
    method.eval()
    torch.testing.assert_close(method.visual_prompts().double(), wanted, rtol=1e-5, atol=1e-5)
    method.eval().train()
    torch.testing.assert_close(method.visual_prompts().double(), ends[-1])


def test_the_share_of_an_epoch_is_its_part_of_the_weights_so_far() -> None:
    weights = [normal(e / 20, 0.75, 0.05) for e in range(1, 21)]
    for epoch in range(20):
        assert last_share(epoch, 20, 0.75, 0.05) == pytest.approx(weights[epoch] / sum(weights[: epoch + 1]))
    assert last_share(0, 10**6, 5.0, 1e-3) == 1.0 and last_share(9, 10, 0.0, 1e-3) == 0.0


@pytest.mark.parametrize("stop", [3, 4, 6, 7])
def test_promptsrc_resumes_its_aggregate_exactly(stop: int) -> None:
    """Three epochs of three steps, stopped inside an epoch or between two."""
    options = {"gpa_mean": 0.6, "gpa_std": 0.4}
    results = []
    for stops in ([], [stop]):
        method = make("promptsrc", tiny_backbone(), TASK, options)
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.fill_(1.0)
        for step in range(9):
            if step in stops:
                saved = {n: t.clone() for n, t in method.state_dict().items()}
                method = make("promptsrc", tiny_backbone(), TASK, options)
                method.load_learned(saved)
            method.advance(Progress(step, 9, step // 3, 3))
            move(method, step)
        results.append(method.eval().state_dict() | {"used": method.text_states()})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


# CoPrompt --------------------------------------------------------------------------------------------


def slow_adapter(adapter: Any, z: Tensor, share: float) -> Tensor:
    first, _, second, _ = adapter.net
    hidden = slow_linear(first, z)
    out = slow_linear(second, hidden * (hidden > 0))
    return share * out * (out > 0) + (1 - share) * z


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_coprompt_is_consistent_with_another_sentence_and_another_view(seed: int) -> None:
    backbone = tiny_backbone()
    method = made("coprompt", backbone, length=3, consistency=2.0, image_adapter=0.3)
    batch = batch_of(backbone)
    coupled = method.visual_prompts
    text, visual = by_layer(coupled.text.prompts), slow_coupled(coupled)
    said = [slow_text(backbone, f"a {w}", text, 3) for w in WORDS]
    classes = [slow_adapter(method.text_adapter, z, 0.2) for z in said]
    seen = [slow_image(backbone, image, visual) for image in batch.images]
    images = [slow_adapter(method.image_adapter, z, 0.3) for z in seen]
    logits = [slow_logits(backbone, x, classes) for x in images]
    torch.manual_seed(seed)
    losses = method.training_step(batch)
    texts = []
    for template in dict.fromkeys([TEMPLATE, *ELEVEN]):
        frozen = frozen_text(backbone, template=template)
        apart = [1 - number(unit(c) @ unit(f)) for c, f in zip(classes, frozen, strict=True)]
        texts.append(sum(apart) / len(WORDS))
    apart = [1 - number(unit(x) @ unit(f.double())) for x, f in zip(images, batch.frozen, strict=True)]
    image = sum(apart) / len(images)
    torch.manual_seed(seed)
    drawn = int(torch.randint(len(texts), (1,)))
    assert len({round(t, 4) for t in texts}) == len(texts)
    close(losses["consistency"], torch.tensor(2.0 * (texts[drawn] + image)))
    close(losses["cross_entropy"], slow_cross_entropy(logits, batch.labels))
    close(method.logits(batch.images, method.class_weights(WORDS)), torch.stack(logits))


# TCP -------------------------------------------------------------------------------------------------


def slow_tcp(method: Any, backbone: Backbone, word: str) -> Tensor:
    known = unit(slow_text(backbone, TEMPLATE.format(word)))
    hidden = slow_linear(method.knowledge.down, known)
    own = slow_linear(method.knowledge.up, hidden / (1 + torch.exp(-1.702 * hidden)))
    prompts = {0: method.text_prompts.prompts[0], method.layer: own.reshape(4, backbone.text_width)}
    return slow_text(backbone, word, prompts, 4)


@pytest.mark.parametrize("activation_bytes", [1 << 30, 1], ids=["at_once", "chunked"])
@pytest.mark.parametrize("layer", [1, 2])
def test_tcp_gives_each_class_its_own_prompts(layer: int, activation_bytes: int) -> None:
    backbone = tiny_backbone()
    backbone.activation_bytes = activation_bytes
    method, batch = made("tcp", backbone, class_layer=layer), batch_of(backbone)
    classes = [slow_tcp(method, backbone, w) for w in WORDS]
    logits = [slow_logits(backbone, slow_image(backbone, image), classes) for image in batch.images]
    apart = sum(1 - number(unit(c) @ unit(f)) for c, f in zip(classes, frozen_text(backbone), strict=True))
    losses = method.training_step(batch)
    close(losses["cross_entropy"], slow_cross_entropy(logits, batch.labels))
    close(losses["knowledge"], torch.tensor(8 * apart / len(WORDS)))
    unseen = ("fire engine", "cat")
    close(method.class_features(unseen), torch.stack([slow_tcp(method, backbone, w) for w in unseen]))
    torch.stack(list(losses.values())).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in method.parameters())


def test_dekgtcp_asks_for_independence_of_the_frozen_classes() -> None:
    backbone = tiny_backbone()
    method, batch = made("dekgtcp", backbone, class_layer=1), batch_of(backbone)
    learned = torch.stack([slow_tcp(method, backbone, w) for w in WORDS]).detach()
    frozen = torch.stack([unit(f) for f in frozen_text(backbone)]).detach()
    count = len(WORDS)
    kernels = []
    for rows in (learned, frozen):
        norm = math.sqrt(sum(float(x) ** 2 for x in rows.flatten()))
        kernels.append(torch.tensor([[float(a @ b) / norm**2 for b in rows] for a in rows]).double())
    centre = torch.eye(count).double() - 1 / count
    hsic = torch.trace(centre @ kernels[0] @ centre @ kernels[1])
    apart = sum(1 - number(unit(c) @ unit(f)) for c, f in zip(learned, frozen, strict=True)) / count
    losses = method.training_step(batch)
    assert list(losses) == ["cross_entropy", "knowledge", "divergence"]
    close(losses["divergence"], 6 * hsic)
    close(losses["knowledge"], torch.tensor(8 * apart))
    close(method.class_features(WORDS), learned)


def test_tcp_says_where_its_prompts_enter_a_shallow_tower() -> None:
    method = make("tcp", tiny_backbone(), TASK, {})
    assert method.layer == 2 and any("layer 8" in note for note in method.notes)  # type: ignore[attr-defined]


# All of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_wrapped_without_a_drop_it_is_the_plain_method(name: str) -> None:
    """The wrapped step takes the same way through the towers: with p = 0 nothing may change."""
    backbone = tiny_backbone()
    plain, wrapped = made(name, backbone), made(f"{name}+drople", backbone, p_min=0.0, p_max=0.0)
    wrapped.load_state_dict(plain.state_dict(), strict=False)
    batch = batch_of(backbone)
    torch.manual_seed(0)
    wanted = plain.training_step(batch)
    torch.manual_seed(0)
    got = wrapped.training_step(batch)
    assert set(got) > set(wanted)
    torch.testing.assert_close(got["cross_entropy"], wanted["cross_entropy"])
    dropped = made(f"{name}+drople", backbone, p_min=0.9, p_max=0.9)
    dropped.load_state_dict(plain.state_dict(), strict=False)
    other = dropped.training_step(batch)["cross_entropy"]
    assert abs(float(other.detach()) - float(wanted["cross_entropy"].detach())) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_long_tail_adjusts_the_logits(name: str) -> None:
    backbone = tiny_backbone()
    method, batch = made(name, backbone), batch_of(backbone)
    logits = method.logits(batch.images, method.class_weights(WORDS)).double()
    method.log_prior = torch.tensor([0.7, 0.1, 0.15, 0.05]).log()
    adjusted = [row + method.log_prior.double() for row in logits]
    close(method.training_step(batch)["cross_entropy"], slow_cross_entropy(adjusted, batch.labels))


def training(name: str, folder: Path) -> Training:
    """Three epochs of two steps."""
    backbone = tiny_backbone()
    torch.manual_seed(0)
    method = make(name, backbone, TASK, {"gpa_mean": 0.6, "gpa_std": 0.4} if name == "promptsrc" else {})
    side = backbone.pixels.size
    drawn = torch.randint(256, (8, 3, side, side), generator=torch.Generator().manual_seed(1))
    frozen = backbone.encode_images(random_images(backbone, 8))
    data = TrainingData(drawn.to(torch.uint8), torch.arange(8) % len(WORDS), frozen)
    options = TrainingOptions(epochs=3, batch_size=4, lr=0.05)
    return Training(method, data, options, seed=1, precision="float32", folder=folder)


@pytest.mark.parametrize("stop", [2, 4, 5])
@pytest.mark.parametrize("name", ["cocoop", "prograd", "promptsrc"])
def test_cut_and_resumed_a_run_ends_the_same(name: str, stop: int, tmp_path: Path) -> None:
    for part in ("whole", "cut"):
        (tmp_path / part).mkdir()
    whole, cut = training(name, tmp_path / "whole"), training(name, tmp_path / "cut")
    whole.run()
    take = cut._step

    def until(indices: Tensor) -> dict[str, Any]:
        if cut.step == stop:
            raise InterruptedError
        return take(indices)

    cut._step = until  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        cut.run()
    resumed = training(name, tmp_path / "cut")
    resumed.run(resume=True)
    ends = [t.method.state_dict() for t in (whole, resumed)]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
    images = random_images(whole.method.backbone, 2)
    answers = [t.method.logits(images, t.method.class_weights(WORDS)) for t in (whole, resumed)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", NAMES)
def test_presets_of_the_authors_are_taken(name: str) -> None:
    assert "authors" in REGISTRY[name].presets
    for preset, given in REGISTRY[name].presets.items():
        options, training = PromptLearner("pocket", name, preset=preset)._split_options()
        assert all(options.get(n, getattr(training, n, None)) == value for n, value in given.items())

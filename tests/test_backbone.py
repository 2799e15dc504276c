"""The walk through the towers against transformers' own CLIP and against slow loops."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_images, slow_layer, slow_linear, slow_norm, tiny_backbone, twin
from torch import Tensor

import drople.backbone.clip as clip
from drople.backbone import Backbone
from drople.dropout import DropRule, TokenDropout
from drople.errors import DropleError
from drople.importance import Bridge
from drople.lora import LoRA
from drople.prompts import TextPrompts

NAMES = ["cat", "golden retriever", "red and white striped lighthouse", "airplane", "soup bowl"]
ATTENTIONS = ["sdpa", "eager"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def padded_ids(backbone: Backbone, texts: list[str], length: int) -> Tensor:
    """bos, words, eos, and eos up to `length`, as CLIP was trained."""
    tokenizer = backbone.tokenizer
    rows = [[tokenizer.bos, *tokenizer.words(text), tokenizer.eos] for text in texts]
    return torch.tensor([row + [tokenizer.eos] * (length - len(row)) for row in rows])


def check_parity(backbone: Backbone, attention: str, *, images: int = 2) -> None:
    theirs = twin(backbone, attention)
    texts = [f"a photo of a {name}." for name in NAMES]
    pixels = random_images(backbone, images)
    with torch.no_grad():
        ids = padded_ids(backbone, texts, backbone.positions)
        their_texts = theirs.text_projection(theirs.text_model(input_ids=ids).pooler_output)
        their_images = theirs.visual_projection(theirs.vision_model(pixel_values=pixels).pooler_output)
        sentences = backbone.sentences(texts)
        our_texts, our_images = backbone.encode_text(sentences), backbone.encode_images(pixels)
        assert sentences.base.shape[1] == max(len(backbone.tokenizer.words(t)) for t in texts) + 2
        close(our_texts, their_texts)
        close(our_images, their_images)
        logits = theirs(input_ids=ids, pixel_values=pixels).logits_per_image
        unit = torch.nn.functional.normalize
        close(backbone.logit_scale * unit(our_images, dim=-1) @ unit(our_texts, dim=-1).T, logits, 1e-4)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    text=st.tuples(st.integers(1, 3), st.sampled_from([4, 6, 8]), st.integers(1, 3)),
    vision=st.tuples(st.integers(1, 3), st.sampled_from([4, 6, 8]), st.integers(1, 3)),
    patch=st.integers(2, 5),
    grid=st.integers(1, 4),
    embed=st.integers(3, 24),
    positions=st.sampled_from([24, 77]),
    activation=st.sampled_from(["quick_gelu", "gelu"]),
    attention=st.sampled_from(ATTENTIONS),
    seed=st.integers(0, 99),
)
def test_parity_with_transformers_over_shapes(
    text: tuple[int, int, int],
    vision: tuple[int, int, int],
    patch: int,
    grid: int,
    embed: int,
    positions: int,
    activation: str,
    attention: str,
    seed: int,
) -> None:
    backbone = tiny_backbone(
        seed=seed,
        text_width=text[0] * text[1],
        text_heads=text[0],
        text_layers=text[2],
        vision_width=vision[0] * vision[1],
        vision_heads=vision[0],
        vision_layers=vision[2],
        patch=patch,
        image=patch * grid,
        embed=embed,
        positions=positions,
        activation=activation,
    )
    assert (backbone.text_width, backbone.vision_width) == (text[0] * text[1], vision[0] * vision[1])
    assert (backbone.embed_dim, backbone.patch_grid, backbone.positions) == (embed, grid, positions)
    check_parity(backbone, attention)


@pytest.mark.parametrize(
    ("vision", "patch", "text", "embed"),
    [
        pytest.param((768, 12), 16, (512, 8), 512, id="ViT-B/16"),
        pytest.param((768, 12), 32, (512, 8), 512, id="ViT-B/32"),
        pytest.param((1024, 16), 14, (768, 12), 768, id="ViT-L/14"),
    ],
)
def test_parity_at_the_true_shapes(
    vision: tuple[int, int], patch: int, text: tuple[int, int], embed: int
) -> None:
    backbone = tiny_backbone(
        vision_width=vision[0],
        vision_heads=vision[1],
        vision_layers=2,
        text_width=text[0],
        text_heads=text[1],
        text_layers=2,
        patch=patch,
        image=224,
        embed=embed,
    )
    check_parity(backbone, "sdpa", images=1)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_old_config_with_the_wrong_eos(attention: str) -> None:
    """OpenAI's first configs say eos 2, and transformers then reads at the largest id."""
    check_parity(tiny_backbone(eos=2), attention)


def test_the_feature_is_read_at_eos() -> None:
    backbone = tiny_backbone()
    sentences = backbone.sentences(NAMES)
    for n, name in enumerate(NAMES):
        length = len(backbone.tokenizer.words(name)) + 2
        assert int(sentences.anchor[n]) == length - 1
        assert sentences.real[n].tolist() == [j < length for j in range(sentences.base.shape[1])]


def test_the_slow_layer_is_transformers_layer() -> None:
    """The reference itself, measured once."""
    backbone = tiny_backbone(dtype=torch.float64)
    layer = twin(backbone, "eager").text_model.encoder.layers[1]
    x = torch.randn(6, backbone.text_width, dtype=torch.float64)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~causal, -torch.inf)
    out, attention = slow_layer(layer, x, causal)
    close(out, layer(x[None], mask[None, None])[0], 1e-6)
    close(attention.sum(-1), torch.ones(3, 6), 1e-9)
    assert attention.amax(-1).mean() > 0.5, "attention this uniform would hide errors"


class Everywhere:
    """Dropout, or none, that claims to reach every layer: then no layer is cut short."""

    def __init__(self, dropout: TokenDropout | None) -> None:
        self.dropout = dropout

    def reaches(self, layer: int) -> bool:
        return True

    def watch(self, layer: int, tokens: Any) -> Any:
        return self.dropout and self.dropout.watch(layer, tokens)

    def drop(self, layer: int, tokens: Any) -> Any:
        return self.dropout.drop(layer, tokens) if self.dropout else tokens


@pytest.mark.parametrize("learned", ["prompts", "weights", "adapter"])
@pytest.mark.parametrize("operation", ["hide", "zero", "remove", None])
def test_the_last_layer_needs_the_global_token_alone(operation: Any, learned: str) -> None:
    """Against the same layer for all tokens; after hidden, zeroed and removed tokens too."""
    backbone = tiny_backbone(dtype=torch.float64, text_layers=3, vision_layers=3)
    sentences, images = backbone.prompted(NAMES, context=3, supplementary=2), random_images(backbone, 3)
    said, seen = text_prompts(backbone, 2, 5), torch.randn(2, 2, backbone.vision_width, requires_grad=True)
    rule = dataclasses.replace(RULE, operation=operation or "hide", scores=("class",))
    more: list[dict[str, Any]] = [{}, {}]
    if learned == "weights":
        torch.manual_seed(1)
        for extra, width in zip(more, (backbone.vision_width, backbone.text_width), strict=True):
            lora = LoRA(width, [1, 2], rank=2, alpha=2.0, on="qv")
            torch.nn.init.normal_(lora.b)
            extra["updates"] = lora(backbone.dtype)
    if learned == "adapter":
        more = [{"adapt": lambda layer, states: states.sin() if layer else None}] * 2
    found = []
    for cut in (True, False):
        torch.manual_seed(5)
        drops: list[Any] = [None if operation is None else TokenDropout(rule, m) for m in ("vision", "text")]
        vision, text = drops if cut else map(Everywhere, drops)
        features = (
            backbone.encode_images(images, prompts=seen, dropout=vision, **more[0]),
            backbone.encode_text(sentences, prompts=said, dropout=text, **more[1]),
        )
        gradients = torch.autograd.grad(sum(f.square().sum() for f in features), (seen, said))
        found.append((*features, *gradients))
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-5)


# Chunks --------------------------------------------------------------------------------------------


def chunk_bytes(backbone: Backbone, length: int, rows: int) -> int:
    """A budget that `rows` sequences of `length` tokens just fit."""
    token = clip.SAVED_UNITS * backbone.text_width * backbone.text_layers * backbone.dtype.itemsize
    return token * length * rows


def text_prompts(backbone: Backbone, depth: int, count: int, seed: int = 3) -> Tensor:
    drawn = torch.randn(depth, count, backbone.text_width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(backbone.dtype).requires_grad_()


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each checkpointed chunk had."""
    sizes: list[int] = []
    real = clip.checkpoint

    def counting(function: Callable[..., Tensor], part: Any, *more: Any, **settings: Any) -> Tensor:
        sizes.append(len(part))
        return real(function, part, *more, **settings)

    monkeypatch.setattr(clip, "checkpoint", counting)
    return sizes


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1])])
def test_chunks_change_nothing(rows: int, sizes: list[int], checkpoints: list[int]) -> None:
    backbone = tiny_backbone(dtype=torch.float64)
    sentences = backbone.prompted(NAMES, context=3, supplementary=2)
    prompts = text_prompts(backbone, 2, 5)
    weights = torch.randn(len(NAMES), backbone.embed_dim)
    features, gradients = [], []
    for budget in (1 << 30, chunk_bytes(backbone, sentences.base.shape[1], rows)):
        backbone.activation_bytes = budget
        features.append(backbone.encode_text(sentences, prompts=prompts))
        gradients.append(torch.autograd.grad((features[-1] * weights).sum(), prompts)[0])
        with torch.no_grad():
            close(backbone.encode_text(sentences, prompts=prompts), features[-1], 1e-6)
    assert checkpoints == sizes
    close(features[0], features[1], 1e-6)
    assert gradients[0].abs().amax(dim=(1, 2)).min() > 1e-3
    close(gradients[0], gradients[1], 1e-6)


# Groups by length ----------------------------------------------------------------------------------


def slow_padding(lengths: list[int], cuts: list[int]) -> int:
    """The tokens that groups of sorted lengths take, each as long as its longest."""
    return sum(
        max(lengths[start:stop]) * (stop - start) for start, stop in zip([0, *cuts], cuts, strict=False)
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60))
def test_every_cut_is_worth_it_and_no_other_would_be(lengths: list[int], worth: int) -> None:
    lengths = sorted(lengths)
    cuts = clip.group_cuts(lengths, worth)
    assert cuts == sorted(set(cuts)) and cuts[-1] == len(lengths)
    taken = slow_padding(lengths, cuts)
    for another in range(1, len(lengths)):
        assert taken - slow_padding(lengths, sorted({*cuts, another})) < worth
    assert slow_padding(lengths, [len(lengths)]) - taken >= worth * (len(cuts) - 1)


@pytest.mark.parametrize("rows", [1, 99])
@pytest.mark.parametrize("own_prompts", [False, True])
def test_groups_by_length_change_nothing(
    rows: int, own_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features, gradients and the states kept for the alignment loss, in the order of the classes."""
    found = []
    for worth in (10**9, 1):
        monkeypatch.setattr(clip, "WORTH_A_GROUP", worth)
        backbone = tiny_backbone(dtype=torch.float64)
        sentences = backbone.prompted(NAMES, context=3, supplementary=2)
        assert len(sentences.groups) == (1 if worth > 1 else 3)
        backbone.activation_bytes = chunk_bytes(backbone, sentences.base.shape[1], rows)
        count = (len(NAMES), 5) if own_prompts else (5,)
        prompts = torch.randn(2, *count, backbone.text_width, generator=torch.Generator().manual_seed(3))
        prompts = prompts.to(backbone.dtype).requires_grad_()
        rule = dataclasses.replace(RULE, p_min=0.0, p_max=0.0, scores=("class",))
        dropout = TokenDropout(rule, "text", rows=torch.tensor([4, 2, 0, 2]), keep_states=True)
        features = backbone.encode_text(sentences, prompts=prompts, dropout=dropout)
        weights = torch.arange(features.numel()).view(features.shape)
        (gradient,) = torch.autograd.grad((features * weights).sum(), prompts)
        kept = [states * real[..., None] for states, real in dropout.take_kept()]
        found.append((features, gradient, *kept))
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-6)


RULE = DropRule(
    layers=2,
    p_min=0.3,
    p_max=0.7,
    operation="hide",
    draw="layer",
    rate="importance",
    scores=("class", "self", "cross"),
    scale="raw",
    noise=0.5,
)


@pytest.mark.parametrize("operation", ["hide", "zero", "zero_scaled", "noise", "remove"])
@pytest.mark.parametrize("draw", ["layer", "shared", "one_layer"])
def test_recomputed_chunks_drop_the_same_tokens(
    operation: Any, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass recomputes a chunk and must draw again what the forward pass drew.

    Checked by the gradient against the same chunks with nothing recomputed, through the features and
    through the states kept for the alignment loss.
    """
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = tiny_backbone().to(place, torch.float32)
    torch.manual_seed(0)
    bridge = Bridge(backbone.vision_width, backbone.text_width, tokens=5, dim=7, scaled=True).to(place)
    sentences = backbone.prompted(NAMES, context=3, supplementary=2)
    backbone.activation_bytes = chunk_bytes(backbone, sentences.base.shape[1], 2)
    prompts = text_prompts(backbone, 2, 5).detach().to(place).requires_grad_()
    rule = dataclasses.replace(RULE, operation=operation, draw=draw)
    labels = torch.tensor([4, 0, 2, 2], device=place)

    def run() -> tuple[list[Tensor], Any]:
        torch.manual_seed(11)
        dropout = TokenDropout(rule, "text", bridge, rows=labels, detach=False, keep_states=True, record=True)
        features = backbone.encode_text(sentences, prompts=prompts, dropout=dropout)
        kept = dropout.take_kept()
        drawn = [seen.chosen for seen in dropout.seen]
        loss = features.square().sum() + sum(bridge.pool("text", *k).square().sum() for k in kept)
        gradients = torch.autograd.grad(loss, [prompts, *bridge.parameters()], allow_unused=True)
        # What is drawn after a step must not depend on whether chunks were recomputed.
        after = torch.rand(3, device=place)
        values = [features, after, *drawn, *(g for g in gradients if g is not None)]
        return values, kept

    recomputed, kept = run()

    def at_once(function: Any, *given: Any, **_: Any) -> Any:
        assert any(isinstance(each, Tensor) and each.device == place for each in given), "for its draws"
        return function(*given)

    monkeypatch.setattr(clip, "checkpoint", at_once)
    plain, plain_kept = run()
    assert len(recomputed) == len(plain)
    for one, other in zip(recomputed, plain, strict=True):
        close(one, other, 1e-6)
    assert len(kept) == len(plain_kept) == rule.layers
    for (one, real), (other, other_real) in zip(kept, plain_kept, strict=True):
        close(one, other, 1e-6)
        assert torch.equal(real, other_real)


@pytest.mark.parametrize("rows", [1, 2, 99])
def test_kept_states_are_those_of_the_asked_classes(rows: int) -> None:
    backbone = tiny_backbone()
    sentences = backbone.prompted(NAMES, context=2)
    prompts = text_prompts(backbone, 2, 2)
    labels = torch.tensor([3, 1, 1, 4])
    backbone.activation_bytes = chunk_bytes(backbone, sentences.base.shape[1], rows)
    rule = dataclasses.replace(RULE, p_min=0.0, p_max=0.0, scores=("class",))
    dropout = TokenDropout(rule, "text", rows=labels, keep_states=True)
    backbone.encode_text(sentences, prompts=prompts, dropout=dropout)
    kept = dropout.take_kept()
    assert len(kept) == 2
    for b, label in enumerate(labels.tolist()):
        slow = slow_text(backbone, NAMES[label], prompts.detach(), context=2, states=True)
        for layer, (states, real) in enumerate(kept):
            assert not states.requires_grad
            length = len(slow[layer])
            assert real[b].tolist() == [j < length for j in range(real.shape[1])]
            close(states[b, :length], slow[layer])


# No class sees another -----------------------------------------------------------------------------


def test_a_class_is_the_same_alone_and_among_others() -> None:
    backbone = tiny_backbone(dtype=torch.float64)
    prompts = text_prompts(backbone, 3, 6)
    together = backbone.encode_text(backbone.prompted(NAMES, context=4, supplementary=2), prompts=prompts)
    plain = backbone.encode_text(backbone.sentences(NAMES))
    for n, name in enumerate(NAMES):
        alone = backbone.encode_text(backbone.prompted([name], context=4, supplementary=2), prompts=prompts)
        close(alone[0], together[n], 1e-6)
        close(backbone.encode_text(backbone.sentences([name]))[0], plain[n], 1e-6)


def test_no_gradient_reaches_another_class() -> None:
    backbone = tiny_backbone(dtype=torch.float64)
    sentences = backbone.prompted(NAMES, context=2)
    base = sentences.base.clone().requires_grad_()
    sentences = dataclasses.replace(sentences, base=base)
    features = backbone.encode_text(sentences, prompts=text_prompts(backbone, 2, 2))
    for k in range(len(NAMES)):
        (gradient,) = torch.autograd.grad(features[k].square().sum(), base, retain_graph=True)
        anchor = int(sentences.anchor[k])
        assert gradient[k, anchor].abs().max() > 1e-6
        assert torch.count_nonzero(gradient[k, anchor + 1 :]) == 0, "padding counts"
        gradient[k] = 0
        assert torch.count_nonzero(gradient) == 0, "a class saw another's tokens"


# Prompts -------------------------------------------------------------------------------------------


def test_untrained_prompts_are_zero_shot() -> None:
    backbone = tiny_backbone()
    prompts = TextPrompts(backbone, depth=1, length=4, supplementary=0, init="a photo of a")
    prompted = backbone.encode_text(backbone.prompted(NAMES, context=4), prompts=prompts())
    plain = backbone.encode_text(backbone.sentences([f"a photo of a {name}" for name in NAMES]))
    assert torch.equal(prompted, plain)


def causal_mask(length: int) -> Tensor:
    return torch.tensor([[k <= j for k in range(length)] for j in range(length)])


def slow_text(backbone: Backbone, name: str, prompts: Tensor, *, context: int, states: bool = False) -> Any:
    """{bos, P, class words, supplementary, eos} of one class, layer by layer."""
    tower, tokenizer = backbone.model.text_model, backbone.tokenizer
    table = tower.embeddings.token_embedding.weight.double()
    places = tower.embeddings.position_embedding.weight.double()
    prompts = prompts.double()
    words = tokenizer.words(name)
    after = 1 + context + len(words)
    supplementary = prompts.shape[1] - context
    x = torch.cat(
        [
            table[tokenizer.bos][None],
            prompts[0, :context],
            table[torch.tensor(words)],
            prompts[0, context:],
            table[tokenizer.eos][None],
        ]
    )
    x = x + places[: len(x)]
    outputs = []
    for i, layer in enumerate(tower.encoder.layers):
        if 0 < i < len(prompts):
            words_now, eos_now = x[1 + context : after], x[after + supplementary :]
            x = torch.cat([x[:1], prompts[i, :context], words_now, prompts[i, context:], eos_now])
        x, _ = slow_layer(layer, x, causal_mask(len(x)))
        outputs.append(x)
    if states:
        return outputs
    return slow_linear(backbone.model.text_projection, slow_norm(tower.final_layer_norm, x[-1]))


def slow_image(backbone: Backbone, pixels: Tensor, prompts: Tensor) -> Tensor:
    """{cls, patches, P} of one image, layer by layer."""
    tower = backbone.model.vision_model
    pixels, prompts = pixels.double(), prompts.double()
    kernel = tower.embeddings.patch_embedding.weight.double()
    side = kernel.shape[-1]
    sequence = [tower.embeddings.class_embedding.double()]
    for row in range(pixels.shape[1] // side):
        for column in range(pixels.shape[2] // side):
            patch = pixels[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
            sequence.append(torch.stack([(patch * k).sum() for k in kernel]))
    x = torch.stack(sequence) + tower.embeddings.position_embedding.weight.double()
    frozen = len(x)
    x = slow_norm(tower.pre_layrnorm, torch.cat([x, prompts[0]]))
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    for i, layer in enumerate(tower.encoder.layers):
        if 0 < i < len(prompts):
            x = torch.cat([x[:frozen], prompts[i]])
        x, _ = slow_layer(layer, x, everything)
    return slow_linear(backbone.model.visual_projection, slow_norm(tower.post_layernorm, x[0]))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("context", "supplementary"), [(4, 0), (2, 3), (0, 2)])
def test_deep_text_prompts_against_loops(depth: int, context: int, supplementary: int) -> None:
    backbone = tiny_backbone(dtype=torch.float64)
    prompts = text_prompts(backbone, depth, context + supplementary)
    names = NAMES[:3]
    sentences = backbone.prompted(names, context=context, supplementary=supplementary)
    ours = backbone.encode_text(sentences, prompts=prompts)
    slow = torch.stack([slow_text(backbone, name, prompts, context=context) for name in names])
    close(ours, slow, 1e-6)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    (mine,) = torch.autograd.grad((ours * weights).sum(), prompts)
    (theirs,) = torch.autograd.grad((slow * weights).sum(), prompts)
    assert theirs.abs().amax(-1).min() > 0, "some prompt counts for nothing"
    close(mine, theirs, 1e-5)


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_deep_visual_prompts_against_loops(depth: int) -> None:
    backbone = tiny_backbone(dtype=torch.float64)
    prompts = torch.randn(depth, 3, backbone.vision_width, dtype=torch.float64, requires_grad=True)
    images = random_images(backbone, 2)
    ours = backbone.encode_images(images, prompts=prompts)
    slow = torch.stack([slow_image(backbone, image, prompts) for image in images])
    close(ours, slow, 1e-6)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    (mine,) = torch.autograd.grad((ours * weights).sum(), prompts)
    (theirs,) = torch.autograd.grad((slow * weights).sum(), prompts)
    assert theirs.abs().amax(-1).min() > 0
    close(mine, theirs, 1e-5)


def test_the_longest_text_that_fits_and_one_more() -> None:
    backbone = tiny_backbone(positions=12)
    fits = " ".join(["cat"] * 6)
    assert backbone.prompted([fits], context=3, supplementary=1).base.shape[1] == 12
    with pytest.raises(DropleError, match=r"cat cat.*12 positions"):
        backbone.prompted(["dog", fits + " cat"], context=3, supplementary=1)
    with pytest.raises(DropleError, match="12 positions"):
        backbone.sentences([" ".join(["cat"] * 11)])


# LoRA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["qv", "k", "qkv"])
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_lora_is_a_merged_copy_and_leaves_the_frozen_weights(tower: str, on: str) -> None:
    backbone = tiny_backbone()
    images, sentences = random_images(backbone, 2), backbone.sentences(NAMES)

    def encode(of: Backbone, updates: Any = None) -> Tensor:
        if tower == "vision":
            return of.encode_images(images, updates=updates)
        return of.encode_text(sentences, updates=updates)

    def layers(of: Backbone) -> Any:
        return (of.model.vision_model if tower == "vision" else of.model.text_model).encoder.layers

    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    frozen = encode(backbone)
    lora = LoRA(layers(backbone)[0].embed_dim, [0, 2], rank=2, alpha=3.0, on=on)
    assert sum(p.numel() for p in lora.parameters()) == 2 * len(on) * 2 * 2 * layers(backbone)[0].embed_dim
    assert torch.equal(encode(backbone, lora(torch.float32)), frozen), "B = 0 changes nothing"

    torch.nn.init.normal_(lora.b, std=0.3)
    merged = copy.deepcopy(backbone)
    for n, i in enumerate((0, 2)):
        for m, name in enumerate(on):
            update = torch.zeros_like(
                before[f"{tower}_model.encoder.layers.{i}.self_attn.{name}_proj.weight"]
            )
            for r in range(2):
                update += 3.0 / 2 * torch.outer(lora.b[n, m, :, r], lora.a[n, m, r]).detach()
            getattr(layers(merged)[i].self_attn, f"{name}_proj").weight.data += update
    ours = encode(backbone, lora(torch.float32))
    close(ours, encode(merged))
    assert (ours - frozen).abs().max() > 1e-2
    ours.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in lora.parameters())
    assert torch.equal(encode(backbone), frozen)
    for name, weight in backbone.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_the_backbone_is_frozen() -> None:
    backbone = tiny_backbone()
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not backbone.model.training


def test_joined_projections_take_no_memory() -> None:
    """Also after a move and a copy: the module's weights are parts of the one that is multiplied with."""
    moved = tiny_backbone().to("cpu", torch.bfloat16)
    for backbone in (tiny_backbone(), moved, copy.deepcopy(moved)):
        for layer in (*backbone.vision, *backbone.text):
            parts = [getattr(layer.attention, f"{name}_proj") for name in "qkv"]
            assert layer.weight.dtype == backbone.dtype
            for n, part in enumerate(parts):
                assert part.weight.data_ptr() == layer.weight.chunk(3)[n].data_ptr()
                assert part.bias.data_ptr() == layer.bias.chunk(3)[n].data_ptr()
        assert len(backbone.vision) == backbone.vision_layers and len(backbone.text) == backbone.text_layers


def test_layers_stay_where_nothing_moves() -> None:
    """A captured step reads their weights where they lay."""
    backbone = tiny_backbone()
    before = backbone.vision[0].weight
    assert backbone.to("cpu").vision[0].weight is before
    assert backbone.to("cpu", torch.bfloat16).vision[0].weight is not before

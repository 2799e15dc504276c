"""Our Triton kernels against plain torch code, on a GPU if conftest.py leaves one, else by Triton's own interpreter:
the same programs."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_images, tiny_backbone
from torch import Tensor

from drople import PromptLearner, importance
from drople.backbone import layer
from drople.backbone.tokens import Tokens
from drople.dropout import DropRule, TokenDropout
from drople.explain import gradcam
from drople.importance import attention_map, class_score, self_score
from drople.kernels import usable, works

pytest.importorskip("triton", reason="Triton is only made for Linux")

from drople.kernels.add_norm import AddNorm
from drople.kernels.attention_scores import attention_scores

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    # A GPU multiplies float32 in shorter numbers.
    tolerance = max(tolerance, 3e-3) if ours.is_cuda else tolerance
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.sampled_from([1, 2, 7, 16, 17, 33, 64, 70, 130]),
    head=st.sampled_from([8, 16, 32, 64, 80]),
    causal=st.booleans(),
    hidden=st.booleans(),
)
def test_scores_without_a_map(
    seed: int, count: int, heads: int, length: int, head: int, causal: bool, hidden: bool
) -> None:
    torch.manual_seed(seed)
    # As a layer hands them over: parts of one product, not laid out by heads.
    query, key = (
        part.unflatten(-1, (heads, head)).transpose(1, 2)
        for part in torch.randn(count, length, 2 * heads * head, device=DEVICE).chunk(2, -1)
    )
    anchor = torch.randint(length, (count,), device=DEVICE)
    real = torch.ones(count, length, dtype=torch.bool, device=DEVICE)
    tokens = Tokens(torch.zeros(count, length, 4, device=DEVICE), anchor, real, real)
    if hidden:
        tokens = Tokens(
            torch.zeros(count, length, 4, device=DEVICE),
            anchor,
            real,
            real,
            hidden=torch.rand(count, length, device=DEVICE) < 0.5,
        )
    mask, scaling = tokens.visible(causal), head**-0.5
    by_class, by_self = attention_scores(query, key, scaling, mask, causal, anchor)
    attention = attention_map(query, key, scaling, mask, causal)
    close(by_class, class_score(attention, tokens))
    close(by_self, self_score(attention, tokens))


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 99),
    shape=st.sampled_from([(1, 1, 8), (2, 5, 96), (3, 2, 256), (1, 4, 768)]),
    added=st.booleans(),
)
def test_sum_and_norm_and_their_gradient(seed: int, shape: tuple[int, ...], added: bool) -> None:
    torch.manual_seed(seed)
    states, more = (
        torch.randn(shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)
    )
    weight, bias = (torch.randn(shape[-1], dtype=torch.float64, device=DEVICE) for _ in range(2))
    total = states + more if added else states
    expected = total, F.layer_norm(total, shape[-1:], weight, bias, 1e-5)
    ours = AddNorm.apply(states.float(), more.float() if added else None, weight.float(), bias.float(), 1e-5)
    for one, other in zip(ours, expected, strict=True):
        close(one.double(), other)
    factors = [torch.randn(shape, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    inputs = [states, more] if added else [states]

    def gradient(pair: tuple[Tensor, Tensor], create_graph: bool) -> tuple[Tensor, ...]:
        loss = sum((f * p.double()).sum() for f, p in zip(factors, pair, strict=True))
        return torch.autograd.grad(loss, inputs, create_graph=create_graph, retain_graph=True)

    for one, other in zip(gradient(ours, False), gradient(expected, False), strict=True):
        close(one, other, 1e-4)
    # The gradient of a gradient.
    for pair in zip(
        *(
            torch.autograd.grad(sum(g.square().sum() for g in gradient(which, True)), inputs)
            for which in (ours, expected)
        ),
        strict=True,
    ):
        close(*pair, 1e-3)


def test_only_the_norm_or_only_the_sum_is_used() -> None:
    states, more = (torch.randn(2, 3, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(2, 32, device=DEVICE)
    for which in (0, 1):
        ours = AddNorm.apply(states, more, weight, bias, 1e-5)[which]
        total = states + more
        expected = (total, F.layer_norm(total, (32,), weight, bias, 1e-5))[which]
        for one, other in zip(
            *(torch.autograd.grad(out.sin().sum(), [states, more]) for out in (ours, expected)), strict=True
        ):
            close(one, other, 1e-4)


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_tower_with_our_kernels(tower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features, gradients and what drops are those of the plain code."""
    backbone = tiny_backbone().to(DEVICE, torch.float32)
    images, sentences = random_images(backbone, 2), backbone.prompted(("cat", "polka-dotted dog"), context=2)
    width = backbone.vision_width if tower == "vision" else backbone.text_width
    prompts = torch.randn(2, 2, width, device=DEVICE, requires_grad=True)
    rule = DropRule(2, 0.1, 0.9, "hide", "layer", "importance", ("class", "self"), "raw", 0.0)
    found = []
    for ours in (False, True):
        for module in (layer, importance):
            monkeypatch.setattr(module, "usable", lambda tensor, ours=ours: ours)
        torch.manual_seed(3)
        dropout = TokenDropout(rule, "vision" if tower == "vision" else "text", record=True)
        if tower == "vision":
            features = backbone.encode_images(images, prompts=prompts, dropout=dropout)
        else:
            features = backbone.encode_text(sentences, prompts=prompts, dropout=dropout)
        (gradient,) = torch.autograd.grad(features.square().sum(), prompts)
        scores = [value for seen in dropout.seen for value in (*seen.scores.values(), seen.chosen.float())]
        found.append([features, gradient, *scores])
    assert len(found[0]) == 2 + 2 * 3
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-3)


def test_gradcam_finds_the_norm_that_our_kernels_step_over(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = PromptLearner(
        tiny_backbone(vision_layers=2, text_layers=2, image=8), epochs=1, precision="float32"
    )
    learner.fit([(picture(name, n), name) for name in ("red", "blue") for n in range(2)], None)
    images, targets = random_images(learner.backbone_, 2), torch.tensor([0, 1], device=DEVICE)
    plain = gradcam(learner, images, targets)
    monkeypatch.setattr(layer, "usable", lambda tensor: True)
    close(gradcam(learner, images, targets), plain, 1e-3)


def test_no_kernel_on_a_cpu() -> None:
    assert not usable(torch.zeros(1, dtype=torch.bfloat16, device="cpu"))


def test_no_kernel_on_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    works.cache_clear()
    assert not works(torch.device("cuda:0"))
    works.cache_clear()


def test_where_triton_cannot_build_plain_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    works.cache_clear()
    assert works(DEVICE)

    def refuse(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    works.cache_clear()
    monkeypatch.setattr(AddNorm, "apply", refuse)
    with pytest.warns(UserWarning, match=r"no kernels here \(Failed to find C compiler\.\): plain ones"):
        assert not works(DEVICE)
    works.cache_clear()

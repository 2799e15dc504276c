"""The embedded model: int8 rounding leaves its features where they were."""

import io
import itertools
import pathlib
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer

import drople.backbone.loading
from drople.backbone.int8 import SCALE, quantise, restore
from drople.backbone.loading import Checkpoint, load_checkpoint

ASSET = pathlib.Path(drople.backbone.loading.__file__).parents[1] / "assets" / "pocket"


@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    seed=st.integers(0, 10_000),
    spread=st.floats(1e-6, 1e4),
)
def test_rounding_is_at_most_half_a_step_of_the_row(shape: list[int], seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * spread
    weight[0] = 0
    packed = quantise({"w": weight})
    assert packed["w"].dtype == torch.int8 and packed["w"].shape == weight.shape
    back = restore(packed)
    assert back.keys() == {"w"}
    for row, original, stored in zip(back["w"], weight, packed["w"], strict=True):
        step = original.abs().max() / 127
        assert (row - original).abs().max() <= step * 0.501
        assert stored.abs().max() == (127 if step > 0 else 0)


def test_vectors_scalars_and_integers_are_kept() -> None:
    state = {
        "bias": torch.randn(5).half(),
        "logit_scale": torch.tensor(4.6),
        "ids": torch.arange(6).reshape(2, 3),
    }
    packed = quantise(state)
    assert packed.keys() == state.keys()
    assert all(torch.equal(packed[name], tensor) for name, tensor in state.items())
    back = restore(packed)
    assert back["bias"].dtype == torch.float32 and back["ids"].dtype == torch.int64


def test_restore_in_another_type() -> None:
    back = restore(quantise({"w": torch.randn(4, 4), "b": torch.randn(4)}), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in back.values()} == {torch.bfloat16}


def test_the_asset_is_small_readable_and_int8() -> None:
    files = list(ASSET.iterdir())
    assert sum(file.stat().st_size for file in files) < 26e6
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in files)
    tensors = load_file(ASSET / "model.int8.safetensors")
    matrices = [name for name, tensor in tensors.items() if tensor.ndim > 1]
    assert matrices
    assert all(tensors[name].dtype == torch.int8 and name + SCALE in tensors for name in matrices)


@pytest.fixture(scope="module")
def pocket() -> Checkpoint:
    return load_checkpoint("pocket")


@pytest.fixture(scope="module")
def original(shared: pathlib.Path) -> Checkpoint:
    return load_checkpoint(shared / "models" / "pocket-clip")


def test_nothing_is_left_random(pocket: Checkpoint) -> None:
    again = load_checkpoint("pocket").model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in pocket.model.state_dict().items())
    assert not any(weight.requires_grad for weight in pocket.model.parameters())
    assert {weight.dtype for weight in pocket.model.parameters()} == {torch.float32}


def test_image_features_agree_with_the_original(
    pocket: Checkpoint, original: Checkpoint, shared: pathlib.Path
) -> None:
    size = pocket.pixels.size
    with tarfile.open(shared / "data" / "dtd10.tar") as pack:
        files = [member for member in pack if member.isfile()]
        arrays = []
        for member in itertools.islice(files, 0, None, max(1, len(files) // 64)):
            content = pack.extractfile(member)
            assert content is not None
            image = Image.open(io.BytesIO(content.read())).convert("RGB").resize((size, size))
            arrays.append(np.asarray(image, dtype=np.float32) / 255)
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(value).reshape(3, 1, 1) for value in (pocket.pixels.mean, pocket.pixels.std))
    images = (images - mean) / std
    assert len(images) >= 64
    features = [
        checkpoint.model.visual_projection(checkpoint.model.vision_model(pixel_values=images).pooler_output)
        for checkpoint in (pocket, original)
    ]
    assert cosine_similarity(*features).min() >= 0.999
    assert not torch.equal(*features)


def test_text_features_agree_with_the_original(pocket: Checkpoint, original: Checkpoint) -> None:
    names = (
        "dog",
        "golden retriever",
        "banded",
        "annual crop land",
        "grand piano",
        "sea horse",
        "guitar",
        "house",
    )
    templates = ("{}", "a photo of a {}.", "a centered satellite photo of {}.", "{} texture.")
    texts = [template.format(name) for template in templates for name in names]
    ids = AutoTokenizer.from_pretrained(ASSET)(texts, padding=True, return_tensors="pt").input_ids
    features = [
        checkpoint.model.text_projection(checkpoint.model.text_model(input_ids=ids).pooler_output)
        for checkpoint in (pocket, original)
    ]
    assert cosine_similarity(*features).min() >= 0.999


def test_ids_are_those_of_transformers(pocket: Checkpoint) -> None:
    theirs = AutoTokenizer.from_pretrained(ASSET)
    texts = [
        "",
        "a photo of a dog.",
        "  A  PHOTO of\ta CAFÉ  ",
        "it's 100% naïve — don't!",
        "日本語 🐕",
        "Zürich",
    ]
    assert [pocket.tokenizer.words(text) for text in texts] == [
        theirs(text).input_ids[1:-1] for text in texts
    ]

"""Batched augmentation against Pillow, one image and one patch at a time."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from drople.data.augment import OPERATIONS, crop_boxes, patch_randaugment, random_resized_crop_flip
from drople.errors import DropleError


def pictures(count: int, side: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)).astype(int)
        noisy = (smooth + rng.integers(-25, 25, smooth.shape)).clip(0, 255).astype(np.uint8)
        made.append(torch.from_numpy(noisy.transpose(2, 0, 1).copy()))
    return torch.stack(made)


def as_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).to(torch.uint8).numpy())


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- crops


@pytest.mark.parametrize("side, size", [(96, 32), (64, 64), (40, 64), (256, 48)])
def test_crops_equal_pillow(side: int, size: int) -> None:
    images = pictures(12, side)
    got = random_resized_crop_flip(images, size, seeded(3))
    generator = seeded(3)
    left, top, width, height = crop_boxes(12, side, (0.08, 1.0), (3 / 4, 4 / 3), generator, images.device)
    mirrored = torch.rand(12, generator=generator) < 0.5
    assert 0 < mirrored.sum() < 12
    for i in range(12):
        box = tuple(float(v) for v in (left[i], top[i], left[i] + width[i], top[i] + height[i]))
        expected = as_pil(images[i]).resize((size, size), Image.Resampling.BILINEAR, box=box)
        if mirrored[i]:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert (got[i] - as_tensor(expected)).abs().mean() < 0.6
        assert (got[i] - as_tensor(expected)).abs().max() < 2


@pytest.mark.parametrize("side, size", [(64, 32), (100, 64), (32, 64)])
def test_the_whole_image_is_a_plain_resize(side: int, size: int) -> None:
    images = pictures(3, side)
    got = random_resized_crop_flip(images, size, scale=(1, 1), ratio=(1, 1), flip=0)
    for image, result in zip(images, got, strict=True):
        expected = as_tensor(as_pil(image).resize((size, size), Image.Resampling.BILINEAR))
        assert (result - expected).abs().max() < 2
    same = random_resized_crop_flip(images, side, scale=(1, 1), ratio=(1, 1), flip=0)
    assert torch.allclose(same, images.float(), atol=1e-3)
    mirrored = random_resized_crop_flip(images, side, scale=(1, 1), ratio=(1, 1), flip=1)
    assert torch.allclose(mirrored, images.float().flip(3), atol=1e-3)


def test_crops_stay_inside_and_have_the_asked_area_and_shape() -> None:
    left, top, width, height = crop_boxes(
        20_000, 1, (0.08, 1.0), (3 / 4, 4 / 3), seeded(0), torch.device("cpu")
    )
    assert left.min() >= 0 and top.min() >= 0
    assert (left + width).max() <= 1 + 1e-6 and (top + height).max() <= 1 + 1e-6
    area, shape = width * height, width / height
    assert area.min() >= 0.08 - 1e-6 and area.max() <= 1 + 1e-6
    assert shape.min() >= 3 / 4 - 1e-5 and shape.max() <= 4 / 3 + 1e-5
    assert 0.45 < float(area.mean()) < 0.54  # the largest areas fit less often
    assert abs(float(shape.log().mean())) < 0.02
    # No crop of twice the width fits in the whole area: the fallback is the whole image.
    *_, width, height = crop_boxes(4, 10, (1, 1), (2, 2), seeded(0), torch.device("cpu"))
    assert width.tolist() == height.tolist() == [10.0] * 4


def test_crop_seeds() -> None:
    images = pictures(4, 32)
    a, b, c = (random_resized_crop_flip(images, 16, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    torch.manual_seed(7)
    d = random_resized_crop_flip(images, 16)
    torch.manual_seed(7)
    assert torch.equal(d, random_resized_crop_flip(images, 16))
    assert a.dtype == torch.float32 and a.min() >= 0 and a.max() <= 255.01


def test_crops_keep_their_precision_under_autocast() -> None:
    images = pictures(2, 32)
    plain = random_resized_crop_flip(images, 16, seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(random_resized_crop_flip(images, 16, seeded(1)), plain)


# ---- patch-wise RandAugment

PILLOW = {
    "identity": lambda image, factor: image,
    "autocontrast": lambda image, factor: ImageOps.autocontrast(image),
    "equalize": lambda image, factor: ImageOps.equalize(image),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "colour": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("side", [16, 32, 40])
@pytest.mark.parametrize("factor", [0.1, 0.64, 1.36, 1.9])
def test_operations_equal_pillow(name: str, side: int, factor: float) -> None:
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (2, 3, side, side), dtype=np.uint8))
    constant = torch.full((1, 3, side, side), 77, dtype=torch.uint8)
    dim = pictures(3, side) // 3 + 40
    patches = torch.cat([pictures(4, side), noise, constant, dim])
    got = OPERATIONS[name](patches.float(), factor)
    expected = torch.stack([as_tensor(PILLOW[name](as_pil(patch), factor)) for patch in patches])
    assert (got - expected).abs().max() <= 2
    assert got.min() >= 0 and got.max() <= 255 and torch.equal(got, got.round())
    does_something = {"identity": False, "equalize": side > 16}.get(name, True)
    assert bool((expected - patches).abs().max() > 4) or not does_something


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_patches_equal_pillow_one_by_one(dtype: torch.dtype) -> None:
    images = pictures(3, 96).to(dtype)
    got = patch_randaugment(images, 32, 2, 7, seeded(5))
    assert got.dtype == dtype and got.shape == images.shape
    choices = torch.randint(len(OPERATIONS), (2, 27), generator=seeded(5))
    assert len(set(choices.flatten().tolist())) == len(OPERATIONS)
    names = list(OPERATIONS)
    number = 0
    for image, result in zip(images, got, strict=True):
        for y in range(0, 96, 32):
            for x in range(0, 96, 32):
                patch = as_pil(image[:, y : y + 32, x : x + 32])
                for step in range(2):
                    patch = PILLOW[names[choices[step, number]]](patch, 1.36)
                difference = (result[:, y : y + 32, x : x + 32].float() - as_tensor(patch)).abs()
                assert difference.max() <= 3
                number += 1


def test_patch_seeds_and_limits() -> None:
    images = pictures(2, 32)
    before = images.clone()
    a, b, c = (patch_randaugment(images, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(images, before)
    assert torch.equal(patch_randaugment(images, n=0), images)
    channels_last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(patch_randaugment(channels_last, generator=seeded(1)), a)
    with pytest.raises(DropleError, match="do not tile"):
        patch_randaugment(images, patch=14)
    with pytest.raises(DropleError, match="magnitude"):
        patch_randaugment(images, m=11)

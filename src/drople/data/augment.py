"""Random crops and patch-wise RandAugment for a whole batch at once, on the device the images are on.

Every draw comes from the generator given (or the device's default one): the same seed gives the same bytes.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from drople.errors import DropleError


def random_resized_crop_flip(
    images: torch.Tensor,
    size: int,
    generator: torch.Generator | None = None,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
) -> torch.Tensor:
    """A random part of each image [B, 3, R, R], resized to `size` and perhaps mirrored: float, 0..255.

    The defaults are CoOp's. Cropping, resizing and mirroring are one linear map a side, so each image gets
    two small matrices; shrinking widens their triangles, which is Pillow's bilinear filter.
    """
    batch, _, _, side = images.shape
    left, top, width, height = crop_boxes(batch, side, scale, ratio, generator, images.device)
    mirrored = _uniform((batch,), generator, images.device) < flip
    # Autocast would halve the precision of the products, which shows in 8-bit pixels.
    with torch.autocast(images.device.type, enabled=False):
        columns = _resampling(left, width, side, size)
        columns = torch.where(mirrored.view(-1, 1, 1), columns.flip(1), columns)
        rows = _resampling(top, height, side, size)
        return rows.unsqueeze(1) @ images.float() @ columns.unsqueeze(1).transpose(2, 3)


def crop_boxes(
    batch: int,
    side: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left, top, width, height [B] in pixels: the first of ten draws that fits, else the whole image."""
    area = _uniform((batch, 10), generator, device) * (scale[1] - scale[0]) + scale[0]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shape = torch.exp(_uniform((batch, 10), generator, device) * (high - low) + low)
    widths, heights = (area * shape).sqrt(), (area / shape).sqrt()
    fits = (widths <= 1) & (heights <= 1)
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    width = torch.where(found, widths.gather(1, first).squeeze(1), 1.0) * side
    height = torch.where(found, heights.gather(1, first).squeeze(1), 1.0) * side
    left = _uniform((batch,), generator, device) * (side - width)
    top = _uniform((batch,), generator, device) * (side - height)
    return left, top, width, height


def patch_randaugment(
    images: torch.Tensor,
    patch: int = 16,
    n: int = 2,
    m: int = 7,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Each `patch` x `patch` square of each image [B, 3, S, S] (0..255) gets its own `n` random operations.

    The patch-wise RandAugment of DroPLe's released code: magnitude `m` of 10. Same dtype out as in.
    """
    batch, channels, height, width = images.shape
    if patch < 3 or height % patch or width % patch:
        raise DropleError(
            f"patches of {patch} pixels do not tile an image of {height} x {width}: choose a patch size of "
            "at least 3 that divides both sides, such as the patch size of the model."
        )
    if not 0 <= m <= 10 or n < 0:
        raise DropleError(f"RandAugment takes a magnitude m of 0 to 10 and n of 0 or more, not m={m}, n={n}.")
    down, across = height // patch, width // patch
    tiles = images.view(batch, channels, down, patch, across, patch).permute(0, 2, 4, 1, 3, 5)
    patches = tiles.reshape(-1, channels, patch, patch).float().round().clamp(0, 255)
    device = generator.device if generator is not None else images.device
    choices = torch.randint(len(OPERATIONS), (n, len(patches)), generator=generator, device=device)
    factor = m / 10 * 1.8 + 0.1
    # Every operation on every patch, then one of them: picking rows first would make the host wait for the
    # device, and such a step cannot be a CUDA graph.
    for choice in choices.to(images.device)[:, :, None, None, None]:
        before = patches
        for number, operation in enumerate(OPERATIONS.values()):
            patches = torch.where(choice == number, operation(before, factor), patches)
    tiles = patches.view(batch, down, across, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(images.shape).to(images.dtype)


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    """Drawn where the generator lives, so that a CPU generator also serves images on a GPU."""
    where = generator.device if generator is not None else device
    return torch.rand(shape, generator=generator, device=where).to(device)


def _resampling(start: torch.Tensor, length: torch.Tensor, side: int, size: int) -> torch.Tensor:
    """Weights [B, size, side] that turn `side` pixels into `size`, covering start .. start + length."""
    step = (length / size).view(-1, 1, 1)
    outputs = torch.arange(size, device=start.device).view(1, -1, 1) + 0.5
    inputs = torch.arange(side, device=start.device).view(1, 1, -1) + 0.5
    distance = (inputs - (start.view(-1, 1, 1) + outputs * step)).abs()
    weights = (1 - distance / step.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(2, keepdim=True)


# The operations take patches [N, 3, P, P] of whole numbers in 0..255 and return the same; each rounds as the
# Pillow function of its name does. The four enhancements blend with a worse version of the patch.


def _identity(patches: torch.Tensor, factor: float) -> torch.Tensor:
    return patches


def _autocontrast(patches: torch.Tensor, factor: float) -> torch.Tensor:
    low, high = patches.amin((2, 3), keepdim=True), patches.amax((2, 3), keepdim=True)
    stretched = ((patches - low) * (255 / (high - low).clamp(min=1))).floor()
    return torch.where(high > low, stretched, patches)


def _equalize(patches: torch.Tensor, factor: float) -> torch.Tensor:
    # Pillow leaves alone what has fewer than 255 pixels below its brightest value: most 16 x 16 patches.
    values = patches.flatten(2).flatten(0, 1).long()
    counts = values.new_zeros(len(values), 256).scatter_add_(1, values, torch.ones_like(values))
    below = counts.cumsum(1) - counts
    step = below.gather(1, values.amax(1, keepdim=True)) // 255
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(1, values), values).view(patches.shape).to(patches.dtype)


def _brightness(patches: torch.Tensor, factor: float) -> torch.Tensor:
    return _blend(torch.zeros_like(patches), patches, factor)


def _contrast(patches: torch.Tensor, factor: float) -> torch.Tensor:
    mean = (_grey(patches).mean((2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, patches, factor)


def _colour(patches: torch.Tensor, factor: float) -> torch.Tensor:
    return _blend(_grey(patches), patches, factor)


def _sharpness(patches: torch.Tensor, factor: float) -> torch.Tensor:
    inner = patches[..., 1:-1, 1:-1]
    smooth = patches.clone()
    smooth[..., 1:-1, 1:-1] = ((F.avg_pool2d(patches, 3, 1) * 9 + 4 * inner) / 13).round()
    return _blend(smooth, patches, factor)


def _blend(worse: torch.Tensor, patches: torch.Tensor, factor: float) -> torch.Tensor:
    return (worse + factor * (patches - worse)).clamp(0, 255).floor()


def _grey(patches: torch.Tensor) -> torch.Tensor:
    red, green, blue = patches.split(1, 1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor()


OPERATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "identity": _identity,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "brightness": _brightness,
    "contrast": _contrast,
    "colour": _colour,
    "sharpness": _sharpness,
}

"""Images in: reading, splitting, decoding and augmenting them."""

from drople.data.augment import patch_randaugment, random_resized_crop_flip
from drople.data.dataset import Example, ImageData, load_data, tidy
from drople.data.images import Pixels, decode, decode_batches, normalise
from drople.data.shots import base_novel, by_label, few_shot, long_tail, shortfall
from drople.safe_image import MAX_PIXELS, BadImage, ImageSource, open_image, square

__all__ = [
    "MAX_PIXELS",
    "BadImage",
    "Example",
    "ImageData",
    "ImageSource",
    "Pixels",
    "base_novel",
    "by_label",
    "decode",
    "decode_batches",
    "few_shot",
    "load_data",
    "long_tail",
    "normalise",
    "open_image",
    "patch_randaugment",
    "random_resized_crop_flip",
    "shortfall",
    "square",
    "tidy",
]

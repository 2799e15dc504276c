"""What a report shows of images: all test images judged, the surest mistakes explained, samples."""

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from drople import metrics
from drople.data.dataset import Example, ImageData
from drople.data.images import normalise
from drople.errors import DropleError
from drople.learner import PromptLearner, file_name
from drople.safe_image import ImageSource, open_image, square

MISTAKES, SAMPLES = 6, 18
# Thumbnails only: the images are other people's, and the page is to stay small.
SAMPLE_SIZE, MISTAKE_SIZE, QUALITY = 104, 128, 72


@dataclass(frozen=True)
class Picture:
    """A thumbnail (a data URI) and what was said of it; `heats` are (what it shows, data URI) of Grad-CAM."""

    image: str
    file: str | None
    truth: str
    predicted: str
    probability: float
    truth_probability: float
    heats: tuple[tuple[str, str], ...] = ()

    @property
    def right(self) -> bool:
        return self.truth == self.predicted


@dataclass(frozen=True)
class Looked:
    """All that needs the images. `evaluation` is as `drople fit` leaves it, but measured now."""

    evaluation: dict[str, Any]
    uncalibrated: dict[str, list[Any]]
    calibrated: dict[str, list[Any]]
    zero_shot_classes: list[float | None]
    mistakes: list[Picture]
    samples: list[Picture]
    note: str


def look(learner: PromptLearner, images: ImageData) -> Looked:
    """Judge the test images (where there are none the validation images, as `drople fit` does)."""
    examples, split = _examples(learner, images)
    logits, good, bad = learner.logits([e.image for e in examples])
    if not good:
        raise DropleError(f"none of the {len(examples)} images of {split} can be read: {bad[0]}")
    kept = [examples[i] for i in good]
    truth = torch.tensor([e.label for e in kept])
    zero_shot, _ = learner.zero_shot_logits([e.image for e in kept])
    calibrated = (logits / learner.temperature_).double().softmax(1)
    evaluation = metrics.evaluate(logits / learner.temperature_, truth, learner.classes_) | {
        "split": split,
        "images": len(kept),
        "skipped": [
            file_name(examples[i].image, images.root) for i in sorted(set(range(len(examples))) - set(good))
        ],
        "ece_uncalibrated": metrics.ece(logits.double().softmax(1), truth),
        "zero_shot_accuracy": metrics.accuracy(zero_shot, truth),
    }
    sure, predicted = calibrated.max(1)
    wrong = (predicted != truth).nonzero().flatten()
    surest = wrong[sure[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist()
    drawn = random.Random(learner.config_["seed"]).sample(range(len(kept)), min(SAMPLES, len(kept)))
    heats, note = _heats(learner, [kept[i] for i in surest], predicted[surest], truth[surest])

    def picture(index: int, size: int, heats: Sequence[tuple[str, str]] = ()) -> Picture:
        return Picture(
            thumbnail(small(kept[index].image, size)),
            file_name(kept[index].image, images.root),
            learner.classes_[int(truth[index])],
            learner.classes_[int(predicted[index])],
            float(sure[index]),
            float(calibrated[index, truth[index]]),
            tuple(heats),
        )

    return Looked(
        evaluation,
        metrics.reliability(logits.double().softmax(1), truth),
        metrics.reliability(calibrated, truth),
        metrics.per_class_accuracy(zero_shot, truth),
        [picture(i, MISTAKE_SIZE, heat) for i, heat in zip(surest, heats, strict=True)],
        [picture(i, SAMPLE_SIZE) for i in drawn],
        note,
    )


def _examples(learner: PromptLearner, images: ImageData) -> tuple[list[Example], str]:
    """The images to judge, numbered by the run's classes."""
    known = {name: label for label, name in enumerate(learner.classes_)}
    strange = [name for name in images.classes if name not in known]
    if strange:
        raise DropleError(
            f"the run never saw the class {strange[0]!r} of this data ({len(strange)} such classes): give "
            "--data what it was trained on; drople evaluate measures other classes."
        )
    split = "test" if images.test else "val"
    found = images.split(split)
    return [Example(e.image, known[images.classes[e.label]]) for e in found], split


def _heats(
    learner: PromptLearner, examples: Sequence[Example], predicted: Tensor, truth: Tensor
) -> tuple[list[list[tuple[str, str]]], str]:
    """Grad-CAM of each image for what was said and for what would have been right; or why there is none."""
    if not examples:
        return [], ""
    from drople.explain import gradcam, overlay

    backbone = learner.backbone_
    pixels = backbone.pixels
    squares = [square(open_image(e.image), pixels.size, pixels.resample) for e in examples]
    batch = normalise(torch.from_numpy(np.stack(squares)).to(backbone.device), pixels, backbone.dtype)
    try:
        said, meant = (
            gradcam(learner, batch, labels.to(backbone.device), learner.words_).float().cpu().numpy()
            for labels in (predicted, truth)
        )
    except DropleError as error:
        return [[] for _ in examples], str(error)
    return [
        [
            (
                f"for {learner.classes_[int(label)]}",
                thumbnail(overlay(small(example.image, MISTAKE_SIZE), heat)),
            )
            for label, heat in ((predicted[i], said[i]), (truth[i], meant[i]))
        ]
        for i, example in enumerate(examples)
    ], ""


def small(source: ImageSource, size: int) -> Image.Image:
    """The square that the model sees, at another size."""
    return Image.fromarray(square(open_image(source), size, Image.Resampling.BICUBIC).transpose(1, 2, 0))


def thumbnail(image: Image.Image) -> str:
    """A picture as a JPEG inside an address."""
    content = io.BytesIO()
    image.convert("RGB").save(content, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode("ascii")

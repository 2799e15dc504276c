"""Whether an exported file says what the run says, and what fewer bits cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drople.answers import percent
from drople.data.dataset import DataSource, ImageData, load_data
from drople.data.images import decode, normalise
from drople.errors import DropleError
from drople.learner import PromptLearner

TOLERANCE = 1e-4  # of a probability, for files in float32
CHECKED = 200
BATCH = 50

Runner = Callable[[Tensor], Tensor]  # uint8 [B, S, S, 3] to probabilities [B, K]


@dataclass(frozen=True)
class Pictures:
    """What is compared on: decoded squares, and their labels where they are known."""

    what: str
    images: Tensor  # uint8 [N, S, S, 3]
    labels: Tensor | None = None


@dataclass(frozen=True)
class Agreement:
    """The file beside the run, on the same pictures."""

    what: str
    images: int
    same_class: float  # share of the pictures with the same most likely class
    largest_difference: float  # of a probability
    accuracy: float | None = None
    run_accuracy: float | None = None

    def lines(self) -> list[str]:
        shown = [
            f"checked on {self.images} {self.what}: the same class for {100 * self.same_class:.1f}%, "
            f"probabilities within {self.largest_difference:.1g}"
        ]
        if self.accuracy is not None and self.run_accuracy is not None:
            points = 100 * (self.accuracy - self.run_accuracy)
            both = f"accuracy {percent(self.accuracy)}, the run's {percent(self.run_accuracy)}"
            shown.append(f"{both} ({points:+.1f} points)")
        return shown


def pictures_to_check(
    learner: PromptLearner, data: DataSource | ImageData | None, split: str | None
) -> Pictures:
    """Up to 200 images that training did not use, spread over the split; drawings where there is no data."""
    pixels = learner.backbone_.pixels
    if data is None:
        from drople.demo.drawings import CLASSES, picture

        drawn = [
            np.asarray(picture(CLASSES[n % len(CLASSES)], np.random.default_rng(n), pixels.size))
            for n in range(CHECKED)
        ]
        return Pictures("drawings", torch.from_numpy(np.stack(drawn)))
    images = data if isinstance(data, ImageData) else load_data(data)
    known = {name: number for number, name in enumerate(learner.classes_)}
    if strangers := [name for name in images.classes if name not in known]:
        raise DropleError(
            f"the run was not trained on {', '.join(strangers[:3])}: the exported file answers for the run's "
            "own classes only, so check it on images of those."
        )
    examples, name = learner._held_out(images, split)
    spread = np.unique(np.linspace(0, len(examples) - 1, CHECKED).round().astype(int))
    chosen = [examples[n] for n in spread]
    squares, good, _ = decode([e.image for e in chosen], pixels.size, pixels.resample, strict=learner.strict)
    if not good:
        raise DropleError(f"none of the images of {name} can be read: give others to check the export on.")
    labels = torch.tensor([known[images.classes[chosen[n].label]] for n in good])
    return Pictures(f"images of {name}", squares.permute(0, 2, 3, 1).contiguous(), labels)


def own_answers(learner: PromptLearner) -> Runner:
    """The learner's own path from pixels to probabilities."""
    backbone, weights = learner.backbone_, learner.class_weights(learner.words_)

    def answer(images: Tensor) -> Tensor:
        pixels = normalise(images.permute(0, 3, 1, 2), backbone.pixels, backbone.dtype)
        return (learner.method_.logits(pixels, weights) / learner.temperature_).softmax(-1)

    return answer


@torch.no_grad()
def compare(learner: PromptLearner, exported: Runner, pictures: Pictures) -> Agreement:
    """What the learner says of the pictures against what the export says."""
    parts = pictures.images.split(BATCH)
    before, after = (
        torch.cat([answer(part) for part in parts]) for answer in (own_answers(learner), exported)
    )
    accuracies: Sequence[float | None] = (None, None)
    if pictures.labels is not None:
        accuracies = [(p.argmax(1) == pictures.labels).float().mean().item() for p in (after, before)]
    return Agreement(
        what=pictures.what,
        images=len(before),
        same_class=(before.argmax(1) == after.argmax(1)).float().mean().item(),
        # Not a number is the largest difference there is.
        largest_difference=(before - after).abs().nan_to_num(nan=torch.inf).max().item(),
        accuracy=accuracies[0],
        run_accuracy=accuracies[1],
    )

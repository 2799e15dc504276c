"""What the page does, without the page: answer, explain, find alike pictures, learn from labelled uploads."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from drople.data.dataset import DataSource, Example, ImageData, load_data
from drople.data.images import normalise
from drople.errors import DropleError, unknown
from drople.explain import gradcam, overlay
from drople.learner import PromptLearner, file_name, fingerprint
from drople.methods.base import frozen_classes
from drople.progress import Progress, Quiet
from drople.safe_image import BadImage, open_image, square
from drople.templates import ELEVEN, read_template

# Pictures are shown larger than the backbone sees them: the same square, with more pixels.
SHOWN = 384
THUMB = 192
NEIGHBOURS = 6


@dataclass(frozen=True)
class Verdict:
    """What the run and the untrained model say of one picture, over the same class names."""

    file: str
    classes: tuple[str, ...]
    run: np.ndarray  # calibrated probabilities [K]
    untrained: np.ndarray  # [K]

    @property
    def best(self) -> str:
        return self.classes[int(self.run.argmax())]


@dataclass(frozen=True)
class Neighbour:
    image: Image.Image
    class_name: str
    similarity: float
    uploaded: bool


@dataclass(frozen=True)
class Retrained:
    """What a retraining was made of, and what it did on the validation images, where there are any."""

    samples: int
    uploads: int
    classes: tuple[str, ...]
    seconds: float
    before: float | None
    after: float | None
    saved: Path | None


class Workbench:
    """One run, its training images where the data is given, and what it was taught since.

    Pages call in from several threads, and Grad-CAM hooks into the model: one call at a time.
    """

    def __init__(
        self,
        learner: PromptLearner,
        data: DataSource | ImageData | None = None,
        *,
        runs: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        learner._check_fitted()
        self.original = self.learner = learner
        self.runs = runs
        self.lock = threading.RLock()
        images = data if isinstance(data, ImageData) or data is None else load_data(data)
        self.samples: list[tuple[Path | Image.Image | np.ndarray, str]] = []
        self.val: list[tuple[Path | Image.Image | np.ndarray, str]] = []
        if images is not None:
            self._match(images, progress or Quiet())
        self.taught: list[tuple[Path, str]] = []
        self._remember(progress or Quiet())

    def _match(self, images: ImageData, progress: Progress) -> None:
        """Find the images the run was trained on: by name first, then among all, and always by their bytes."""
        wanted = {known_by: name for _, name, known_by in self.original.config_["samples"]}
        names = {name for name, *_ in self.original.config_["samples"]}
        everything = [*images.train, *images.val]
        likely = [e for e in everything if file_name(e.image, images.root) in names]
        found: dict[str, Example] = {}
        for part in (likely, everything):
            if len(found) < len(wanted):
                found |= {k: e for e in part if (k := fingerprint(e.image)) in wanted}
        if not found:
            raise DropleError(
                f"none of the {len(wanted)} images this run was trained on is in the data given: give --data the "
                "folder or table that drople fit was given."
            )
        if len(found) < len(wanted):
            progress.say(f"{len(wanted) - len(found)} of {len(wanted)} training images are not in the data")
        self.samples = [(found[k].image, name) for k, name in wanted.items() if k in found]
        ours = {id(e) for e in found.values()}
        self.val = [(e.image, images.classes[e.label]) for e in images.val if id(e) not in ours]

    def _remember(self, progress: Progress) -> None:
        """Features of every image learned from, as the model of now sees them."""
        learned_from = [*self.samples, *self.taught]
        sources = [image for image, _ in learned_from]
        parts: list[Tensor] = []
        self.known: list[tuple[Path | Image.Image | np.ndarray, str, bool]] = []
        with progress.task("features of the training images", len(sources)) as update:
            for results, good, _ in self.learner._encode(sources, [_features], update):
                parts += results
                self.known += [(*learned_from[i], i >= len(self.samples)) for i in good]
        self.features = torch.cat(parts) if parts else None

    # Asking ----------------------------------------------------------------------------------------

    @property
    def template(self) -> str:
        """The run's sentence around a class name, as `drople fit --template` takes it."""
        templates = tuple(self.original.config_["templates"])
        return "eleven" if templates == ELEVEN else templates[0]

    @property
    def calibrated(self) -> bool:
        """Whether there were validation images to calibrate on."""
        return "validation" in self.learner.metrics_

    def words(self, classes: Iterable[str]) -> tuple[str, ...]:
        """What goes into the sentences: the run's words for its classes, a new name as it is typed."""
        ours = dict(zip(self.original.classes_, self.original.words_, strict=True))
        return tuple(ours.get(name, name) for name in classes)

    def verdicts(
        self, files: Sequence[str], classes: Sequence[str], template: str, *, strict: bool = False
    ) -> tuple[list[Verdict], list[str]]:
        """What is on the pictures that can be read, and a line about each that cannot (`strict` raises it).

        The sentence is of the untrained model: learned prompts stand in its place.
        """
        named = tuple(classes)
        words, templates = self.words(named), read_template(template.strip())
        if len(set(words)) < 2:
            raise DropleError("there must be two or more different classes to choose from.")
        images, good, bad = self._pixels(files, strict)
        notes = [f"{Path(error.source).name}: {error.reason}" for error in bad]
        if not good:
            return [], notes
        with self.lock, torch.no_grad():
            learner = self.learner
            weights = learner.class_weights(words)
            logits = learner.method_.logits(images, weights).float() / learner.temperature(words)
            frozen = frozen_classes(learner.backbone_, words, templates)
            plain = learner.method_.similarity(learner.backbone_.encode_images(images), frozen).float()
        run, untrained = logits.softmax(-1).cpu().numpy(), plain.softmax(-1).cpu().numpy()
        found = [Verdict(f, named, run[n], untrained[n]) for n, f in enumerate(good)]
        return found, notes

    def explain(self, file: str, class_name: str, classes: Sequence[str]) -> Image.Image:
        """Grad-CAM over the square of a picture that the model sees, for one of the classes."""
        if class_name not in classes:
            raise unknown("class", class_name, classes)
        images, *_ = self._pixels([file], strict=True)
        target = torch.tensor([list(classes).index(class_name)])
        with self.lock:
            heat = gradcam(self.learner, images, target, self.words(classes))[0].cpu().numpy()
        return overlay(shown(file, SHOWN), heat)

    def neighbours(self, file: str, count: int = NEIGHBOURS) -> list[Neighbour]:
        """The images learned from that are nearest, by the cosine of the learned features."""
        images, *_ = self._pixels([file], strict=True)
        with self.lock, torch.no_grad():
            if self.features is None:
                return []
            cosine = (_features(self.learner, images) @ self.features.T)[0].float()
            best = cosine.topk(min(count, len(cosine)))
            nearest = [(self.known[k], value) for value, k in zip(*(x.tolist() for x in best), strict=True)]
        return [
            Neighbour(shown(image, THUMB), name, value, uploaded)
            for (image, name, uploaded), value in nearest
        ]

    def _pixels(self, files: Sequence[str], strict: bool) -> tuple[Tensor, list[str], list[BadImage]]:
        wanted, device = self.learner.backbone_.pixels, self.learner.backbone_.device
        rows: list[np.ndarray] = []
        good: list[str] = []
        bad: list[BadImage] = []
        for file in files:
            try:
                rows.append(square(open_image(file), wanted.size, wanted.resample))
                good.append(file)
            except BadImage as error:
                if strict:
                    raise
                bad.append(error)
        stacked = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, 3, wanted.size, wanted.size)
        return normalise(stacked.to(device), wanted, self.learner.backbone_.dtype), good, bad

    # Teaching --------------------------------------------------------------------------------------

    def retrain(
        self,
        labelled: Mapping[str, str],
        classes: Sequence[str],
        *,
        template: str | None = None,
        epochs: int | None = None,
        save_as: str = "",
        progress: Progress | None = None,
    ) -> Retrained:
        """Train anew, as the run was, on its training images and the labelled uploads (file: class).

        Classes are those listed that have an image; the others can still be asked for, as any new class can.
        The model in use changes only when all has gone well.
        """
        started = time.monotonic()
        if not labelled:
            raise DropleError("no upload is labelled: label some pictures first, then retrain.")
        for name in labelled.values():
            if name not in classes:
                raise DropleError(f"an upload is labelled {name!r}, which is no longer among the classes.")
        place = self.place(save_as)
        uploads = [(Path(file), name) for file, name in labelled.items()]
        mine = {fingerprint(file) for file, _ in uploads}
        # A picture labelled now overrules what it was, and cannot be validated on.
        samples = [(i, n) for i, n in self.samples if n in classes and fingerprint(i) not in mine]
        counts = Counter(name for _, name in [*samples, *uploads])
        kept = tuple(name for name in classes if counts[name])
        if len(kept) < 2:
            raise DropleError(
                f"all images to learn from are of one class, {kept[0]!r}: label pictures of another one too"
                f"{'' if self.samples else ', or start the page with --data, the images of the run'}."
            )
        number = {name: k for k, name in enumerate(kept)}
        images = ImageData(
            kept,
            self.words(kept),
            tuple(Example(i, number[n]) for i, n in [*samples, *uploads]),
            tuple(Example(i, number[n]) for i, n in self.val if n in number and fingerprint(i) not in mine),
        )
        old = self.original
        settings = {**old.get_params(), "backbone": old.backbone_, "progress": progress}
        settings["template"] = template or self.template
        if epochs is not None:
            settings["epochs"] = epochs
        with self.lock:
            learner = PromptLearner(**settings).fit(images, shots=None)
            # The name by which it was found, so that a saved run finds it again.
            learner.config_["backbone"] = old.config_["backbone"]
            learner.progress = old.progress
            if place is not None:
                learner.save(place)
            before = _accuracy(self.learner)
            self.learner, self.taught = learner, uploads
            self._remember(progress or Quiet())
        return Retrained(
            samples=len(samples),
            uploads=len(uploads),
            classes=kept,
            seconds=time.monotonic() - started,
            before=before,
            after=_accuracy(learner),
            saved=place,
        )

    def place(self, name: str) -> Path | None:
        """Where a retrained run goes: a new folder beside the run. A page may write nowhere else."""
        name = name.strip()
        if not name:
            return None
        if self.runs is None:
            raise DropleError("this run is in memory only: start the page on a run folder to save beside it.")
        if name.startswith(".") or Path(name).name != name or "\\" in name or not name.isprintable():
            raise DropleError(
                f"{name!r} cannot be a folder's name: give a plain name, without / or a dot first."
            )
        place = self.runs / name
        if place.exists():
            raise DropleError(f"{place.name} is there already: give another name.")
        return place

    def reset(self) -> None:
        """Back to the run as it was."""
        with self.lock:
            self.learner, self.taught = self.original, []
            self._remember(Quiet())


def read_classes(text: str) -> list[str]:
    """Class names, one a line, each once. A name may have commas in it, as ImageNet's have."""
    return list(dict.fromkeys(name for line in text.splitlines() if (name := line.strip())))


def shown(image: str | Path | Image.Image | np.ndarray, size: int) -> Image.Image:
    """The square of a picture that the model sees, with more pixels."""
    return Image.fromarray(square(open_image(image), size, Image.Resampling.LANCZOS).transpose(1, 2, 0))


def _features(learner: PromptLearner, images: Tensor) -> Tensor:
    return torch.nn.functional.normalize(learner.method_.image_features(images), dim=-1)


def _accuracy(learner: PromptLearner) -> float | None:
    measured = learner.metrics_.get("validation")
    return float(measured["accuracy"]) if measured else None

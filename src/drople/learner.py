"""`PromptLearner`: fit, predict, predict_proba, score, save, load.

It joins the rooms: data in, a frozen backbone, a method, the training loop, and out come answers.
Training sees the train and validation parts only; no test file can be reached from here.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from drople import __version__, metrics
from drople.arriving import Arriving, sender
from drople.backbone import Backbone
from drople.data.dataset import DataSource, Example, ImageData, load_data
from drople.data.images import MANY_FILES, decode, decode_batches, normalise
from drople.data.shots import few_shot, shortfall
from drople.device import find_device, own_draws, usual_dtype
from drople.errors import DropleError, OtherSettings, unknown
from drople.methods import Method, Task, find, make, option_groups, option_names
from drople.methods.base import TowerMethod, TrainingData, frozen_classes
from drople.options import build, check_range, names
from drople.progress import Progress, Quiet
from drople.records import read_json, read_tensors, write_bytes, write_json, write_tensors
from drople.safe_image import BadImage, ImageSource
from drople.templates import DEFAULT, read_template
from drople.training import (
    CHECKPOINT,
    DTYPES,
    LOG,
    Precision,
    Status,
    Training,
    TrainingOptions,
)

CONFIG, PROMPTS, METRICS = "config.json", "prompts.safetensors", "metrics.json"
# Training images are kept a little larger than the backbone sees them, so that crops have room.
ROOM = 8 / 7
# Of many pictures a GPU gets more at a time: layer after layer is asked for by a Python that hands over pictures too.
ENCODE_BATCH, MANY_BATCH = 64, 256
EMPTY: Mapping[str, Any] = {}
NUMBERS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
# What a run cannot be loaded without.
CONFIG_FIELDS: dict[str, type] = {
    "backbone": str,
    "method": str,
    "options": dict,
    "training": dict,
    "templates": list,
    "classes": list,
    "words": list,
    "seed": int,
    "samples": list,
    "precision": str,
}


@dataclass(frozen=True)
class Adjustment:
    """What a post-hoc method makes of the learned and the zero-shot logits, and the temperature of that."""

    adjust: Callable[[Tensor, Tensor], Tensor]
    temperature: float


class PromptLearner:
    """A classifier made of a frozen CLIP and a handful of images.

    `options` are those of the method (`drople methods NAME` lists them) and of training (epochs, lr,
    batch_size, ...). `preset` names a set of them: "auto" is what suits the backbone, "none" the method's default, and
    so is "auto" where an option of the method is given. After `fit`: `classes_`, `method_`, `temperature_`, `history_`.
    """

    def __init__(
        self,
        backbone: str | Path | Backbone = "pocket",
        method: str = "drople",
        *,
        preset: str | None = "auto",
        template: str | None = None,
        seed: int = 1,
        device: str = "auto",
        precision: Precision = "auto",
        strict: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.backbone, self.method, self.preset, self.template = backbone, method, preset, template
        self.seed, self.device, self.precision, self.strict = seed, device, precision, strict
        self.progress = progress or Quiet()
        self.options = options

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        shown = ("backbone", "method", "preset", "template", "seed", "device", "precision", "strict")
        return {name: getattr(self, name) for name in shown} | self.options

    def set_params(self, **params: Any) -> "PromptLearner":
        own = set(self.get_params()) - set(self.options)
        for name, value in params.items():
            if name in own:
                setattr(self, name, value)
            else:
                self.options[name] = value
        return self

    # Learning --------------------------------------------------------------------------------------

    def fit(
        self,
        data: DataSource | ImageData,
        shots: int | None = 16,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        classnames: Mapping[str, str] | str | Path | None = None,
    ) -> "PromptLearner":
        """Learn from `shots` images of each class (all of them with None).

        With `out` a run folder is written as training goes, and `resume` goes on from where a killed
        run stopped.
        """
        method_options, training_options = self._split_options()
        if self.preset == "auto" and self.preset_ is not None:
            self.progress.say(
                f"preset {self.preset_}, which suits {self._named} (preset none is {self.method}'s default)"
            )
        images = data if isinstance(data, ImageData) else load_data(data, classnames=classnames)
        self._say(images.notes)
        if not images.train:
            raise DropleError("there are no training images: add a train folder with one folder a class.")
        chosen = few_shot(images.train, shots, self.seed)
        self._say(shortfall(images.train, shots, images.classes))
        folder = None if out is None else Path(out)
        config = self._config(images, shots, chosen, method_options, training_options)
        if folder is not None:
            self._check_folder(folder, config, resume)
        elif resume:
            raise DropleError("resume needs out: the run folder to go on with.")
        self._set_up(config, method_options)
        if isinstance(self.method_, TowerMethod):
            # A class name too long to stand among the prompts is refused here, not at the first step.
            self.method_.sentences(self.words_)
        if folder is not None and resume and (folder / METRICS).exists():
            self.progress.say(f"{folder} is finished already: nothing to train")
            (folder / CHECKPOINT).unlink(missing_ok=True)
            return self._restore(folder, read_json(folder / METRICS))
        training = Training(
            self.method_,
            self._training_data(chosen if self.method_.learns else ()),
            training_options,
            seed=self.seed,
            precision=self.precision,
            folder=folder,
        )
        # Not before all that can be refused has been, in every process: what is left behind can go on.
        training.wait_for_everyone()
        if folder is not None and training.accelerator.is_main_process:
            write_json(folder / CONFIG, config)
        self.history_: list[dict[str, float]] = []
        if list(self.method_.parameters()):
            with (
                own_draws(),
                self.progress.task(f"training {self.method}", training.steps) as update,
            ):

                def on_status(status: Status) -> None:
                    self.history_.append(status.values)
                    update(status.step, status.values)

                training.run(on_status, resume)
        self.method_.eval()
        # Before what serves training alone is let go.
        trained = self.method_.trainable
        self.method_.finish(training.data)
        if images.val:
            self.method_.select(lambda: self._batches(images.val))
        dtype = str(self.backbone_.dtype).removeprefix("torch.")
        self.metrics_ = {**self._validate(images.val), "trainable_parameters": trained}
        self.metrics_ |= {"dtype": dtype, "device": self.backbone_.device.type}
        self.metrics_ |= {"unread_images": self.unread_} if self.unread_ else {}
        if folder is not None and training.accelerator.is_main_process:
            self.save(folder)
            training.finish()
        return self

    def _split_options(self) -> tuple[dict[str, Any], TrainingOptions]:
        """The options of the method and of training, presets first, then what was given."""
        kind, _ = find(self.method)
        given = dict(self.options)
        known = option_names(self.method)
        self.preset_ = None if self.preset == "none" else self.preset
        if self.preset == "auto":
            # Who sets options of the method starts from its default.
            self.preset_ = None if any(n in known for n in given) else kind.preset_with.get(self._named)
        if self.preset_ is not None:
            if self.preset_ not in kind.presets:
                if not kind.presets:
                    raise DropleError(
                        f"{self.method} has no presets, so no {self.preset_!r}: leave --preset out."
                    )
                raise unknown(f"preset of {self.method}", self.preset_, ["auto", "none", *kind.presets])
            given = {**kind.presets[self.preset_], **given}
        template = given.pop("templates", DEFAULT)
        self.templates_ = read_template(template if self.template is None else self.template)
        of_training = names(TrainingOptions)
        for name in given:
            if name not in known and name not in of_training:
                raise unknown(f"option of {self.method}", name, [*known, *of_training])
        check_range("seed", self.seed, 0, 2**31 - 1)
        training = build(TrainingOptions, {n: v for n, v in given.items() if n in of_training})
        of_method: dict[str, Any] = {}
        for group in option_groups(self.method).values():
            own = {n: v for n, v in given.items() if n in names(group)}
            built: Any = build(group, own)
            of_method |= {n: getattr(built, n) for n in own}
        return of_method, training

    @property
    def _named(self) -> str:
        return self.backbone.name if isinstance(self.backbone, Backbone) else str(self.backbone)

    def _config(
        self,
        images: ImageData,
        shots: int | None,
        chosen: Sequence[Example],
        method_options: Mapping[str, Any],
        training: TrainingOptions,
    ) -> dict[str, Any]:
        return {
            "drople": __version__,
            "backbone": self._named,
            "method": self.method,
            "preset": self.preset_,
            "options": {n: list(v) if isinstance(v, tuple) else v for n, v in method_options.items()},
            "training": asdict(training),
            "templates": list(self.templates_),
            "classes": list(images.classes),
            "words": list(images.words),
            "shots": shots,
            "seed": self.seed,
            "precision": self.precision,
            "samples": [
                [file_name(e.image, images.root), images.classes[e.label], fingerprint(e.image)]
                for e in chosen
            ],
        }

    def _check_folder(self, folder: Path, config: dict[str, Any], resume: bool) -> None:
        there = folder / CONFIG
        if resume and there.exists():
            before = read_json(there)
            changed = list(_changes(before, config))
            if changed:
                raise OtherSettings(
                    f"{folder} was begun with other settings ({'; '.join(changed)}): give the same ones to resume, or "
                    "another --out."
                )
            return
        if any((folder / name).exists() for name in (CONFIG, PROMPTS, METRICS, CHECKPOINT)):
            raise DropleError(
                f"{folder} already holds a run: give another --out, or --resume to go on with it."
            )
        if folder.exists() and not folder.is_dir():
            raise DropleError(f"{folder} is a file: give --out a folder.")
        others = [path.name for path in sorted(folder.glob("[!.]*")) if path.name != LOG]
        if others:
            raise DropleError(f"{folder} holds {others[0]} and no run: give --out a folder of its own.")

    def _set_up(
        self, config: Mapping[str, Any], method_options: Mapping[str, Any], saved: Mapping[str, Any] = EMPTY
    ) -> None:
        """Backbone and method as the config says, untrained; a run that was saved in the numbers it had there."""
        place = find_device(self.device)
        given = self.backbone if isinstance(self.backbone, Backbone) else None
        if self.precision not in ("auto", *DTYPES):
            raise unknown("precision", self.precision, DTYPES)
        if self.precision != "auto":
            dtype = DTYPES[self.precision]
        elif saved.get("device") == place.type and saved.get("dtype") in NUMBERS:
            dtype = NUMBERS[saved["dtype"]]
        elif given is not None and given.device == place:
            dtype = given.dtype  # somebody else may need it as it is
        else:
            dtype = usual_dtype(place)
        self.backbone_ = (given or Backbone.load(config["backbone"])).to(place, dtype)
        self.classes_ = tuple(config["classes"])
        self.words_ = tuple(config["words"])
        task = Task(self.words_, tuple(config["templates"]))
        with own_draws():
            torch.manual_seed(config["seed"])
            self.method_: Method = make(config["method"], self.backbone_, task, method_options).to(place)
        self._say(self.method_.notes)
        self.config_ = dict(config)
        self._weights: dict[tuple[str, tuple[str, ...]], Tensor] = {}

    def _training_data(self, chosen: Sequence[Example]) -> TrainingData:
        backbone, device = self.backbone_, self.backbone_.device
        pixels = backbone.pixels
        sources = [e.image for e in chosen]
        with self.progress.task("reading images", len(sources)) as update:
            images, good, bad = decode(
                sources, round(pixels.size * ROOM), pixels.resample, strict=self.strict, progress=update
            )
        self._say_bad(bad)
        self.unread_ = len(bad)
        if sources and not good:
            raise DropleError("none of the training images can be read: see the list above.")
        lost = sorted({e.label for e in chosen} - {chosen[i].label for i in good})
        if lost:
            some = ", ".join(repr(self.classes_[label]) for label in lost[:3]) + ", ..." * (len(lost) > 3)
            raise DropleError(f"no training image of {some} can be read: replace those in the list above.")
        labels = torch.tensor([chosen[i].label for i in good], dtype=torch.long)
        frozen = [torch.empty(0, backbone.embed_dim, device=device)]
        with self.progress.task("frozen features", len(good)) as update:
            for features, *_ in self._encode([sources[i] for i in good], [_frozen], update):
                frozen += features
        return TrainingData(images.to(device), labels.to(device), torch.cat(frozen))

    def _batches(self, examples: Sequence[Example]) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised images and their labels, a batch at a time."""
        device, pixels = self.backbone_.device, self.backbone_.pixels
        sources = [e.image for e in examples]
        for batch, indices, _ in decode_batches(sources, pixels.size, pixels.resample, ENCODE_BATCH):
            if indices:
                labels = torch.tensor([examples[i].label for i in indices], device=device)
                yield normalise(batch.to(device), pixels, self.backbone_.dtype), labels

    def _validate(self, val: Sequence[Example]) -> dict[str, Any]:
        """Calibrate on validation images; their accuracy is written down, and chooses nothing."""
        self.temperature_ = self.text_temperature_ = 1.0
        uncalibrated = {"temperature": 1.0, "text_temperature": 1.0}
        if not val:
            return uncalibrated
        plain = self.method_.weights_by_text(self.words_)
        views = [_learned(self.words_), lambda learner, images: learner.method_.logits(images, plain)]
        # Where nothing but the text is known of the trained classes either, both are one.
        views = views[:1] if torch.equal(plain, self.class_weights(self.words_)) else views
        answers, good, bad = self._all_logits([e.image for e in val], views, "checking on validation images")
        self._say_bad(bad)
        if not good:
            return uncalibrated
        logits, labels = answers[0], torch.tensor([val[i].label for i in good])
        self.temperature_ = metrics.fit_temperature(logits, labels)
        self.text_temperature_ = metrics.fit_temperature(answers[-1], labels)
        return {
            "temperature": self.temperature_,
            "text_temperature": self.text_temperature_,
            "validation": {
                "images": len(good),
                "accuracy": metrics.accuracy(logits, labels),
                "ece_uncalibrated": metrics.ece(logits.softmax(-1), labels),
                "ece": metrics.ece((logits / self.temperature_).softmax(-1), labels),
            },
        }

    def temperature(self, words: Sequence[str]) -> float:
        """What the logits of a list of classes are divided by: of classes that were trained on more may be known than
        their text, and then others have a temperature of their own."""
        return self.temperature_ if set(words) <= set(self.words_) else self.text_temperature_

    # Answering -------------------------------------------------------------------------------------

    def predict(self, images: Any, classes: Iterable[str] | None = None) -> list[str]:
        """The most likely class of each image; `classes` may be others than those trained on."""
        self._check_fitted()
        classes = as_classes(classes)
        named = self.classes_ if classes is None else classes
        return [named[k] for k in self.predict_proba(images, classes).argmax(1)]

    def predict_proba(self, images: Any, classes: Iterable[str] | None = None) -> np.ndarray:
        """Calibrated probabilities [N, K], in the order of `classes_` (or of `classes`).

        An image that cannot be read raises; `readable_proba` skips it instead.
        """
        return self._proba(as_sources(images), classes, strict=True)[1]

    def readable_proba(
        self, images: Any, classes: Iterable[str] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Which images could be read, and their probabilities; the others are said, or with `strict` raised."""
        return self._proba(as_sources(images), classes, strict=self.strict)

    def _proba(
        self, sources: list[ImageSource], classes: Iterable[str] | None, strict: bool
    ) -> tuple[list[int], np.ndarray]:
        self._check_fitted()
        known = dict(zip(self.classes_, self.words_, strict=True))
        named = as_classes(classes)
        words = self.words_ if named is None else tuple(known.get(name, name) for name in named)
        if len(set(words)) < 2:
            raise DropleError("prediction needs two or more different classes to choose from.")
        if not sources:
            return [], np.empty((0, len(words)), np.float32)
        logits, good, bad = self._logits(sources, words, "predicting")
        if bad and strict:
            raise bad[0]
        self._say_bad(bad)
        if not good:
            raise DropleError("none of the images can be read: " + str(bad[0]))
        return good, (logits / self.temperature(words)).softmax(-1).numpy()

    def score(self, data: DataSource | ImageData, split: str | None = None) -> float:
        """Top-1 accuracy on labelled images."""
        return float(self.evaluate(data, split, zero_shot=False)["accuracy"])

    def evaluate(
        self,
        data: DataSource | ImageData,
        split: str | None = None,
        *,
        zero_shot: bool = True,
        classnames: Mapping[str, str] | str | Path | None = None,
        choices: Literal["auto", "data"] = "auto",
        adjustment: Adjustment | None = None,
    ) -> dict[str, Any]:
        """Accuracy, calibration, per class and confusion on a split: `test` where the data has one,
        else every image that training did not use.

        Classes the run never saw are taken as they are: prompts learned on some classes serve others. The
        classes to choose from are the run's where it knows all of the data's, else (or with
        `choices="data"`) the data's.
        An `adjustment` makes other logits of the learned and the zero-shot ones (post-hoc methods).
        """
        self._check_fitted()
        images = data if isinstance(data, ImageData) else load_data(data, classnames=classnames, least=1)
        examples, name = self._held_out(images, split)
        known = {c: k for k, c in enumerate(self.classes_)}
        strange = [c for c in images.classes if c not in known]
        ours = choices == "auto" and not strange
        classes, words = (self.classes_, self.words_) if ours else (images.classes, images.words)
        if len(classes) < 2:
            raise DropleError(
                f"{classes[0]!r} is the only class to choose from: evaluate on data with more of them, or on a class "
                "that the run was trained on."
            )
        if choices == "auto" and 0 < len(strange) < len(images.classes):
            self.progress.say(
                f"class {strange[0]!r} is not one of the run's ({len(strange)} of {len(images.classes)} are not): "
                f"choosing among the {len(images.classes)} of this data"
            )
        labels = [known[images.classes[e.label]] if ours else e.label for e in examples]
        sources = [e.image for e in examples]
        views = [_learned(words)] + ([_zero_shot(words)] if zero_shot or adjustment else [])
        logits, good, bad = self._all_logits(sources, views, f"evaluating {name}")
        self._say_bad(bad)
        if not good:
            raise DropleError(f"none of the {len(sources)} images of {name} can be read: see the list above.")
        truth = torch.tensor([labels[i] for i in good])
        temperature = self.temperature(words)
        if adjustment is not None:
            logits[0], temperature = adjustment.adjust(logits[0], logits[1]), adjustment.temperature
        result = metrics.evaluate(logits[0] / temperature, truth, classes)
        extra: dict[str, Any] = {"split": name, "images": len(good), "skipped": [str(b.source) for b in bad]}
        extra["ece_uncalibrated"] = metrics.ece(logits[0].softmax(-1), truth)
        if zero_shot:
            extra["zero_shot_accuracy"] = metrics.accuracy(logits[1], truth)
        return result | extra

    def logits(self, images: Any) -> tuple[Tensor, list[int], list[BadImage]]:
        """Logits [N_good, K] over the classes trained on, not yet divided by the temperature; which images
        they are of, and the ones left out."""
        self._check_fitted()
        return self._logits(as_sources(images), self.words_, "judging images")

    @property
    def trainable_(self) -> int:
        """How many numbers were trained."""
        return int(self.metrics_.get("trainable_parameters", self.method_.trainable))

    def zero_shot_logits(self, images: Any) -> tuple[Tensor, list[int]]:
        """What the untrained model says of images, over the classes trained on; and which could be read."""
        self._check_fitted()
        logits, good, _ = self._all_logits(as_sources(images), [_zero_shot(self.words_)], "zero-shot")
        return logits[0], good

    def both_logits(self, images: Any) -> tuple[Tensor, Tensor, list[int]]:
        """What the learned and the untrained model say of images, which are decoded once."""
        self._check_fitted()
        views = [_learned(self.words_), _zero_shot(self.words_)]
        (learned, zero_shot), good, _ = self._all_logits(as_sources(images), views, "judging images")
        return learned, zero_shot, good

    def _held_out(self, images: ImageData, split: str | None) -> tuple[tuple[Example, ...], str]:
        trained = {known_by for *_, known_by in self.config_["samples"]}
        if split is not None or images.test:
            name = split or "test"
            examples = images.split(name)
            # Of very many it is not asked: every file would be read twice.
            copies = len(examples) < MANY_FILES and sum(fingerprint(e.image) in trained for e in examples)
            if copies:
                what = f"{copies} of the {len(examples)} images of {name}"
                self.progress.say(f"{what} were trained on: the accuracy is too good by them")
            return examples, name
        everything = [*images.train, *images.val, *(e for part in images.extra.values() for e in part)]
        rest = tuple(e for e in everything if fingerprint(e.image) not in trained)
        if not rest:
            raise DropleError("every image of this data was trained on: give other images to evaluate on.")
        left_out = len(everything) - len(rest)
        name = f"all but the {left_out} images trained on" if left_out else "all images"
        return rest, name

    def _logits(
        self, sources: Sequence[ImageSource], words: tuple[str, ...], what: str
    ) -> tuple[Tensor, list[int], list[BadImage]]:
        logits, good, bad = self._all_logits(sources, [_learned(words)], what)
        return logits[0], good, bad

    def _all_logits(
        self, sources: Sequence[ImageSource], views: "Sequence[View]", what: str
    ) -> tuple[list[Tensor], list[int], list[BadImage]]:
        parts: list[list[Tensor]] = []
        arriving: list[Arriving] = []
        good: list[int] = []
        bad: list[BadImage] = []
        with self.progress.task(what, len(sources)) as update:
            for results, indices, failures in self._encode(sources, views, update):
                here, arriving = arriving, [Arriving(r.float()) for r in results]
                parts += [[each.get() for each in here]] if here else []
                good += indices
                bad += failures
        if not good:
            return [torch.empty(0, 0) for _ in views], good, bad
        parts += [[each.get() for each in arriving]] if arriving else []
        return [torch.cat(column) for column in zip(*parts, strict=True)], good, bad

    @torch.no_grad()
    def _encode(
        self, sources: Sequence[ImageSource], views: "Sequence[View]", update: Callable[[int], None]
    ) -> Iterator[tuple[list[Tensor], list[int], list[BadImage]]]:
        backbone, done = self.backbone_, 0
        pixels, gpu, send = backbone.pixels, backbone.device.type == "cuda", sender(backbone.device)
        size = MANY_BATCH if gpu and len(sources) >= MANY_FILES else ENCODE_BATCH
        for batch, indices, bad in decode_batches(
            sources, pixels.size, pixels.resample, size, strict=self.strict, pinned=gpu
        ):
            images = normalise(send(batch), pixels, backbone.dtype)
            yield [view(self, images) for view in views] if indices else [], indices, bad
            done += len(indices) + len(bad)
            update(done)

    def class_weights(self, words: tuple[str, ...], learned: bool = True) -> Tensor:
        """Class weights, folded once for each list of classes."""
        key = ("learned" if learned else "frozen", words)
        if key not in self._weights:
            with torch.no_grad():
                if learned:
                    self._weights[key] = self.method_.class_weights(words)
                else:
                    features = frozen_classes(self.backbone_, words, self.method_.task.templates)
                    self._weights[key] = torch.nn.functional.normalize(features, dim=-1)
        return self._weights[key]

    # Keeping ---------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the run: config, what was learned, metrics. The last file says that it is whole."""
        self._check_fitted()
        folder = Path(folder)
        write_json(folder / CONFIG, self.config_)
        if not (folder / LOG).exists():
            write_bytes(folder / LOG, "".join(f"{json.dumps(row)}\n" for row in self.history_).encode())
        metadata = {"drople": __version__, "method": str(self.config_["method"])}
        write_tensors(folder / PROMPTS, self.method_.state_dict(), metadata)
        write_json(folder / METRICS, self.metrics_)

    @classmethod
    def load(
        cls, folder: str | Path, *, device: str = "auto", progress: Progress | None = None
    ) -> "PromptLearner":
        """A learner as it was saved."""
        folder = Path(folder)
        if not folder.is_dir():
            raise DropleError(f"there is no run folder {folder}: give the --out of a drople fit.")
        config = read_json(folder / CONFIG)
        missing = [n for n, kind in CONFIG_FIELDS.items() if not isinstance(config.get(n), kind)]
        if missing or not sound(config):
            wrong = f"lacks {', '.join(missing)}" if missing else "has lists that do not go together"
            raise DropleError(f"{folder / CONFIG} {wrong}: it was not written by drople fit.")
        if not (folder / METRICS).exists():
            raise DropleError(f"{folder} is not finished: go on with drople fit --resume.")
        learner = cls(
            config["backbone"],
            config["method"],
            preset=config.get("preset"),
            template=config["templates"][0] if len(config["templates"]) == 1 else "eleven",
            seed=config["seed"],
            device=device,
            precision=config["precision"],
            progress=progress,
        )
        learner.options = {**config["options"], **config["training"]}
        saved = read_json(folder / METRICS)
        learner._set_up(config, config["options"], saved)
        return learner._restore(folder, saved)

    def _restore(self, folder: Path, saved: dict[str, Any]) -> "PromptLearner":
        """What was learned, into the method that was set up for it."""
        tensors, _ = read_tensors(folder / PROMPTS)
        try:
            self.method_.load_learned(tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split()).split(": ", 1)[-1]
            raise DropleError(
                f"{folder / PROMPTS} does not fit {self.method} on {self.backbone} ({reason[:200]}): the files of "
                "this folder are not of one run."
            ) from None
        self.method_.eval()
        self.metrics_, self.history_ = saved, []
        both: list[Any] = [saved.get("temperature"), saved.get("text_temperature", saved.get("temperature"))]
        if not all(isinstance(each, float | int) and 0 < each < math.inf for each in both):
            raise DropleError(f"{folder / METRICS} has no temperature: it was not written by drople fit.")
        self.temperature_, self.text_temperature_ = (float(each) for each in both)
        return self

    def _check_fitted(self) -> None:
        if not hasattr(self, "method_"):
            raise DropleError("this learner has learned nothing yet: call fit(data) first, or load a run.")

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.progress.say(line)

    def _say_bad(self, bad: Sequence[BadImage]) -> None:
        for image in bad[:10]:
            self.progress.say(f"skipped {image.source}: {image.reason}")
        if len(bad) > 1:
            self.progress.say(f"{len(bad)} images skipped in all")


View = Callable[[PromptLearner, Tensor], Tensor]


def _frozen(learner: PromptLearner, images: Tensor) -> Tensor:
    """`z_v^o`: the frozen features of plain images."""
    return learner.backbone_.encode_images(images)


def _learned(words: tuple[str, ...]) -> View:
    return lambda learner, images: learner.method_.logits(images, learner.class_weights(words))


def _zero_shot(words: tuple[str, ...]) -> View:
    def view(learner: PromptLearner, images: Tensor) -> Tensor:
        weights = learner.class_weights(words, learned=False)
        return learner.method_.similarity(_frozen(learner, images), weights)

    return view


def fingerprint(image: ImageSource) -> str:
    """What an image is known by in a run: the hash of its bytes, wherever its file lies."""
    if isinstance(image, str | Path):
        try:
            return hashlib.sha256(Path(image).read_bytes()).hexdigest()
        except OSError:
            return f"unreadable:{Path(image).name}"
    return hashlib.sha256(np.ascontiguousarray(np.asarray(image)).tobytes()).hexdigest()


def sound(config: Mapping[str, Any]) -> bool:
    """Whether the lists of a config hold what they should."""
    texts = [*config["classes"], *config["words"], *config["templates"]]
    return (
        all(isinstance(text, str) for text in texts)
        and len(config["classes"]) == len(config["words"])
        and bool(config["templates"])
        and all(isinstance(sample, list) and sample for sample in config["samples"])
    )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two configs, in words."""
    for name, value in now.items():
        was = before.get(name)
        if was == value:
            continue
        if isinstance(was, dict) and isinstance(value, dict):
            yield from _changes(was, {**dict.fromkeys(was), **value})
        elif isinstance(value, list) or isinstance(was, list):
            yield f"other {name}"
        else:
            yield f"{name} was {'not set' if was is None else was}, is {'not set' if value is None else value}"


def file_name(image: ImageSource, root: Path | None) -> str | None:
    """Where an image lies under the data's root; None for one that came from memory."""
    if not isinstance(image, str | Path):
        return None
    path = Path(image)
    return path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else path.name


def as_sources(images: Any) -> list[ImageSource]:
    """One image or many: of arrays, one of numbers is a picture, and any other a list of what it holds."""
    picture = isinstance(images, np.ndarray) and images.dtype.kind not in "OU" and images.ndim != 4
    if picture or isinstance(images, str | Path | Image.Image) or not isinstance(images, Iterable):
        return [images]
    return list(images)


def as_classes(classes: Iterable[str] | None) -> tuple[str, ...] | None:
    """Other classes to choose from, each in words."""
    if isinstance(classes, str):
        raise DropleError(f"classes is one text, {classes!r}: give a list of two or more.")
    return None if classes is None else tuple(classes)

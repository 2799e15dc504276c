"""Why a run says what it says: Grad-CAM, and the importance by which its tokens drop.

Grad-CAM (Selvaraju et al., ICCV 2017) on the patch tokens of the image tower, as the paper's figures and its
appendix B.4 show it. Importance maps are those of the section "Importance Weighted Token Dropout", seen in a
pass in which nothing drops.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers.decoders import ByteLevel
from torch import Tensor, nn

from drople.answers import image_files
from drople.data.images import normalise
from drople.device import own_draws
from drople.dropout import TokenDropout
from drople.errors import DropleError, unknown
from drople.importance import Modality
from drople.learner import PromptLearner
from drople.methods.adapter import FeatureAdapter
from drople.methods.base import Method, TowerMethod
from drople.pictures import (
    COLUMNS,
    FORMATS,
    Column,
    Explanation,
    Format,
    Word,
    overlay,
    save_comparison,
    save_explanation,
)
from drople.progress import Progress
from drople.safe_image import BadImage, open_image, square

__all__ = ["explain", "gradcam", "importance_maps", "overlay", "word_importance"]

# Images whose activations are kept for the gradient at once.
BATCH = 16
# Photos are drawn larger than the backbone sees them: the same square, with more pixels.
DRAWN = 330
LISTED = 5
WORD_END = "</w>"  # what CLIP's vocabulary writes behind the last piece of a word
RATES = {
    "uniform": "vanilla dropout",
    "block": "block dropout",
    "group": "group dropout",
    "standout": "StandOut",
    "attribution": "AD-DROP",
}


# Maps ----------------------------------------------------------------------------------------------


def gradcam(
    learner: PromptLearner,
    images: Tensor,
    targets: Tensor,
    words: Sequence[str] | None = None,
    *,
    learned: bool = True,
) -> Tensor:
    """Where normalised images [N, 3, S, S] speak for the classes `targets` [N]: [N, g, g] in 0..1.

    The activations are what the first layer norm of the last layer gives: past it a patch can reach cls only
    through this layer's attention, so nothing by which a patch matters is left out. Their channels are
    weighted with the mean gradient of the class's logit over the patches; the positive part of the sum is
    scaled to 0..1. `targets` count in `words` (the run's own by default). Not `learned`: the frozen model.
    """
    named = learner.words_ if words is None else tuple(words)
    weights = learner.class_weights(named, learned=learned)
    parts = zip(images.split(BATCH), targets.to(weights.device).split(BATCH), strict=True)
    return torch.cat([_gradcam(learner, part, wanted, weights, learned) for part, wanted in parts])


def _gradcam(
    learner: PromptLearner, images: Tensor, targets: Tensor, weights: Tensor, learned: bool
) -> Tensor:
    method, backbone = learner.method_, learner.backbone_
    norm: Any = backbone.model.vision_model.encoder.layers[-1].layer_norm1
    kept: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        if kept:  # an adapter beside the layer may ask its norm again (MMA)
            return None
        kept.append(output.detach().requires_grad_())
        return kept[0]

    hook = norm.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            if learned:
                logits = _logits(method, images, weights)
            else:
                logits = method.similarity(backbone.encode_images(images), weights)
            wanted = logits.gather(1, targets[:, None]).sum()
            (gradient,) = torch.autograd.grad(wanted, kept[0])
    finally:
        hook.remove()
    side = backbone.patch_grid
    # cls stands before the patches, prompts behind them.
    patches, gradient = (x[:, 1 : 1 + side * side].detach().float() for x in (kept[0], gradient))
    heat = (patches @ gradient.mean(1)[..., None]).relu().squeeze(-1)
    heat = heat - heat.amin(1, keepdim=True)
    return (heat / heat.amax(1, keepdim=True).clamp_min(1e-12)).unflatten(1, (side, side))


def _logits(method: Method, images: Tensor, weights: Tensor) -> Tensor:
    """`method.logits` is for inference and keeps no graph; below its decorator is the function that does."""
    return inspect.unwrap(type(method).logits)(method, images, weights)


@torch.no_grad()
def importance_maps(learner: PromptLearner, images: Tensor) -> dict[str, Tensor]:
    """What each dropout layer makes of the patches of normalised images: [layers, N, g, g] by name.

    `class`, `self` and `cross` (those the run uses), `importance` and `probability`. Runs whose tokens drop
    by no score have the probability alone; runs without dropout have nothing.
    """
    towers = _dropping(learner.method_)
    dropout = None if towers is None else _watching(towers, "vision")
    if towers is None or dropout is None:
        return {}
    side = learner.backbone_.patch_grid
    with own_draws():
        towers.encode_images(images, dropout)
    found: dict[str, list[Tensor]] = {}
    for seen in dropout.seen:
        for name, value in _named(dropout, seen).items():
            found.setdefault(name, []).append(value[:, 1 : 1 + side * side].unflatten(1, (side, side)))
    return {name: torch.stack(values) for name, values in found.items()}


@torch.no_grad()
def word_importance(learner: PromptLearner, words: str) -> tuple[Word, ...]:
    """The tokens of a class's sentence, each with its importance at every dropout layer of the text tower."""
    towers = _dropping(learner.method_)
    dropout = None if towers is None else _watching(towers, "text")
    if towers is None or dropout is None or not _has_importance(dropout):
        return ()
    sentences = towers.sentences([words])
    with own_draws():
        towers.encode_text(sentences, dropout)
    if not dropout.seen:
        return ()
    end = int(sentences.anchor[0])
    values = torch.stack([seen.importance[0, :end] for seen in dropout.seen]).T.tolist()
    return tuple(
        Word(text, tuple(own), joined, special)
        for (text, joined, special), own in zip(_tokens(learner, sentences), [*values, ()], strict=True)
    )


def _dropping(method: Method) -> TowerMethod | None:
    """Whose tokens dropped in training: the method's own, or those of the prompts that an adapter stands on."""
    towers = method.prompts if isinstance(method, FeatureAdapter) else method
    return towers if isinstance(towers, TowerMethod) and towers.regulariser is not None else None


def _watching(towers: TowerMethod, modality: Modality) -> TokenDropout | None:
    """The run's own token dropout, recording, and leaving every token as it is: noise of strength 0."""
    regulariser = towers.regulariser
    if regulariser is None or not regulariser.layers[modality] or regulariser.options.rate == "attribution":
        return None
    dropout = regulariser.dropout(modality, record=True)
    rule = replace(dropout.rule, operation="noise", noise=0.0)
    if rule.draw == "one_layer":
        rule = replace(rule, draw="layer")  # any of them may be the one
    return replace(dropout, rule=rule, keep_states=False)


def _has_importance(dropout: TokenDropout) -> bool:
    return dropout.rule.rate not in ("uniform", "block")


def _named(dropout: TokenDropout, seen: Any) -> dict[str, Tensor]:
    own = {"importance": seen.importance} if _has_importance(dropout) else {}
    return {**seen.scores, **own, "probability": seen.probability}


def _tokens(learner: PromptLearner, sentences: Any) -> Iterator[tuple[str, bool, bool]]:
    """(text, continues the word before, is no word) of every token of one sentence, eos included."""
    backbone = learner.backbone_
    backend, end = backbone.tokenizer._backend, int(sentences.anchor[0])
    ids = sentences.ids[0].tolist()
    prompts = sentences.slots[0].any(1).tolist() if sentences.slots is not None else [False] * (end + 1)
    after_words, counts, joined = False, {"P": 0, "S": 0}, False
    yield "bos", False, True
    for place in range(1, end):
        if prompts[place]:
            kind = "S" if after_words else "P"
            counts[kind] += 1
            yield f"[{kind}{counts[kind]}]", False, True
            continue
        after_words = True
        piece = str(backend.id_to_token(ids[place]))
        yield ByteLevel().decode([piece.removesuffix(WORD_END)]), joined, False
        joined = not piece.endswith(WORD_END)
    yield "eos", False, True


# Pictures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Something that answers: a run, or the frozen model below one."""

    title: str
    learner: PromptLearner
    learned: bool = True

    def pixels(self, picture: Image.Image) -> np.ndarray:
        wanted = self.learner.backbone_.pixels
        return square(picture, wanted.size, wanted.resample)

    def images(self, shots: "Sequence[Shot]", index: int) -> Tensor:
        backbone = self.learner.backbone_
        stacked = torch.from_numpy(np.stack([shot.pixels[index] for shot in shots]))
        return normalise(stacked.to(backbone.device), backbone.pixels, backbone.dtype)

    @torch.no_grad()
    def probabilities(self, images: Tensor, words: tuple[str, ...]) -> Tensor:
        learner, method = self.learner, self.learner.method_
        weights = learner.class_weights(words, learned=self.learned)
        if self.learned:
            return (method.logits(images, weights).float() / learner.temperature(words)).softmax(-1).cpu()
        return method.similarity(learner.backbone_.encode_images(images), weights).float().softmax(-1).cpu()

    def heat(self, images: Tensor, targets: Tensor, words: tuple[str, ...]) -> np.ndarray:
        return gradcam(self.learner, images, targets, words, learned=self.learned).cpu().numpy()


@dataclass(frozen=True)
class Shot:
    """An image that could be read: as it is drawn, and as each model sees it."""

    file: Path
    photo: Image.Image
    pixels: tuple[np.ndarray, ...]


def explain(
    run: str | Path | PromptLearner,
    images: Sequence[str | Path],
    *,
    out: str | Path,
    class_name: str | None = None,
    compare: bool = False,
    compare_with: Sequence[str | Path | PromptLearner] = (),
    format: Format = "png",
    device: str = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Draw why the run says what it says of some images, or what speaks for `class_name` in them.

    One picture an image goes into the folder `out`; where `out` ends in .png, .svg or .pdf it is the picture.
    `compare` draws the zero-shot model, the runs of `compare_with` and the run below each other instead.
    Gives, for each image that could be read: image, class, probability, picture.
    """
    files = list(dict.fromkeys(image_files([Path(image) for image in images])))
    if not files:
        raise DropleError("there are no images to explain: give one or more files, or folders of them.")
    compare = compare or bool(compare_with)
    written = places(Path(out), files, format, compare)
    model = _model(run, device, progress)
    wanted = None if class_name is None else class_index(model.learner, class_name)
    if compare:
        models = [Model("Zero-shot", model.learner, learned=False)]
        models += [_model(other, device, progress) for other in compare_with]
        pages = _readable(files, [*models, model], COLUMNS, strict)
        return [
            row
            for shots, place in zip(pages, written, strict=False)
            for row in _compare([*models, model], shots, wanted, place)
        ]
    names = dict(zip(files, written, strict=True))
    return [
        row
        for shots in _readable(files, [model], BATCH, strict)
        for row in _explain(model, shots, wanted, names)
    ]


def class_index(learner: PromptLearner, name: str) -> int:
    """Which of the run's classes a name means: as the folders call it or in words, in any case."""
    asked = name.strip().casefold()
    for names in (learner.classes_, learner.words_):
        lowered = [known.casefold() for known in names]
        if asked in lowered:
            return lowered.index(asked)
    raise unknown("class", name, learner.classes_)


def places(out: Path, files: Sequence[Path], format: Format, compare: bool) -> list[Path]:
    """Where the pictures go: one an image, or one a page of a comparison. No image is ever written over."""
    if format not in FORMATS:
        raise unknown("picture format", format, FORMATS)
    count = -(-len(files) // COLUMNS) if compare else len(files)
    if out.suffix.lower()[1:] in FORMATS and not out.is_dir():
        if count > 1:
            raise DropleError(f"{out} is one picture, but {count} are to be drawn: give --out a folder.")
        if any(out.exists() and out.samefile(file) for file in files):
            raise DropleError(f"{out} is the image itself: give --out another name.")
        return [out]
    if out.exists() and not out.is_dir():
        raise DropleError(
            f"{out} is a file: give --out a folder, or a name that ends in .{' or .'.join(FORMATS)}."
        )
    if compare:
        stems = ["comparison"] * count
    else:
        alike = Counter(file.stem.lower() for file in files)
        # Folders are often classes, each with its own 001.jpg.
        stems = [f"{f.parent.name}-{f.stem}" if alike[f.stem.lower()] > 1 else f.stem for f in files]
        stems = [f"{stem}-explained" for stem in stems]
    times: Counter[str] = Counter()
    named = []
    for stem in stems:
        times[stem.lower()] += 1
        again = f"-{times[stem.lower()]}" if times[stem.lower()] > 1 else ""
        named.append(out / f"{stem}{again}.{format}")
    return named


def _model(run: str | Path | PromptLearner, device: str, progress: Progress | None) -> Model:
    """A run and what it is called: its method, or the dropout that makes it an ablation."""
    if isinstance(run, PromptLearner):
        run._check_fitted()
        learner, folder = run, ""
    else:
        learner = PromptLearner.load(run, device=device, progress=progress)
        folder = f"\n{Path(run).resolve().name}"
    method = learner.method_
    towers = _dropping(method)
    regulariser = None if towers is None else towers.regulariser
    title = type(method).__name__
    if regulariser is not None:
        title = " + ".join(dict.fromkeys([title, RATES.get(regulariser.options.rate, "DroPLe")]))
    title = title.removeprefix("DroPLe + ")
    title = title[0].upper() + title[1:]
    return Model(title + folder, learner)


def _readable(
    files: Sequence[Path], models: Sequence[Model], size: int, strict: bool
) -> Iterator[list[Shot]]:
    """The images that can be read, `size` at a time; the others are said as `drople predict` says them."""
    learner = models[-1].learner
    bad: list[BadImage] = []
    shots: list[Shot] = []
    found = False
    with learner.progress.task("explaining", len(files)) as update:
        for done, file in enumerate(files):
            try:
                picture = open_image(file)
            except BadImage as error:
                if strict:
                    raise
                bad.append(error)
                continue
            photo = Image.fromarray(square(picture, DRAWN, Image.Resampling.LANCZOS).transpose(1, 2, 0))
            shots.append(Shot(file, photo, tuple(model.pixels(picture) for model in models)))
            if len(shots) == size:
                found = True
                yield shots
                shots = []
                update(done + 1)
        if shots:
            found = True
            yield shots
    learner._say_bad(bad)
    if not found:
        raise DropleError("none of the images can be read: " + str(bad[0]))


def _explain(
    model: Model, shots: Sequence[Shot], wanted: int | None, names: Mapping[Path, Path]
) -> Iterator[dict[str, Any]]:
    learner, method = model.learner, model.learner.method_
    images = model.images(shots, 0)
    shares = model.probabilities(images, learner.words_)
    targets = shares.argmax(1) if wanted is None else torch.full((len(shots),), wanted)
    heats = model.heat(images, targets, learner.words_)
    maps = {name: value.float().cpu().numpy() for name, value in importance_maps(learner, images).items()}
    words = {target: word_importance(learner, learner.words_[target]) for target in set(targets.tolist())}
    towers = _dropping(method)
    options = None if towers is None or towers.regulariser is None else towers.regulariser.options
    about = model.title.replace("\n", ", run ")
    for n, (shot, target) in enumerate(zip(shots, targets.tolist(), strict=True)):
        best = shares[n].argsort(descending=True)[:LISTED].tolist()
        listed = best if target in best else [*best[:-1], target]
        content = Explanation(
            photo=shot.photo,
            name=shot.file.name,
            run=f"{about}, on {learner.backbone_.name}",
            class_name=learner.classes_[target],
            probability=float(shares[n, target]),
            answers=tuple((learner.classes_[k], float(shares[n, k])) for k in listed),
            heat=heats[n],
            maps={name: value[:, n] for name, value in maps.items()},
            words=words[target],
            drop_range=(0.0, 1.0) if options is None else (options.p_min, options.p_max),
            notes=tuple(_notes(method)),
        )
        place = names[shot.file]
        save_explanation(place, content)
        yield _row(shot, content.class_name, content.probability, place)


def _notes(method: Method) -> Iterator[str]:
    """What a picture leaves out, and why."""
    towers = _dropping(method)
    regulariser = None if towers is None else towers.regulariser
    if towers is None or regulariser is None:
        yield "No tokens drop in this method: there is no importance to show."
        return
    rate, high = regulariser.options.rate, regulariser.options.p_max
    if rate in ("uniform", "block"):
        yield f"In this run every token drops with probability {high:.0%}: there is no importance to show."
        return
    if rate == "attribution":
        yield "In this run the gradient of a training step said which tokens drop: there is no importance to show."
        return
    yield "Maps are those of a pass in which nothing drops, as at prediction."
    prompts = towers.visual_prompts() if towers.visual_prompts else None
    if prompts is not None and regulariser.layers["vision"]:
        count = prompts.shape[1]
        yield f"The {count} visual prompts of a layer have an importance too, but no place in the image."


def _compare(
    models: Sequence[Model], shots: Sequence[Shot], wanted: int | None, place: Path
) -> Iterator[dict[str, Any]]:
    """One page. Every model is asked of the same classes: those of the run, which stands last."""
    run = models[-1].learner
    words, classes = run.words_, run.classes_
    images = [model.images(shots, n) for n, model in enumerate(models)]
    shares = [model.probabilities(own, words) for model, own in zip(models, images, strict=True)]
    targets = shares[-1].argmax(1) if wanted is None else torch.full((len(shots),), wanted)
    heats = [model.heat(own, targets, words) for model, own in zip(models, images, strict=True)]
    best = [share.max(1) for share in shares]
    columns = [
        Column(
            photo=shot.photo,
            class_name=classes[int(targets[n])],
            heats=tuple(heat[n] for heat in heats),
            answers=tuple((classes[int(b.indices[n])], float(b.values[n])) for b in best),
        )
        for n, shot in enumerate(shots)
    ]
    save_comparison(place, [model.title for model in models], columns)
    for n, (shot, column) in enumerate(zip(shots, columns, strict=True)):
        yield _row(shot, column.class_name, float(shares[-1][n, targets[n]]), place)


def _row(shot: Shot, class_name: str, probability: float, place: Path) -> dict[str, Any]:
    return {
        "image": str(shot.file),
        "class": class_name,
        "probability": round(probability, 6),
        "picture": str(place),
    }

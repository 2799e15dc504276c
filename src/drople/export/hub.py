"""A folder ready for upload to the Hugging Face Hub: what was learned, its config, metrics and a model card.

Nothing in it says where on which machine it was made: training images are known by the hash of their bytes.
"""

from pathlib import Path
from typing import Any

from drople import __version__
from drople.answers import percent
from drople.errors import DropleError
from drople.learner import CONFIG, METRICS, PROMPTS, PromptLearner
from drople.methods import find
from drople.records import write_bytes, write_json, write_tensors

CARD = "README.md"
PAPER = """@inproceedings{chen2026dropout,
  title = {Dropout Prompt Learning: Towards Robust and Adaptive Vision-Language Models},
  author = {Chen, Biao and Zuo, Lin and Jing, Mengmeng and He, Kunbin and Wang, Yuchen},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  year = {2026}
}"""


def write_hub(learner: PromptLearner, folder: Path, *, backbone: str | None, dataset: str | None) -> None:
    """Config, weights, metrics and card; `PromptLearner.load` takes the folder as it takes a run."""
    config = public_config(learner.config_, backbone)
    metrics = public_metrics(learner.metrics_)
    write_json(folder / CONFIG, config)
    about = {"drople": __version__, "method": str(config["method"])}
    write_tensors(folder / PROMPTS, learner.method_.state_dict(), about)
    write_json(folder / METRICS, metrics)
    write_bytes(folder / CARD, card(learner, config, metrics, dataset).encode())


def public_config(config: dict[str, Any], backbone: str | None) -> dict[str, Any]:
    """The config with a backbone that others can find, and without the names of files."""
    name = str(config["backbone"]) if backbone is None else backbone
    if Path(name).expanduser().is_dir():
        raise DropleError(
            f"the run's backbone is the folder {name}, which nobody else has: give its name on the Hugging "
            "Face Hub with --backbone, such as openai/clip-vit-base-patch16."
        )
    samples = [[None, *rest] for _, *rest in config["samples"]]
    return config | {"backbone": name, "samples": samples}


def public_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    evaluation = metrics.get("evaluation")
    if not evaluation:
        return metrics
    skipped = [Path(name).name for name in evaluation.get("skipped", ())]
    return metrics | {"evaluation": evaluation | {"skipped": skipped}}


def card(learner: PromptLearner, config: dict[str, Any], metrics: dict[str, Any], dataset: str | None) -> str:
    """The model card."""
    kind, wrapped = find(config["method"])
    title = kind.title + (" + DroPLe" if wrapped and kind.name != "drople" else "")
    counts = [sum(sample[1] == name for sample in config["samples"]) for name in config["classes"]]
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    hub_backbone = "/" in config["backbone"]
    settings = [f"{name} {value}" for name, value in (config["options"] | config["training"]).items()]
    parts = [
        "---",
        "library_name: drople",
        "pipeline_tag: image-classification",
        *([f"base_model: {config['backbone']}"] if hub_backbone else []),
        "tags: [clip, prompt-learning, few-shot]",
        "---",
        "",
        f"# {title}, {len(config['classes'])} classes",
        "",
        f"An image classifier: the frozen CLIP `{config['backbone']}` and {learner.trainable_:,} "
        f"numbers learned by {title} from {each} images a class. The weights here are those numbers; drople "
        "brings the rest.",
        "",
        "## Use",
        "",
        "```python",
        "from drople import PromptLearner",
        "",
        'learner = PromptLearner.load("path/to/this/folder")',
        'print(learner.predict(["photo.jpg"]))',
        "```",
        "",
        "## Data",
        "",
        *([dataset, ""] if dataset else []),
        f"{sum(counts)} training images, {each} a class (seed {config['seed']}); `config.json` knows each by "
        "the SHA-256 of its bytes. Classes:",
        "",
        ", ".join(config["classes"]) + ".",
        "",
        "## Training",
        "",
        f"Templates: {'; '.join(config['templates'])}",
        "",
        f"Settings: {', '.join(settings)}. drople {__version__}.",
        "",
        "## Metrics and calibration",
        "",
        *_metrics(metrics),
        "",
        "## Citation",
        "",
        f"{kind.title}: {kind.citation}.",
        "",
        "```bibtex",
        PAPER,
        "```",
        "",
    ]
    return "\n".join(parts)


def _metrics(metrics: dict[str, Any]) -> list[str]:
    """A table of what was measured, and on how many images."""
    rows: list[str] = []
    for name, part in (("validation", metrics.get("validation")), ("held out", metrics.get("evaluation"))):
        if part:
            split = part.get("split", name)
            cells = (part["accuracy"], part.get("zero_shot_accuracy"), part["ece"], part["ece_uncalibrated"])
            rows.append(f"| {split} | {part['images']} | " + " | ".join(map(percent, cells)) + " |")
    temperature = f"Probabilities are calibrated: logits are divided by {metrics['temperature']:.3f}"
    if not rows:
        return ["Nothing was measured: there were no validation or test images. The temperature is 1."]
    return [
        "| images of | images | accuracy | zero-shot accuracy | calibration error | before calibration |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"{temperature}, a temperature fitted on the validation images.",
    ]

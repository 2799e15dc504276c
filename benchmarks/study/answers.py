"""One training, many ways to answer: means over epochs, shares of the frozen features, prototypes.

    python benchmarks/study/answers.py --grid GRID.json --data DATA --backbone pocket --workers 2 --out answers.jsonl

Takes the grids of `study.py` with the protocol "nested", and trains as it does. Each line is one training with its
answers by name: accuracy on the half trained on, and on the held-out half. "last", "half", "mid", "all", "e10", "e20"
are the parameters of the last epoch, the mean of the second half's, of the middle third's and of all, and those at a
third and at two thirds; "i" and "t" shares of the frozen image and class features; "p" the weight of prototypes; "a"
a share of what LoRA adds. (nested_b16_6.jsonl has those of the last epoch alone.)
"""

from typing import Any

import study
import torch
import torch.nn.functional as F
from study import Pictures, dataset, normalise
from torch import Tensor

from drople.lora import LoRA
from drople.methods import Task, make
from drople.prototypes import Prototypes
from drople.training import Status, Training

SHARES = (0.0, 0.3, 0.5)
OMEGAS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SCALES = (0.3, 0.5, 0.7)


def of_epochs(last: int) -> dict[str, range]:
    third = last // 3
    return {
        "last": range(last, last + 1),
        "half": range(last // 2 + 1, last + 1),
        "mid": range(third + 1, 2 * third + 1),
        "all": range(1, last + 1),
        "e10": range(third, third + 1),
        "e20": range(2 * third, 2 * third + 1),
    }


@torch.no_grad()
def features(method: Any, pictures: Pictures, rows: Tensor) -> Tensor:
    pixels, dtype = method.backbone.pixels, method.backbone.dtype
    each = [method.image_features(normalise(pictures.plain[part], pixels, dtype)) for part in rows.split(256)]
    return F.normalize(torch.cat(each).float(), dim=-1)


def right(images: Tensor, classes: Tensor, labels: Tensor) -> float:
    return float(((images @ F.normalize(classes, dim=-1).T).argmax(1) == labels).float().mean())


def run(task: dict[str, Any]) -> dict[str, Any]:
    method, few, schedule, chosen, asked = study.begin(task)
    _, template, pictures = dataset(task["dataset"])
    backbone = method.backbone
    training = Training(method, few, schedule, seed=task["seed"], precision="bf16")
    at: dict[int, list[Tensor]] = {}

    def keep(status: Status) -> None:
        if status.step % training.per_epoch == 0:
            at[status.epoch + 1] = [p.detach().clone() for p in method.parameters()]

    training.run(keep)
    answers: dict[str, dict[str, float]] = {}
    loras = {part: part.scale for part in method.modules() if isinstance(part, LoRA)}
    for name, epochs in of_epochs(schedule.epochs).items():
        for parameter, *states in zip(method.parameters(), *(at[e] for e in epochs), strict=True):
            parameter.data.copy_(torch.stack(states).mean(0))
        shares = SHARES if name in ("last", "half") else SHARES[:1]
        trained_on = features(method, pictures, pictures.rows(chosen)) if name == "last" else None
        for part, (words, examples) in asked.items():
            where = pictures.rows(examples)
            truth = torch.tensor([e.label for e in examples], device=backbone.device)
            images, frozen = (
                features(method, pictures, where),
                F.normalize(pictures.frozen[where].float(), dim=-1),
            )
            classes = method.class_weights(words).float()
            plain = make("zero-shot", backbone, Task(words, (template,)), {}).class_weights(words).float()
            for i in shares:
                for t in shares:
                    mixed = F.normalize((1 - i) * images + i * frozen, dim=-1)
                    answer = answers.setdefault(f"{name} i{i} t{t}", {})
                    answer[part] = right(mixed, (1 - t) * classes + t * plain, truth)
            if trained_on is not None:
                for omega in OMEGAS:
                    known = Prototypes(method.task.words, classes.shape[1], omega).to(backbone.device)
                    known.hold(trained_on, few.labels)
                    answers.setdefault(f"p{omega}", {})[part] = right(
                        images, known.join(words, classes), truth
                    )
                for share in SCALES if loras else ():
                    for lora, scale in loras.items():
                        lora.scale = share * scale
                    answers.setdefault(f"a{share}", {})[part] = right(
                        features(method, pictures, where), method.class_weights(words).float(), truth
                    )
                for lora, scale in loras.items():
                    lora.scale = scale
    return {**task, "answers": answers}


def attempt(task: dict[str, Any]) -> dict[str, Any]:
    """One run that fails must not end the study."""
    try:
        return run(task)
    except Exception as error:
        return {**task, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    study.attempt = attempt
    study.main()

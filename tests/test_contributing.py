"""The walk-through of CONTRIBUTING.md is a method that works."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from tiny import random_images, tiny_backbone

from drople.methods import REGISTRY, Batch, Task, make

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture
def bias(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 60
    file = tmp_path / "bias.py"
    file.write_text(code)
    runpy.run_path(str(file))
    yield "bias"
    REGISTRY.pop("bias")


def test_a_strangers_method_trains_and_keeps_the_backbone(bias: str) -> None:
    backbone = tiny_backbone()
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    task = Task(("cat", "dog", "tree"), ("a photo of a {}.",))
    method = make(bias, backbone, task, {"strength": "0.5"})
    images = random_images(backbone, 6)
    batch = Batch(images, torch.arange(6) % 3, backbone.encode_images(images))
    optimizer = torch.optim.AdamW(method.parameter_groups(1e-2))
    losses = []
    for _ in range(5):
        loss = torch.stack(list(method.training_step(batch).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert method.trainable == backbone.embed_dim
    assert all(torch.equal(before[name], weight) for name, weight in backbone.model.state_dict().items())
    assert method.logits(images, method.class_weights(["zebra", "okapi"])).shape == (6, 2)

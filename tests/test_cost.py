"""Costs against counts by hand and the numbers that papers print."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drople.backbone import Backbone
from drople.backbone.shapes import SHAPES, shape_backbone
from drople.cost import (
    Cost,
    _label,
    _training_step,
    class_names,
    costs,
    duration,
    flops,
    measure,
    plot,
    print_costs,
    rows,
    short,
    trainable_on,
)
from drople.errors import DropleError
from drople.methods import REGISTRY, Batch, Task, make


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that measure: on a busy machine threads wait for each other a hundredfold."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def cost(method: str, **changes: object) -> Cost:
    plain = Cost(method, "pocket", 100, 32, "cpu", 2048, 10**12, 10**9, 0.5, 100.0, 2**30)
    return Cost(**{**vars(plain), **changes})  # type: ignore[arg-type]


# Shapes and counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "published"),
    [
        ("coop", 2_048),  # 4 tokens x 512
        ("cocoop", 35_360),  # CoCoOp, table 3
        ("maple", 3_555_072),  # MaPLe: 3.55 M
        ("promptsrc", 46_080),  # PromptSRC: 46 k
        ("mma", 674_560),  # MMA: 0.674 M
        ("tcp", 331_904),  # TCP: 0.33 M
        ("zero-shot", 0),
        ("linear-probe", 100 * 513),
        ("tip-adapter-f", 100 * 16 * 512),
    ],
)
def test_trainable_on_vit_b_16(method: str, published: int) -> None:
    assert trainable_on(method, "vit-b-16") == published


def test_every_method_can_be_counted_on_every_shape() -> None:
    for shape in SHAPES:
        counts = {name: trainable_on(name, shape) for name in REGISTRY}
        assert all(
            n == 0 for name, n in counts.items() if name in ("zero-shot", "zero-shot-ensemble", "tip-adapter")
        )
        assert all(
            n > 0
            for name, n in counts.items()
            if name not in ("zero-shot", "zero-shot-ensemble", "tip-adapter")
        )


def test_a_count_is_that_of_the_method_itself() -> None:
    backbone = shape_backbone("vit-b-32", hollow=True)
    made = make("dac-vt", backbone, Task(class_names(7), ("a {}.",)), {})
    assert trainable_on("dac-vt", "vit-b-32", classes=7) == made.trainable


def test_shapes_are_those_of_openai() -> None:
    backbone = shape_backbone("shape:vit-b-16", hollow=True)
    assert backbone.name == "shape:vit-b-16" and backbone.pixels.size == 224 and backbone.patch_grid == 14
    count = sum(p.numel() for p in backbone.model.parameters())
    # OpenAI's ViT-B/16 has 149,620,737, with a table of 49,408 words.
    assert count + (49408 - 12288) * 512 == 149_620_737
    large = shape_backbone("vit-l-14", hollow=True)
    assert sum(p.numel() for p in large.model.parameters()) + (49408 - 12288) * 768 == 427_616_513
    with pytest.raises(DropleError, match="did you mean shape:vit-b-16"):
        shape_backbone("shape:vit-b-15")


def test_a_shape_with_weights_encodes() -> None:
    backbone = shape_backbone("vit-b-32")
    features = backbone.encode_images(torch.randn(1, 3, 224, 224))
    assert features.shape == (1, 512) and bool(features.isfinite().all()) and float(features.std()) > 0


# Measuring -----------------------------------------------------------------------------------------


def flops_by_hand(classes: int) -> int:
    """Products of one image through the tiny tower of `checkpoints.py` and against the classes."""
    width, hidden, patches, layers, embed = 32, 64, 16, 3, 16
    tokens = patches + 1

    def layer(queries: int) -> int:
        """All tokens are keys and values; those that are queries too go on to the MLP."""
        projections = 2 * (tokens + queries) * width * width
        return projections + 2 * queries * tokens * width + 2 * queries * width * hidden

    towers = (layers - 1) * layer(tokens) + layer(1)
    return 2 * (patches * 3 * 8 * 8 * width + towers + width * embed + embed * classes)


def test_inference_flops_against_a_count_by_hand() -> None:
    found = measure("zero-shot", str(tiny_checkpoint()), classes=5, batch=3, device="cpu", repeats=1)
    assert found.inference_flops == flops_by_hand(5)
    assert found.trainable == 0 and found.training_flops is None and found.step_seconds is None


@pytest.mark.parametrize("name", ["coop", "drople", "mma", "cocoop"])
def test_flops_of_a_step_are_those_that_torch_counts(name: str) -> None:
    made = make(name, Backbone.load(tiny_checkpoint()), Task(class_names(4), ("a {}.",)), {})
    _, gradients = _training_step(made.train(), classes=4, batch=2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gradients()
    assert flops(gradients) == counter.get_total_flops() > 0


def test_a_step_that_asks_for_gradients_is_counted() -> None:
    """ProGrad takes CoOp's gradient and a second one of the same logits, and its zero-shot logits."""
    counts, backward = {}, 0
    for name in ("coop", "prograd"):
        made = make(name, Backbone.load(tiny_checkpoint()), Task(class_names(4), ("a {}.",)), {})
        _, gradients = _training_step(made.train(), classes=4, batch=2)
        counts[name] = flops(gradients)
        if name == "coop":
            batch = Batch(
                torch.randn(2, 3, 32, 32), torch.tensor([0, 1]), torch.randn(2, made.backbone.embed_dim)
            )
            with sdpa_kernel(SDPBackend.MATH):
                loss = made(batch)["cross_entropy"]
            backward = flops(loss.backward)
    zero_shot = 2 * 2 * 16 * 4  # batch, width of the embedding, classes
    assert counts["prograd"] == counts["coop"] + backward + zero_shot and backward > 10**5


def test_costs_in_processes_of_their_own() -> None:
    seen: list[tuple[int, int]] = []
    failed: list[DropleError] = []
    # What cannot be measured does not lose the rest.
    found = costs(
        ["coop", "tip-adapter"], [str(tiny_checkpoint()), "no/such/folder"], classes=4, batch=2, repeats=1,
        device="cpu", on_done=lambda done, total: seen.append((done, total)), on_failed=failed.append,
    )  # fmt: skip
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(failed) == 2 and all("no/such/folder" in str(error) for error in failed)
    coop, tip = found
    assert coop.trainable == 4 * 24 and coop.step_seconds is not None and coop.step_seconds > 0
    # Forward and backward through the text tower, and two images.
    assert coop.training_flops is not None and coop.training_flops > 2 * coop.inference_flops
    assert coop.images_per_second > 0 and 2**18 < coop.memory_bytes < 2**30
    assert tip.training_flops is None and tip.inference_flops > coop.inference_flops
    json.dumps(rows(found))


def test_memory_grows_with_the_batch() -> None:
    small, large = (
        costs(["maple"], ["pocket"], classes=2, batch=batch, repeats=1, device="cpu")[0].memory_bytes
        for batch in (1, 8)
    )
    # Seven images more: of each of 12 layers the hidden layer of the MLP alone is 67 x 1024 floats an image.
    assert large - small > 7 * 12 * 67 * 1024 * 4


def test_mistakes() -> None:
    with pytest.raises(DropleError, match="did you mean drople"):
        costs(["droplet"])
    with pytest.raises(DropleError, match="classes"):
        costs(["coop"], classes=1)
    with pytest.raises(DropleError, match="at least 1"):
        costs(["coop"], batch=0)
    with pytest.raises(DropleError, match="shape:vit-b-16"):
        costs(["coop"], ["shape:vit-b-61"])


# Showing -------------------------------------------------------------------------------------------


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    print_costs([cost("coop"), cost("zero-shot", trainable=0, training_flops=None, step_seconds=None)])
    printed = capsys.readouterr().out
    for words in (
        "coop",
        "2,048",
        "1 T",
        "1 G",
        "500 ms",
        "100",
        "1,024 MiB",
        "zero-shot",
        "100 classes, batch 32, cpu",
    ):
        assert words in printed
    assert [short(n) for n in (None, 7, 1234, 5.67e9, 3e17)] == ["-", "7", "1.23 k", "5.67 G", "300 P"]
    assert duration(2.5) == "2.5 s"


def test_names_of_bubbles_do_not_lie_on_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    crowd = [
        cost(
            name,
            trainable=2048 * (1 + n % 3),
            step_seconds=float(0.5 + 0.02 * torch.rand((), generator=generator)),
        )
        for n, name in enumerate(sorted(REGISTRY))
    ]
    figure = Figure(figsize=(10, 7))
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    axes.scatter([c.trainable for c in crowd], [c.step_seconds for c in crowd])
    axes.set(xscale="log", yscale="log", xlim=(1e2, 1e6), ylim=(0.1, 3))
    _label(axes, crowd, [300.0] * len(crowd))
    canvas.draw()
    names = [t for t in axes.texts if t.get_text()]
    boxes = [Text.get_window_extent(t) for t in names]  # without the line to the bubble
    assert [t.get_text() for t in names] == sorted(REGISTRY)
    for n, box in enumerate(boxes):
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
        assert not [names[m] for m in range(n) if box.overlaps(boxes[m])]


def test_plot(tmp_path: Path) -> None:
    found = [
        cost("coop"),
        cost("maple", trainable=3_000_000, step_seconds=0.9),
        cost("drople", backbone="b16"),
    ]
    plot(found, tmp_path / "cost.png")
    with Image.open(tmp_path / "cost.png") as image:
        assert image.width > 800 and len(set(image.convert("L").resize((60, 40)).tobytes())) > 10
    with pytest.raises(DropleError, match="nothing to plot"):
        plot([cost("zero-shot", step_seconds=None)], tmp_path / "none.png")
    with pytest.raises(DropleError, match="cannot write"):
        plot(found, tmp_path / "cost.txyz")

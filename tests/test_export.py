"""Exported files answer as the run does, elsewhere too: in onnxruntime, in torch, in a ten-line script."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import own_folder, picture, splits, tiny_checkpoint
from PIL import Image

from drople import PromptLearner
from drople.errors import DropleError
from drople.export import Exported, export
from drople.export.classifier import Classifier, describe, trace

DOC = Path(__file__).parent.parent / "docs" / "export.md"
needs_onnx = pytest.mark.usefixtures("onnx_extra")


@pytest.fixture(scope="session")
def onnx_extra() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the export extra is not installed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours")


def trained(data: Path, method: str, **options: Any) -> PromptLearner:
    given = {"epochs": 1, "device": "cpu", "precision": "float32", **options}
    return PromptLearner(tiny_checkpoint(), method, **given).fit(data, 4)


@pytest.fixture(scope="module")
def run(data: Path) -> PromptLearner:
    return trained(data, "drople", lora_rank=2, lora_from=1)


def run_onnx(file: Path, images: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return list(session.run(["probabilities", "logits"], {"images": images}))


# ONNX on real images -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(shared: Path, onnx_extra: None) -> tuple[PromptLearner, Path, Exported, list[Path]]:
    """DroPLe on pocket and the eurosat pack, exported and checked on 200 test images."""
    folder = own_folder()
    with tarfile.open(shared / "data" / "eurosat.tar") as tar:
        members = [
            m
            for n, m in enumerate(tar)
            if ("/test/" in m.name and n % 10 == 0) or ("/train/" in m.name and n % 16 == 0)
        ]
        tar.extractall(folder, members=members, filter="data")
    images = sorted((folder / "eurosat" / "test").rglob("*.jpg"))
    assert len(images) >= 200
    learner = PromptLearner("pocket", "drople", epochs=1, device="cpu", precision="float32")
    learner.fit(folder / "eurosat", 1)
    # Prompts far from where they start, and a temperature: neither can be forgotten unnoticed.
    with torch.no_grad():
        for parameter in learner.method_.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    learner._weights.clear()
    learner.temperature_ = 1.7
    file = folder / "out" / "eurosat.onnx"
    return learner, file, export(learner, "onnx", file, data=folder / "eurosat"), images


def test_onnx_gives_the_runs_probabilities_on_200_images(real: Any) -> None:
    learner, file, exported, images = real
    assert exported.check.images == 200 and exported.check.same_class == 1.0
    assert exported.check.largest_difference < 1e-4
    assert exported.check.accuracy == exported.check.run_accuracy is not None
    # Once more by the public interface, from files, with an odd batch.
    from drople.safe_image import open_image, square

    some = images[:37]
    squares = np.stack([square(open_image(f), 128, 3).transpose(1, 2, 0) for f in some])
    probabilities, logits = run_onnx(file, squares)
    expected = learner.predict_proba(some)
    assert np.abs(probabilities - expected).max() < 1e-4
    assert (probabilities.argmax(1) == expected.argmax(1)).all()
    assert np.allclose(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), probabilities, atol=1e-5)


def test_onnx_metadata_and_shapes(real: Any) -> None:
    import onnx

    learner, file, _, _ = real
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["classes"]) == list(learner.classes_)
    assert (about["size"], about["resample"], about["method"], about["backbone"]) == (
        "128",
        "3",
        "drople",
        "pocket",
    )
    assert float(about["temperature"]) == learner.temperature_
    assert json.loads(about["mean"]) == list(learner.backbone_.pixels.mean)
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    assert shapes == [["batch", 128, 128, 3]]
    assert model.opset_import[0].version >= 18
    # The text tower stayed behind, and so did the places of files on this machine.
    assert file.stat().st_size < 45e6
    content = file.read_bytes()
    assert (
        b"site-packages" not in content and b".py" not in content and str(Path.home()).encode() not in content
    )


def test_the_ten_lines_of_the_docs_run_without_drople(real: Any, tmp_path: Path) -> None:
    learner, file, _, images = real
    script = next(re.finditer(r"```python\n(.*?)```", DOC.read_text("utf-8"), re.S)).group(1)
    assert len(script.strip().splitlines()) == 10
    (tmp_path / "run.py").write_text("import sys\nassert 'drople' not in sys.modules\n" + script)
    # A photo that is not square, on its side by its EXIF data.
    wide = Image.open(images[5]).resize((211, 150))
    exif = Image.Exif()
    exif[0x0112] = 6
    wide.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    command = [sys.executable, "run.py", str(file), "photo.jpg"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    expected = learner.predict_proba(tmp_path / "photo.jpg")[0]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for _, name in lines] == [learner.classes_[k] for k in expected.argsort()[::-1][:3]]
    for shown, k in zip(lines, expected.argsort()[::-1][:3], strict=True):
        assert float(shown[0]) == pytest.approx(expected[k], abs=2e-4)


# Fewer bits ----------------------------------------------------------------------------------------


@needs_onnx
@pytest.mark.parametrize(("dtype", "most"), [("fp16", 0.02), ("int8", 0.15)])
def test_fewer_bits_lose_little_and_say_how_much(data: Path, tmp_path: Path, dtype: Any, most: float) -> None:
    import onnx

    # By text alone, so that it is not certain of everything.
    run = trained(data, "drople", prototypes=0.0)
    before = {n: t.clone() for n, t in run.backbone_.model.state_dict().items()}
    exported = export(run, "onnx", tmp_path / "small.onnx", dtype=dtype, data=data)
    assert 0 < exported.check.largest_difference < most
    assert exported.check.accuracy is not None and len(exported.lines()) == 3
    kinds = {t.data_type for t in onnx.load(tmp_path / "small.onnx").graph.initializer}
    assert (onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.INT8) in kinds
    # The learner is as it was.
    after = run.backbone_.model.state_dict()
    assert run.backbone_.dtype == torch.float32 and all(torch.equal(after[n], t) for n, t in before.items())


# torch ---------------------------------------------------------------------------------------------


def test_torch_program(run: PromptLearner, tmp_path: Path) -> None:
    file = tmp_path / "run.pt2"
    exported = export(run, "torch", file)
    assert exported.check.what == "drawings" and exported.check.largest_difference < 1e-4
    about = {"about.json": ""}
    program = torch.export.load(file, extra_files=about)
    assert json.loads(about["about.json"]) == describe(run, "float32")
    module = program.module()
    held = sum(t.numel() for t in (*program.state_dict.values(), *program.constants.values()))
    model = run.backbone_.model
    towers = sum(
        p.numel() for part in (model.vision_model, model.visual_projection) for p in part.parameters()
    )
    method: Any = run.method_
    learned = method.visual_prompts().numel()
    classes = len(run.classes_) * model.config.projection_dim
    assert held <= towers + learned + classes + 200, "no weight twice, and LoRA in the weights"
    for batch in (1, 5):
        images = torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8)
        probabilities, logits = module(images)
        expected = run.predict_proba([i.numpy() for i in images])
        assert np.abs(probabilities.numpy() - expected).max() < 1e-4
        assert torch.allclose(logits.softmax(-1), probabilities, atol=1e-6)
    with zipfile.ZipFile(file) as archive:
        # Raw tensors and JSON: torch's pickles begin with PK or \x80.
        pickles = [n for n in archive.namelist() if archive.read(n)[:1] == b"\x80" or n.endswith(".pkl")]
        text = archive.read(next(n for n in archive.namelist() if n.endswith("models/model.json")))
    assert not pickles
    assert b".py" not in text and b"site-packages" not in text


KINDS = ("clip-lora", "mma", "tip-adapter-f", "linear-probe", "maple", "gallop", "drople", "dac-v+drople")


@pytest.mark.parametrize("method", KINDS)
def test_methods_of_every_kind_can_be_traced(data: Path, method: str) -> None:
    learner = trained(data, method)
    before = {name: weight.clone() for name, weight in learner.backbone_.model.state_dict().items()}
    images = [np.asarray(picture(c, 7).crop((0, 0, 32, 32))) for c in ("red", "green", "blue")]
    probabilities, _ = trace(learner).module()(torch.from_numpy(np.stack(images)))
    assert np.abs(probabilities.numpy() - learner.predict_proba(images)).max() < 1e-5
    after = learner.backbone_.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items()), "the learner's own stays"


# Hub -----------------------------------------------------------------------------------------------


def test_hub_folder(tmp_path: Path) -> None:
    photos = splits(tmp_path / "secret-home" / "photos")
    learner = PromptLearner("pocket", "coop+drople", epochs=1, device="cpu").fit(photos, 2)
    learner.metrics_["evaluation"] = learner.evaluate(photos) | {"skipped": [str(photos / "bad.jpg")]}
    learner.save(tmp_path / "run")
    exported = export(tmp_path / "run", "hub", tmp_path / "hub", dataset="Coloured noise.", data=photos)
    folder = tmp_path / "hub"
    assert exported.check.largest_difference == 0 and exported.check.accuracy is not None
    assert {f.name for f in folder.iterdir()} == {
        "config.json",
        "prompts.safetensors",
        "metrics.json",
        "README.md",
    }
    for file in folder.iterdir():
        assert b"secret-home" not in file.read_bytes() and b"/tmp" not in file.read_bytes()
    card = (folder / "README.md").read_text("utf-8")
    for words in (
        "Coloured noise.",
        "Context Optimization + DroPLe",
        "Zhou et al., IJCV 2022",
        "Dropout Prompt Learning",
        "PromptLearner.load",
        "calibration error",
        "blue, green, red",
        "6 training images, 2 a class",
    ):
        assert words in card
    images = sorted((photos / "test").rglob("*.png"))
    assert np.array_equal(
        PromptLearner.load(folder, device="cpu").predict_proba(images), learner.predict_proba(images)
    )
    # It still knows what it was trained on.
    assert PromptLearner.load(folder).evaluate(photos / "train")["images"] == 18 - 6


def test_a_backbone_of_this_machine_needs_a_name(run: PromptLearner, tmp_path: Path) -> None:
    with pytest.raises(DropleError, match="--backbone"):
        export(run, "hub", tmp_path / "hub")
    export(run, "hub", tmp_path / "hub", backbone="someone/tiny-clip")
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["backbone"] == "someone/tiny-clip"
    assert "base_model: someone/tiny-clip" in (tmp_path / "hub" / "README.md").read_text()


# Refusals ------------------------------------------------------------------------------------------


def test_what_cannot_be_folded_is_refused(data: Path, tmp_path: Path) -> None:
    learner = trained(data, "cocoop")
    with pytest.raises(DropleError, match="cocoop makes the features of its classes anew"):
        export(learner, "torch", tmp_path / "a.pt2")
    assert not (tmp_path / "a.pt2").exists()
    assert export(learner, "hub", tmp_path / "hub", backbone="a/b").check.largest_difference == 0


@pytest.mark.parametrize(
    ("to", "out", "options", "words"),
    [
        ("onx", "a.onnx", {}, "did you mean onnx"),
        ("onnx", "a.onnx", {"dtype": "int4"}, "dtype"),
        ("torch", "a.pt2", {"dtype": "int8"}, "--to onnx"),
        ("onnx", "a.bin", {}, ".onnx"),
        ("onnx", "folder.onnx", {}, "is a folder"),
        ("hub", "full", {}, "there already"),
    ],
)
def test_mistakes(run: PromptLearner, tmp_path: Path, to: Any, out: str, options: Any, words: str) -> None:
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(DropleError, match=re.escape(words)):
        export(run, to, tmp_path / out, **options)


def test_unknown_classes_and_unfitted_learners(run: PromptLearner, data: Path, tmp_path: Path) -> None:
    other = splits(tmp_path / "other", ("red", "yellow"), 2)
    with pytest.raises(DropleError, match="not trained on yellow"):
        export(run, "torch", tmp_path / "a.pt2", data=other)
    with pytest.raises(DropleError, match="learned nothing yet"):
        export(PromptLearner("pocket"), "torch", tmp_path / "a.pt2")


def test_a_missing_extra_is_named(
    run: PromptLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(DropleError, match=re.escape("pip install drople[export]")):
        export(run, "onnx", tmp_path / "a.onnx")


def test_bf16_runs_are_exported_in_float32(data: Path, tmp_path: Path) -> None:
    learner = trained(data, "coop", precision="bf16")
    assert learner.backbone_.dtype == torch.bfloat16
    exported = export(learner, "hub", tmp_path / "hub", backbone="a/b")
    assert exported.check.largest_difference == 0
    from drople.export import _plain

    plain = _plain(learner, None)
    assert plain.backbone_.dtype == torch.float32
    images = torch.from_numpy(
        np.stack([np.asarray(picture("red", n).crop((0, 0, 32, 32))) for n in range(4)])
    )
    difference = Classifier(plain)(images)[0].numpy() - learner.predict_proba([i.numpy() for i in images])
    assert np.abs(difference).max() < 0.1

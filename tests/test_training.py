"""The training loop: same bytes whatever happens to the process, no silent NaN, nothing frozen moves."""

import hashlib
import json
import math
import os
import random
import signal
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from checkpoints import RUN_FILES, Command, contents, drople, picture, pictures, splits, tiny_checkpoint
from safetensors.torch import load_file

from drople import training as training_module
from drople.backbone import Backbone
from drople.cuda_graph import GraphedStep
from drople.data.images import normalise
from drople.errors import DropleError
from drople.learner import PromptLearner
from drople.methods import Batch, Progress, Task, make
from drople.records import read_tensors
from drople.training import CHECKPOINT, Training, TrainingData, TrainingOptions, augment, epoch_order, rate

COLOURS = ("red", "green", "blue")


def fit_arguments(data: Path, out: Path, *extra: object) -> list[object]:
    # Five steps an epoch, so that checkpoints, looks and epochs do not fall together.
    settings = ["--set", "batch_size=4", "--set", "epochs=12", "--backbone", tiny_checkpoint()]
    return ["fit", data, "--out", out, *settings, *extra]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    answer = drople(*fit_arguments(data, out))
    assert answer.code == 0, answer.err
    return out


def training_data(backbone: Backbone, count: int = 6) -> TrainingData:
    images = [np.asarray(picture(c, n).resize((36, 36))) for c in COLOURS for n in range(count)]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    labels = torch.arange(3).repeat_interleave(count)
    generator = torch.Generator().manual_seed(1)
    return TrainingData(pixels, labels, torch.randn(3 * count, backbone.embed_dim, generator=generator))


def new_training(
    name: str = "drople", folder: Path | None = None, *, seed: int = 1, **options: Any
) -> Training:
    backbone = Backbone.load(tiny_checkpoint())
    torch.manual_seed(0)
    own = {n: options.pop(n) for n in list(options) if n not in TrainingOptions.__dataclass_fields__}
    method = make(name, backbone, Task(COLOURS, ("a photo of a {}.",)), own)
    data = training_data(backbone)
    return Training(method, data, TrainingOptions(**options), seed=seed, precision="float32", folder=folder)


def parameters(training: Training) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in training.method.named_parameters()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# Killed and resumed --------------------------------------------------------------------------------


def wait_for(condition: Any, command: Command, seconds: float = 60) -> bool:
    """Whether the condition came true before the command ended."""
    end = time.monotonic() + seconds
    while command.process.is_alive():
        if condition():
            return True
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)
    return False


def stamp(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_killed_many_times_gives_the_bytes_of_an_undisturbed_run(
    kill: signal.Signals, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out, chance, kills = tmp_path / "run", random.Random(int(kill)), 0
    arguments = fit_arguments(data, out, "--resume")
    # The first dies before its first checkpoint: nothing but a config to go on from.
    command = Command(*arguments)
    if wait_for((out / "config.json").exists, command):
        os.kill(command.process.pid or 0, kill)
        kills += 1
    command.wait()
    for _ in range(5):
        before = stamp(out / CHECKPOINT)
        command = Command(*arguments)
        if wait_for(lambda before=before: stamp(out / CHECKPOINT) not in (None, before), command):
            time.sleep(chance.uniform(0, 0.02))
            os.kill(command.process.pid or 0, kill)
            kills += 1
        answer = command.wait()
        assert answer.code in (0, -signal.SIGKILL, 130), answer.err
        assert answer.code != 130 or "goes on with --resume" in answer.err, answer.err
        with pytest.raises(DropleError) if not (out / "metrics.json").exists() else nullcontext():
            PromptLearner.load(out)
    assert kills >= 4, "the run was too short to be killed"
    answer = drople(*arguments)
    assert answer.code == 0, answer.err
    assert contents(out) == contents(undisturbed)
    visible = {p.name for p in out.iterdir() if not p.name.startswith(".")}
    assert visible == set(RUN_FILES), "the checkpoint goes once the run is whole"


def test_same_seed_same_bytes_other_seed_other_bytes(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    assert drople(*fit_arguments(data, tmp_path / "again")).code == 0
    assert contents(tmp_path / "again") == contents(undisturbed)
    assert drople(*fit_arguments(data, tmp_path / "other", "--seed", 2)).code == 0
    other, same = contents(tmp_path / "other"), contents(undisturbed)
    assert all(other[name] != same[name] for name in ("prompts.safetensors", "log.jsonl", "config.json"))


def test_a_finished_run_says_so_and_stays_as_it_is(data: Path, undisturbed: Path) -> None:
    before = contents(undisturbed)
    # As if killed between the last file and the removal of the checkpoint.
    (undisturbed / CHECKPOINT).write_bytes(b"left over")
    answer = drople(*fit_arguments(data, undisturbed, "--resume"))
    assert answer.code == 0
    assert "finished already" in answer.err
    assert contents(undisturbed) == before
    assert not (undisturbed / CHECKPOINT).exists()


def test_killed_before_its_evaluation_a_run_gets_it_on_resume(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    PromptLearner(tiny_checkpoint(), batch_size=4, epochs=12).fit(data, out=tmp_path / "run")
    assert "evaluation" not in json.loads((tmp_path / "run/metrics.json").read_text("utf-8"))
    assert drople(*fit_arguments(data, tmp_path / "run", "--resume")).code == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text("utf-8"))
    assert metrics["evaluation"]["images"] == 18


def test_other_settings_cannot_resume(data: Path, undisturbed: Path) -> None:
    before = contents(undisturbed)
    for extra, named in (
        (("--set", "lr=0.01"), "(lr was 0.002, is 0.01)"),
        (("--seed", 3), "seed was 1, is 3"),
        (("--shots", 2), "(shots was 16, is 2; other samples)"),
        (("--method", "coop"), "(method was drople, is coop)"),
        (("--set", "p_max=0.4"), "(p_max was not set, is 0.4)"),
        (("--template", "a {}"), "(other templates)"),
    ):
        answer = drople(*fit_arguments(data, undisturbed, "--resume", *extra))
        assert answer.code == 2
        assert "other settings" in answer.err and named in answer.err
    assert contents(undisturbed) == before


def test_a_run_is_not_overwritten(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    before = contents(undisturbed)
    answer = drople(*fit_arguments(data, undisturbed))
    assert answer.code == 2 and "already holds a run" in answer.err
    assert contents(undisturbed) == before
    (tmp_path / "file").write_text("mine", "utf-8")
    answer = drople(*fit_arguments(data, tmp_path / "file"))
    assert answer.code == 2 and "is a file" in answer.err
    answer = drople(*fit_arguments(data, tmp_path / "file" / "run"))
    assert answer.code == 2 and "Traceback" not in answer.err
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_resume_needs_a_folder(data: Path) -> None:
    with pytest.raises(DropleError, match="resume needs out"):
        PromptLearner(tiny_checkpoint()).fit(data, resume=True)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    run = new_training(folder=tmp_path, epochs=2, batch_size=4)
    run.run()
    whole, log = (tmp_path / CHECKPOINT).read_bytes(), (tmp_path / "log.jsonl").read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DropleError, match="damaged"):
        new_training(folder=tmp_path, epochs=2, batch_size=4).run(resume=True)
    (tmp_path / CHECKPOINT).write_bytes(whole)
    with pytest.raises(DropleError, match="does not fit"):
        new_training("coop", folder=tmp_path, epochs=2, batch_size=4).run(resume=True)
    (tmp_path / "log.jsonl").write_bytes(log[:10])
    with pytest.raises(DropleError, match="shorter"):
        new_training(folder=tmp_path, epochs=2, batch_size=4).run(resume=True)


def test_the_scale_of_fp16_is_resumed(tmp_path: Path) -> None:
    """fp16 needs a GPU; its scaler does not."""

    def with_scaler(**settings: Any) -> Training:
        training = new_training(folder=tmp_path, epochs=1, batch_size=9)
        training.accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
        return training

    first = with_scaler(init_scale=512.0, growth_interval=7)
    first.accelerator.scaler.scale(torch.ones(1))
    first.accelerator.scaler._growth_tracker += 3
    (tmp_path / "log.jsonl").touch()
    first._save()
    second = with_scaler()
    second._load()
    assert second.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    assert second.accelerator.scaler.state_dict()["_growth_tracker"] == 3


def test_a_process_trains_in_other_numbers_than_before() -> None:
    """Accelerate keeps one state a process, and refuses another."""
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True, mixed_precision="bf16")
    assert new_training(epochs=1, batch_size=9).accelerator.mixed_precision == "no"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_checkpoint_leads_to_the_same_end(optimizer: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 4, "batch_size": 4, "optimizer": optimizer, "lr": 0.01}
    whole = new_training(folder=tmp_path / "whole", **options)
    whole.run()
    stopped = new_training(folder=tmp_path / "cut", **options)

    take = stopped._step

    def stop(indices: torch.Tensor) -> Any:
        # In the middle of an epoch, so that the last checkpoint is some steps old.
        if stopped.step == 13:
            raise InterruptedError
        return take(indices)

    stopped._step = stop  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        stopped.run()
    resumed = new_training(folder=tmp_path / "cut", **options)
    resumed.run(resume=True)
    assert_equal(parameters(resumed), parameters(whole))
    assert (tmp_path / "cut/log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()


@pytest.mark.parametrize(("seconds", "epochs"), [(0.0, 10), (0.2, 10), (0.5, 6), (5.0, 2)])
def test_checkpoints_are_rarer_where_they_take_long(
    seconds: float, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch and the last step always have one; of ten epochs of five seconds a slow disk gets few."""
    run = new_training(folder=tmp_path, epochs=10, batch_size=4)
    now, saved, step = [0.0], [], run._step

    def save() -> None:
        now[0] += seconds
        saved.append(run.step)

    def one(*given: Any) -> Any:
        now[0] += 5.0 / run.per_epoch
        return step(*given)

    monkeypatch.setattr(training_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(run, "_save", save)
    monkeypatch.setattr(run, "_step", one)
    run.run()
    assert saved[0] == run.per_epoch and saved[-1] == run.steps
    assert len(saved) == epochs


# Losses that are not finite ------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_with_step_losses_and_advice(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    answer = drople(*fit_arguments(data, out, "--set", "lr=1e30", "--set", "clip_norm=0"))
    assert answer.code == 2
    assert "not finite" in answer.err and "step" in answer.err and "cross_entropy" in answer.err
    assert "learning rate" in answer.err and "1e+30" in answer.err
    assert not (out / "prompts.safetensors").exists() and not (out / "metrics.json").exists()
    assert not (out / CHECKPOINT).exists()
    for line in (out / "log.jsonl").read_text("utf-8").splitlines():
        assert math.isfinite(json.loads(line)["loss"])
    answer = drople("predict", out, next((data / "test/red").iterdir()))
    assert answer.code == 2 and "not finished" in answer.err


def test_nan_left_by_the_last_step_is_not_saved(tmp_path: Path) -> None:
    run = new_training(folder=tmp_path, epochs=1, batch_size=32, clip_norm=0.0)
    assert run.steps == 1
    name, parameter = next(run.method.named_parameters())
    parameter.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DropleError, match=f"{name} is not finite after step 1 of 1.*learning rate"):
        run.run()
    assert not (tmp_path / CHECKPOINT).exists()


def test_bf16_trains_on_the_cpu_and_stays_finite(data: Path, tmp_path: Path) -> None:
    learner = PromptLearner(tiny_checkpoint(), precision="bf16", epochs=4, batch_size=4)
    learner.fit(data, out=tmp_path / "run")
    assert learner.backbone_.dtype == torch.bfloat16
    learned = load_file(tmp_path / "run/prompts.safetensors")
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in learned.values())
    assert np.isfinite(learner.predict_proba([picture("red", 0)])).all()
    assert PromptLearner.load(tmp_path / "run").backbone_.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        (None, torch.float32),
    ],
)
def test_the_usual_precision_is_the_processor_s(
    processor: dict[str, bool] | None, wanted: torch.dtype, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU in bf16 only where it is fast; a torch that cannot say counts as one that is not."""
    if processor is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    learner = PromptLearner(tiny_checkpoint(), "zero-shot", device="cpu").fit(data)
    assert learner.backbone_.dtype == wanted
    given = Backbone.load(tiny_checkpoint())
    learner = PromptLearner(given, "zero-shot", device="cpu").fit(data)
    assert learner.backbone_ is given and given.dtype == torch.float32, "somebody may need it as it is"


def test_fp16_on_the_cpu_is_refused_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    answer = drople(*fit_arguments(data, tmp_path / "run", "--precision", "fp16", "--device", "cpu"))
    assert answer.code == 2
    assert "fp16 training needs a CUDA GPU" in answer.err and "bf16" in answer.err
    assert not (tmp_path / "run").exists()


def test_momentum_of_what_had_no_gradient_where_the_run_began(tmp_path: Path) -> None:
    """A CUDA graph gives every parameter one, and the optimiser of a GPU takes all or none."""
    options: dict[str, Any] = {"optimizer": "sgd", "batch_size": 6, "epochs": 2, "alignment": 0.0}
    begun = new_training(folder=tmp_path, **options)
    begun.run()
    assert any(parameter.grad is None for parameter in begun.method.parameters())
    resumed = new_training(folder=tmp_path, **options)
    resumed._load()
    for parameter in resumed.method.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in resumed.optimizer.param_groups:
        group["fused"] = True
    resumed.optimizer.step()


# The parts of a step -------------------------------------------------------------------------------


def test_the_rate_rises_and_falls_as_a_cosine() -> None:
    steps, warmup = 40, 0.1
    rates = [rate(step, steps, warmup) for step in range(steps)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    for step in range(4, steps):
        assert rates[step] == pytest.approx(math.cos(math.pi / 2 * (step - 4) / 36) ** 2)
    assert rates[4] == 1.0 and rates[22] == pytest.approx(0.5) and 0 < rates[-1] < 0.003
    assert [rate(s, 3, 0.0) for s in range(3)] == [1.0, 1.0, 0.5]
    assert [rate(s, 4, 1.0) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(0, 1, 0.05) == 1.0


def test_the_log_has_a_row_a_step_with_the_rate_that_was_used(undisturbed: Path) -> None:
    rows = [json.loads(line) for line in (undisturbed / "log.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(60))
    assert [row["epoch"] for row in rows] == [step // 5 for step in range(60)]
    for row in rows:
        assert row["lr"] == pytest.approx(2e-3 * rate(row["step"], 60, 0.05), rel=1e-5)
        terms = ("cross_entropy", "residual_entropy_visual", "residual_entropy_text", "l2", "alignment")
        assert row["loss"] == pytest.approx(sum(row[term] for term in terms), abs=1e-4)
        assert 0 <= row["accuracy"] <= 1 and 0.1 <= row["drop_rate_vision"] <= 0.5


def test_every_image_is_seen_once_an_epoch_in_an_order_of_its_own() -> None:
    orders = [epoch_order(18, 1, epoch).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(18)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(18, 1, 2).tolist() == orders[2]
    assert epoch_order(18, 2, 2).tolist() != orders[2]


@pytest.mark.parametrize("augmentation", ["crop_flip", "patch_randaugment"])
def test_draws_of_a_step_do_not_hang_on_what_was_drawn_before(augmentation: str) -> None:
    first = new_training(batch_size=4, augmentation=augmentation)
    second = new_training(batch_size=4, augmentation=augmentation)
    torch.manual_seed(99)
    torch.rand(1234)
    first.step = second.step = 7
    indices = torch.tensor([0, 7, 8, 17])
    shown = first._step(indices)
    torch.rand(7)
    again = second._step(indices)
    assert {n: float(v) for n, v in shown.items()} == {n: float(v) for n, v in again.items()}
    assert_equal(parameters(first), parameters(second))
    third = new_training(batch_size=4, augmentation=augmentation)
    third.step = 8
    assert float(third._step(indices)["loss"]) != float(shown["loss"])


def test_training_does_not_disturb_the_callers_random_numbers(data: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    PromptLearner(tiny_checkpoint(), epochs=1).fit(data)
    assert torch.equal(torch.rand(3), expected)


def test_one_step_is_one_step_of_the_optimiser_written_plainly() -> None:
    """No accumulation, no hidden scaling: SGD by hand on the same batch gives the same prompts."""
    options: dict[str, Any] = {"batch_size": 4, "augmentation": "none", "optimizer": "sgd", "lr": 0.1}
    run = new_training("coop", epochs=1, weight_decay=0.01, clip_norm=0.05, warmup=0.0, **options)
    by_hand = new_training("coop", epochs=1, **options)
    (parameter,) = by_hand.method.parameters()
    buffer = torch.zeros_like(parameter)
    order = epoch_order(18, 1, 0)
    backbone = by_hand.method.backbone
    for step, indices in enumerate(order.split(4)):
        pixels = augment(by_hand.data.images[indices], backbone.pixels.size, 8, "none")
        batch = Batch(
            normalise(pixels, backbone.pixels), by_hand.data.labels[indices], by_hand.data.frozen[indices]
        )
        by_hand.method.advance(Progress(step, 5, 0, 1))
        losses = by_hand.method.training_step(batch)
        (gradient,) = torch.autograd.grad(sum(losses.values()), [parameter])  # type: ignore[arg-type]
        gradient = gradient * min(1.0, 0.05 / (float(gradient.norm()) + 1e-6))
        buffer = 0.9 * buffer + gradient + 0.01 * parameter.detach()
        with torch.no_grad():
            parameter -= 0.1 * rate(step, 5, 0.0) * buffer
    run.run()
    (trained,) = run.method.parameters()
    torch.testing.assert_close(trained, parameter, rtol=1e-4, atol=1e-6)


def test_no_frozen_weight_changes(data: Path) -> None:
    def digest(backbone: Backbone) -> str:
        state = sorted(backbone.model.state_dict().items())
        return hashlib.sha256(b"".join(n.encode() + t.cpu().numpy().tobytes() for n, t in state)).hexdigest()

    before = digest(Backbone.load(tiny_checkpoint()))
    learner = PromptLearner(tiny_checkpoint(), epochs=3, lr=0.1, precision="float32").fit(data)
    assert digest(learner.backbone_) == before
    assert all(p.grad is None and not p.requires_grad for p in learner.backbone_.model.parameters())


def test_training_lowers_the_loss_and_beats_zero_shot(data: Path) -> None:
    learner = PromptLearner(tiny_checkpoint(), epochs=25, batch_size=6, lr=0.02, device="cpu").fit(data)
    assert learner.history_[-1]["cross_entropy"] < 0.7 * learner.history_[0]["cross_entropy"]
    result = learner.evaluate(data)
    assert result["accuracy"] > 0.85 and result["accuracy"] > result["zero_shot_accuracy"]


@pytest.mark.parametrize("kind", ["crop_flip", "patch_randaugment", "none"])
def test_augmented_pixels_have_the_size_and_range_the_backbone_wants(kind: Any) -> None:
    images = torch.from_numpy(np.stack([np.asarray(picture("red", n).resize((36, 36))) for n in range(3)]))
    torch.manual_seed(0)
    pixels = augment(images.permute(0, 3, 1, 2), 32, 8, kind)
    assert pixels.shape == (3, 3, 32, 32) and pixels.dtype == torch.float32
    assert float(pixels.min()) >= -1 and float(pixels.max()) <= 256
    repeated = augment(images.permute(0, 3, 1, 2), 32, 8, kind)
    assert torch.equal(pixels, repeated) == (kind == "none")


@pytest.mark.parametrize("augmentation", ["crop_flip", "patch_randaugment", "none"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_augmentations_and_optimisers_train(augmentation: str, optimizer: str) -> None:
    run = new_training(epochs=2, batch_size=7, augmentation=augmentation, optimizer=optimizer, lr=0.01)
    before = parameters(run)
    run.run()
    assert all(not torch.equal(before[n], p) for n, p in run.method.named_parameters())


# Several processes ---------------------------------------------------------------------------------


def together(*arguments: object) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**shared, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
    commands = [Command(*arguments, environment=rank) for rank in ranks]
    return [command.wait() for command in commands]


@pytest.mark.parametrize(
    "method",
    [
        ("--method", "coop"),
        ("--set", "p_min=0", "--set", "p_max=0", "--set", "alignment=0"),
        ("--method", "zero-shot"),
    ],
)
def test_two_processes_learn_what_one_does(method: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    """Batches of 5 do not halve, and the last of an epoch has 3: the shares of the processes differ."""
    common = ("--set", "augmentation=none", "--set", "batch_size=5", "--set", "epochs=3")
    common += ("--device", "cpu", "--precision", "float32", "--json", *method)
    arguments = [fit_arguments(data, tmp_path / name, *common) for name in ("one", "two")]
    assert drople(*arguments[0]).code == 0
    first, second = together(*arguments[1])
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert second.out == "" and "note:" not in second.err, "one of them speaks"
    assert first.json["evaluation"]["images"] == 18
    one, two = (load_file(tmp_path / name / "prompts.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-5)
    configs = [(tmp_path / name / "config.json").read_bytes() for name in ("one", "two")]
    assert configs[0] == configs[1]
    assert {p.name for p in (tmp_path / "two").iterdir()} == set(RUN_FILES)


def test_two_processes_with_fewer_images_than_processes_in_a_batch(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", ("red", "green"), 5)
    settings = ("--set", "batch_size=3", "--set", "alignment=0", "--set", "epochs=2", "--device", "cpu")
    arguments = fit_arguments(data, tmp_path / "run", *settings)
    first, second = together(*arguments)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    tensors, _ = read_tensors(tmp_path / "run/prompts.safetensors")
    assert all(bool(t.isfinite().all()) for t in tensors.values())


def test_a_step_that_cannot_be_captured_runs_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CUDA graph fails, gradients and what is shown are those of a plain step, at every size of batch."""
    module = torch.nn.Linear(3, 1)
    data = torch.randn(6, 3)

    def compute(indices: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = module(data[indices]).square().mean()
        loss.backward()
        return {"loss": loss.detach()}

    def fails(indices: torch.Tensor) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    step = GraphedStep(compute, module)
    monkeypatch.setattr(step, "_capture", fails)
    with pytest.warns(UserWarning, match="no CUDA graph here.*stream is capturing\\)") as said:
        for indices in (torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5]), torch.tensor([1, 2, 3, 4])):
            shown = step(indices)
            loss = module(data[indices]).square().mean()
            assert torch.equal(shown["loss"], loss)
            for parameter, gradient in zip(
                module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
            ):
                torch.testing.assert_close(parameter.grad, gradient)
    assert len(said) == 1

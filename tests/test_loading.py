"""Checkpoints: what loads is exactly what was saved, and what is broken says how."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    SiglipConfig,
)

from drople.backbone import Backbone
from drople.backbone.loading import load_checkpoint
from drople.backbone.tokenizer import Tokenizer
from drople.errors import DropleError

MERGES = [("d", "o"), ("do", "g</w>"), ("p", "h"), ("c", "a"), ("ca", "t</w>"), ("o", "f</w>")]
TEXTS = [
    "",
    "dog",
    "a photo of a dog.",
    "  A  PHOTO of\ta CAT  ",
    "it's the dogs' 123rd café, naïve — 100%!",
    "日本語 and emoji 🐕",
    "don't <|endoftext|> stop",
]


def vocabulary() -> dict[str, int]:
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in MERGES]
    return {token: place for place, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}


def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=vocabulary(), merges=MERGES)


def config(width: int = 16, layers: int = 2, image: int = 32, patch: int = 8, **text: int) -> CLIPConfig:
    size = len(vocabulary())
    tower = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    ends = {"vocab_size": size, "bos_token_id": size - 2, "eos_token_id": size - 1}
    return CLIPConfig(
        text_config={**tower, "max_position_embeddings": 40, **ends, **text},
        vision_config={**tower, "image_size": image, "patch_size": patch},
        projection_dim=12,
    )


def save(folder: pathlib.Path, made: CLIPConfig | None = None, **options: object) -> CLIPModel:
    torch.manual_seed(0)
    model = CLIPModel(made or config())
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return model


def refused(folder: pathlib.Path | str) -> str:
    with pytest.raises(DropleError) as caught:
        load_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change(file: pathlib.Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    "made",
    [
        config(),
        config(width=24, layers=1, image=48, patch=16),
        config(
            width=8, layers=3, image=30, patch=10, max_position_embeddings=33, bos_token_id=0, eos_token_id=2
        ),
    ],
    ids=["small", "wide", "old-ends"],
)
def test_loads_exactly_what_was_saved(tmp_path: pathlib.Path, made: CLIPConfig) -> None:
    saved = save(tmp_path, made)
    loaded = load_checkpoint(tmp_path)
    state = loaded.model.state_dict()
    assert state.keys() == saved.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.state_dict().items())
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.pixels.size == made.vision_config.image_size
    assert loaded.name == str(tmp_path)


def test_half_precision_becomes_float32(tmp_path: pathlib.Path) -> None:
    saved = save(tmp_path).half()
    saved.save_pretrained(tmp_path)
    state = load_checkpoint(str(tmp_path)).model.state_dict()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in saved.state_dict().items())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_shards_load_and_a_missing_one_is_named(tmp_path: pathlib.Path) -> None:
    saved = save(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    loaded = load_checkpoint(tmp_path).model
    assert torch.equal(loaded.visual_projection.weight, saved.visual_projection.weight)
    shards[1].unlink()
    assert shards[1].name in refused(tmp_path)


def test_loading_is_silent(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    capfd.readouterr()
    load_checkpoint(tmp_path)
    load_checkpoint("pocket")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "said",
    [
        {"size": 32},
        {"size": {"shortest_edge": 32}},
        {"size": {"height": 32, "width": 32}},
        {"size": {"shortest_edge": 40}, "crop_size": 32},
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {"size": 32, "crop_size": 20, "do_center_crop": False},
    ],
)
def test_pixels_in_every_spelling(tmp_path: pathlib.Path, said: dict[str, object]) -> None:
    save(tmp_path)
    said |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    for name, content in (("preprocessor_config", said), ("processor_config", {"image_processor": said})):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(content))
        pixels = load_checkpoint(tmp_path).pixels
        assert (pixels.size, pixels.mean, pixels.std) == (32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        assert pixels.resample == 2
        file.unlink()


def test_pixels_that_do_not_fit_the_tower(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    for said in ({"crop_size": 224}, {"size": {"height": 32, "width": 64}}):
        file.write_text(json.dumps(said))
        assert "vision_config.image_size" in refused(tmp_path)


def test_ids_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    ours, theirs = load_checkpoint(tmp_path).tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs, CLIPTokenizer)
    for text in TEXTS:
        assert [ours.bos, *ours.words(text), ours.eos] == theirs(text).input_ids
    assert "dog</w>" in theirs.convert_ids_to_tokens(ours.words("dog"))


def test_vocabulary_and_merges_without_tokenizer_json(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary()))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, MERGES)) + "\n")
    ours = load_checkpoint(tmp_path).tokenizer
    assert [ours.words(text) for text in TEXTS] == [tokenizer()(text).input_ids[1:-1] for text in TEXTS]


@pytest.mark.parametrize("ends", [{}, {"bos_token_id": 0, "eos_token_id": 2}], ids=["right", "old"])
def test_place_of_eos_is_where_the_tower_reads(tmp_path: pathlib.Path, ends: dict[str, int]) -> None:
    save(tmp_path, config(**ends))
    loaded = load_checkpoint(tmp_path)
    texts = ["a cat", "a photo of a dog", ""]
    sentences = Backbone(loaded).sentences(texts)
    assert sentences.ids.shape[1] == max(len(loaded.tokenizer.words(text)) for text in texts) + 2
    read = loaded.model.text_model(input_ids=sentences.ids)
    places = torch.arange(len(texts)), sentences.anchor
    assert torch.equal(read.last_hidden_state[places], read.pooler_output)


def test_the_tokens_of_some_characters(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    tokens = load_checkpoint(tmp_path).tokenizer
    for before, name, after in (("a photo of a ", "cat", "."), ("", "dog cat", ""), ("dog ", "dog", " dog")):
        first, last = tokens.span(f"{before}{name}{after}", len(before), len(before) + len(name))
        assert tokens.words(f"{before}{name}{after}")[first:last] == tokens.words(name)
        assert first == len(tokens.words(before))
    assert tokens.span("a cat", 2, 2) == tokens.span("", 0, 0) == (0, 0)


def test_words_may_be_longer_than_the_context(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    assert len(load_checkpoint(tmp_path).tokenizer.words("dog " * 100)) == 100


def test_settings_saved_in_a_tokenizer_are_not_obeyed(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    backend = tokenizer().backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=30)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path, config().text_config).words("cat dog cat dog cat dog")) == 6


def test_tokenizer_of_another_vocabulary(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    CLIPTokenizer().save_pretrained(tmp_path)  # what transformers makes up where it finds no files
    message = refused(tmp_path)
    assert "knows 2 tokens" in message and str(len(vocabulary())) in message


def test_ends_that_contradict_the_tokenizer(tmp_path: pathlib.Path) -> None:
    save(tmp_path, config(eos_token_id=49407))
    assert "text_config.eos_token_id 49407" in refused(tmp_path)
    save(tmp_path, config(bos_token_id=5))
    assert "text_config.bos_token_id 5" in refused(tmp_path)


def test_no_tokenizer_or_a_damaged_one(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    assert "cannot be read" in refused(tmp_path)
    file.unlink()
    assert "tokenizer.json" in refused(tmp_path)


def test_no_config_or_a_damaged_one(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text()[:100])
    assert "not valid JSON" in refused(tmp_path)
    file.write_text("[]")
    assert "JSON object" in refused(tmp_path)
    file.unlink()
    assert "has no config.json" in refused(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 1000, -1], ids=["empty", "start", "header", "last-byte"])
def test_weights_cut_short(tmp_path: pathlib.Path, length: int) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    message = refused(tmp_path)
    assert "not a complete safetensors file" in message and "Download it again" in message


def test_weights_that_are_a_pointer(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 598641023\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    assert "Git LFS pointer" in refused(tmp_path)


def test_missing_tensors_are_never_made_up(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    kept = {name: tensor for name, tensor in state.items() if "layers.1.mlp" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    message = refused(tmp_path)
    assert "layers.1.mlp" in message and f"and {len(state) - len(kept) - 3} more" in message


def test_weights_of_another_shape(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    config(width=24).save_pretrained(tmp_path)
    assert "fit config.json" in refused(tmp_path)


def test_no_weights_and_pickle_alone(tmp_path: pathlib.Path) -> None:
    model = save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights" in refused(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    message = refused(tmp_path)
    assert "pytorch_model.bin" in message and "save_pretrained" in message


def test_models_that_are_no_clip(tmp_path: pathlib.Path) -> None:
    tiny = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=32
    )
    BertModel(tiny).save_pretrained(tmp_path)
    assert "'bert'" in refused(tmp_path)
    SiglipConfig().save_pretrained(tmp_path)
    assert "'siglip'" in refused(tmp_path)
    config().vision_config.save_pretrained(tmp_path)
    assert "both towers" in refused(tmp_path)


def test_paths_that_are_no_folder(tmp_path: pathlib.Path) -> None:
    save(tmp_path)
    assert "is a file" in refused(tmp_path / "model.safetensors")
    assert "no folder" in refused(tmp_path / "absent")
    assert "no folder" in refused("./absent")


def test_hub_names_offline(tmp_path: pathlib.Path) -> None:
    """A cached repository loads with no network; another fails at once, with advice."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    save(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    code = """
import time
from drople.backbone.loading import load_checkpoint
from drople.errors import DropleError
print(load_checkpoint("someone/tiny").name)
start = time.monotonic()
try:
    load_checkpoint("someone/tyni")
except DropleError as error:
    print(error)
print(time.monotonic() - start < 5)
"""
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    name, message, quick = run.stdout.splitlines()
    assert (name, quick) == ("someone/tiny", "True")
    assert "'someone/tyni'" in message and "spelling" in message and "'pocket'" in message
    assert run.stderr == ""

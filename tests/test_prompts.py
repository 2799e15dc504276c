"""Learnable prompts: where they start, how many there are, and what is refused."""

from typing import Any

import pytest
import torch
from tiny import random_images, tiny_backbone

from drople.backbone import Backbone
from drople.errors import DropleError
from drople.methods import Task, make
from drople.methods.base import TrainingData
from drople.methods.drople import DeepPromptOptions, DroPLe
from drople.prompts import PROMPT_STD, CoupledPrompts, TextPrompts, VisualPrompts, capped, words_behind


def words_of(backbone: Backbone, text: str) -> torch.Tensor:
    """Rows of the token table, by hand."""
    table = backbone.model.text_model.embeddings.token_embedding.weight
    ids = backbone.tokenizer.words(text)
    return torch.stack([table[i] for i in ids])


@pytest.mark.parametrize(("length", "from_words"), [(4, 4), (2, 2), (6, 4), (0, 0)])
def test_context_starts_from_words(length: int, from_words: int) -> None:
    backbone = tiny_backbone()
    words = words_of(backbone, "a photo of a")
    assert len(words) == 4
    torch.manual_seed(0)
    prompts = TextPrompts(backbone, depth=3, length=length, supplementary=5, init="a photo of a")()
    assert prompts.shape == (3, length + 5, backbone.text_width)
    assert torch.equal(prompts[0, :from_words], words[:from_words])
    drawn = torch.cat([prompts[0, from_words:].flatten(), prompts[1:].flatten()]).detach()
    assert float(drawn.std()) == pytest.approx(PROMPT_STD, rel=0.2)
    assert drawn.unique().numel() == drawn.numel()
    assert prompts.requires_grad and prompts.dtype == torch.float32


def test_the_token_table_is_not_what_is_trained() -> None:
    backbone = tiny_backbone()
    before = words_of(backbone, "a photo of a").clone()
    prompts = TextPrompts(backbone, depth=1, length=4, supplementary=0, init="a photo of a")
    with torch.no_grad():
        prompts.prompts.add_(1)
    assert torch.equal(words_of(backbone, "a photo of a"), before)


def test_prompts_without_words_are_drawn() -> None:
    torch.manual_seed(0)
    prompts = TextPrompts(tiny_backbone(), depth=1, length=16, supplementary=0, init="")()
    assert prompts.shape == (1, 16, 24)
    assert float(prompts.detach().std()) == pytest.approx(PROMPT_STD, rel=0.2)


def test_visual_prompts() -> None:
    backbone = tiny_backbone()
    torch.manual_seed(0)
    module = VisualPrompts(backbone, depth=4, length=3)
    assert module().shape == (4, 3, backbone.vision_width) != (4, 3, backbone.text_width)
    assert float(module().detach().std()) == pytest.approx(PROMPT_STD, rel=0.2)
    assert [name for name, _ in module.named_parameters()] == ["prompts"]


@pytest.mark.parametrize(("depth", "length", "supplementary"), [(0, 4, 0), (1, 0, 0), (-1, 4, 4)])
def test_text_prompts_that_cannot_be(depth: int, length: int, supplementary: int) -> None:
    with pytest.raises(DropleError, match="depth of at least 1"):
        TextPrompts(tiny_backbone(), depth=depth, length=length, supplementary=supplementary, init="a")


@pytest.mark.parametrize(("depth", "length"), [(0, 4), (1, 0)])
def test_visual_prompts_that_cannot_be(depth: int, length: int) -> None:
    with pytest.raises(DropleError, match="at least 1"):
        VisualPrompts(tiny_backbone(), depth=depth, length=length)


def test_depth_is_capped_and_said() -> None:
    assert capped(3, 3, "text prompts") == (3, None)
    assert capped(2, 3, "text prompts") == (2, None)
    depth, note = capped(9, 3, "text prompts")
    assert depth == 3 and note is not None
    assert "text prompts" in note and "9" in note and "3" in note


def test_a_shallow_backbone_gets_as_many_layers_as_it_has() -> None:
    backbone = tiny_backbone(text_layers=2, vision_layers=3)
    method = DroPLe(
        backbone, Task(("cat", "dog"), ("a photo of a {}.",)), DeepPromptOptions(supplementary=16)
    )
    assert method.text_states().shape == (2, 4 + 16, backbone.text_width)
    assert method.visual_prompts is not None
    assert method.visual_prompts().shape == (3, 4, backbone.vision_width)
    assert len(method.notes) == 2 and "9" in method.notes[0] and "6" in method.notes[1]
    assert method.class_features(("cat", "dog", "horse")).shape == (3, backbone.embed_dim)
    assert method.trainable == 2 * 20 * backbone.text_width + 3 * 4 * backbone.vision_width


def test_a_name_that_does_not_fit_beside_the_prompts() -> None:
    backbone = tiny_backbone(positions=24)
    method = DroPLe(backbone, Task(("cat",), ("{}",)), DeepPromptOptions(supplementary=16))
    with pytest.raises(DropleError, match=r"cat cat cat.*20 prompt tokens.*24 positions"):
        method.class_features(("dog", "cat cat cat"))
    assert method.class_features(("cat cat",)).shape == (1, backbone.embed_dim)


def test_coupled_prompts_are_a_linear_function_of_the_context() -> None:
    backbone = tiny_backbone()
    text = TextPrompts(backbone, depth=3, length=2, supplementary=4, init="a photo")
    visual = CoupledPrompts(backbone, text, depth=2)
    made = visual()
    assert made.shape == (2, 2, backbone.vision_width)
    for layer in range(2):
        for token in range(2):
            slow = visual.bias[layer, 0] + text()[layer, token] @ visual.weight[layer]
            torch.testing.assert_close(made[layer, token], slow)
    made.sum().backward()
    assert text.prompts.grad is not None and text.prompts.grad[:2, :2].abs().min() > 0
    assert not text.prompts.grad[2].any() and not text.prompts.grad[:, 2:].any()


@pytest.mark.parametrize("name", ["drople", "maple", "coprompt"])
def test_coupled_prompts_are_saved_without_their_functions(name: str) -> None:
    """What the functions make is kept instead: the same images' features to the bit, from far fewer numbers."""
    backbone, task = tiny_backbone(), Task(("cat", "dog"), ("a photo of a {}.",))
    ones = make(name, backbone, task, {}).eval()
    images, labels = random_images(backbone, 2), torch.tensor([0, 1])
    before, whole = ones.image_features(images), ones.state_dict()
    pixels = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    ones.finish(TrainingData(pixels, labels, backbone.encode_images(images)))
    kept = ones.state_dict()
    assert "visual_prompts.weight" in whole and kept.keys() - whole.keys() == {"visual_prompts.made"}
    assert whole.keys() - kept.keys() == {"visual_prompts.weight", "visual_prompts.bias"}
    again = make(name, backbone, task, {}).eval()
    again.load_learned(kept)
    assert torch.equal(before, again.image_features(images)) and again.trainable == ones.trainable
    assert torch.equal(ones.class_weights(("cat", "zebra")), again.class_weights(("cat", "zebra")))
    with pytest.raises(RuntimeError, match="made"):
        again.load_learned(kept | {"visual_prompts.made": kept["visual_prompts.made"][:1]})


def test_the_default_has_the_prompts_of_maple() -> None:
    """The same numbers in both give the same features of images and of classes, seen or not."""
    backbone, task = tiny_backbone(), Task(("cat", "polka-dotted dog"), ("a photo of a {}.",))
    without = {"prototypes": 0.0}
    ours, theirs = (make(n, backbone, task, o).eval() for n, o in (("drople", without), ("maple+drople", {})))
    ours.load_state_dict(theirs.state_dict())
    images = random_images(backbone, 2)
    assert torch.equal(ours.image_features(images), theirs.image_features(images))
    assert torch.equal(
        ours.class_features(("zebra", *task.words)), theirs.class_features(("zebra", *task.words))
    )


def test_words_of_init_behind_the_context_stay() -> None:
    assert words_behind("a photo of a", 2) == "of a "
    assert words_behind("a photo of a", 4) == words_behind("", 2) == ""


def test_without_context_visual_prompts_are_not_coupled() -> None:
    backbone, given = tiny_backbone(), {"text_length": 0, "supplementary": 2, "visual_length": 3}
    method: Any = make("drople", backbone, Task(("cat",), ("{}",)), given)
    assert isinstance(method.visual_prompts, VisualPrompts) and method.visual_prompts().shape[1] == 3
    assert any("not coupled" in note for note in method.notes)


def test_coupled_prompts_are_no_deeper_than_the_text() -> None:
    method: Any = make("drople", tiny_backbone(), Task(("cat",), ("{}",)), {"text_depth": 1})
    assert len(method.visual_prompts()) == 1 and any("coupled prompts" in note for note in method.notes)


@pytest.mark.parametrize(
    "template", ["a photo of a {}.", "{} texture.", "a photo of a {}, a type of pet.", "my {}"]
)
def test_context_from_the_template_starts_at_zero_shot(template: str) -> None:
    """Without visual prompts, and before LoRA has learned, learned and frozen branch are one."""
    backbone, task = tiny_backbone(), Task(("cat", "polka-dotted dog"), (template,))
    given = {"init": "template", "text_depth": 1, "visual_depth": 0}
    method, frozen = (
        make(name, backbone, task, o).eval() for name, o in (("drople", given), ("zero-shot", {}))
    )
    for words in (task.words, ("zebra",)):
        torch.testing.assert_close(method.class_weights(words), frozen.class_weights(words))
    images = random_images(backbone, 2)
    torch.testing.assert_close(method.image_features(images), frozen.image_features(images))
    deep: Any = make("drople", backbone, task, {**given, "text_depth": 2, "supplementary": 3})
    before, after = (len(backbone.tokenizer.words(part)) for part in template.split("{}"))
    assert deep.text_states().shape == (2, before + after + 3, backbone.text_width)


def test_a_template_without_words_starts_from_others() -> None:
    method: Any = make("drople", tiny_backbone(), Task(("cat",), ("{}",)), {"init": "template"})
    assert method.text_states().shape[1] == 2 and any("has no words" in note for note in method.notes)

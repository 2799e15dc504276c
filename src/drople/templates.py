"""Sentences around class names."""

from collections.abc import Sequence

from drople.errors import DropleError

DEFAULT = "a photo of a {}."

# OpenAI's hand-picked seven for ImageNet (CLIP, "Prompt Engineering for ImageNet"), and four more of its
# eighty: eleven in all, as many as the released code averages for its frozen branch.
ELEVEN = (
    "a photo of a {}.",
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
    "a photo of many {}.",
    "a close-up photo of a {}.",
    "a cropped photo of the {}.",
)


def with_eleven(templates: Sequence[str]) -> tuple[str, ...]:
    """A task's own sentences and the eleven, each once: what frozen class features are averaged over."""
    return tuple(dict.fromkeys((*templates, *ELEVEN)))


def read_template(template: str) -> tuple[str, ...]:
    """One sentence with {} for the class, or the name of a list of them."""
    if template == "eleven":
        return ELEVEN
    if (
        template.count("{}") != 1
        or template.replace("{}", "").count("{")
        or "}" in template.replace("{}", "")
    ):
        raise DropleError(
            f"the template {template!r} must hold {{}} once, where the class name goes, as in {DEFAULT!r}, "
            "or be the word eleven for an average over eleven sentences."
        )
    return (template,)

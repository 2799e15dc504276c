"""Every method of the field behind one interface. A new one is one file in this folder."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from drople.backbone import Backbone
from drople.errors import DropleError, unknown
from drople.methods.base import REGISTRY, Batch, Method, PromptMethod, Task
from drople.options import build, names
from drople.regulariser import DropleOptions, Progress, Regulariser

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

WRAP = "+drople"

__all__ = ["REGISTRY", "Batch", "Method", "Progress", "Task", "find", "make", "option_names"]


def wraps(kind: type[Method]) -> bool:
    """Whether DroPLe can be put around a method."""
    return issubclass(kind, PromptMethod) and not getattr(kind, "wrapped", False)


def find(name: str) -> tuple[type[Method], bool]:
    """The class behind a method's name, and whether DroPLe wraps it ("coop+drople")."""
    plain = name.removesuffix(WRAP)
    if plain not in REGISTRY:
        raise unknown("method", name, [*REGISTRY, *(n + WRAP for n, kind in REGISTRY.items() if wraps(kind))])
    kind = REGISTRY[plain]
    if name != plain and getattr(kind, "wrapped", False):
        raise DropleError(f"{plain} already drops tokens: give {plain}, without {WRAP}.")
    wrapped = name != plain or getattr(kind, "wrapped", False)
    if wrapped and not issubclass(kind, PromptMethod):
        raise DropleError(f"{plain} has no tokens of its own to drop: DroPLe wraps prompt learners only.")
    return kind, wrapped


def option_names(name: str) -> list[str]:
    """The options of a method, those of DroPLe included where it is wrapped."""
    kind, wrapped = find(name)
    return names(kind.Options, *([DropleOptions] if wrapped else []))


def make(name: str, backbone: Backbone, task: Task, options: Mapping[str, Any]) -> Method:
    """A method ready to train, its options checked."""
    kind, wrapped = find(name)
    known = option_names(name)
    for given in options:
        if given not in known:
            raise unknown(f"option of {name}", given, known)
    own = set(names(kind.Options))
    method = kind(backbone, task, build(kind.Options, {k: v for k, v in options.items() if k in own}))
    rest = build(DropleOptions, {k: v for k, v in options.items() if k not in own})
    if wrapped and isinstance(method, PromptMethod):
        method.wrap(Regulariser(backbone, rest))
    return method

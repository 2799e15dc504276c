"""Every method of the field behind one interface. A new one is one file in this folder."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from drople.backbone import Backbone
from drople.errors import DropleError, unknown
from drople.methods.adapter import FeatureAdapter
from drople.methods.base import REGISTRY, Batch, Method, Task, TowerMethod
from drople.options import build, names
from drople.regulariser import Progress, Regulariser

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

WRAP = "+drople"

__all__ = [
    "REGISTRY",
    "Batch",
    "Method",
    "Progress",
    "Task",
    "TowerMethod",
    "find",
    "make",
    "option_groups",
    "option_names",
]


def wraps(kind: type[Method]) -> bool:
    """Whether DroPLe can be put around a method, or under it."""
    own = issubclass(kind, TowerMethod) and not getattr(kind, "wrapped", False)
    return own or getattr(kind, "takes_prompts", False)


def find(name: str) -> tuple[type[Method], bool]:
    """The class behind a method's name, and whether DroPLe is with it ("coop+drople")."""
    plain = name.removesuffix(WRAP)
    if plain not in REGISTRY:
        raise unknown("method", name, [*REGISTRY, *(n + WRAP for n, kind in REGISTRY.items() if wraps(kind))])
    kind = REGISTRY[plain]
    wrapped = getattr(kind, "wrapped", False)
    if name != plain and wrapped:
        raise DropleError(f"{plain} already drops tokens: give {plain}, without {WRAP}.")
    if name != plain and not wraps(kind):
        raise DropleError(
            f"{plain} has no tokens to drop: DroPLe wraps what learns inside the towers, and adapters that can stand "
            "on prompts."
        )
    return kind, name != plain or wrapped


def option_groups(name: str) -> dict[str, type]:
    """The options of a method by whose they are: its own, those of the prompts it stands on, DroPLe's."""
    kind, wrapped = find(name)
    groups = {"method": kind.Options}
    if not wrapped:
        return groups
    if not issubclass(kind, TowerMethod):
        kind = _prompts()
        groups["prompts"] = kind.Options
    return groups | {"drople": kind.DropOptions}


def option_names(name: str) -> list[str]:
    """The options of a method, those of DroPLe included where it is wrapped."""
    return names(*option_groups(name).values())


def make(name: str, backbone: Backbone, task: Task, options: Mapping[str, Any]) -> Method:
    """A method ready to train, its options checked."""
    kind, wrapped = find(name)
    known = option_names(name)
    for given in options:
        if given not in known:
            raise unknown(f"option of {name}", given, known)
    built: dict[str, Any] = {
        group: build(of, {k: v for k, v in options.items() if k in names(of)})
        for group, of in option_groups(name).items()
    }
    method = kind(backbone, task, built["method"])
    if wrapped:
        prompts = method
        if isinstance(method, FeatureAdapter):
            prompts = _prompts()(backbone, task, built["prompts"])
        assert isinstance(prompts, TowerMethod)
        prompts.wrap(Regulariser(backbone, built["drople"]))
        if isinstance(method, FeatureAdapter):
            method.stand_on(prompts)
    return method


def _prompts() -> type[TowerMethod]:
    """The prompts that DroPLe itself trains."""
    kinds = (kind for kind in REGISTRY.values() if issubclass(kind, TowerMethod))
    return next(kind for kind in kinds if getattr(kind, "wrapped", False))

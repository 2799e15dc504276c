"""Options of methods: frozen dataclasses whose fields carry their help, checked when they are built."""

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from drople.errors import DropleError, unknown

T = TypeVar("T")


def option(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its help and the range it may take."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


def with_defaults(kind: type[T], **values: Any) -> type[T]:
    """The same options, some of them with another default."""
    hints = typing.get_type_hints(kind)
    changed = [
        (f.name, hints[f.name], dataclasses.field(default=values.pop(f.name), metadata=f.metadata))
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.name in values
    ]
    assert not values, f"{kind.__name__} has no {', '.join(values)}"
    return dataclasses.make_dataclass(kind.__name__, changed, bases=(kind,), frozen=True)


def names(*kinds: type) -> list[str]:
    return [f.name for kind in kinds for f in dataclasses.fields(kind)]


def build(kind: type[T], given: Mapping[str, Any]) -> T:
    """An instance of the dataclass; values may be text, as a command line gives them."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in given.items():
        if name not in fields:
            raise unknown("option", name, fields)
        values[name] = convert(name, value, hints[name])
        low, high = fields[name].metadata.get("low"), fields[name].metadata.get("high")
        if isinstance(values[name], int | float) and not isinstance(values[name], bool):
            check_range(name, values[name], low, high)
    return kind(**values)


def typed(given: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """The values as these dataclasses hold them, so that what means the same is the same, text or not; what
    they would refuse stays as it is."""
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    values = dict(given)
    for name in values.keys() & hints.keys():
        with contextlib.suppress(DropleError):
            value = convert(name, values[name], hints[name])
            if isinstance(value, float):
                check_range(name, value)  # no number at all (nan) has no spelling in JSON
            values[name] = value
    return values


def check_range(name: str, value: float, low: float | None = None, high: float | None = None) -> None:
    """Refuse what is not finite or outside [low, high]."""
    if not math.isfinite(value):
        raise DropleError(f"option {name} is {value}: it must be a finite number.")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = (
            f"at least {low}"
            if high is None
            else f"at most {high}"
            if low is None
            else f"from {low} to {high}"
        )
        raise DropleError(f"option {name} is {value}: it must be {bounds}.")


def convert(name: str, value: Any, hint: Any) -> Any:
    """The value as the type the option has; text is read, anything else must fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return convert(name, value, next(a for a in args if a is not type(None)))
    if origin is Literal:
        if value not in args:
            raise unknown(f"value of option {name}", str(value), [str(a) for a in args])
        return value
    if origin is tuple:
        if not isinstance(value, str | list | tuple):
            raise DropleError(f"option {name} is {value!r}: it must be a list.")
        parts = [p.strip() for p in value.split(",") if p.strip()] if isinstance(value, str) else value
        return tuple(convert(name, part, args[0]) for part in parts)
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise DropleError(f"option {name} is {value!r}: it must be true or false.")
    if hint in (int, float):
        try:
            number = hint(value)
        except (TypeError, ValueError, OverflowError):
            raise DropleError(
                f"option {name} is {value!r}: it must be a {'whole ' * (hint is int)}number."
            ) from None
        if hint is int and isinstance(value, float) and value != number:
            raise DropleError(f"option {name} is {value!r}: it must be a whole number.")
        return number
    return str(value)


def written(value: Any) -> str:
    """An option's value as --set takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(written, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

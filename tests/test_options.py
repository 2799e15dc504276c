"""Options: text from a command line becomes numbers, and what cannot be is refused by name."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drople.errors import DropleError
from drople.options import build, check_range, convert, names, option, typed, with_defaults
from drople.regulariser import DropleOptions


@dataclass(frozen=True)
class Options:
    count: int = option(3, "a number", low=1)
    share: float = option(0.5, "a share", low=0, high=1)
    flag: bool = option(False, "a switch")
    kind: Literal["one", "other"] = option("one", "a choice")
    list: tuple[Literal["a", "b"], ...] = option(("a",), "several choices")
    maybe: float | None = option(None, "a number or none", low=0)
    words: str = option("a photo of a", "some words")


def test_text_is_read_as_what_the_option_is() -> None:
    text = {"count": "7", "share": "0.25", "flag": "yes", "kind": "other", "list": "a, b", "maybe": "2"}
    assert build(Options, {**text, "words": "x"}) == Options(7, 0.25, True, "other", ("a", "b"), 2.0, "x")
    assert build(Options, {"maybe": "none", "list": "b,"}) == Options(maybe=None, list=("b",))
    assert build(Options, {"count": 4.0, "share": 1}) == Options(count=4, share=1.0)
    assert build(Options, {}) == Options()
    assert names(Options)[:2] == ["count", "share"]


def test_values_are_as_the_option_holds_them_and_mistakes_stay() -> None:
    text = {"count": "7", "share": "0.50", "flag": "yes", "list": "a,b", "maybe": "none"}
    values = {"count": 7, "share": 0.5, "flag": True, "list": ("a", "b"), "maybe": None}
    assert typed(text, Options) == typed(values, Options) == values
    assert list(typed(text, Options)) == list(text)
    wrong = {"count": "few", "share": "nan", "flag": "perhaps", "kind": "onee", "other": "1"}
    assert typed(wrong, Options) == wrong
    assert repr(typed({"share": 1, "other": 1}, Options)) == "{'share': 1.0, 'other': 1}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": "0"}, "count is 0: it must be at least 1"),
        ({"count": "1.5"}, "whole number"),
        ({"count": 1.5}, "whole number"),
        ({"count": "many"}, "whole number"),
        ({"count": None}, "whole number"),
        ({"share": "nan"}, "finite"),
        ({"share": "inf"}, "finite"),
        ({"share": float("nan")}, "finite"),
        ({"share": "1.01"}, "from 0 to 1"),
        ({"share": "half"}, "number"),
        ({"share": []}, "number"),
        ({"flag": "perhaps"}, "true or false"),
        ({"flag": 2}, "true or false"),
        ({"kind": "on"}, "did you mean one"),
        ({"kind": 3}, "one, other"),
        ({"kind": ["one"]}, "kind"),
        ({"list": "a,c"}, "unknown value of option list 'c'"),
        ({"list": 3}, "list"),
        ({"maybe": "-1"}, "at least 0"),
        ({"maybe": "nan"}, "finite"),
        ({"cuont": 3}, "did you mean count"),
        ({"count": float("inf")}, "count"),
        ({"count": float("nan")}, "count"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(DropleError) as caught:
        build(Options, wrong)
    assert said in str(caught.value) and next(iter(wrong)) in str(caught.value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**60), 2**60))
def test_numbers_written_as_text_are_the_same_numbers(share: float, count: int) -> None:
    assert convert("share", repr(share), float) == share
    assert convert("count", str(count), int) == count


@given(st.text())
def test_any_text_is_a_value_or_an_error_for_people(text: str) -> None:
    for name in names(Options):
        try:
            build(Options, {name: text})
        except DropleError as error:
            assert name in str(error)


def test_a_range_with_one_end() -> None:
    check_range("x", 5)
    check_range("x", 5, 1, None)
    with pytest.raises(DropleError, match="at most 3"):
        check_range("x", 5, None, 3)


def test_options_that_are_checked_together_have_one_spelling() -> None:
    """0.6 is above the default p_max, and right beside another one."""
    text = {"p_min": "0.6", "p_max": "0.8"}
    assert typed(text, DropleOptions) == {"p_min": 0.6, "p_max": 0.8}


def test_the_same_options_with_other_defaults() -> None:
    other = with_defaults(DropleOptions, l2=3.5, p_max=0.4)
    made = build(other, {"p_min": "0.2"})
    assert (made.l2, made.p_max, made.p_min) == (3.5, 0.4, 0.2) and isinstance(made, DropleOptions)
    assert names(other) == names(DropleOptions) and DropleOptions().l2 == 0.0
    with pytest.raises(DropleError, match="l2"):
        build(other, {"l2": -1})
    with pytest.raises(DropleError, match="swap"):
        build(other, {"p_min": 0.45})
    with pytest.raises(AssertionError, match="no_such"):
        with_defaults(DropleOptions, no_such=1)

"""The README's tree names every file of the package, as the files describe themselves."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tree_is_current() -> None:
    tree = runpy.run_path(str(ROOT / "tools" / "tree.py"))["tree"]()
    assert tree in (ROOT / "README.md").read_text(), "run python tools/tree.py --write"


def test_every_module_says_what_it_is_for() -> None:
    first = runpy.run_path(str(ROOT / "tools" / "tree.py"))["first_sentence"]
    silent = [f for f in (ROOT / "src").rglob("*.py") if not first(f)]
    assert not silent

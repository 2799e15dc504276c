"""The documentation: the site builds without a warning and loads nothing from elsewhere, and its code runs.

Blocks of `sh` and `python` are run in the order of their page, each page in a folder of its own with `photos`,
`new` and `new.jpg`. They run as they are written but for training, which takes one epoch on a tiny CLIP in the
place of `pocket`. A block that cannot run here has `<!-- not run: REASON -->` above it; its commands must still
be commands of drople.
"""

import contextlib
import functools
import glob
import io
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import drople, tiny_checkpoint

from drople import PromptLearner
from drople.cli import app, read_settings
from drople.data.catalog import is_known
from drople.demo.drawings import CLASSES, draw
from drople.methods import option_names
from drople.options import names
from drople.training import TrainingOptions

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<kind>sh|python)\n(?P<code>.*?)^```$", re.M | re.S
)
# What cannot be run on pages that are read as plain files first, where a mark would be in the way: the page,
# how the block begins, and why.
UNMARKED = {
    ("README.md", "make "): "sets up an environment",
    ("README.md", "pip "): "needs a package index",
    ("README.md", "drople methods "): "benchmarks datasets that are not here",
    ("docs/export.md", "import json, sys"): "tests/test_export.py runs it on an exported file",
    ("docs/results.md", ""): "hours of training: what was measured",
}


@dataclass(frozen=True)
class Block:
    page: str
    kind: str
    code: str
    reason: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command; comments are gone, long lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text("utf-8")
    found = [
        Block(page, match["kind"], match["code"], match["reason"] or unmarked(page, match["code"]))
        for match in BLOCK.finditer(text)
    ]
    assert len(found) == len(re.findall(r"```(?:sh|python)\b", text)), f"a block of {page} is not read"
    return found


def unmarked(page: str, code: str) -> str | None:
    return next((why for (on, start), why in UNMARKED.items() if on == page and code.startswith(start)), None)


EVERY = [block for page in PAGES for block in blocks(page)]


# The code ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has before the first command: a folder a class, and pictures to ask about."""
    folder = tmp_path_factory.mktemp("reader")
    drople("--version")  # the server that commands fork from finds drople by a path that may be relative
    drawings = draw(folder / "drawings", seed=1, train_per_class=6, test_per_class=1)
    (folder / "new").mkdir()
    for name in CLASSES[:4]:
        shutil.copytree(drawings / "train" / name, folder / "photos" / name)
        (picture,) = (drawings / "test" / name).iterdir()
        shutil.copy(picture, folder / "new" / f"{name}{picture.suffix}")
    shutil.copy(picture, folder / "new.jpg")
    shutil.rmtree(drawings)
    return folder


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.page == p and b.reason is None for b in EVERY)])
def test_the_code_of_a_page_runs(
    page: str, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(drawn, folder)
    monkeypatch.chdir(folder)
    if page == "docs/export.md":
        pytest.importorskip("onnxruntime", reason="the export extra is not installed")
        assert drople("fit", "photos", "--out", "RUN", *shortened("fit")).code == 0
    started = PromptLearner.__init__

    @functools.wraps(started)
    def quick(self: PromptLearner, backbone: Any = "pocket", *arguments: Any, **options: Any) -> None:
        backbone = tiny_checkpoint() if backbone == "pocket" else backbone
        started(self, backbone, *arguments, **{"epochs": 1, **options})

    monkeypatch.setattr(PromptLearner, "__init__", quick)
    variables: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.code, page, "exec"), variables)
            continue
        for words in block.commands:
            assert words[0] == "drople", f"{page} has {words}: mark the block as not run, and say why"
            answer = drople(*expanded(words[1:]), *shortened(words[1]))
            assert answer.code == 0, f"{page}: {shlex.join(words)}\n{answer.out}\n{answer.err}"
            assert answer.out.strip(), f"{page}: {shlex.join(words)} says nothing"


def shortened(command: str) -> list[object]:
    """What makes training quick; a page that gave these flags itself would be refused for giving them twice."""
    if command == "export":
        return ["--backbone", "tests/tiny-clip"]  # pocket is known by its name, a folder must be given one
    return ["--epochs", 1, "--backbone", tiny_checkpoint()] if command in ("fit", "benchmark") else []


def expanded(words: list[str]) -> list[str]:
    """Patterns as a shell has them."""
    return [each for word in words for each in (sorted(glob.glob(word)) if "*" in word else [word])]


NOT_RUN = [block for block in EVERY if block.reason is not None]


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda b: f"{b.page}: {b.reason}")
def test_what_is_not_run_can_be_read(block: Block) -> None:
    if block.kind == "python":
        compile(block.code, block.page, "exec")
        return
    for words in block.commands:
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        if words[:1] != ["drople"]:
            continue
        _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
        given = bound.arguments
        methods = [*(given.get("methods") or ()), *([given["method"]] if "method" in given else [])]
        known = {name for method in methods for name in option_names(method)} | set(names(TrainingOptions))
        assert set(read_settings(given.get("set_"))) <= known, words
        if words[1] == "benchmark":
            assert all(is_known(n) or "/" in n for n in given["datasets"]), words


def test_a_command_that_is_wrong_is_seen() -> None:
    """The two tests above can fail: on a flag, on a method, on a dataset that is none."""
    for wrong in (
        "fit photos --outt run",
        "nonsense",
        "cost --methods dropel",
        "benchmark few-shot --data pet",
        "benchmark few-shot --data dtd --methods coop --set text_length=8",
    ):
        with pytest.raises(Exception):  # noqa: B017
            test_what_is_not_run_can_be_read(Block("", "sh", f"drople {wrong}\n", "wrong"))


def test_every_command_is_shown() -> None:
    shown = {w[1] for b in EVERY if b.kind == "sh" for w in b.commands if len(w) > 1 and w[0] == "drople"}
    commands = {name for name in app if not name.startswith("-")}
    assert commands <= shown, "a command that no page shows"


# The site ------------------------------------------------------------------------------------------


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    for name in ("mkdocs", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="the documentation's tools are not installed: drople[dev]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", project / "mkdocs.yml", "-d", site]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {p.stem for p in ROOT.glob("docs/*.md")} <= {p.stem for p in pages}
    loads = re.compile(
        r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"'>]*"
    )
    for page in pages:
        assert not loads.findall(page.read_text("utf-8")), page.name
    for style in site.rglob("*.css"):
        text = style.read_text("utf-8")
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", text), style.name


def test_the_api_page_has_what_is_public(site: Path) -> None:
    page = (site / "api.html").read_text("utf-8")
    public = [name for name, value in vars(PromptLearner).items() if name[0] != "_" and value.__doc__]
    assert len(public) > 8
    for name in public:
        assert f'id="drople.learner.PromptLearner.{name}"' in page
    assert "Calibrated probabilities" in page


@pytest.mark.parametrize("wrong", ["nowhere.md", "start.md#nowhere", "/nowhere.md", "pictures/none.png"])
def test_a_broken_link_fails_the_build(wrong: str, site: Path, tmp_path: Path) -> None:
    for name in ("mkdocs.yml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "src").symlink_to(ROOT / "src")
    with open(tmp_path / "docs" / "index.md", "a", encoding="utf-8") as page:
        page.write(f"\n[a link]({wrong})\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0 and wrong.strip("/").partition("#")[0] in built.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_plain_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing, f"{page} links to {missing}"
    assert targets or page == "CONTRIBUTING.md"

"""The README's tree names every file of the package, as the files describe themselves; its figures are the records'."""

import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records.tar.gz"


def test_the_tree_is_current() -> None:
    tree = runpy.run_path(str(ROOT / "tools" / "tree.py"))["tree"]()
    assert tree in (ROOT / "README.md").read_text(), "run python tools/tree.py --write"


def test_every_module_says_what_it_is_for() -> None:
    first = runpy.run_path(str(ROOT / "tools" / "tree.py"))["first_sentence"]
    silent = [f for f in (ROOT / "src").rglob("*.py") if not first(f)]
    assert not silent


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not RECORDS.exists():
        pytest.skip("the records of docs/results.md are not here")
    folder = tmp_path_factory.mktemp("records")
    with tarfile.open(RECORDS) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(
    "asked", [("records-b16", "records-b16-seeds"), ("records-b16", "--protocol", "long-tail")], ids=str
)
def test_what_is_said_of_the_study_is_what_the_records_say(records: Path, asked: tuple[str, ...]) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "study" / "compare.py", *asked]
    answer = subprocess.run(command, cwd=records, capture_output=True, text=True, check=True).stdout
    rows = {line.split("|")[1].strip(): line for line in answer.splitlines() if line.startswith("|")}
    results = (ROOT / "docs" / "results.md").read_text("utf-8")
    for listed in ("zero-shot", "coop", "cocoop", "kgcoop", "maple", "promptsrc", "baseline"):
        assert rows[listed] in results and rows[listed].endswith("| yes |"), rows[listed]
    readme = (ROOT / "README.md").read_text("utf-8")
    for method, name in (("promptsrc", "PromptSRC"), ("maple", "MaPLe")):
        mean, error = map(float, rows[method].split("|")[4].split("±"))
        assert f"{mean:.1f} ± {error:.1f} above {name}'s" in readme, rows[method]

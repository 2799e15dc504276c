"""The web page in a real Chromium: upload, predict, add a class, see the overlay, label and retrain.

DROPLE_SCREENSHOTS names a folder to keep pictures of the page in, to be looked at.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import pictures, splits, tiny_checkpoint
from test_serve import free_port

from drople import PromptLearner
from drople.serve import running

pytest.importorskip("gradio", reason="gradio is not installed: pip install drople[serve]")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A browser of its own accord calls home; none of that is the page's doing.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=found, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its data and pictures that are in neither."""
    here = tmp_path_factory.mktemp("served")
    splits(here / "data", count=4)
    pictures(here / "uploads", ("red", "blue", "yellow"), count=3, first=900)
    options: dict[str, Any] = {"epochs": 12, "batch_size": 6, "lr": 0.02, "augmentation": "none"}
    PromptLearner(tiny_checkpoint(), "maple", **options).fit(here / "data", out=here / "runs" / "mine")
    return here


class Page:
    """The page as a reader meets it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.asked, self.broken = page, [], []
        page.set_default_timeout(20_000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.broken.append(str(error)))
        page.goto(url)

    def upload(self, *files: Path) -> None:
        self.page.set_input_files("#pictures input[type=file]", [str(f) for f in files])

    def text(self, where: str) -> str:
        return str(self.page.inner_text(where))

    def wait(self, where: str, text: str) -> None:
        self.page.locator(where).filter(has_text=text).first.wait_for()

    def keep(self, name: str) -> None:
        if kept := os.environ.get("DROPLE_SCREENSHOTS"):
            self.page.screenshot(path=f"{kept}/{name}.png", full_page=True)

    def source(self, image: str) -> str:
        return str(self.page.get_attribute(f"{image} img", "src"))


@pytest.fixture
def opened(browser: Any, folder: Path) -> Iterator[Page]:
    with running(
        folder / "runs" / "mine", data=folder / "data", port=free_port(), upload_mb=1, device="cpu"
    ) as url:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = Page(context.new_page(), url)
        yield page
        context.close()
        own = (url, url.replace("http", "ws", 1), "data:", "blob:")
        assert [a for a in page.asked if not a.startswith(own)] == []
        assert page.broken == []


def test_from_an_upload_to_a_retrained_run(opened: Page, folder: Path) -> None:
    page, uploads = opened.page, folder / "uploads"
    opened.upload(uploads / "red" / "900.png", *(uploads / "yellow" / f"{n}.png" for n in (900, 901, 902)))
    opened.wait("#verdict", "red")
    assert "sure, 900.png" in opened.text("#verdict")
    # The overlay is a picture that has arrived, and another one for another class.
    page.wait_for_function("document.querySelector('#heat img')?.naturalWidth === 384")
    first = opened.source("#heat")
    assert page.locator("#answers button.thumbnail-item").count() == 4
    assert page.locator("#nearest figure").count() == 6
    opened.keep("predicted")
    page.click("#explained input")
    page.get_by_role("option", name="blue").click()
    page.wait_for_function(f"document.querySelector('#heat img')?.getAttribute('src') !== {first!r}")

    # A class that was never trained on.
    page.fill("#new-class input, #new-class textarea", "yellow")
    page.click("#add-class")
    opened.wait("#verdict .bars", "yellow")
    assert page.input_value("#classes textarea").split("\n") == ["blue", "green", "red", "yellow"]

    # Three uploads are labelled with it.
    for number in (1, 2, 3):
        page.click(f"#answers button.thumbnail-item >> nth={number}")
        opened.wait("#verdict", f"sure, 90{number - 1}.png")
        if number == 1:
            opened.keep("untaught")
        page.click("#label input")
        page.locator("#label").get_by_role("option", name="yellow").click()
        page.click("#tell")
        opened.wait("#labelled", f"{number} labelled")
    page.fill("#save-as input, #save-as textarea", "taught")
    page.click("#retrain")
    opened.wait("#outcome", "Retrained on 12 training images and 3 of yours, 4 classes")
    assert "Saved as taught." in opened.text("#outcome") and "before)" in opened.text("#outcome")
    page.locator("#verdict .verdict").filter(has_text="yellow").wait_for()
    opened.wait("#nearest", "yellow (yours)")
    opened.keep("retrained")
    assert PromptLearner.load(folder / "runs" / "taught").classes_ == ("blue", "green", "red", "yellow")

    page.click("#reset")
    opened.wait("#outcome", "as it was saved")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)
    opened.keep("phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_is_wrong_is_said_on_the_page(opened: Page, folder: Path, tmp_path: Path) -> None:
    page, good = opened.page, folder / "uploads" / "blue" / "900.png"
    bad = tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:70])
    opened.upload(good, bad)
    opened.wait("#verdict", "blue")
    opened.wait("#notes", "damaged or cut short")
    assert "bad.png" in opened.text("#notes") and "900.png" not in opened.text("#notes")
    opened.keep("bad-image")
    # A class's name is text, not a part of the page.
    page.fill("#new-class input, #new-class textarea", "<s>x</s>")
    page.click("#add-class")
    opened.wait("#verdict .bars", "<s>x</s>")
    assert page.locator("#verdict s").count() == 0
    page.fill("#template input, #template textarea", "no place for a class")
    page.click("#apply")
    opened.wait("#notes", "must hold {} once")
    assert "blue" in opened.text("#verdict")
    page.click("#restore")
    opened.wait("#notes", "damaged or cut short")  # still true, and now all that is wrong
    assert "must hold" not in opened.text("#notes")
    page.fill("#classes textarea", "blue")
    page.click("#apply")
    opened.wait("#notes", "two or more")
    page.click("#retrain")
    opened.wait("#outcome", "no upload is labelled")

"""The page's server: on this machine alone unless told otherwise, and silent towards every other.

gradio counts its users and links to the outside by default. Here its telemetry is off, pages are told to
load nothing from elsewhere (Content-Security-Policy), other sites cannot post to it, and uploads are limited
in size and deleted at the end.
"""

import ipaddress
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from drople.errors import DropleError
from drople.options import check_range
from drople.progress import Progress, Quiet

if TYPE_CHECKING:
    from gradio import Blocks

    from drople.data.dataset import DataSource, ImageData
    from drople.learner import PromptLearner

UPLOAD_MB = 20
POLICY = "; ".join(
    (
        "default-src 'self'",
        # gradio's page starts from inline scripts and builds functions from strings.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}
# gradio's page names a picture and a site of its makers for those who link to it, and samples for its API.
FOREIGN = re.compile(
    rb"<meta\b[^>]*\bhttps?://[^>]*>|https://(?:raw\.githubusercontent|github)\.com/[^\"\\]*"
)


def serve(
    run: "str | Path | PromptLearner",
    *,
    data: "DataSource | None" = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str = "auto",
    open_browser: bool = False,
    upload_mb: int = UPLOAD_MB,
    progress: Progress | None = None,
) -> None:
    """Serve the page until interrupted (Ctrl-C)."""
    say = (progress or Quiet()).say
    with running(
        run, data=data, host=host, port=port, device=device, upload_mb=upload_mb, progress=progress
    ) as url:
        try:
            say(f"open {url} in a browser; Ctrl-C ends it")
            if open_browser:
                import webbrowser

                webbrowser.open(url)
            threading.Event().wait()
        except KeyboardInterrupt:
            say("the page is closed; uploads are deleted")


@contextmanager
def running(
    run: "str | Path | PromptLearner",
    *,
    data: "DataSource | ImageData | None" = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str = "auto",
    upload_mb: int = UPLOAD_MB,
    progress: Progress | None = None,
) -> Iterator[str]:
    """The page, served while the context lasts: gives its address."""
    check_range("port", port, 1, 65535)
    check_range("upload_mb", upload_mb, 1, 1000)
    loopback = is_loopback(host)
    if not loopback:
        (progress or Quiet()).say(
            f"the page is open to every machine that can reach {host}: whoever does can see the training images "
            "and retrain. There is no password; the default host, 127.0.0.1, is this machine alone."
        )
    with tempfile.TemporaryDirectory(prefix="drople-serve-") as uploads:
        before = os.environ.get("GRADIO_TEMP_DIR")
        os.environ["GRADIO_TEMP_DIR"] = uploads
        try:
            blocks = build(run, data=data, device=device, progress=progress)
            try:
                yield _launch(blocks, host, port, loopback, upload_mb)
            finally:
                blocks.close(verbose=False)
        finally:
            if before is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = before


def build(
    run: "str | Path | PromptLearner",
    *,
    data: "DataSource | ImageData | None" = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Blocks":
    """The page of a run, not yet served; `data` is what the run was trained on."""
    _silence()
    from drople.learner import PromptLearner

    if isinstance(run, PromptLearner):
        learner, runs = run, None
    else:
        learner, runs = PromptLearner.load(run, device=device, progress=progress), Path(run).resolve().parent
    from drople.serve.page import lay_out
    from drople.serve.workbench import Workbench

    return lay_out(Workbench(learner, data, runs=runs, progress=progress))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _silence() -> None:
    """Before anything is imported that would count its users."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        raise DropleError(f"the web page needs {error.name}: pip install drople[serve]") from None


def _launch(blocks: "Blocks", host: str, port: int, loopback: bool, upload_mb: int) -> str:
    from starlette.middleware import Middleware

    from drople.serve.page import STYLE, theme

    guard = Middleware(Guard, hosts={"127.0.0.1", "localhost", "::1", host} if loopback else None)
    try:
        _, url, _ = blocks.queue(max_size=32).launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            inbrowser=False,
            max_file_size=upload_mb * 1024 * 1024,
            allowed_paths=[],
            enable_monitoring=False,
            mcp_server=False,
            pwa=False,
            ssr_mode=False,
            footer_links=[],
            theme=theme(),
            css=STYLE,
            app_kwargs={"middleware": [guard]},
        )
    except OSError as error:
        raise DropleError(
            f"the page cannot be served on {host}:{port} ({error}): give another --port."
        ) from None
    return url


class Guard:
    """Sends the headers above, and refuses what another site's page asks of this one.

    `hosts` are the names by which this server may be called: a site can make its own name point here.
    """

    def __init__(self, app: Any, hosts: set[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self.welcome(dict(scope["headers"])):
            await send({"type": "http.response.start", "status": 403, "headers": list(HEADERS.items())})
            await send({"type": "http.response.body", "body": b"another site may not use this page"})
            return
        await self.app(scope, receive, _guarded(send) if scope["type"] == "http" else send)

    def welcome(self, headers: dict[bytes, bytes]) -> bool:
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        called = urlsplit(f"//{host}").hostname
        return (self.hosts is None or called in self.hosts) and (
            not origin or urlsplit(origin).netloc == host
        )


def _guarded(send: Any) -> Any:
    """Adds the headers; a page of HTML is held back until it is whole, and loses its foreign addresses."""
    start: dict[str, Any] = {}
    page = bytearray()

    async def guarded(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [(n, v) for n, v in message["headers"] if n not in HEADERS] + list(HEADERS.items())
            message = {**message, "headers": headers}
            if dict(headers).get(b"content-type", b"").startswith(b"text/html"):
                start.update(message)
                return
        elif start:
            page.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            body = FOREIGN.sub(b"", bytes(page))
            kept = [(n, v) for n, v in start["headers"] if n != b"content-length"]
            await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
            message = {"type": "http.response.body", "body": body}
        await send(message)

    return guarded

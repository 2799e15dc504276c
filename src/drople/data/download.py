"""Files from their publishers: resumed where they broke off, checked, and there whole or not at all.

Only the standard library. A file grows as NAME.part, with the server's mark of its version in NAME.part.tag,
and takes its name when it is complete and its checksum, where one is known, is right.
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drople.data.archives import BadArchive, is_archive, unpack
from drople.data.catalog import Dataset, File, find, steps
from drople.errors import DropleError

CHUNK = 2**18
# Worth another try: the server is busy or passing on another's trouble.
PASSING = (408, 425, 429, 500, 502, 503, 504)
ARCHIVES = (".zip", ".tar", ".gz", ".tgz")

Progress = Callable[[str, int, int | None], None]


class DownloadFailed(DropleError):
    """A file that could not be had, and why."""


class _Changed(Exception):
    """What is on the disk is not the beginning of what the server has."""


@dataclass(frozen=True)
class Got:
    """What `get` did: the files it put in the folder, what went otherwise, what is left to do by hand."""

    name: str
    folder: Path
    done: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.steps


def get(
    name: str | Dataset,
    root: Path,
    *,
    progress: Progress | None = None,
    tries: int = 5,
    timeout: float = 60.0,
    pause: float = 2.0,
) -> Got:
    """Fetches a dataset from its publisher to its folder under `root`, or says how to get it by hand.

    What is there already is left alone. `progress` is called with a file's name, its bytes so far, and its
    size where that is known.
    """
    entry = find(name)
    folder = root / entry.folder
    if not entry.fetchable:
        return Got(entry.name, folder, steps=tuple(steps(entry, root)))
    done: list[str] = []
    notes: list[str] = []
    for file in entry.files:
        if all((folder / path).exists() for path in file.gives):
            notes.append(f"{', '.join(file.gives)}: there already")
            continue
        try:
            fetched = fetch(
                file.urls,
                folder / file.filename,
                md5=file.md5,
                progress=progress,
                tries=tries,
                timeout=timeout,
                pause=pause,
            )
            _put(file, fetched, folder)
        except (DropleError, OSError) as error:
            if not file.optional:
                raise DropleError(f"{error} By hand: {' '.join(steps(entry, root))}") from None
            notes.append(f"went on without {file.filename}: {error}")
            continue
        done.append(file.filename)
    return Got(entry.name, folder, tuple(done), tuple(notes))


def fetch(
    urls: str | Sequence[str],
    target: Path,
    *,
    md5: str | None = None,
    progress: Progress | None = None,
    tries: int = 5,
    timeout: float = 60.0,
    pause: float = 2.0,
) -> Path:
    """The file at the first of `urls` that gives it, as `target`; a broken transfer goes on where it was."""
    if target.exists():
        if md5 is None or _md5(target) == md5:
            return target
        raise DownloadFailed(f"{target} is there but its MD5 sum is not {md5}: move it away and try again.")
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in [urls] if isinstance(urls, str) else urls:
        try:
            return _fetch_one(url, target, md5, progress, tries, timeout, pause)
        except DownloadFailed as error:
            failures.append(str(error))
    raise DownloadFailed(" ".join(failures))


def _fetch_one(
    url: str,
    target: Path,
    md5: str | None,
    progress: Progress | None,
    tries: int,
    timeout: float,
    pause: float,
) -> Path:
    if urlsplit(url).scheme not in ("http", "https"):
        raise DownloadFailed(f"{url} is not an http or https address.")
    part = target.with_name(f"{target.name}.part")
    tag = target.with_name(f"{target.name}.part.tag")
    why = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        resumed = part.exists()
        try:
            _transfer(url, part, tag, md5 is not None, target.name, progress, timeout)
        except _Changed as error:
            _forget(part, tag)
            why = str(error)
            continue
        except urllib.error.HTTPError as error:
            why = f"the server answered {error.code} {error.reason}"
            error.close()
            if error.code not in PASSING:
                raise DownloadFailed(f"cannot get {url}: {why}.") from None
            continue
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(getattr(error, "reason", "") or error) or type(error).__name__
            if isinstance(error, OSError) and error.filename is not None:
                raise DownloadFailed(f"cannot write {error.filename}: {error.strerror}.") from None
            continue
        if md5 is not None and (found := _md5(part)) != md5:
            _forget(part, tag)
            why = f"its MD5 sum is {found} and not {md5}"
            if resumed:
                # The beginning may be of another version or another address: once more from nothing.
                continue
            raise DownloadFailed(f"{url} is not the file expected: {why}. It was not kept.")
        os.replace(part, target)
        tag.unlink(missing_ok=True)
        return target
    kept = f" What came is kept in {part}: the next try goes on from there." if part.exists() else ""
    raise DownloadFailed(f"cannot get {url}: {why}, after {tries} tries.{kept}")


def _transfer(
    url: str, part: Path, tag: Path, checked: bool, name: str, progress: Progress | None, timeout: float
) -> None:
    """Brings `part` to its full length, or raises."""
    start = part.stat().st_size if part.exists() else 0
    mark = tag.read_text("utf-8") if tag.exists() else ""
    if start and not (mark or checked):
        # Nothing could tell whether the rest belongs to this beginning.
        start = 0
    headers = {"User-Agent": "drople", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if mark:
            headers["If-Range"] = mark
    try:
        answer = _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not start:
            raise
        error.close()
        # Nothing after what we have: complete, if the server's size says so too.
        if _size_in(error.headers.get("Content-Range")) == start:
            return
        raise _Changed("the file on the server is shorter than what was kept") from None
    with answer:
        total = _total(answer, start)
        if answer.status != 206:
            start = 0
        mark = answer.headers.get("ETag", "") or answer.headers.get("Last-Modified", "")
        # A weak tag promises the same meaning, not the same bytes.
        tag.write_text("" if mark.startswith("W/") else mark, "utf-8")
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - start > free:
            raise DownloadFailed(f"{name} needs {total - start:,} bytes and {part.parent} has {free:,} free.")
        with open(part, "ab" if start else "wb") as out:
            done = start
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(name, done, total)
            out.flush()
            os.fsync(out.fileno())
    if total is not None and done < total:
        raise ConnectionError(f"the transfer broke off after {done:,} of {total:,} bytes")
    if total is not None and done > total:
        raise _Changed(f"{done:,} bytes came instead of {total:,}")


def _total(answer: Any, start: int) -> int | None:
    """The size of the whole file, where the server says it."""
    if answer.status == 206:
        given = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range") or "")
        if given is None or int(given[1]) != start:
            raise _Changed("the server sent another part than the one asked for")
        return _size_in(answer.headers.get("Content-Range"))
    length = answer.headers.get("Content-Length")
    return int(length) if length is not None else None


def _size_in(content_range: str | None) -> int | None:
    size = re.search(r"/(\d+)$", content_range or "")
    return int(size[1]) if size else None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows within http and https, and never from https down to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before, after) == ("https", "http"):
            fp.close()
            raise DownloadFailed(f"{req.full_url} sends on to {newurl}, which is not followed.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Only what http needs: the default opener also reads local files and ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _put(file: File, fetched: Path, folder: Path) -> None:
    """A fetched file to where the loaders look; what is unusable goes, so that the next try gets it anew."""
    if fetched.suffix == ".json":
        try:
            json.loads(fetched.read_text("utf-8"))
        except ValueError:
            fetched.unlink()
            raise DownloadFailed(
                f"{file.urls[0]} gave something that is not JSON, a web page perhaps."
            ) from None
        return
    if fetched.suffix not in ARCHIVES:
        return
    if not is_archive(fetched):
        fetched.unlink()
        raise DownloadFailed(f"{file.urls[0]} gave something that is no archive, a web page perhaps.")
    work = folder / f".{file.filename}.unpacked"
    inner = folder / f".{file.filename}.nested"
    try:
        for leftover in (work, inner):
            shutil.rmtree(leftover, ignore_errors=True)
        source = unpack(fetched, work)
        if file.nested:
            source = unpack(work / file.nested, inner)
        source /= file.inside
        absent = [
            path
            for path in file.gives
            if not (folder / path).exists()
            and not (source / os.path.relpath(path, file.place or ".")).exists()
        ]
        if absent:
            raise BadArchive(fetched, f"it does not hold {', '.join(absent)}: its layout may have changed.")
        _move(source, folder / file.place)
    except BadArchive:
        # With a sum that is right, another copy would be as bad.
        if file.md5 is None:
            fetched.unlink()
        raise
    finally:
        for leftover in (work, inner):
            shutil.rmtree(leftover, ignore_errors=True)
    fetched.unlink()


def _move(source: Path, place: Path) -> None:
    """Each entry by one rename; what has its name there already is whole, and stays."""
    if not place.exists():
        source.rename(place)
        return
    for entry in sorted(source.iterdir()):
        if not (place / entry.name).exists():
            entry.rename(place / entry.name)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _forget(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)

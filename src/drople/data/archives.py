"""Unpacking a stranger's tar, tar.gz or zip: nothing leaves the target folder, and all of it comes or none.

Refused: absolute names and .., links that lead out, devices and pipes, a name given twice, encrypted zips,
and archives that grow far beyond their size. One is unpacked beside its target and renamed at the end.
"""

import gzip
import io
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from drople.errors import DropleError

# JPEGs shrink by a few percent; lists of file names shrink some ten times.
MAX_RATIO = 50
# Small archives may shrink more than that and harm nobody.
FLOOR = 64 * 2**20
MAX_FILES = 3_000_000
CHUNK = 2**20
_GZIP = b"\x1f\x8b"


class BadArchive(DropleError):
    """An archive that is not unpacked, and why."""

    def __init__(self, archive: Path, reason: str) -> None:
        super().__init__(f"{archive} was not unpacked: {reason}")


@dataclass(frozen=True)
class Member:
    """One entry: a folder, a file with its content, or a link with where it leads."""

    name: str
    kind: str
    content: IO[bytes] | None = None
    leads_to: str = ""


def unpack(archive: Path, target: Path, *, max_bytes: int | None = None, max_files: int = MAX_FILES) -> Path:
    """Unpacks `archive` as the new folder `target`; on any error there is no `target` and nothing is left."""
    if target.exists():
        raise DropleError(f"{target} exists already: nothing is unpacked over it.")
    limit = max_bytes if max_bytes is not None else max(FLOOR, MAX_RATIO * archive.stat().st_size)
    # Beside the target, so that the last step is one rename; by a fixed name, so that what a killed run left
    # is cleared away by the next.
    work = target.with_name(f".{target.name}.unpacking")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _fill(archive, work, limit, max_files)
        work.rename(target)
    except BadArchive:
        raise
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise BadArchive(archive, f"it is damaged or cut short ({error}). Get it again.") from None
    except (RuntimeError, NotImplementedError) as error:
        raise BadArchive(archive, f"it uses something not read here ({error}).") from None
    except OSError as error:
        raise DropleError(f"{archive} was not unpacked: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def is_archive(path: Path) -> bool:
    """Whether the content, not the name, is a tar, tar.gz or zip."""
    # Not by tarfile.is_tarfile, which reads on as far as a hostile header tells it to.
    with open(path, "rb") as file:
        start = file.read(tarfile.BLOCKSIZE)
    if start[:2] == _GZIP or _is_zip(start):
        return True
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "replace")
    except tarfile.TarError:
        return False
    return True


def _is_zip(start: bytes) -> bool:
    return start[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def _fill(archive: Path, work: Path, limit: int, max_files: int) -> None:
    left = limit
    symlinks: list[tuple[Path, str]] = []
    for number, member in enumerate(_members(archive, limit), 1):
        if number > max_files:
            raise BadArchive(archive, f"it has more than {max_files:,} entries.")
        place = _inside(archive, work, member.name)
        if member.kind == "folder":
            place.mkdir(parents=True, exist_ok=True)
            continue
        if os.path.lexists(place):
            raise BadArchive(archive, f"it holds {member.name!r} twice.")
        place.parent.mkdir(parents=True, exist_ok=True)
        if member.kind == "symlink":
            _inside(archive, work, os.path.join(os.path.dirname(member.name), member.leads_to), clean=True)
            symlinks.append((place, member.leads_to))
        elif member.kind == "hardlink":
            original = _inside(archive, work, member.leads_to)
            if not original.is_file():
                raise BadArchive(archive, f"the link {member.name!r} leads to no file of it.")
            os.link(original, place)
        else:
            assert member.content is not None
            left -= _copy(member.content, place, left)
            if left < 0:
                raise BadArchive(archive, f"it unpacks to more than {limit:,} bytes, too much for its size.")
    # Made last, so that no file was ever written through one; asked again, because links lead through links.
    for place, leads_to in symlinks:
        os.symlink(leads_to, place)
    root = os.path.realpath(work)
    for place, leads_to in symlinks:
        if os.path.commonpath((root, os.path.realpath(place))) != root:
            raise BadArchive(archive, f"the link {place.name!r} leads out of the folder, to {leads_to!r}.")


def _copy(content: IO[bytes], place: Path, left: int) -> int:
    """Bytes written; one chunk past `left` at most."""
    written = 0
    with open(place, "xb") as out:
        while written <= left and (chunk := content.read(CHUNK)):
            out.write(chunk)
            written += len(chunk)
    return written


def _inside(archive: Path, work: Path, name: str, clean: bool = False) -> Path:
    """The place of a name below `work`; a link's goal may hold .. as long as it stays inside (`clean`)."""
    given = name.replace("\\", "/") if os.name == "nt" else name
    pure = PurePosixPath(os.path.normpath(given) if clean else given)
    if not given or "\0" in given or pure.is_absolute() or ".." in pure.parts or Path(given).drive:
        raise BadArchive(archive, f"its entry {name!r} leads out of the folder.")
    return work.joinpath(*pure.parts)


def _members(archive: Path, limit: int) -> Iterator[Member]:
    with open(archive, "rb") as file:
        start = file.read(4)
        file.seek(0)
        if _is_zip(start):
            yield from _zip_members(archive)
            return
        plain = gzip.GzipFile(fileobj=file) if start[:2] == _GZIP else file
        # A header may declare gigabytes of metadata: what is read is limited, not only what is written.
        counted = _Counted(plain, archive, 2 * limit)
        with tarfile.open(fileobj=counted, mode="r|") as tar:
            for info in tar:
                yield _tar_member(archive, tar, info)


def _tar_member(archive: Path, tar: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    if info.isdir():
        return Member(info.name, "folder")
    if info.issym() or info.islnk():
        return Member(info.name, "symlink" if info.issym() else "hardlink", leads_to=info.linkname)
    content = tar.extractfile(info) if info.isfile() else None
    if content is None:
        raise BadArchive(archive, f"its entry {info.name!r} is neither a file, a folder nor a link.")
    return Member(info.name, "file", content)


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            mode = info.external_attr >> 16
            if info.is_dir():
                yield Member(info.filename, "folder")
                continue
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFLNK):
                raise BadArchive(archive, f"its entry {info.filename!r} is no file, folder or link.")
            with opened.open(info) as content:
                if stat.S_ISLNK(mode):
                    leads_to = content.read(4096).decode("utf-8", "replace")
                    yield Member(info.filename, "symlink", leads_to=leads_to)
                else:
                    yield Member(info.filename, "file", content)


class _Counted(io.RawIOBase):
    """A stream that may be read up to a limit."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, archive: Path, limit: int) -> None:
        self.stream, self.archive, self.left = stream, archive, limit

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise BadArchive(self.archive, "it unpacks to far too much for its size.")
        return data

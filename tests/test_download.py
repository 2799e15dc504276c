"""Downloads against a real server on loopback, broken transfers included; hostile archives built here."""

import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from drople.data.archives import BadArchive, is_archive, unpack
from drople.data.catalog import Dataset, File, find
from drople.data.download import DownloadFailed, _Redirects, fetch, get
from drople.data.layouts import load_benchmark
from drople.errors import DropleError

BODY = bytes(range(256)) * 4000
MD5 = hashlib.md5(BODY).hexdigest()


@dataclass
class Server:
    """What is served, how it misbehaves, and what was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = '"one"'
    ranges: bool = True
    # How many bytes of the body each coming answer sends before the line is cut; whole ones after them.
    cuts: list[int] = field(default_factory=list)
    # Answers to give first, instead of the file.
    statuses: list[int] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    lengths: bool = True
    wrong_part: bool = False
    asked: list[tuple[str, str | None]] = field(default_factory=list)


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def plain(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            server.asked.append((self.path, wanted))
            if server.statuses:
                return self.plain(server.statuses.pop(0))
            if self.path in server.redirects:
                return self.plain(302, Location=server.redirects[self.path])
            if self.path not in server.files:
                return self.plain(404)
            body = server.files[self.path]
            start = 0
            same = self.headers.get("If-Range") in (None, server.etag)
            if wanted and server.ranges and same:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    return self.plain(416, Content_Range=f"bytes */{len(body)}")
                if server.wrong_part:
                    start -= 1
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            rest = body[start:]
            if server.etag:
                self.send_header("ETag", server.etag)
            if server.lengths:
                self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest[: server.cuts.pop(0)] if server.cuts else rest)
            return None

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    state.files["/f.bin"] = BODY
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture(autouse=True)
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the machine must not come between us and loopback."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def alone(path: Path) -> None:
    """Nothing else is left beside the file."""
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_whole_file_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    target = tmp_path / "new" / "f.bin"
    found = fetch(f"{server.url}/f.bin", target, md5=MD5, progress=lambda *each: seen.append(each))
    assert found.read_bytes() == BODY
    assert seen[-1] == ("f.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    alone(target)
    fetch(f"{server.url}/f.bin", target, md5=MD5)
    assert len(server.asked) == 1


@pytest.mark.parametrize("md5", [MD5, None])
def test_a_broken_transfer_goes_on_where_it_stopped(server: Server, tmp_path: Path, md5: str | None) -> None:
    server.cuts = [300_000, 5, 400_000]
    target = tmp_path / "f.bin"
    fetch(f"{server.url}/f.bin", target, md5=md5, pause=0)
    assert target.read_bytes() == BODY
    ranges = [wanted for _, wanted in server.asked]
    assert ranges == [None, "bytes=300000-", "bytes=300005-", "bytes=700005-"]
    alone(target)


def test_the_next_call_resumes_what_the_last_one_left(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 0]
    with pytest.raises(
        DownloadFailed, match=r"broke off after 300,000 of 1,024,000 bytes, after 2 tries.*kept in"
    ):
        fetch(f"{server.url}/f.bin", tmp_path / "f.bin", tries=2, pause=0)
    assert not (tmp_path / "f.bin").exists()
    assert (tmp_path / "f.bin.part").stat().st_size == 300_000
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert server.asked[-1][1] == "bytes=300000-"


def test_a_file_that_changed_is_not_sewn_together(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000]
    with pytest.raises(DownloadFailed):
        fetch(f"{server.url}/f.bin", tmp_path / "f.bin", tries=1)
    server.files["/f.bin"], server.etag = BODY[::-1], '"two"'
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY[::-1]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_mark_or_a_sum_it_starts_anew(server: Server, tmp_path: Path, etag: str | None) -> None:
    server.etag, server.cuts = etag, [300_000]
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", pause=0)
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert [wanted for _, wanted in server.asked] == [None, None]


def test_a_server_without_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cuts = False, [300_000]
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5, pause=0)
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_server_that_sends_the_wrong_part(server: Server, tmp_path: Path) -> None:
    server.wrong_part, server.cuts = True, [300_000]
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5, pause=0)
    assert (tmp_path / "f.bin").read_bytes() == BODY


@pytest.mark.parametrize("extra", [b"", b"more than the server has"])
def test_a_part_that_is_already_whole_or_too_long(server: Server, tmp_path: Path, extra: bytes) -> None:
    (tmp_path / "f.bin.part").write_bytes(BODY + extra)
    (tmp_path / "f.bin.part.tag").write_text('"one"')
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5, pause=0)
    assert (tmp_path / "f.bin").read_bytes() == BODY
    alone(tmp_path / "f.bin")


def test_a_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="not the file expected"):
        fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5="0" * 32, pause=0)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_beginning_is_found_by_the_checksum(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.bin.part").write_bytes(b"x" * 1000)
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5, pause=0)
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert [wanted for _, wanted in server.asked] == ["bytes=1000-", None]


def test_a_file_there_with_another_sum_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(b"the user's own")
    with pytest.raises(DownloadFailed, match="move it away"):
        fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5)
    assert (tmp_path / "f.bin").read_bytes() == b"the user's own"


def test_not_found_is_not_tried_again(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="404"):
        fetch(f"{server.url}/gone.bin", tmp_path / "f.bin", pause=0)
    assert len(server.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_busy_server_is_tried_again_but_not_for_ever(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", pause=0)
    assert len(server.asked) == 3
    server.statuses = [503] * 9
    with pytest.raises(DownloadFailed, match=r"503 .*after 4 tries"):
        fetch(f"{server.url}/f.bin", tmp_path / "g.bin", tries=4, pause=0)
    assert len(server.asked) == 7


def test_the_second_address_helps(server: Server, tmp_path: Path) -> None:
    fetch((f"{server.url}/gone.bin", f"{server.url}/f.bin"), tmp_path / "f.bin", md5=MD5)
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_redirects_are_followed_within_http(server: Server, tmp_path: Path) -> None:
    server.redirects = {
        "/old": "/f.bin",
        "/away": "file:///etc/hostname",
        "/ftp": "ftp://127.0.0.1/x",
        "/loop": "/loop",
    }
    server.cuts = [300_000]
    fetch(f"{server.url}/old", tmp_path / "f.bin", md5=MD5, pause=0)
    assert server.asked[-1] == ("/f.bin", "bytes=300000-")
    for path in ("/away", "/ftp"):
        with pytest.raises(DownloadFailed, match=r"not followed|not allowed"):
            fetch(server.url + path, tmp_path / "g.bin", pause=0)
    with pytest.raises(DownloadFailed, match="infinite loop"):
        fetch(f"{server.url}/loop", tmp_path / "g.bin", pause=0, tries=1)
    assert not (tmp_path / "g.bin").exists()


def test_a_redirect_from_https_down_to_http_is_refused() -> None:
    request = urllib.request.Request("https://example.org/f")
    with pytest.raises(DownloadFailed, match="not followed"):
        _Redirects().redirect_request(request, io.BytesIO(), 302, "Found", {}, "http://example.org/f")
    up = urllib.request.Request("http://example.org/f")
    assert (
        _Redirects().redirect_request(up, io.BytesIO(), 302, "Found", {}, "https://example.org/f") is not None
    )


def test_only_http_addresses(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("local")
    with pytest.raises(DownloadFailed, match="not an http"):
        fetch((tmp_path / "secret").as_uri(), tmp_path / "f.bin")


def test_without_a_length_the_checksum_decides(server: Server, tmp_path: Path) -> None:
    server.lengths, server.cuts = False, [300_000]
    with pytest.raises(DownloadFailed, match="not the file expected"):
        fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5, tries=1)
    fetch(f"{server.url}/f.bin", tmp_path / "f.bin", md5=MD5)
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_server_that_is_not_there_and_one_that_is_silent(tmp_path: Path) -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(DownloadFailed, match="after 2 tries"):
            fetch(f"http://127.0.0.1:{port}/f", tmp_path / "f", tries=2, pause=0)
        silent.listen()
        with pytest.raises(DownloadFailed, match="timed out, after 1 tries"):
            fetch(f"http://127.0.0.1:{port}/f", tmp_path / "f", tries=1, timeout=0.2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DownloadFailed, match="needs 1,024,000 bytes"):
        fetch(f"{server.url}/f.bin", tmp_path / "f.bin")


# --- archives


def tar_of(*members: tuple[str, bytes | str | tarfile.TarInfo], mode: str = "w") -> bytes:
    """(name, content) for files; a TarInfo in place of the content for anything else."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            data = content if isinstance(content, bytes) else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def special(kind: bytes, leads_to: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, leads_to
    return info


def zip_of(*members: tuple[str, bytes], mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            opened.writestr(info, content)
    return out.getvalue()


GOOD = (("a/one.txt", b"one"), ("a/b/two.txt", b"two"))


@pytest.mark.parametrize(
    "content", [tar_of(*GOOD), tar_of(*GOOD, mode="w:gz"), zip_of(*GOOD)], ids=["tar", "tar.gz", "zip"]
)
def test_good_archives(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "a.bin"
    archive.write_bytes(content)
    assert is_archive(archive)
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "a" / "one.txt").read_bytes() == b"one"
    assert (tmp_path / "out" / "a" / "b" / "two.txt").read_bytes() == b"two"
    assert {each.name for each in tmp_path.iterdir()} == {"a.bin", "out"}
    with pytest.raises(DropleError, match="exists already"):
        unpack(archive, tmp_path / "out")


FIRST = ("good.txt", b"good")
HOSTILE = {
    "parent": tar_of(FIRST, ("../evil.txt", b"evil")),
    "parent inside": tar_of(FIRST, ("a/../../evil.txt", b"evil")),
    "symlink out": tar_of(FIRST, ("door", special(tarfile.SYMTYPE, "../.."))),
    "symlink absolute": tar_of(FIRST, ("door", special(tarfile.SYMTYPE, "/etc"))),
    "through a symlink": tar_of(("door", special(tarfile.SYMTYPE, "..")), ("door/evil.txt", b"evil")),
    "chained symlinks": tar_of(
        ("p/q/up", special(tarfile.SYMTYPE, "../..")), ("p/q/out", special(tarfile.SYMTYPE, "up/../../.."))
    ),
    "hard link out": tar_of(FIRST, ("door", special(tarfile.LNKTYPE, "../secret.txt"))),
    "hard link absolute": tar_of(FIRST, ("door", special(tarfile.LNKTYPE, "/etc/hostname"))),
    "hard link to nothing": tar_of(FIRST, ("door", special(tarfile.LNKTYPE, "absent"))),
    "device": tar_of(FIRST, ("null", special(tarfile.CHRTYPE))),
    "pipe": tar_of(FIRST, ("pipe", special(tarfile.FIFOTYPE))),
    "twice": tar_of(FIRST, ("good.txt", b"evil")),
    "zip parent": zip_of(FIRST, ("../evil.txt", b"evil")),
    "zip symlink": zip_of(("door", b"../.."), mode=0o120777),
    "zip pipe": zip_of(("pipe", b""), mode=0o010644),
    "cut tar": tar_of(FIRST, ("big.bin", bytes(100_000)))[:5000],
    "cut tar.gz": tar_of(FIRST, ("big.bin", os.urandom(100_000)), mode="w:gz")[:5000],
    "cut zip": zip_of(FIRST, ("big.bin", os.urandom(100_000)))[:5000],
    "a web page": b"<!DOCTYPE html><html>sign in first</html>" * 50,
    "empty": b"",
    "gzip of no tar": gzip.compress(b"hello" * 1000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives_leave_nothing(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret.txt").write_text("secret")
    archive = home / "a.tar"
    archive.write_bytes(HOSTILE[kind])
    with pytest.raises(BadArchive, match="was not unpacked"):
        unpack(archive, home / "out")
    assert {each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*")} == {
        "home",
        "home/a.tar",
        "home/secret.txt",
    }


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_absolute_names_are_refused(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    archive = tmp_path / "a.bin"
    archive.write_bytes(pack(FIRST, (str(tmp_path / "evil.txt"), b"evil")))
    with pytest.raises(BadArchive, match="leads out of the folder"):
        unpack(archive, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]


def test_only_archives_count_as_archives(tmp_path: Path) -> None:
    for content in (b"", b"<html>" * 200, b'{"train": []}', bytes(512)):
        (tmp_path / "x").write_bytes(content)
        assert not is_archive(tmp_path / "x")


@pytest.mark.parametrize("pack", [lambda *m: tar_of(*m, mode="w:gz"), zip_of], ids=["tar.gz", "zip"])
def test_bombs_are_stopped(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    archive = tmp_path / "bomb"
    archive.write_bytes(pack(("a", bytes(9 * 2**20)), ("b", bytes(9 * 2**20))))
    assert archive.stat().st_size < 100_000
    with pytest.raises(BadArchive, match=r"more than 10,000,000 bytes|far too much"):
        unpack(archive, tmp_path / "out", max_bytes=10_000_000)
    assert [each.name for each in tmp_path.iterdir()] == ["bomb"]
    unpack(archive, tmp_path / "out")


def test_the_default_limit_follows_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drople.data.archives.FLOOR", 1000)
    archive = tmp_path / "bomb"
    archive.write_bytes(zip_of(("a", bytes(5 * 2**20))))
    with pytest.raises(BadArchive, match="too much for its size"):
        unpack(archive, tmp_path / "out")


def test_a_bomb_in_a_header_is_stopped(tmp_path: Path) -> None:
    # A long-name record of 50 MB of zeros: it is read to be understood, and never written.
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 50 * 2**20
    archive = tmp_path / "bomb.tar.gz"
    archive.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(50 * 2**20), 1))
    with pytest.raises(BadArchive, match="far too much"):
        unpack(archive, tmp_path / "out", max_bytes=2**20)


def test_too_many_entries(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(tar_of(*((f"{number}", b"") for number in range(20))))
    with pytest.raises(BadArchive, match="more than 10 entries"):
        unpack(archive, tmp_path / "out", max_files=10)


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    links = (
        ("a/b/soft", special(tarfile.SYMTYPE, "../one.txt")),
        ("hard", special(tarfile.LNKTYPE, "a/one.txt")),
    )
    archive.write_bytes(tar_of(("a/one.txt", b"one"), *links))
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "a" / "b" / "soft").read_bytes() == b"one"
    assert (tmp_path / "out" / "hard").read_bytes() == b"one"


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".out.unpacking" / "half").mkdir(parents=True)
    (tmp_path / "a.tar").write_bytes(tar_of(FIRST))
    unpack(tmp_path / "a.tar", tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["good.txt"]
    assert not (tmp_path / ".out.unpacking").exists()


# --- whole datasets, in the form their publishers give them


def jpeg() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), "teal").save(out, format="JPEG")
    return out.getvalue()


def served(server: Server, name: str, contents: dict[str, bytes]) -> Dataset:
    """The catalog's entry with its addresses on loopback; files that `contents` leaves out are not found."""
    entry = find(name)
    files: list[File] = []
    for file in entry.files:
        path = f"/{file.filename}"
        content = contents.get(file.filename)
        md5 = file.md5
        if content is not None:
            server.files[path] = content
            md5 = hashlib.md5(content).hexdigest() if md5 else None
        files.append(replace(file, urls=(server.url + path,), md5=md5))
    return replace(entry, files=tuple(files))


def test_get_caltech101_an_archive_in_an_archive(server: Server, tmp_path: Path) -> None:
    images = [
        (f"101_ObjectCategories/{name}/image_{number:04}.jpg", jpeg())
        for name in ("ant", "bass")
        for number in range(10)
    ]
    inner = tar_of(*images, mode="w:gz")
    outer = zip_of(("caltech-101/101_ObjectCategories.tar.gz", inner), ("__MACOSX/x", b""))
    got = get(served(server, "caltech101", {"caltech-101.zip": outer}), tmp_path, pause=0)
    assert got.complete
    assert got.done == ("caltech-101.zip",)
    assert any("without split_zhou_Caltech101.json" in note and "404" in note for note in got.notes)
    assert [each.name for each in got.folder.iterdir()] == ["101_ObjectCategories"]
    assert load_benchmark("caltech101", tmp_path).classes == ("ant", "bass")


def test_get_oxford_pets_in_two_archives_and_a_split(server: Server, tmp_path: Path) -> None:
    split = {"train": [["a_1.jpg", 0, "a"]], "val": [["a_2.jpg", 0, "a"]], "test": [["b_1.jpg", 1, "b"]]}
    contents = {
        "images.tar.gz": tar_of(
            *((f"images/{name}.jpg", jpeg()) for name in ("a_1", "a_2", "b_1")), mode="w:gz"
        ),
        "annotations.tar.gz": tar_of(("annotations/test.txt", b"b_1 2 1 1\n"), mode="w:gz"),
        "split_zhou_OxfordPets.json": json.dumps(split).encode(),
    }
    entry = served(server, "oxford_pets", contents)
    server.cuts = [100]
    got = get(entry, tmp_path, pause=0)
    assert got.done == tuple(contents)
    assert load_benchmark("oxford_pets", tmp_path).notes == ("split read from split_zhou_OxfordPets.json",)
    asked = len(server.asked)
    again = get(entry, tmp_path)
    assert (again.done, len(again.notes), len(server.asked)) == ((), 3, asked)


def test_get_puts_the_contents_of_an_inner_folder_in_place(server: Server, tmp_path: Path) -> None:
    top = "fgvc-aircraft-2013b/data"
    lists = [(f"{top}/images_variant_{split}.txt", b"0000001 737\n") for split in ("train", "val", "test")]
    content = tar_of(
        (f"{top}/images/0000001.jpg", jpeg()), (f"{top}/variants.txt", b"737\n"), *lists, mode="w:gz"
    )
    get(served(server, "fgvc_aircraft", {"fgvc-aircraft-2013b.tar.gz": content}), tmp_path)
    assert load_benchmark("fgvc_aircraft", tmp_path).classes == ("737",)
    sketch = zip_of(("sketch/n01440764/sketch_1.JPEG", jpeg()))
    get(served(server, "imagenet_sketch", {"ImageNet-Sketch.zip": sketch}), tmp_path)
    assert load_benchmark("imagenet_sketch", tmp_path).words == ("tench",)


def test_get_does_not_take_a_web_page_for_data(server: Server, tmp_path: Path) -> None:
    page = b"<!DOCTYPE html><html>Google Drive - Virus scan warning</html>"
    entry = served(server, "imagenetv2", {"imagenetv2-matched-frequency.tar.gz": page})
    with pytest.raises(DropleError, match=r"no archive, a web page perhaps.*By hand: .*ImageNetV2"):
        get(entry, tmp_path)
    good = zip_of(("2750/River/River_1.jpg", jpeg()))
    entry = served(server, "eurosat", {"EuroSAT.zip": good, "split_zhou_EuroSAT.json": page})
    got = get(entry, tmp_path)
    assert got.done == ("EuroSAT.zip",)
    assert "not JSON" in got.notes[0]
    assert [each.name for each in got.folder.iterdir()] == ["2750"]
    assert list((tmp_path / "imagenetv2").iterdir()) == []


def test_get_refuses_a_hostile_archive_and_one_of_another_layout(server: Server, tmp_path: Path) -> None:
    for content in (HOSTILE["parent"], tar_of(("other/x.jpg", jpeg()))):
        entry = served(server, "imagenetv2", {"imagenetv2-matched-frequency.tar.gz": content})
        with pytest.raises(DropleError, match=r"leads out of the folder|layout may have changed"):
            get(entry, tmp_path)
        assert not (tmp_path / "evil.txt").exists()
        assert list((tmp_path / "imagenetv2").iterdir()) == []


def test_get_leaves_alone_what_is_there(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "dtd" / "images" / "mine.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"the user's own")
    content = tar_of(("dtd/images/banded/1.jpg", jpeg()), ("dtd/labels/train1.txt", b"x\n"), mode="w:gz")
    get(served(server, "dtd", {"dtd-r1.0.1.tar.gz": content}), tmp_path)
    assert mine.read_bytes() == b"the user's own"
    assert (tmp_path / "dtd" / "labels" / "train1.txt").exists()


@pytest.mark.parametrize("name", ["imagenet", "stanford_cars", "ucf101", "pacs"])
def test_get_says_what_to_do_by_hand(tmp_path: Path, name: str) -> None:
    got = get(name, tmp_path)
    assert not got.complete and not got.done
    assert find(name).page in got.steps[0]
    assert got.steps[-1] == f"drople data check {name}"
    assert list(tmp_path.iterdir()) == []

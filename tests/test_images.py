"""Decoding: every kind of picture comes out right, every kind of bad file comes out as `BadImage`."""

import os
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import drople.data.images as images
import drople.safe_image as safe_image
from drople.data import MAX_PIXELS, BadImage, Pixels, decode, decode_batches, normalise, open_image, square
from drople.errors import DropleError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Something with both smooth parts and edges, as photos have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-20, 20, smooth.shape)).clip(0, 255).astype(np.uint8))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


# ---- good pictures


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
def test_exif_orientation(tmp_path: Path, kind: str, orientation: int) -> None:
    upright = np.zeros((32, 48, 3), np.uint8)
    upright[:16, :16] = 255, 0, 0
    upright[16:, 32:] = 0, 0, 255
    undo = {2: 0, 3: 1, 4: 3, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition a camera would have made
    methods = {
        0: Image.Transpose.FLIP_LEFT_RIGHT,
        1: Image.Transpose.ROTATE_180,
        2: Image.Transpose.ROTATE_90,
        3: Image.Transpose.FLIP_TOP_BOTTOM,
        4: Image.Transpose.ROTATE_270,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.TRANSVERSE,
    }
    stored = Image.fromarray(upright)
    if orientation in undo:
        stored = stored.transpose(methods[undo[orientation]])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{kind}"
    stored.save(path, exif=exif)
    difference = np.abs(np.asarray(open_image(path)).astype(int) - upright)
    assert difference.mean() < 6


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    for name in ("deep.png", "deep.tif", "deep.pgm"):
        Image.fromarray(values).save(tmp_path / name)
        opened = np.asarray(open_image(tmp_path / name)).astype(float)
        assert opened.shape == (64, 64, 3)
        assert np.abs(opened[..., 0] - values / 257).max() <= 1


def test_floats_and_wide_integers_are_scaled() -> None:
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    expected = np.rint(ramp * 255)
    for values in (ramp, ramp * 255, ramp * 65535, ramp * 1e9 - 5e8):
        opened = np.asarray(open_image(Image.fromarray(values.astype(np.float32))))[..., 0]
        assert np.abs(opened - expected).max() <= 1
    wide = Image.fromarray((ramp * 2_000_000).astype(np.int32))
    assert np.abs(np.asarray(open_image(wide))[..., 0] - expected).max() <= 1
    odd = np.array([[np.nan, np.inf], [-np.inf, 1.0]], np.float32)
    assert open_image(Image.fromarray(odd)).getpixel((1, 1)) == (255, 255, 255)
    assert open_image(Image.fromarray(np.full((2, 2), 70_000, np.int32))).size == (2, 2)


def test_transparency_is_white(tmp_path: Path) -> None:
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[..., 0] = 200
    rgba[:4, :, 3] = 255
    rgba[4:, :, 3] = 128
    rgba[6:, :, 3] = 0
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    Image.fromarray(rgba).convert("LA").save(tmp_path / "la.png")
    Image.fromarray(rgba).save(tmp_path / "rgba.webp", lossless=True)
    for name in ("rgba.png", "rgba.webp"):
        image = open_image(tmp_path / name)
        assert image.getpixel((0, 0)) == (200, 0, 0)
        assert np.abs(np.array(image.getpixel((0, 5))) - (227, 127, 127)).max() <= 1
        assert image.getpixel((0, 7)) == (255, 255, 255)
    assert open_image(tmp_path / "la.png").getpixel((0, 7)) == (255, 255, 255)
    assert open_image(rgba).getpixel((0, 7)) == (255, 255, 255)
    assert open_image(Image.fromarray(rgba).convert("RGBa")).getpixel((0, 7)) == (255, 255, 255)

    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 255, 0, 255, 0])
    palette.putpixel((0, 0), 0)
    palette.save(tmp_path / "p.png", transparency=1)
    assert open_image(tmp_path / "p.png").getpixel((0, 0)) == (0, 0, 255)
    assert open_image(tmp_path / "p.png").getpixel((1, 1)) == (255, 255, 255)
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "key.png", transparency=(1, 2, 3))
    assert open_image(tmp_path / "key.png").getpixel((1, 1)) == (255, 255, 255)


def test_other_modes(tmp_path: Path) -> None:
    red = Image.new("RGB", (16, 16), (250, 10, 10))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    red.convert("CMYK").save(tmp_path / "cmyk.tif")
    red.quantize(8).save(tmp_path / "palette.gif")
    red.save(tmp_path / "plain.bmp")
    red.save(tmp_path / "plain.ppm")
    for path in sorted(tmp_path.iterdir()):
        image = open_image(path)
        assert image.mode == "RGB"
        assert np.abs(np.array(image.getpixel((8, 8))) - (250, 10, 10)).max() <= 6, path.name
    Image.new("1", (4, 4), 1).save(tmp_path / "bits.png")
    red.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))])
    assert open_image(tmp_path / "phone.jpg").getpixel((8, 8))[0] > 240
    assert open_image(str(tmp_path / "bits.png")).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(np.full((3, 5), 7, np.uint8)).getpixel((0, 0)) == (7, 7, 7)


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_first_frame_of_an_animation(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    path = tmp_path / f"moving.{kind}"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50)
    with Image.open(path) as check:
        assert check.n_frames == 3
    assert np.abs(np.array(open_image(path).getpixel((4, 4))) - (255, 0, 0)).max() <= 3


def test_broken_metadata_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "exif.jpg"
    photo(20, 20).save(path, exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff" + b"\x99" * 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(path).size == (20, 20)


# ---- bad pictures


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    good = folder / "good.jpg"
    photo(64, 64).save(good)
    content = good.read_bytes()
    files = {
        "truncated.jpg": (content[: len(content) // 2], "cut short"),
        "header.jpg": (content[:3], "not an image"),
        "empty.jpg": (b"", "empty"),
        "text.jpg": (b"this is no picture at all\n" * 20, "not an image"),
        "bomb.png": (png_header(60_000, 60_000), "million pixels"),
        "big.png": (png_header(8_001, 8_001), "million pixels"),
        "nothing.png": (png_header(10, 10), "cut short"),
        "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "not an image"),
        "page.jpg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    }
    made = {}
    for name, (body, reason) in files.items():
        (folder / name).write_bytes(body)
        made[name] = (folder / name, reason)
    (folder / "folder.jpg").mkdir()
    (folder / "dangling.jpg").symlink_to(folder / "gone.jpg")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    os.mkfifo(folder / "pipe.jpg")
    made["folder.jpg"] = (folder / "folder.jpg", "folder")
    made["dangling.jpg"] = (folder / "dangling.jpg", "no such file")
    made["loop.jpg"] = (folder / "loop.jpg", "")
    made["pipe.jpg"] = (folder / "pipe.jpg", "regular file")
    made["missing.jpg"] = (folder / "missing.jpg", "no such file")
    made["nul.jpg"] = (Path("a\0b.jpg"), "")
    if os.geteuid() != 0:  # root may read everything
        (folder / "locked.jpg").write_bytes(content)
        (folder / "locked.jpg").chmod(0)
        made["locked.jpg"] = (folder / "locked.jpg", "permission")
    return made


def test_bad_files_say_why(tmp_path: Path) -> None:
    for name, (path, reason) in bad_files(tmp_path).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(BadImage) as caught:
                open_image(path)
        assert caught.value.source == str(path), name
        assert caught.value.reason and reason in caught.value.reason, (name, caught.value.reason)
        assert isinstance(caught.value, DropleError)


def test_the_pixel_limit_is_where_it_says(tmp_path: Path) -> None:
    side = int(MAX_PIXELS**0.5)
    path = tmp_path / "limit.png"
    path.write_bytes(png_header(side, side))
    with pytest.raises(BadImage, match="cut short"):
        open_image(path)
    path.write_bytes(png_header(side + 1, side))
    with pytest.raises(BadImage, match="million pixels"):
        open_image(path)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
    ],
)
def test_odd_arrays(array: np.ndarray) -> None:
    with pytest.raises(BadImage, match="uint8"):
        open_image(array)


def test_pictures_without_pixels() -> None:
    with pytest.raises(BadImage, match="no pixels"):
        open_image(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "gif", "tif", "bmp"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_bytes_only_ever_raise_bad_image(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    path = tmp_path / f"fuzz.{kind}"
    photo(24, 17).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        assert open_image(path).mode == "RGB"
    except BadImage as error:
        assert error.reason


# ---- CLIP's square


@pytest.mark.parametrize(
    "width, height",
    [(300, 200), (200, 300), (224, 224), (64, 64), (37, 501), (225, 224), (1000, 641), (3, 2500)],
)
@pytest.mark.parametrize("size, resample", [(224, 3), (97, 2)])
def test_square_equals_transformers(width: int, height: int, size: int, resample: int) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = photo(width, height, seed=width)
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, resample=resample
    )
    raw = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
    ours = square(image, size, resample)
    assert ours.dtype == np.uint8 and ours.shape == (3, size, size)
    assert np.abs(ours.astype(int) - raw.astype(int)).max() <= 1

    expected = processor(image, return_tensors="pt")["pixel_values"]
    pixels = Pixels(size, CLIP_MEAN, CLIP_STD, resample)
    got = normalise(torch.from_numpy(ours)[None], pixels, torch.float32)
    assert (got - expected).abs().max() <= 1.01 / 255 / min(CLIP_STD)
    assert normalise(torch.from_numpy(ours)[None], pixels, torch.bfloat16).dtype == torch.bfloat16


def test_square_of_a_thread_thin_picture() -> None:
    for shape in ((1, 1_000_000, 3), (1_000_000, 1, 3), (1, 1, 3)):
        assert square(open_image(np.full(shape, 9, np.uint8)), 224, 3).max() == 9


# ---- many at once


@pytest.mark.parametrize("room", [0, 10**6], ids=["forgetful", "remembering"])
def test_decode_keeps_order_and_returns_the_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(images, "_MEMORY", images._Memory())
    images.remember(room)
    bad = [path for path, _ in bad_files(tmp_path).values()]
    sources: list = []
    for number in range(40):
        path = tmp_path / f"{number}.png"
        photo(30 + number, 40, seed=number).save(path)
        sources.append(path)
    sources[5:5] = bad[:2]
    sources[33:33] = bad[2:]
    sources.append(np.full((9, 9, 3), 5, np.uint8))
    counts: list[int] = []
    decoded, good, failures = decode(sources, 32, 3, progress=counts.append)
    assert [str(failure.source) for failure in failures] == [str(path) for path in bad]
    assert [sources[i] for i in good] == [
        source for source in sources if not any(source is path for path in bad)
    ]
    assert decoded.dtype == torch.uint8 and decoded.shape == (41, 3, 32, 32)
    for row, index in zip(decoded, good, strict=True):
        assert np.array_equal(row.numpy(), square(open_image(sources[index]), 32, 3))
    assert counts == sorted(counts) and counts[-1] == len(sources)

    with pytest.raises(BadImage) as caught:
        decode(sources, 32, 3, strict=True)
    assert caught.value.source == str(bad[0])


def test_decode_of_nothing() -> None:
    images, good, bad = decode([], 16, 3)
    assert images.shape == (0, 3, 16, 16) and good == [] and bad == []
    assert list(decode_batches([], 16, 3, 4)) == []


@pytest.mark.parametrize("count", [1, 3, 4, 9, 20])
def test_batches(count: int) -> None:
    sources = [photo(20, 20, seed) for seed in range(count)]
    batches = list(decode_batches(sources, 16, 3, 4))
    assert [len(batch) for batch, _, _ in batches] == [min(4, count - start) for start in range(0, count, 4)]
    assert [index for _, indices, _ in batches for index in indices] == list(range(count))
    assert torch.equal(torch.cat([batch for batch, _, _ in batches]), decode(sources, 16, 3)[0])


def test_a_wholly_bad_batch_is_still_given(tmp_path: Path) -> None:
    sources = [tmp_path / "a.jpg", tmp_path / "b.jpg", photo(9, 9)]
    first, second = decode_batches(sources, 8, 3, 2)
    assert first[0].shape == (0, 3, 8, 8) and first[1] == [] and len(first[2]) == 2
    assert second[1] == [2] and not second[2]


def test_batches_are_not_read_far_ahead_and_stop_when_closed() -> None:
    """Memory stays bounded: of 100 batches only a few may have been asked for after the first."""

    class Counting(list):
        asked = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Counting.asked = max(Counting.asked, index.stop)
            return super().__getitem__(index)

    stream = decode_batches(Counting([photo(16, 16)] * 400), 8, 3, 4)
    next(stream)
    assert 4 < Counting.asked <= 12
    stream.close()
    assert not any(thread.name.startswith("drople-decode") for thread in threading.enumerate())


def test_pictures_are_remembered_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once opened, a file is not opened again, unless it changed; what does not fit is decoded each time."""
    monkeypatch.setattr(images, "_MEMORY", images._Memory())
    opened: list[str] = []
    really = safe_image.open_image

    def counting(source: images.ImageSource) -> Image.Image:
        opened.append(Path(str(source)).name)
        return really(source)

    monkeypatch.setattr(safe_image, "open_image", counting)
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for number, path in enumerate(paths):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    plain, _, _ = images.decode(paths, 8, 3)
    images.decode(paths, 8, 3)
    assert len(opened) == 6, "nothing is kept unless it is asked for"
    images.remember(2 * 3 * 8 * 8)
    opened.clear()
    for _ in range(3):
        found, good, bad = images.decode(paths, 8, 3)
        assert torch.equal(found, plain) and good == [0, 1, 2] and not bad
    assert len(opened) == 3 + 2, "two fit"
    kept = next(path for path in paths if opened.count(path.name) == 1)
    Image.new("RGB", (9, 9), (200, 0, 0)).save(kept)
    os.utime(kept, ns=(1, 1))
    found, _, _ = images.decode([kept], 8, 3)
    assert (found[0, 0] == 200).all()

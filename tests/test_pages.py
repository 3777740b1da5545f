"""Pages: the pixels that are sent are Chandra's own, and images that Chandra gets wrong are right here."""

from __future__ import annotations

import base64
import dataclasses
import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chandra.input import load_image, load_pdf_images
from chandra.model.util import scale_to_fit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support import DATA, ROOT, SHARED, encode, jpeg_sized, one_page, picture, png, tiff_sized, with_bytes, written

import ocr

PDFS, IMAGES = DATA / "pdfs", DATA / "images"


def document(source: Path, password: str | None = None, forms: bool = True) -> ocr.Document:
    seen = ocr.survey(source, password)
    return ocr.Document(
        source, seen.kind, seen.pages, seen.sha256, seen.stamp, password, seen.has_forms and forms, seen.notes
    )


def sent(source: Path, number: int = 1, dpi: int = ocr.DPI) -> Image.Image:
    """The image that a server decodes."""
    taken = ocr.picture_of(document(source), number, dpi)
    image = Image.open(io.BytesIO(base64.b64decode(taken.png)))
    assert image.format == "PNG" and image.size == taken.sent
    return image.convert("RGB")


def loaded(data: bytes, folder: Path, frame: int = 1) -> Image.Image:
    """A file's page as RGB at its own size: what it looks like before it is enlarged."""
    (folder / "file").write_bytes(data)
    return ocr.load_page(document(folder / "file"), frame, ocr.DPI).image


@pytest.fixture
def own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images stay small, so that single pixels can be looked at."""
    monkeypatch.setattr(ocr, "MIN_IMAGE_SIDE", 1)


# ---- equal to Chandra's


# Chandra cannot read these, or would hang or take minutes.
NOT_CHANDRA = (
    "bad34 bad_page_type boundingBox_invalid bug_1324189 circular_viewer_ref cropped_no_overlap "
    "encrypted_hello_world_r2 hugemono invalid issue19484_1 poppler-85140-0 poppler-937-0-fuzzed shared-unnamed-field"
).split()
ORDINARY = [path for path in sorted(PDFS.glob("*.pdf")) if path.stem not in NOT_CHANDRA]
# Chandra takes these images wrongly (deep greys, alpha) or not at all; the rest it takes as they are.
OWN_WAY = (
    "16bit.cropped.tif hopper_16bit.pgm transparent.png pil123p.png apng-mode_16bit.png truncated_image.png "
    "rgb_trns_ycbc.j2k corrupted.heic decompression_bomb.gif dispose_bgnd.gif zPug_3.heic RGB_8__128x128.heif"
).split()
PLAIN = [path for path in sorted(IMAGES.iterdir()) if path.suffix != ".md" and path.name not in OWN_WAY]


def same_as_chandra(source: Path, number: int, page: Image.Image, dpi: int) -> None:
    theirs, ours = scale_to_fit(page), sent(source, number, dpi)
    assert ours.size == theirs.size
    assert ours.tobytes() == theirs.tobytes(), f"{source.name}, page {number}, {dpi} dpi"


@pytest.mark.parametrize("dpi", [150, 192, 300])
@pytest.mark.parametrize("source", ORDINARY, ids=lambda path: path.stem)
def test_pixels_of_pdf_pages_are_chandras(source: Path, dpi: int) -> None:
    for number, page in enumerate(load_pdf_images(source, [], image_dpi=dpi), 1):
        same_as_chandra(source, number, page, dpi)


@pytest.mark.parametrize("source", PLAIN, ids=lambda path: path.name)
def test_pixels_of_images_are_chandras(source: Path) -> None:
    same_as_chandra(source, 1, load_image(source), ocr.DPI)


@pytest.mark.slow
@pytest.mark.parametrize("dpi", [150, 192, 300])
@pytest.mark.parametrize("source", sorted(SHARED.glob("pdfs/*.pdf")), ids=lambda path: path.stem)
def test_pixels_of_more_pdf_pages_are_chandras(source: Path, dpi: int) -> None:
    if source.stem in NOT_CHANDRA:
        pytest.skip("Chandra does not read it")
    # pages that are too long for the server have no reply to compare
    for number, page in enumerate(load_pdf_images(source, list(range(5)), image_dpi=dpi), 1):
        same_as_chandra(source, number, page, dpi)


@pytest.mark.parametrize("format", ["BMP", "GIF", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "QOI", "SGI", "TGA", "WEBP"])
def test_pixels_of_every_common_format_are_chandras(format: str, tmp_path: Path) -> None:
    source = tmp_path / f"page.{format.lower()}"
    source.write_bytes(written(format, (1700, 1600)))
    same_as_chandra(source, 1, load_image(source), ocr.DPI)


sides = st.integers(1, 40_000)


@settings(max_examples=2000)
@given(sides, sides)
@example(1, 1)
@example(2048, 3072)
@example(2049, 3072)
@example(1, 40_000)
@example(10_000, 10_000)
def test_pages_are_scaled_to_the_size_chandra_scales_them_to(width: int, height: int) -> None:
    class Sized(Image.Image):
        """An image without pixels, that says what it would be resized to."""

        size = (width, height)

        def __init__(self) -> None:
            pass

        def resize(self, size: Any, *_: Any, **__: Any) -> Any:
            self.size = size
            return self

    assert ocr.sent_size(width, height) == scale_to_fit(Sized()).size  # type: ignore[comparison-overlap]


@settings(max_examples=300)
@given(st.integers(1, 64), st.integers(1, 64), st.booleans(), st.randoms(use_true_random=False))
def test_the_png_decodes_to_the_same_pixels(width: int, height: int, grey: bool, random: Any) -> None:
    image = Image.frombytes("L" if grey else "RGB", (width, height), random.randbytes(width * height * (3 - 2 * grey)))
    data = ocr.encode_png(image)
    decoded = Image.open(io.BytesIO(data))
    decoded.load()
    assert decoded.mode == image.mode and decoded.size == image.size and decoded.tobytes() == image.tobytes()


def test_a_page_without_colour_is_sent_as_grey_with_the_same_pixels(tmp_path: Path) -> None:
    grey, colour = picture((1600, 1700), "L").convert("RGB"), picture((1600, 1700), "L").convert("RGB")
    colour.putpixel((801, 803), (200, 201, 200))  # one pixel is enough
    for name, image, mode in (("grey.png", grey, "L"), ("colour.png", colour, "RGB")):
        image.save(tmp_path / name)
        data = ocr.picture_of(document(tmp_path / name), 1, ocr.DPI).png
        decoded = Image.open(io.BytesIO(base64.b64decode(data)))
        assert decoded.mode == mode
        assert decoded.convert("RGB").tobytes() == scale_to_fit(image).tobytes()


# ---- images that Chandra takes wrongly


def turned_by(orientation: int, upright: Image.Image) -> bytes:
    """A JPEG whose pixels lie as a camera stores them, and whose EXIF says how to turn them."""
    turn = Image.Transpose
    back: dict[int, Any] = {2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE}
    back |= {6: turn.ROTATE_90, 7: turn.TRANSVERSE, 8: turn.ROTATE_270}
    stored = upright.transpose(back[orientation]) if orientation in back else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(stored, "JPEG", exif=exif, quality=95, subsampling=0)


@pytest.mark.usefixtures("own_size")
@pytest.mark.parametrize("orientation", range(10))
def test_photographs_are_turned_as_their_exif_says(orientation: int, tmp_path: Path) -> None:
    upright = picture((160, 120))
    page = loaded(turned_by(orientation, upright), tmp_path)
    assert page.size == upright.size
    difference = sum(abs(a - b) for a, b in zip(page.tobytes(), upright.tobytes(), strict=True)) / (160 * 120 * 3)
    assert difference < 4


@pytest.mark.usefixtures("own_size")
def test_a_damaged_exif_costs_no_page(tmp_path: Path) -> None:
    data = turned_by(6, picture())
    at = data.index(b"Exif\0\0") + 6
    for damage in (b"XX", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff"):
        assert loaded(with_bytes(data, at, damage), tmp_path).size in ((180, 240), (240, 180))


def palette_image(index: int) -> Image.Image:
    image = Image.new("P", (4, 4), index)
    image.putpalette([3 * n % 256 for n in range(48)])
    return image


@pytest.mark.usefixtures("own_size")
@pytest.mark.parametrize(
    ("image", "options"),
    [
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), {}),
        (Image.new("LA", (4, 4), (0, 0)), {}),
        (palette_image(7), {"transparency": 7}),
        (palette_image(1), {"transparency": bytes([255, 0])}),
        (Image.new("RGB", (4, 4), (1, 2, 3)), {"transparency": (1, 2, 3)}),
        (Image.new("L", (4, 4), 9), {"transparency": 9}),
        (Image.new("1", (4, 4), 0), {"transparency": 0}),
    ],
    ids=["RGBA", "LA", "palette index", "palette alphas", "RGB key", "grey key", "1 bit key"],
)
def test_what_is_transparent_is_white_paper(image: Image.Image, options: dict[str, Any], tmp_path: Path) -> None:
    assert loaded(encode(image, "PNG", **options), tmp_path).getcolors() == [(16, (255, 255, 255))]


@pytest.mark.usefixtures("own_size")
def test_half_transparent_ink_is_half_as_dark(tmp_path: Path) -> None:
    (page,) = loaded(encode(Image.new("RGBA", (4, 4), (0, 0, 0, 128)), "PNG"), tmp_path).getcolors()
    assert page[1] == (127, 127, 127)


RAMP = [0, 100, 1000, 30_000, 60_000, 65_535]


@pytest.mark.usefixtures("own_size")
@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bit_greys_keep_their_steps(format: str, tmp_path: Path) -> None:
    image = Image.new("I;16", (6, 1))
    image.putdata(RAMP)
    page = loaded(encode(image, format), tmp_path)
    assert [r for r, _, _ in page.get_flattened_data()] == pytest.approx([v * 255 / 65535 for v in RAMP], abs=1)


@pytest.mark.usefixtures("own_size")
def test_big_endian_and_faint_16_bit_scans_fill_the_range(tmp_path: Path) -> None:
    samples = struct.pack(">6H", *(500 + v // 100 for v in RAMP))
    entries = [(256, 3, 6), (257, 3, 1), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (279, 4, 12)]
    ifd = b"".join(
        struct.pack(">HHI", tag, kind, 1) + (struct.pack(">HH", v, 0) if kind == 3 else struct.pack(">I", v))
        for tag, kind, v in entries
    )
    data = b"MM\0*" + struct.pack(">I", 20) + samples + struct.pack(">H", len(entries)) + ifd + bytes(4)
    page = loaded(data, tmp_path)
    assert [r for r, _, _ in page.get_flattened_data()] == pytest.approx([v * 255 / 65535 for v in RAMP], abs=1)


@pytest.mark.usefixtures("own_size")
def test_floats_are_scaled_by_their_range_and_one_grey_is_paper(tmp_path: Path) -> None:
    image = Image.new("F", (3, 1))
    image.putdata([-2.0, 0.0, 2.0])
    assert [r for r, _, _ in loaded(encode(image, "TIFF"), tmp_path).get_flattened_data()] == pytest.approx(
        [0, 127, 255], abs=1
    )
    for value in (0.0, 0.5, 1e30):
        assert loaded(encode(Image.new("F", (3, 1), value), "TIFF"), tmp_path).getcolors() == [(3, (255, 255, 255))]
    image.putdata([float("inf"), float("-inf"), 0.0])
    with pytest.raises(ocr.PageError, match="infinite values"):
        loaded(encode(image, "TIFF"), tmp_path)


@pytest.mark.usefixtures("own_size")
@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("YCbCr", (76, 85, 255), (254, 0, 0)),
        ("LAB", (255, 128, 128), (255, 255, 255)),
        ("1", 255, (255, 255, 255)),
        ("P", 0, (0, 0, 0)),
    ],
)
def test_other_colour_spaces_are_converted(mode: str, colour: Any, seen: tuple[int, ...], tmp_path: Path) -> None:
    image = Image.new(mode, (4, 4), colour)
    ((_, pixel),) = loaded(encode(image, "TIFF"), tmp_path).getcolors()
    assert pixel == pytest.approx(seen, abs=3)


@pytest.mark.usefixtures("own_size")
def test_every_frame_of_a_tiff_is_a_page(tmp_path: Path) -> None:
    frames = [picture((100 + n, 90)) for n in range(4)]
    data = encode(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    assert [loaded(data, tmp_path, n).tobytes() for n in range(1, 5)] == [frame.tobytes() for frame in frames]
    assert document(tmp_path / "file").pages == 4 and not document(tmp_path / "file").notes


@pytest.mark.usefixtures("own_size")
def test_a_tiff_that_breaks_off_after_some_frames_keeps_those_and_tells_of_the_next(tmp_path: Path) -> None:
    frames = [picture((100 + n, 90)) for n in range(3)]
    data = encode(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    assert loaded(data[:-60], tmp_path, 2).tobytes() == frames[1].tobytes()
    assert document(tmp_path / "file").pages == 3
    with pytest.raises(ocr.PageError, match="the file is damaged or cut off"):
        loaded(data[:-60], tmp_path, 3)


@pytest.mark.usefixtures("own_size")
@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "MPO"])
def test_of_an_animation_the_first_frame_is_read_and_it_is_said(format: str, tmp_path: Path) -> None:
    options = {} if format == "MPO" else {"lossless": True} if format == "WEBP" else {}
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "lime", "blue")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    page = loaded(data, tmp_path)
    assert page.getpixel((20, 15)) == pytest.approx((255, 0, 0), abs=3)
    seen = document(tmp_path / "file")
    assert seen.pages == 1 and seen.notes == ("the first of its 3 frames is read",)


@pytest.mark.parametrize("name", ["zPug_3.heic", "RGB_8__128x128.heif"])
def test_heic_is_read_with_pillow_heif(name: str) -> None:
    pytest.importorskip("pillow_heif")
    assert min(sent(IMAGES / name).size) > 1000


def test_without_pillow_heif_its_name_is_said() -> None:
    script = f"""
import sys
sys.modules["pillow_heif"] = None
from pathlib import Path
import ocr
try:
    ocr.survey(Path({str(IMAGES / "zPug_3.heic")!r}), None)
except ocr.DocumentError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout == "a HEIC/HEIF image: install the package that reads it, pip install pillow-heif\n"


# ---- what a file is, its first bytes say


@pytest.mark.parametrize(("name", "data"), [("image.pdf", written("PNG")), ("pdf.png", one_page()), ("", one_page())])
def test_a_file_is_what_its_first_bytes_say(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / (name or "nameless")
    path.write_bytes(data)
    assert document(path).kind == ("pdf" if data.startswith(b"%PDF") else "image")


def test_a_pdf_may_begin_with_junk_and_an_image_may_mention_a_pdf(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"HTTP/1.1 200 OK\r\n\r\n" + one_page())
    assert document(tmp_path / "junk").kind == "pdf"
    (tmp_path / "image").write_bytes(encode(picture(), "JPEG", comment=b"made from %PDF-1.4 by hand"))
    assert document(tmp_path / "image").kind == "image"


# ---- sizes


@pytest.mark.parametrize(
    ("size", "dpi"), [((612, 792), 150), ((200, 300), 368.64), ((100, 100), 737.28), ((3000, 100), 737.28)]
)
def test_pdf_pages_are_drawn_at_the_dpi_or_until_their_short_side_has_1024_px(
    size: tuple[int, int], dpi: float
) -> None:
    scale, notes = ocr.drawing_scale(*size, 150)
    assert scale * 72 == pytest.approx(dpi) and not notes


def test_pages_too_large_to_draw_are_drawn_at_a_lower_dpi_and_it_is_said() -> None:
    scale, notes = ocr.drawing_scale(14400, 14400, 150)
    assert 14400 * scale < ocr.MAX_DRAWN**0.5 and notes == (
        "drawn at 50 dpi, not 150: the page measures 14400 x 14400 pt",
    )


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((0, 100), "the page has no area"),
        ((-5, 100), "the page has no area"),
        ((float("inf"), 1), "the page has no area"),
        ((float("nan"), 1), "the page has no area"),
        ((1, 201), "cut it into shorter pages"),
        ((595, 2147483648), "cut it into shorter pages"),
    ],
)
def test_pages_that_cannot_be_drawn_are_refused_with_the_reason(size: tuple[float, float], said: str) -> None:
    with pytest.raises(ocr.PageError, match=said):
        ocr.drawing_scale(*size, 150)


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(), st.integers(20, 1200))
def test_no_page_is_drawn_larger_than_the_limit(width: float, height: float, dpi: int) -> None:
    try:
        scale, _ = ocr.drawing_scale(width, height, dpi)
    except ocr.PageError:
        return
    assert width * scale * height * scale <= ocr.MAX_DRAWN * 1.001


@pytest.mark.parametrize("size", [(300, 40_000), (2, 399), (20, 3000), (4000, 5000)])
def test_long_strips_are_enlarged_within_bounds(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "MAX_DRAWN", 15_000_000)
    image = loaded(encode(Image.new("RGB", size, "white"), "PNG"), tmp_path)
    assert image.width * image.height <= max(ocr.MAX_DRAWN, size[0] * size[1])


@pytest.mark.parametrize("data", [jpeg_sized(60_000, 60_000), tiff_sized(60_000, 60_000), png(60_000, 60_000)])
def test_sizes_are_checked_before_anything_is_decoded(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(data)
    with pytest.raises(ocr.DocumentError, match="claims 3600 megapixels"):
        ocr.survey(tmp_path / "bomb", None)


# ---- ink


def test_ink_tells_pages_with_text_from_blank_ones(tmp_path: Path) -> None:
    def ink(image: Image.Image) -> float:
        return ocr.ink_share(image.reduce(4))

    page = Image.new("RGB", (1240, 1754), "white")
    shadow = Image.linear_gradient("L").resize(page.size).convert("RGB")
    assert ink(page) == 0 and ink(shadow) < ocr.INK
    for text, at in (("Chapter 1", (300, 300)), ("12", (1200, 1700))):
        written_on = page.copy()
        from PIL import ImageDraw, ImageFont

        ImageDraw.Draw(written_on).text(at, text, "black", ImageFont.load_default(28))
        assert ink(written_on) > 0
    assert ink(written_on) < 1
    (tmp_path / "white.pdf").write_bytes(one_page(""))
    assert ocr.picture_of(document(tmp_path / "white.pdf"), 1, 150).ink == 0
    (tmp_path / "text.pdf").write_bytes(one_page("Some words"))
    assert ocr.picture_of(document(tmp_path / "text.pdf"), 1, 150).ink > ocr.INK


def test_pictures_that_differ_have_other_fingerprints(tmp_path: Path) -> None:
    prints = set()
    for text in ("one", "two", "three"):
        (tmp_path / "a.pdf").write_bytes(one_page(text))
        prints.add(ocr.picture_of(document(tmp_path / "a.pdf"), 1, 150).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("box", "cut"), [((0, 0, 1000, 1000), ocr.MAX_FIGURE_AREA), ((100, 100, 110, 110), ocr.MAX_FIGURES)]
)
def test_a_reply_of_thousands_of_figures_fills_no_disk(box: tuple[float, ...], cut: int, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(picture(), "PNG"))
    source = dataclasses.replace(document(tmp_path / "a.png"), folder=tmp_path / "out")
    div = f'<div data-bbox="{" ".join(map(str, box))}" data-label="Figure"><img alt="x"/></div>'
    blocks = ocr.read_reply(div * 2000)
    wanted = ocr.Wanted("chandra", "vllm", 150, 12384, 6, False, False, True, "dollars", "")
    found, notes = ocr.cut_figures(blocks, source, 1, wanted)
    assert len(found) == 2000 and sum(block.image is not None for block in found) == cut
    assert len(list((tmp_path / "out" / "images").iterdir())) == cut
    assert f"more than {cut}" in notes[0]

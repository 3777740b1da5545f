"""Searchable PDFs: what was read is found where it stands, in every script, and the pages look as before."""

from __future__ import annotations

import html
import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pypdfium2 as pdfium
import pytest
from PIL import Image
from running import command, page_record
from standin import Answer, Standin
from support import DATA, encode, encrypted, one_page, picture

import ocr

READ = """<div data-bbox="100 100 900 130" data-label="Section-Header"><h1>Kings of Norway</h1></div>
<div data-bbox="100 200 500 400" data-label="Text"><p>Many words that are broken over some lines so as to fill a box of
text, as paragraphs on pages do, until it is full of them &amp; more.</p></div>
<div data-bbox="600 200 900 250" data-label="Text"><p>שלום עולם</p></div>
<div data-bbox="600 300 900 350" data-label="Text"><p>مرحبا بالعالم</p></div>
<div data-bbox="600 400 900 450" data-label="Text"><p>汉字文本測試</p></div>
<div data-bbox="600 450 900 500" data-label="Text"><p>नमस्ते दुनिया 𝒳 😀</p></div>
<div data-bbox="100 500 900 800" data-label="Table"><table><tr><th>Port</th><th>Fare</th></tr>
<tr><td>Quay</td><td>7.50</td></tr></table></div>
<div data-bbox="100 850 900 900" data-label="Image"><img alt="A gull that nobody wrote about"/></div>"""
# What is searched, and the box of its block or cell, 0-1000 as a person sees the page.
PLACES = {
    "Norway": (100, 100, 900, 130),
    "full of them & more": (100, 200, 500, 400),
    "שלום עולם": (600, 200, 900, 250),
    "مرحبا": (600, 300, 900, 350),
    "汉字文本": (600, 400, 900, 450),
    "नमस्ते": (600, 450, 900, 500),
    "Fare": (500, 500, 900, 650),
    "7.50": (500, 650, 900, 800),
}


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(picture((240, 180)), "JPEG", exif=exif)


def frames() -> bytes:
    return encode(picture(mode="1"), "TIFF", save_all=True, append_images=[picture((300, 200), "L"), picture()])


FILES: dict[str, bytes] = {
    "plain.pdf": one_page(),
    "turned90.pdf": one_page(page="/Rotate 90"),
    "turned180.pdf": one_page(page="/Rotate 180"),
    "turned270.pdf": one_page(page="/Rotate 270"),
    "cropped.pdf": one_page(page="/CropBox [50 60 250 300] /Rotate 90"),
    "shifted.pdf": one_page(box="-100 -50 200 350"),
    "unclosed.pdf": one_page(objects={11: b"<< /Length 21 >>\nstream\nq q 3 0 0 3 50 50 cm\nendstream"}),
    "inherits.pdf": one_page(pages=2, root="/Lang (en)"),
    "photo.jpg": encode(picture(), "JPEG"),
    "turned.jpg": turned(6),
    "mirrored.jpg": turned(5),
    "cmyk.jpg": encode(picture(mode="CMYK"), "JPEG"),
    "clear.png": encode(picture(mode="RGBA"), "PNG"),
    "frames.tif": frames(),
}


def read_document(folder: Path, name: str, data: bytes, reply: str = READ, password: str | None = None) -> ocr.Document:
    """A document whose pages were all read as `reply`."""
    source = folder / name
    source.write_bytes(data)
    looked = ocr.survey(source, password)
    document = ocr.Document(
        source, looked.kind, looked.pages, looked.sha256, looked.stamp, password,
        folder=folder / "out" / name, numbers=range(1, looked.pages + 1),
    )  # fmt: skip
    (document.folder / "pages").mkdir(parents=True)
    for number in document.numbers:
        ocr.page_file(document.folder, number, ".html").write_text(reply, "utf-8")
        ocr.page_file(document.folder, number, ".json").write_text('{"status": "ok"}')
    return document


class Spot(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float


def where(page: Any, words: str) -> Spot | None:
    """Where a page's text says something, 0-1000 as a person sees the page."""
    text = page.get_textpage()
    found = text.search(words).get_next()
    if not found:
        return None
    x0, y0, x1, y1 = page.get_bbox()
    corners = []
    for i in range(found[0], found[0] + found[1]):
        left, bottom, right, top = text.get_charbox(i)
        corners += [((x - x0) / (x1 - x0), (y - y0) / (y1 - y0)) for x, y in ((left, bottom), (right, top))]
    seen = {
        0: lambda u, v: (u, 1 - v),
        90: lambda u, v: (v, u),
        180: lambda u, v: (1 - u, v),
        270: lambda u, v: (1 - v, 1 - u),
    }
    points = [seen[page.get_rotation()](u, v) for u, v in corners]
    xs, ys = [1000 * x for x, _ in points], [1000 * y for _, y in points]
    return Spot(min(xs), min(ys), max(xs), max(ys))


def pixels(path: Path, number: int, password: str | None = None) -> bytes:
    with pdfium.PdfDocument(path, password=password) as pdf:
        return bytes(pdf[number].render(scale=1).to_pil().tobytes())


@pytest.mark.parametrize("name", FILES)
def test_words_are_found_in_their_place(tmp_path: Path, name: str) -> None:
    document = read_document(tmp_path, name, FILES[name])
    ocr.write_searchable(document)
    copy = ocr.searchable_file(document)
    with pdfium.PdfDocument(copy) as pdf:
        assert len(pdf) == document.pages
        for page in pdf:
            for words, (x0, y0, x1, y1) in PLACES.items():
                spot = where(page, words)
                assert spot, words
                assert spot.left >= x0 - 2 and spot.right <= x1 + 2, (words, spot)
                assert spot.top >= y0 - 2 and spot.bottom <= y1 + 2, (words, spot)
            said = page.get_textpage().get_text_range()
            assert "𝒳 😀" in said and "gull" not in said
    if name.endswith(".pdf"):
        for i in range(document.pages):
            assert pixels(copy, i) == pixels(document.source, i)
    assert not list(document.folder.glob("*.part"))


class Word(NamedTuple):
    text: str
    spot: Spot


def poppler(path: Path, number: int, password: str, *options: str) -> str:
    """What poppler reads of a page."""
    pages = ("-f", str(number), "-l", str(number))
    words = ["pdftotext", *options, "-cropbox", *pages, "-upw", password, str(path), "-"]
    return subprocess.run(words, capture_output=True, check=True, timeout=60).stdout.decode()


def poppler_words(path: Path, number: int, turned: bool, password: str) -> list[Word]:
    """A page's words for poppler, 0-1000 as a person sees the page. It tells a turned page's size as it lies."""
    said = poppler(path, number, password, "-bbox")
    sides = re.search(r'<page width="([\d.]+)" height="([\d.]+)">', said)
    assert sides
    width, height = (float(side) for side in (sides.groups()[::-1] if turned else sides.groups()))
    found = re.findall(r'<word xMin="(\S+)" yMin="(\S+)" xMax="(\S+)" yMax="(\S+)">(.*?)</word>', said)
    scales = (1000 / width, 1000 / height) * 2
    return [Word(html.unescape(w[4]), Spot(*(float(v) * k for v, k in zip(w, scales, strict=False)))) for w in found]


FORM = DATA / "pdfs" / "text_form.pdf"
SIGNED = one_page(
    root="/AcroForm << /SigFlags 3 /Fields [6 0 R] >>",
    page="/Annots [6 0 R]",
    objects={
        5: "<< /Type /Sig /Filter /Adobe.PPKLite /ByteRange [0 9 9 9] /Contents <00> >>",
        6: "<< /Type /Annot /Subtype /Widget /FT /Sig /T (Signature1) /V 5 0 R /Rect [0 0 0 0] /P 10 0 R >>",
    },
)
OTHERS = {"form.pdf": FORM.read_bytes(), "signed.pdf": SIGNED, "locked.pdf": encrypted(b"secret")}


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext is not installed (apt-get install poppler-utils)")
@pytest.mark.parametrize("name", FILES | OTHERS)
def test_another_reader_finds_them_there_too(tmp_path: Path, name: str) -> None:
    password = "secret" if name == "locked.pdf" else None
    document = read_document(tmp_path, name, (FILES | OTHERS)[name], password=password)
    ocr.write_searchable(document)
    copy = ocr.searchable_file(document)
    with pdfium.PdfDocument(copy, password=password) as pdf:
        turned = [page.get_rotation() in (90, 270) for page in pdf]
    for number, is_turned in enumerate(turned, 1):
        words = poppler_words(copy, number, is_turned, password or "")
        said = poppler(copy, number, password or "")
        for wanted, (x0, y0, x1, y1) in PLACES.items():
            # Its boxes are those of the font's lines, a little higher than the signs.
            inside = [
                word.text
                for word in words
                if word.spot.left >= x0 - 8 and word.spot.right <= x1 + 8 and word.spot.top >= y0 - 8
                if word.spot.bottom <= y1 + 8
            ]
            # Of words that run leftwards it boxes each sign; as text it tells them as they are read.
            assert all(part in inside or set(part) <= set("".join(inside)) for part in wanted.split()), (wanted, inside)
            assert all(part in said for part in wanted.split())
        if name.endswith(".pdf"):
            assert pixels(copy, number - 1, password) == pixels(document.source, number - 1, password)


def test_an_image_keeps_its_pixels_and_size(tmp_path: Path) -> None:
    image = encode(picture((300, 200)), "PNG", dpi=(100, 100))
    document = read_document(tmp_path, "page.png", image)
    ocr.write_searchable(document)
    with pdfium.PdfDocument(ocr.searchable_file(document)) as pdf:
        assert [round(side) for side in pdf[0].get_size()] == [216, 144]
        drawn = pdf[0].render(scale=100 / 72).to_pil().convert("RGB")
    assert drawn.size == (300, 200) and drawn.tobytes() == picture((300, 200)).tobytes()
    jpeg = FILES["photo.jpg"]
    document = read_document(tmp_path, "photo.jpg", jpeg)
    ocr.write_searchable(document)
    assert jpeg in ocr.searchable_file(document).read_bytes()  # not pressed a second time


def test_a_page_that_says_it_already_is_left_alone(tmp_path: Path) -> None:
    reply = '<div data-bbox="50 450 950 550" data-label="Text"><p>A page of text</p></div>'
    document = read_document(tmp_path, "digital.pdf", FILES["plain.pdf"], reply)
    ocr.write_searchable(document)
    with pdfium.PdfDocument(ocr.searchable_file(document)) as pdf:
        assert pdf[0].get_textpage().get_text_range().count("page") == 1


def test_the_original_is_kept_and_equal_runs_give_equal_files(tmp_path: Path) -> None:
    import pikepdf

    data = one_page(root="/Lang (nn) /Outlines 4 0 R", objects={4: "<< /Type /Outlines /Count 0 >>"})
    document = read_document(tmp_path, "kept.pdf", data)
    ocr.write_searchable(document)
    first = ocr.searchable_file(document).read_bytes()
    ocr.write_searchable(document)
    assert ocr.searchable_file(document).read_bytes() == first
    with pikepdf.open(document.source) as before, pikepdf.open(io.BytesIO(first)) as after:
        assert str(after.Root.Lang) == "nn" and after.Root.Outlines.Count == 0
        assert after.pages[0].Contents[-1].read_bytes() == before.pages[0].Contents.read_bytes()
        assert "/F1" in after.pages[0].Resources.Font


def test_locked_and_broken_files(tmp_path: Path) -> None:
    locked = read_document(tmp_path, "locked.pdf", encrypted(b"secret"), password="secret")
    ocr.write_searchable(locked)
    copy = ocr.searchable_file(locked)
    with pdfium.PdfDocument(copy, password="secret") as pdf:
        assert where(pdf[0], "Norway")
    with pytest.raises(pdfium.PdfiumError):
        pdfium.PdfDocument(copy)
    document = read_document(tmp_path, "gone.pdf", FILES["plain.pdf"])
    document.source.write_bytes(one_page("another"))
    with pytest.raises(ocr.DocumentError, match="changed"):
        ocr.write_searchable(document)
    hostile = (
        '<div data-bbox="0 0 1000 1000" data-label="Table"><table>'
        + "<tr><td colspan=9999 rowspan=9999>x</td></tr>" * 300
    )
    ocr.write_searchable(read_document(tmp_path, "hostile.pdf", FILES["plain.pdf"], hostile + "</table>) Tj ET Q (\\"))


def test_the_command_writes_it_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "doc.pdf").write_bytes(one_page(pages=2))
    args = ("doc.pdf", "--out", "out", "--searchable-pdf", "--workers", "1")
    with Standin(answer=lambda request: Answer(READ)) as server:
        done = command(*args, server=server, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        copy = tmp_path / "out" / "doc" / "doc.searchable.pdf"
        made = copy.stat().st_mtime_ns
        asked = len(server.requests)
        copy.unlink()
        assert command(*args, server=server, cwd=tmp_path).returncode == 0
        assert copy.stat().st_mtime_ns > made
        made = copy.stat().st_mtime_ns
        assert command(*args, server=server, cwd=tmp_path).returncode == 0
        assert copy.stat().st_mtime_ns == made
        assert len([r for r in server.requests[asked:] if r.size == server.requests[0].size]) <= len(server.requests)
    assert page_record(tmp_path / "out", "doc", 2)["status"] == "suspect"  # both pages have one reply
    with pdfium.PdfDocument(copy) as pdf:
        assert all(where(page, "Norway") for page in pdf)


@pytest.mark.parametrize(
    "latex", [r"\frac{a}{b}", r"\begin{aligned} a &= b \\ c &< d \end{aligned}", r"\sqrt{gh} \text{ if } x<1"]
)
def test_formulas_become_mathml_with_their_latex(latex: str) -> None:
    said = ocr.to_mathml(latex)
    assert said and said.startswith("<math") and f">{html.escape(latex)}</annotation>" in said


@pytest.mark.parametrize("latex", ["", r"\unknown{x}", r"\frac{", "x" * 5000, r"\def\a{\a\a}\a", "{" * 900])
def test_what_is_no_formula_stays_latex(latex: str) -> None:
    assert ocr.to_mathml(latex) is None


def test_the_documents_page_draws_its_formulas(tmp_path: Path) -> None:
    reply = '<div data-bbox="0 0 9 9" data-label="Equation-Block"><math display="block">c &lt; \\sqrt{h}</math></div>'
    shown = ocr.maths_drawn(ocr.to_html(ocr.read_reply(reply)))
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"' in shown and "<mo>&lt;</mo>" in shown

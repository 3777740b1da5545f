"""Hostile inputs: each gets its status and words a person understands, and costs no other file anything.

KINDS is the table: what a file is, and what must be said of it. One run reads them all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import subprocess
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from standin import Answer, Request, Standin
from support import (
    BOMBS,
    DATA,
    SHARED,
    WRITTEN,
    Outcome,
    command,
    encode,
    encrypted,
    full_disk,
    jpeg_sized,
    one_page,
    pdf,
    picture,
    png,
    sabotaged,
    stream,
    tiff_sized,
    with_bytes,
    written,
)

import ocr

# What must be said: None when every page is read, words on the document, or words on single pages.
Said = str | None | Mapping[int, str]

DAMAGED = "damaged or cut off"
NO_PAGES = "has no pages"
NOT_LOADED = "PDFium cannot load this page; the PDF is damaged there"
NO_AREA = "the page has no area"
TOO_LARGE = r"claims \d+ (megapixels|x \d+ px), and 178 .*scale it down"

FILES: dict[str, Said] = {
    "pdfs/bad34.pdf": {1: NOT_LOADED},
    "pdfs/bad_page_type.pdf": {2: NOT_LOADED},
    "pdfs/blank_book_pg1.pdf": None,
    "pdfs/boundingBox_invalid.pdf": {3: NO_AREA},
    "pdfs/bug_1055869.pdf": None,
    "pdfs/bug_1265.pdf": None,
    "pdfs/bug_1324189.pdf": DAMAGED,
    "pdfs/circular_viewer_ref.pdf": NO_PAGES,
    "pdfs/cropped_no_overlap.pdf": {1: NO_AREA},
    "pdfs/encrypted_hello_world_r2.pdf": "needs a password: give it with --password",
    "pdfs/hugemono.pdf": None,
    "pdfs/invalid.pdf": DAMAGED,
    "pdfs/issue15150.pdf": None,
    "pdfs/issue19484_1.pdf": NO_PAGES,
    "pdfs/issue7200.pdf": None,
    "pdfs/livecycle.pdf": None,
    "pdfs/negzero.pdf": None,
    "pdfs/no_contents.pdf": None,
    "pdfs/poppler-85140-0.pdf": {1: "takes 200 times at most; cut it into shorter pages"},
    "pdfs/poppler-937-0-fuzzed.pdf": {1: NOT_LOADED},
    "pdfs/rotation.pdf": None,
    "pdfs/shared-unnamed-field.pdf": None,
    "pdfs/text_form.pdf": None,
    "images/16bit.cropped.tif": None,
    "images/apng-mode_16bit.png": None,
    "images/corrupted.heic": "a damaged HEIC/HEIF image",
    "images/decompression_bomb.gif": TOO_LARGE,
    "images/lab.tif": None,
    "images/multipage.tiff": None,
    "images/multipage-lastframe.tif": None,
    "images/pil123p.png": None,
    "images/tiff_strip_cmyk_16l_jpeg.tif": None,
    "images/truncated_image.png": {1: DAMAGED},
    "images/zPug_3.heic": None,
}


def pages(more: str) -> bytes:
    return pdf({1: "<< /Type /Catalog /Pages 2 0 R >>", 2: f"<< /Type /Pages {more} >>"})


XOBJECT = (
    "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 400] /Contents 11 0 R /Resources << /XObject << /X 5 0 R >> >> >>"
)
FORM = "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"
HUGE = (
    "/Type /XObject /Subtype /Image /Width 100000 /Height 100000 /BitsPerComponent 8 /ColorSpace /DeviceRGB "
    "/Filter /FlateDecode"
)
CUT = f"{DAMAGED}|a damaged .* image|no image that Pillow can read"
OFFICE, WEB, SAVE = "Office document", "a web page, not a PDF or image", "save it as PDF or PNG"

MADE: dict[str, tuple[bytes, Said]] = {
    "empty.pdf": (b"", "the file is empty"),
    "zeros.png": (bytes(5000), "holds zeros where a document begins"),
    "text.pdf": (b"Dear all, here is the report.", "no PDF, and no image that Pillow can read"),
    "noise.pdf": (bytes(n * n * 31 % 251 for n in range(4000)), "no PDF, and no image that Pillow can read"),
    "page.html.pdf": (b"<!DOCTYPE html><html><h1>404</h1></html>", WEB),
    "xhtml.pdf": (b"\xef\xbb\xbf\n <html><h1>404</h1></html>", WEB),
    "letter.docx.pdf": (b"PK\3\4" + bytes(200), OFFICE),
    "letter.doc.pdf": (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(500), OFFICE),
    "letter.rtf.pdf": (rb"{\rtf1 Dear all}", "save it as PDF"),
    "drawing.svg.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', SAVE),
    "book.djvu.pdf": (b"AT&TFORM\0\0\0\0DJVM", "convert it to PDF"),
    "photo.jxl.jpg": (bytes.fromhex("0000000c4a584c200d0a870a"), "a JPEG XL image"),
    # formats that Pillow knows and has no decoder of its own for
    "figure.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "a PostScript file"),
    "preview.eps": (bytes.fromhex("c5d0d3c6") + bytes(200), "a PostScript file"),
    "old.wmf": (bytes.fromhex("d7cdc69a0000") + bytes(100), "a Windows metafile"),
    "old.emf": (b"\1\0\0\0\x6c\0\0\0" + bytes(32) + b" EMF" + bytes(100), "a Windows metafile"),
    "data.h5.png": (b"\x89HDF\r\n\x1a\n" + bytes(100), r"a data file \(HDF5\)"),
    "data.grib.png": (b"GRIB\0\0\0\1" + bytes(100), r"weather data \(GRIB\)"),
    "data.bufr.png": (b"BUFR" + bytes(100), r"weather data \(BUFR\)"),
    "film.mpg.png": (b"\0\0\1\xb3\x10\0\x10" + bytes(100), r"a film \(MPEG\)"),
    # headers with nothing behind them
    "stub.blp": (b"BLP2" + bytes(300), "no image that Pillow can read"),
    "stub.dds": (b"DDS " + bytes(200), "no image that Pillow can read"),
    "stub.fits": (b"SIMPLE  = T".ljust(80) + b"END".ljust(80), "no image that Pillow can read"),
    "stub.icns": (b"icns" + bytes(200), "no image that Pillow can read"),
    "stub.pcd": (bytes(2048) + b"PCD_" + bytes(3000), "holds zeros where a document begins|" + DAMAGED),
    "stub.xpm": (b'/* XPM */\nstatic char *a[] = {\n"4 4 2 1",\n". c nonsense"\n', "no image that Pillow can read"),
    "colours.xpm": (
        b'/* XPM */\nstatic char *a[] = {\n"2 2 2 1",\n". c #000000",\n"x c #ffffff",\n".?","x."};\n',
        {1: DAMAGED},
    ),
    "zero.png": (png(0, 0), "a damaged PNG image"),
    "zero.bmp": (with_bytes(written("BMP"), 18, bytes(8)), "a damaged BMP image"),
    "zero.jpg": (jpeg_sized(0, 0), "a damaged JPEG image"),
    "zero.tif": (tiff_sized(0, 0), "a damaged TIFF image"),
    "crc.png": (with_bytes(written("PNG"), written("PNG").index(b"IDAT") + 30, b"\x55\xaa\x55"), {1: DAMAGED}),
    "crc-header.png": (png(9, 9, bytes(252), crc=1), "a damaged PNG image"),
    "strip.png": (png(2, 500, bytes(7 * 500)), {1: "250 times as long as wide"}),
    "dot.png": (png(1, 1, bytes(4)), None),
    "exif.jpg": (with_bytes(written("JPEG"), 20, b"\xff\xe1\0\x10Exif\0\0MM\0*\xff\xff\xff\xff"), {1: DAMAGED}),
    "several.mpo": (encode(picture(), "MPO", save_all=True, append_images=[picture((90, 60))]), None),
    # PDFs
    "no-pages.pdf": (pages("/Count 0 /Kids []"), NO_PAGES),
    "no-root.pdf": (pdf({1: "<< >>"}, trailer=""), DAMAGED),
    "header-only.pdf": (b"%PDF-1.7\n", DAMAGED),
    "cut.pdf": (one_page(pages=3)[:700], DAMAGED),
    "cyclic.pdf": (pages("/Count 2 /Kids [2 0 R 2 0 R]"), {1: NOT_LOADED, 2: NOT_LOADED}),
    "claims.pdf": (one_page("Alone").replace(b"/Count 1 ", b"/Count 1048574 "), {2: NOT_LOADED}),
    "claims-more.pdf": (one_page("Alone too").replace(b"/Count 1 ", b"/Count 2147483647 "), None),
    "owner.pdf": (encrypted(), None),
    "locked.pdf": (encrypted(user=b"secret"), "needs a password: give it with --password"),
    "attached.pdf": (
        one_page(
            "Attached",
            root="/Names << /EmbeddedFiles << /Names [(x.exe) 5 0 R] >> >> /OpenAction << /S /Launch /F (x.exe) >>",
            objects={5: "<< /Type /Filespec /F (x.exe) /EF << /F 6 0 R >> >>", 6: stream(b"MZ")},
        ),
        None,
    ),
    "script.pdf": (one_page("Scripted", root="/OpenAction << /S /JavaScript /JS (while(true){}) >>"), None),
    "junk-first.pdf": (b"junk\n" * 100 + one_page("After junk"), None),
    "no-box.pdf": (one_page("No box", box="0 0 0 0"), None),
    "upside-down.pdf": (one_page("Upside down", box="300 400 0 0"), None),
    "endless-box.pdf": (one_page("Endless", box="0 0 1e30 1e30"), None),
    "deep.pdf": (one_page(objects={11: stream(b"q " * 500_000)}), None),
    "picture-bomb.pdf": (
        one_page(
            objects={
                10: XOBJECT,
                11: stream(b"300 0 0 400 0 0 cm /X Do"),
                5: stream(zlib.compress(bytes(30_000_000)), HUGE),
            }
        ),
        None,
    ),
    **{name: (data, TOO_LARGE) for name, data in BOMBS.items()},
    **{f"whole-{name}.{name.lower()}": (written(name), None) for name in WRITTEN},
    **{f"cut-{name}.{name.lower()}": (written(name)[: len(written(name)) * 6 // 10], CUT) for name in WRITTEN},
}
SUSPECT_IS_FINE = {"bug_1055869.pdf", "bug_1265.pdf", "livecycle.pdf"}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """One run of the command over all kinds, with a whole document before and after them."""
    base = tmp_path_factory.mktemp("hostile")
    shelf = base / "shelf"
    shelf.mkdir()
    for name in FILES:
        (shelf / name.rpartition("/")[2]).write_bytes((DATA / name).read_bytes())
    for name, (data, _) in MADE.items():
        (shelf / name).write_bytes(data)
    for name in ("0-first.pdf", "zz-last.pdf"):
        (shelf / name).write_bytes(one_page(name, pages=2))
    # By a list: some of these names would not be looked at in a searched folder.
    (base / "list").write_text("\n".join(map(str, sorted(shelf.iterdir()))))
    with Standin(tokens=300) as server:
        yield command(f"@{base / 'list'}", out=base / "out", url=server.url)


ALL: dict[str, Said] = {name.rpartition("/")[2]: said for name, said in FILES.items()} | {
    name: said for name, (_, said) in MADE.items()
}


@pytest.mark.parametrize("name", ALL)
def test_every_kind_gets_its_status_and_plain_words(name: str, everything: Outcome) -> None:
    record, said = everything.document(name), ALL[name]
    lines = [line for line in everything.err.splitlines() if f"/{name}" in line]
    if record.get("error"):
        assert isinstance(said, str), record["error"]
        assert re.search(said, record["error"])
        errors = [record["error"]]
    else:
        failed = {int(page): error for page, error in record["errors"].items()}
        if isinstance(said, str):  # an image's only page is the document
            said = {1: said}
        assert failed.keys() == (said or {}).keys(), failed
        assert all(re.search(words, failed[page]) for page, words in (said or {}).items()), failed
        assert record["ok"] + record["suspect"] + record["failed"] > 0
        errors = list(failed.values())
        for page in failed:
            assert any(f"/{name}, page {page}: " in line for line in lines)
    for error in errors:
        assert any(error in line for line in lines), "one line on standard error names the file"
        words = re.sub(r"\(.*\)", "", error)
        assert len(words.split()) > 3 and not re.search(r"[A-Z]\w+(Error|Exception)|<class|object at", words), error


def test_the_other_files_are_done_and_every_page_is_accounted_for(everything: Outcome) -> None:
    assert everything.code == 1
    assert {d["source"].rpartition("/")[2] for d in everything.run["documents"]} == {*ALL, "0-first.pdf", "zz-last.pdf"}
    for name in ("0-first.pdf", "zz-last.pdf"):
        assert everything.document(name)["ok"] == 2
    read = [d for d in everything.run["documents"] if "folder" in d]
    for status in ("ok", "suspect", "failed"):
        assert everything.run["pages"][status] == sum(d[status] for d in read)
    assert everything.run["stopped"] is None
    out = Path(everything.run["documents"][0]["source"]).parents[1] / "out"
    for record in read:
        whole = ocr.read_json(out / record["folder"] / (record["folder"] + ".json"))
        counts = [page["status"] for page in whole["pages"]]
        assert [counts.count(s) for s in ("ok", "suspect", "failed")] == [
            record[s] for s in ("ok", "suspect", "failed")
        ]
    doubted = {d["source"].rpartition("/")[2] for d in read if d["suspect"]}
    assert not doubted - SUSPECT_IS_FINE - {"dot.png"}, [d for d in read if d["suspect"]]


def test_what_was_done_otherwise_is_noted(everything: Outcome) -> None:
    out = Path(everything.run["documents"][0]["source"]).parents[1] / "out"

    def notes(name: str) -> str:
        page = ocr.read_json(out / everything.document(name)["folder"] / "pages" / "0001.json")
        return "; ".join([*everything.document(name).get("notes", []), *page.get("notes", [])])

    assert "drawn at" in notes("hugemono.pdf") and "not 150" in notes("hugemono.pdf")
    assert "form fields are not drawn" in notes("shared-unnamed-field.pdf")
    assert "XFA form" in notes("bug_1055869.pdf")
    assert "drawn only by Adobe Reader" in notes("livecycle.pdf")
    assert everything.document("livecycle.pdf")["suspect"] == 1
    assert "the first of its 2 frames is read" in notes("several.mpo")
    assert "claims 1048574 pages and none after page 1 can be loaded" in notes("claims.pdf")


def test_memory_stays_within_bounds(everything: Outcome) -> None:
    assert everything.code == 1
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit < 3 << 29


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the larger collection is not here")
def test_a_larger_collection_is_accounted_for(tmp_path: Path) -> None:
    with Standin(tokens=300) as server:
        done = command(SHARED / "pdfs", SHARED / "images", out=tmp_path / "out", url=server.url, timeout=580)
    files = [path for folder in ("pdfs", "images") for path in (SHARED / folder).iterdir()]
    assert len(done.run["documents"]) == len(files) and done.code == 1
    for record in done.run["documents"]:
        name = record["source"].rpartition("/")[2]
        if name in ALL:
            assert bool(record.get("error") or record.get("errors")) == (ALL[name] is not None), record
        else:
            assert not record.get("error") and not record["errors"], record


# ---- damaged images of every format, in many ways


@pytest.mark.parametrize("format", WRITTEN)
def test_no_damage_to_an_image_raises_anything_but_plain_words(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random
    import warnings

    monkeypatch.setattr(ocr, "MIN_IMAGE_SIDE", 1)
    rng, whole, path = random.Random(format), written(format, (48, 36)), tmp_path / "image"
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(min(len(data), rng.choice((16, 64, 1 << 20))))
            data[at : at + rng.choice((1, 1, 4))] = rng.choice(
                (b"\0", b"\xff", bytes([rng.randrange(256)]), b"\xff\xff\xff\xff")
            )
        path.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                frames, _ = ocr.survey_image(path)
                ocr.load_image(path, frames - 1)
        except (ocr.DocumentError, ocr.PageError) as e:
            words = re.sub(r"\(.*\)", "", str(e))
            assert len(words.split()) > 3 and len(str(e)) < 600


@pytest.mark.parametrize(
    "error",
    [
        SyntaxError(),
        KeyError("x"),
        OverflowError(),
        RecursionError(),
        zlib.error("Error -3"),
        IndexError("y"),
        TypeError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_whatever_a_decoder_raises_the_page_says_that_the_file_is_damaged(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    (tmp_path / "a.png").write_bytes(written("PNG"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(ocr.PageError, match=r"^the image cannot be decoded: the file is damaged or cut off \("):
        ocr.load_image(tmp_path / "a.png", 0)


def test_no_file_makes_a_worker_start_a_program_or_a_connection() -> None:
    for event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "socket.bind"):
        with pytest.raises(PermissionError, match="a render worker may not"):
            ocr.refuse_network(event, ())
    assert not ocr.UNDECODED & set(ocr.image_formats())


# ---- workers that hang and die


def library_run(inputs: list[Path], out: Path, url: str, **settings: Any) -> tuple[ocr.RunResult, list[str]]:
    lines: list[str] = []
    result = ocr.run(
        inputs,
        out,
        ocr.Settings(url=url, workers=2, check=False, **settings),
        on_event=lambda level, text: lines.append(text),
    )
    return result, lines


def test_a_worker_that_is_killed_or_hangs_costs_no_other_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "start_worker", sabotaged)
    monkeypatch.setattr(ocr, "RENDER_LIMIT", 1.5)
    names = ("a.pdf", "hang-b.pdf", "c.pdf", "kill-d.pdf", "e.pdf")
    for name in names:
        (tmp_path / name).write_bytes(one_page(name, pages=2))
    with Standin(tokens=300) as server:
        result, lines = library_run([tmp_path / name for name in names], tmp_path / "out", server.url)
    assert result.exit_code == 1
    for document in result.documents:
        bad = document.source.name.startswith(("hang-", "kill-"))
        assert document.count(ocr.FAILED if bad else ocr.OK) == 2, document
    assert sum("hang-b.pdf, page" in line and "took more than" in line for line in lines) == 2
    assert sum("kill-d.pdf, page" in line and "the worker process died" in line for line in lines) == 2


def test_a_page_that_never_ends_drawing_is_given_up_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "RENDER_LIMIT", 2.0)
    endless = stream(zlib.compress(b"0 0 1 rg 0 0 9 9 re f " * 8_000_000), "/Filter /FlateDecode")
    (tmp_path / "endless.pdf").write_bytes(one_page(objects={11: endless}))
    (tmp_path / "other.pdf").write_bytes(one_page("Other"))
    with Standin(tokens=300) as server:
        result, lines = library_run([tmp_path], tmp_path / "out", server.url)
    assert [document.count(ocr.OK) for document in result.documents] == [0, 1] and result.exit_code == 1
    assert any("endless.pdf, page 1: drawing the page took more than 2 s" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers have a memory limit on Linux only")
def test_a_page_that_takes_all_memory_costs_its_worker_and_no_other_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drawing that contains itself twice."""
    itself = one_page(objects={10: XOBJECT, 11: stream(b"/X Do"), 5: stream(b"/X Do /X Do", FORM)})
    (tmp_path / "itself.pdf").write_bytes(itself)
    (tmp_path / "other.pdf").write_bytes(one_page("Other"))
    with Standin(tokens=300) as server:
        result, lines = library_run([tmp_path], tmp_path / "out", server.url)
    assert [document.count(ocr.OK) for document in result.documents] == [0, 1] and result.exit_code == 1
    assert any("itself.pdf, page 1: PDFium crashed or ran out of memory" in line for line in lines)


def test_a_form_that_never_starts_is_read_without_it_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "FORMS_LIMIT", 1.0)
    with Standin(tokens=300) as server:
        result, lines = library_run([DATA / "pdfs" / "shared-unnamed-field.pdf"], tmp_path / "out", server.url)
    assert result.exit_code == 0 and result.documents[0].count(ocr.OK) == 1
    assert any("its form fields are not drawn" in line for line in lines)


# ---- files that change, disks that fill


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.write_bytes(one_page("Another", pages=30)), "the file changed during the run; run again"),
        (lambda path: path.write_bytes(b""), "the file changed during the run; run again"),
        (lambda path: path.unlink(), "cannot be read any more: No such file or directory"),
    ],
    ids=["rewritten", "emptied", "gone"],
)
def test_a_file_that_changes_during_the_run_fails_for_its_remaining_pages(
    change: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    source, other = tmp_path / "a.pdf", tmp_path / "b.pdf"
    source.write_bytes(one_page("Before", pages=30))
    other.write_bytes(one_page("Other", pages=3))

    def answer(request: Request) -> None:
        if request.number == 0:
            change(source)

    with Standin(answer, tokens=300) as server:
        result, lines = library_run([source, other], tmp_path / "out", server.url, concurrency=1)
    first, second = result.documents
    assert second.count(ocr.OK) == 3 and result.exit_code == 1
    assert first.count(ocr.OK) + first.count(ocr.FAILED) == 30 and first.count(ocr.FAILED) > 10
    assert all(said in (page.error or said) for page in first.pages.values())
    assert any(f"{source}, page 30: " in line and said in line for line in lines)


def test_a_full_disk_stops_the_run_and_a_rerun_finishes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.pdf"
    source.write_bytes(one_page("Page", pages=6))
    with Standin(tokens=300) as server:
        with monkeypatch.context() as patch:
            patch.setattr(ocr, "start_worker", full_disk)
            result, lines = library_run([source], tmp_path / "out", server.url, concurrency=1)
        assert result.exit_code == 1 and os.strerror(errno.ENOSPC) in str(result.stopped)
        assert any(line.startswith("stopped: ") and os.strerror(errno.ENOSPC) in line for line in lines)
        again, _ = library_run([source], tmp_path / "out", server.url)
    assert again.exit_code == 0 and again.documents[0].count(ocr.OK) == 6
    assert sum(page.cached for page in again.documents[0].pages.values()) >= 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_real_disk_that_fills_up_keeps_what_is_done(small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.pdf"
    source.write_bytes(one_page("Page", pages=40))
    with Standin(tokens=1000) as server:
        done = command(source, out=small_disk / "out", url=server.url)
        assert done.code == 1 and "No space left on device" in done.err
        kept = [path for path in (small_disk / "out" / "a" / "pages").glob("*.json") if ".attempts" not in path.name]
        assert 0 < len(kept) < 40 and all(ocr.read_json(path)["status"] == "ok" for path in kept)
        subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
        again = command(source, out=small_disk / "out", url=server.url)
    assert again.code == 0 and again.run["pages"] == {"ok": 40, "suspect": 0, "failed": 0, "cached": len(kept)}


# ---- what may not be read or written


def without_root_powers() -> None:
    """Runs in the child before the command: root obeys permissions there as anybody does (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


obeys_permissions = pytest.mark.skipif(
    sys.platform == "win32" or (sys.platform != "linux" and os.geteuid() == 0), reason="root reads everything here"
)


@obeys_permissions
def test_what_may_not_be_read_is_said_and_the_rest_is_done(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    (shelf / "closed").mkdir(parents=True)
    for name in ("a.pdf", "b.pdf", "closed/c.pdf"):
        (shelf / name).write_bytes(one_page(name))
    (shelf / "a.pdf").chmod(0)
    (shelf / "closed").chmod(0)
    try:
        with Standin(tokens=300) as server:
            done = command(shelf, out=tmp_path / "out", url=server.url, preexec_fn=without_root_powers)
    finally:
        (shelf / "closed").chmod(0o755)
    assert done.code == 1 and done.document("b.pdf")["ok"] == 1
    assert done.document("a.pdf")["error"] == "cannot be read: Permission denied"
    assert done.document("closed")["error"] == "cannot be read: Permission denied"
    assert len(done.said("/a.pdf")) >= 1 and len(done.said("/closed")) >= 1


@obeys_permissions
def test_an_output_that_may_not_be_written_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(one_page())
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    (tmp_path / "file").write_bytes(b"")
    with Standin() as server:
        for out, why in (("locked/out", "Permission denied"), ("file/out", "Not a directory"), ("file", "File exists")):
            done = command(tmp_path / "a.pdf", out=tmp_path / out, url=server.url, preexec_fn=without_root_powers)
            assert done.code == 2 and f"--out {tmp_path / out}: cannot be written: {why}" in done.err
        assert not server.requests


def test_the_output_may_lie_in_the_searched_folder(tmp_path: Path) -> None:
    figure = '<div data-bbox="100 100 900 900" data-label="Figure"><img alt="A figure"/></div>'
    (tmp_path / "a.pdf").write_bytes(one_page())
    with Standin(Answer(figure)) as server:
        for _ in range(2):
            done = command(".", out=tmp_path / "out", url=server.url, cwd=tmp_path)
            assert done.code == 0 and [d["source"] for d in done.run["documents"]] == ["a.pdf"]
        assert (tmp_path / "out" / "a" / "images" / "0001-01.webp").exists()
        assert len(server.requests) == 1
        done = command(".", out=tmp_path / ".", url=server.url, cwd=tmp_path)
    assert done.code == 1 and "give --out a folder of its own" in done.err


# ---- names


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="not every name exists here")
def test_names_of_every_kind_get_a_place_of_their_own_inside_the_output(tmp_path: Path) -> None:
    shelf = os.fsencode(tmp_path) + b"/shelf"
    names = [
        b"with space.pdf", b"two\nlines.pdf", b"tab\t.pdf", b"caf\xe9.pdf", "rtl \u202efdp.exe.pdf".encode(),
        b"x" * 251 + b".pdf", b"x" * 250 + b"y.pdf", b"...pdf", b"..x.pdf", b"-out.pdf", b"nul.pdf", b"CON.pdf",
        b"Case.pdf", b"case.pdf", unicodedata.normalize("NFC", "né.pdf").encode(),
        unicodedata.normalize("NFD", "né.pdf").encode(), b"a.md.pdf", b"a/pages.pdf", b"a/a.json/x.pdf", b"a.pdf",
        b"$(touch x).pdf", b"\x1b[31mred.pdf", b"<script>.pdf", b"run.json.pdf", b"report.pdf.pdf", b"~.pdf",
    ]  # fmt: skip
    for number, name in enumerate(names):
        path = shelf + b"/" + name
        Path(os.fsdecode(path)).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(one_page(f"Document {number}"))
    (tmp_path / "list").write_bytes(b"\0".join(shelf + b"/" + name for name in names))
    out = tmp_path / "out"
    with Standin(tokens=300) as server:
        done = command(f"@{tmp_path / 'list'}", tmp_path / "shelf", out=out, url=server.url)
        # `...pdf` and its like are hidden files: read because the list names them.
        assert done.code == 0, done.err
        assert done.run["pages"]["ok"] == len(names) == len(server.requests)
        again = command(f"@{tmp_path / 'list'}", out=out, url=server.url)
        assert again.run["pages"]["cached"] == len(names) == len(server.requests)
    folders = [d["folder"] for d in done.run["documents"]]
    assert len({ocr.folded(folder) for folder in folders}) == len(names)
    for folder in folders:
        assert ".." not in folder.split("/") and (out / folder / "pages" / "0001.json").exists()
        markdown = out / folder / (ocr.short_name(folder.rpartition("/")[2]) + ".md")
        assert markdown.exists() and markdown.resolve().is_relative_to(out.resolve())
    assert all(line.isprintable() for line in (done.out + done.err).split("\n"))
    assert sorted(os.listdir(tmp_path)) == ["list", "out", "shelf"]


# ---- passwords, page ranges


def test_passwords_open_what_they_open_and_appear_nowhere(tmp_path: Path) -> None:
    (tmp_path / "locked.pdf").write_bytes(encrypted(user=b"secret-word"))
    (tmp_path / "open.pdf").write_bytes(one_page("Open"))
    (tmp_path / "password").write_text("secret-word\n")
    inputs = [tmp_path / "locked.pdf", tmp_path / "open.pdf"]
    with Standin(tokens=300) as server:
        wrong = command(*inputs, "--password", "wrong-word", out=tmp_path / "out", url=server.url)
        assert wrong.code == 1 and "locked.pdf: the PDF does not open with this password" in wrong.err
        right = command(*inputs, "--password-file", tmp_path / "password", out=tmp_path / "out", url=server.url)
    assert right.code == 0 and right.run["pages"]["ok"] == 2
    written_files = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    said = right.out + right.err + wrong.out + wrong.err
    assert not any(b"secret-word" in data or b"wrong-word" in data for data in [*written_files, said.encode()])


def test_a_page_range_outside_a_document_is_that_documents_error_and_says_how_many_it_has(tmp_path: Path) -> None:
    (tmp_path / "short.pdf").write_bytes(one_page(pages=3))
    (tmp_path / "long.pdf").write_bytes(one_page("Long", pages=7))
    (tmp_path / "image.png").write_bytes(written("PNG"))
    with Standin(tokens=300) as server:
        done = command(tmp_path, "--pages", "2,4-", out=tmp_path / "out", url=server.url)
    assert done.code == 1 and done.document("long.pdf")["ok"] == 5 and done.document("image.png")["ok"] == 1
    assert "short.pdf: has 3 pages, so --pages 4- is out of range" in done.err

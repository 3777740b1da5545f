"""Makes a run's folder into pages a person looks at: files that open from disk, no server and no network.

    python view.py ocr_out                       writes ocr_out/view/index.html
    python view.py ocr_out --compare other_out   the same pages of two runs side by side, differences marked
    python view.py runs/omni --data DIR          a benchmark's pages with their tests, worst first

The file reads in the order the work is done:
    Finding      the documents of a run and their sources, half-written ones too; the run to compare with
    Tests        what the benchmarks' scorers said of each page
    Pages        one page: its picture, its blocks as safe HTML, its data file           (worker processes)
    Differences  two readings of a page, with the words marked that differ
    Index        rows and documents in chunks, words in shards: a browser loads what it shows
    Command      arguments, progress, exit codes

What is written: index.html with viewer.css and viewer.js (from the folder viewer/ beside this file), data/*.js, and
pages/DOCUMENT/0001.js with its pictures. A browser may load scripts from disk, but fetch nothing: so data are scripts
that call `OCR.put`. Written again, only pages that changed are made anew.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import html
import io
import json
import os
import re
import secrets
import shutil
import sys
import unicodedata
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ocr

if TYPE_CHECKING:
    from lxml import etree
    from PIL import Image

FORMAT = 5  # of the files written; others are written again
ASSETS = Path(__file__).resolve().parent / "viewer"
UNFINISHED = "unfinished"  # a page with files but no record: the run stopped there
STATUSES = (ocr.OK, ocr.SUSPECT, ocr.FAILED, UNFINISHED)

CHUNK = 1000  # pages, or documents, in a file of the index
SEGMENT = 4000  # pages in a part of the word index
SHARD = 100  # pages' words in a file of it
PICTURE = (1024, 5000)  # px: the short and the long side of a page's picture at most
THUMBNAIL = (240, 320)  # px, drawn at half of it
LONGEST_TEXT = 400_000  # characters of a page that a tab shows
BATCH = 16  # pages that a worker process makes in a go
PAGE_LIMIT = 120.0  # s to make a page, or a batch of them


# ----------------------------------------------------------------------------------------------------------- Finding


@dataclass(frozen=True)
class Entry:
    """A document of the run: where it lies below the run's folder, its pages, and the file it was read from."""

    place: str
    folder: Path
    numbers: tuple[int, ...]
    source: Path | None
    sha256: str | None  # of the source when it was read
    error: str | None = None
    other: Path | None = None  # its folder in the run to compare with

    @property
    def id(self) -> str:
        return hashlib.sha256(self.place.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        return ocr.show(Path(self.source.name)) if self.source else self.place


def client_folder(run: Path) -> Path:
    """Where the client's documents lie: in a benchmark's run in the folder ocr."""
    inner = run / "ocr"
    return inner if "benchmark" in ocr.read_json(run / "run.json") and inner.is_dir() else run


def find_documents(run: Path, data: Path | None = None) -> list[Entry]:
    """The documents of a run, in the order run.json tells and then by name; those that could not be read, too."""
    top = client_folder(run)
    told = [item for path in run_files(top) for item in told_documents(path, top)]
    order = {item["folder"]: i for i, item in enumerate(told) if "folder" in item}
    errors = {item["folder"]: item.get("error") for item in told if "folder" in item}
    sources = Sources(data)
    entries = []
    for folder in sorted(document_folders(top), key=lambda f: natural(f.relative_to(top).as_posix())):
        place = folder.relative_to(top).as_posix()
        source, base = ocr.read_json(folder / "source.json").get("source"), output_of(folder, top)
        found = sources.find(Path(os.path.normpath(base / source))) if isinstance(source, str) else None
        entries.append(Entry(place, folder, page_numbers(folder), found, told_hash(folder), errors.get(place)))
    entries.sort(key=lambda entry: order.get(entry.place, len(order)))
    unread = (item for item in told if "folder" not in item and item.get("error"))
    return entries + [
        Entry(f"? {item['source']}", top, (), Path(str(item["source"])), None, str(item["error"])) for item in unread
    ]


def run_files(top: Path) -> list[Path]:
    """The client's run.json files: one, or one a repeat in a benchmark's run."""
    return [top / "run.json", *sorted(top.glob("repeat*/run.json"))]


def told_documents(path: Path, top: Path) -> Iterator[dict[str, Any]]:
    """The documents a run.json tells of, their folders as below `top`."""
    documents = ocr.read_json(path).get("documents")
    for item in documents if isinstance(documents, list) else []:
        if isinstance(item, dict) and "source" in item:
            below = path.parent.relative_to(top).as_posix()
            if isinstance(item.get("folder"), str) and below != ".":
                item["folder"] = f"{below}/{item['folder']}"
            yield item


def output_of(folder: Path, top: Path) -> Path:
    """The output folder that a document's source is told relative to."""
    first = folder.relative_to(top).parts[:1]
    inner = top / first[0] if first else top
    return inner if (inner / "run.json").exists() else top


def document_folders(top: Path) -> Iterator[Path]:
    """The folders of documents, at any depth."""
    for folder, names, files in os.walk(top):
        if "source.json" in files or ("pages" in names and any((Path(folder) / "pages").glob("*.json"))):
            yield Path(folder)
            names[:] = [name for name in names if name not in ("pages", "images")]
        names[:] = [name for name in names if not (name == "view" and (Path(folder) / name / "viewer.js").exists())]


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key by which page 2 comes before page 10."""
    return [(int(part), "") if part.isdecimal() else (0, part.casefold()) for part in re.split(r"(\d{1,18})", text)]


def page_numbers(folder: Path) -> tuple[int, ...]:
    """The pages that have any file, done or not."""
    names = (re.match(r"(\d{4,9})\.", name) for name in list_names(folder / "pages"))
    return tuple(sorted({int(match[1]) for match in names if match and int(match[1])}))


def list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def told_hash(folder: Path) -> str | None:
    """The SHA-256 of the source at the time of the run, from the start of the document's JSON."""
    with contextlib.suppress(OSError), open(folder / (ocr.short_name(folder.name) + ".json"), "rb") as file:
        found = re.search(rb'"sha256": "([0-9a-f]{64})"', file.read(20_000))
        return found[1].decode() if found else None
    return None


def is_file(path: Path) -> bool:
    """False too for what can be no file's name here: too long, or with a zero byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


class Sources:
    """Finds the files that documents were read from: where the run had them, or by name below `data`."""

    def __init__(self, data: Path | None):
        self.data = data

    @functools.cached_property
    def by_name(self) -> dict[str, Path]:
        return {path.name: path for path in sorted(self.data.rglob("*")) if path.is_file()} if self.data else {}

    def find(self, path: Path) -> Path:
        return path if is_file(path) else self.by_name.get(path.name, path)


def pair_up(entries: Sequence[Entry], other_run: Path) -> list[Entry]:
    """The documents with their folders in the other run: of the same place, else of the same file name if only one."""
    others = find_documents(other_run)
    by_place = {other.place: other.folder for other in others}
    names = collections.Counter(other.name for other in others)
    by_name = {other.name: other.folder for other in others if names[other.name] == 1}
    return [dataclasses.replace(entry, other=by_place.get(entry.place) or by_name.get(entry.name)) for entry in entries]


# ------------------------------------------------------------------------------------------------------------- Tests


@dataclass(frozen=True)
class Test:
    """A benchmark's test of a page. `passed` is None when it was not scored."""

    id: str
    type: str
    passed: bool | None
    why: str
    asked: str  # what it asks for, as the benchmark words it
    tags: tuple[str, ...] = ()


Tests = dict[tuple[Path, int], list[Test]]  # by a document's folder and a page number


def benchmark_tests(run: Path, entries: Sequence[Entry], data: Path | None) -> Tests:
    """The tests of a benchmark's run, by page; none for a run of ocr.py."""
    benchmark = ocr.read_json(run / "run.json").get("benchmark")
    if benchmark == "omni_parse_bench":
        return omni_tests(run, entries, data)
    return olmocr_tests(run, entries) if benchmark == "olmOCR-bench" else {}


def omni_tests(run: Path, entries: Sequence[Entry], data: Path | None) -> Tests:
    """omni_parse_bench: a file of results a page; what each test asks stands in the dataset's gold."""
    pages = omni_pages(data) if data else {}
    tests: Tests = {}
    for entry in entries:
        page_id = pages.get(entry.name) or (entry.source.stem if entry.source else entry.folder.name)
        gold = ocr.read_json(data / "gold" / f"{page_id}.json") if data and Path(page_id).name == page_id else {}
        asked = {test.get("id"): test.get("args") for test in gold.get("tests") or [] if isinstance(test, dict)}
        for line in json_lines(run / "unit_tests" / "details" / f"{page_id}.jsonl"):
            name = str(line.get("test_id"))
            test = Test(
                name,
                str(line.get("test_type")),
                line.get("result") == "pass",
                str(line.get("why") or ""),
                words_of(asked.get(name)),
                tuple(map(str, line.get("tags") or ())),
            )
            tests.setdefault((entry.folder, 1), []).append(test)
    return tests


def omni_pages(data: Path) -> dict[str, str]:
    """The page_id of each file, from the dataset's manifest."""
    try:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(data / "manifest.parquet", columns=["page_id", "doc_path"]).to_pylist()
    except Exception:  # no pyarrow, no manifest: a page is then called as its file
        return {}
    return {Path(str(row["doc_path"])).name: str(row["page_id"]) for row in rows}


def olmocr_tests(run: Path, entries: Sequence[Entry]) -> Tests:
    """olmOCR-bench: the tests that were run; those that failed stand in failed_tests.jsonl, and why in the log."""
    scored = (run / "failed_tests.jsonl").exists()
    failed = {str(line.get("id")) for line in json_lines(run / "failed_tests.jsonl")}
    reasons = logged_reasons(run / "score.log")
    by_pdf: dict[str, list[tuple[int, Test]]] = {}
    for path in sorted((run / "bench").glob("*.jsonl")):
        for line in json_lines(path):
            name, page = str(line.get("id")), line.get("page")
            rest = {key: value for key, value in line.items() if key not in ("id", "pdf", "page", "type", "checked")}
            passed = name not in failed if scored else None
            why = reasons.get(name, "") if not passed else ""
            test = Test(name, str(line.get("type")), passed, why, words_of(rest), (path.stem,))
            by_pdf.setdefault(str(line.get("pdf")), []).append((page if isinstance(page, int) else 1, test))
    tests: Tests = {}
    for entry in entries:
        # Which of the benchmark's PDFs this is, its path says: folder and name.
        pdf = "/".join(entry.source.parts[-2:]) if entry.source else ""
        for page, test in by_pdf.get(pdf, []):
            tests.setdefault((entry.folder, page), []).append(test)
        if (name := f"{pdf}_baseline") in failed:
            asked = "some text that does not run on, in the page's own script"
            test = Test(name, "baseline", False, reasons.get(name, ""), asked, ("baseline",))
            tests.setdefault((entry.folder, 1), []).append(test)
    return tests


def logged_reasons(log: Path) -> dict[str, str]:
    """Why tests failed, as the scorer of olmOCR-bench printed it."""
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        return {}
    return dict(re.findall(r"^\s*\[FAIL\] Test (\S+) on .*? Ex: (.*)$", text, re.MULTILINE))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; what is no object is left out."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                yield value


def words_of(value: Any) -> str:
    """A test's arguments on one line, without those that are empty."""
    if isinstance(value, dict):
        said = {key: words_of(inner) for key, inner in value.items() if inner not in ("", None, False, 0, [], {})}
        if set(said) == {"text", "max_diffs"}:
            del said["max_diffs"]
        if len(said) == 1:  # what it is about needs no name
            return next(iter(said.values()))
        return "; ".join(f"{key}: {words}" for key, words in said.items())
    if isinstance(value, list):
        return ", ".join(map(words_of, value))
    return "" if value is None else str(value)


# ------------------------------------------------------------------------------------------------------------- Pages


@dataclass(frozen=True)
class PageJob:
    """A page to make: all that a worker process needs."""

    folder: Path
    number: int
    target: Path  # the folder that the page's files go to
    view: Path
    document: ocr.Document | None  # None: its picture is not drawn
    trouble: str | None  # why not
    other: Path | None
    compare: bool
    tests: tuple[Test, ...]
    other_tests: tuple[Test, ...]


class PageRow(NamedTuple):
    """What the index tells of a page."""

    status: str
    why: str
    size: tuple[int, int]
    drawn: bool
    score: tuple[int, int] | None  # tests passed, of all; or words that differ, of all
    tests: tuple[int, int] | None  # those that only this run passes, and only the other one
    words: str  # that a search finds it by, a space between them


def open_source(source: Path, sha256: str | None, password: str | None) -> ocr.Document:
    """The file a document was read from, ready to be drawn. Raises DocumentError when it is another file by now."""
    looked = ocr.survey(source, password)
    if sha256 and looked.sha256 != sha256:
        raise ocr.DocumentError("the file has changed since it was read")
    return ocr.Document(source, looked.kind, looked.pages, looked.sha256, looked.stamp, password, looked.has_forms)


def make_pages(jobs: Sequence[PageJob]) -> list[PageRow]:
    return [make_page(job) for job in jobs]


def make_page(job: PageJob) -> PageRow:
    """Writes a page's data and pictures, unless they are there, and tells its row."""
    path, stamp = job.target / f"{job.number:04d}.js", stamp_of(job)
    if (row := row_on_disk(path, stamp)) is not None:
        return row
    page = read_page(job.folder, job.number, job.view)
    note = job.trouble
    if job.document:
        try:
            page["picture"], size = draw(job)
            page["size"] = page["size"] or size
        except ocr.PageError as e:
            note = str(e)
    page["size"] = page["size"] or (1000, 1414)
    if note:
        page["notes"].append(f"no picture: {note}")
    score = None
    if job.compare:
        other = job.other if job.other and has_page(job.other, job.number) else None
        page["other"] = read_page(other, job.number, job.view) if other else absent()
        score = mark_differences(page, page["other"])
        if job.other_tests:
            page["other"]["tests"] = [dataclasses.asdict(test) for test in job.other_tests]
    if job.tests:
        page["tests"] = [dataclasses.asdict(test) for test in job.tests]
        scored = [test.passed for test in job.tests if test.passed is not None]
        score = score or ((sum(scored), len(scored)) if scored else None)
    finish_blocks(page["blocks"])
    finish_blocks((page.get("other") or {}).get("blocks", []))
    why = page["error"] or "; ".join(page["reasons"])
    words = " ".join(sorted(search_words(page["text"])))
    row = PageRow(page["status"], ocr.clip(why, 200), page["size"], "picture" in page, score, unlike(job), words)
    head = script_json({"stamp": stamp, "row": row})
    key = json.dumps(f"page/{job.target.name}/{job.number}")
    save(path, f"// {head}\nOCR.put({key}, {script_json(page)});\n".encode("utf-8", "replace"))
    return row


def save(path: Path, data: bytes) -> None:
    """Writes a file, unless it holds that already: a copy of the view is brought up to date by what changed.
    Raises OutputError."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == len(data) and path.read_bytes() == data:
            return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ocr.write_atomic(path, data)
    except OSError as e:
        raise ocr.OutputError(f"{ocr.show(path.parent)}: cannot be written: {ocr.reason(e)}") from None


def unlike(job: PageJob) -> tuple[int, int] | None:
    """How many tests only this run passes, and how many only the other one; None for none."""
    theirs = {test.id: test.passed for test in job.other_tests}
    pairs = [(test.passed, theirs[test.id]) for test in job.tests if test.id in theirs]
    only = pairs.count((True, False)), pairs.count((False, True))
    return only if any(only) else None


def stamp_of(job: PageJob) -> str:
    """Names everything a page is made of."""
    folders = [folder for folder in (job.folder, job.other) if folder]
    stamps = [file_stamp(ocr.page_file(folder, job.number, s)) for folder in folders for s in (".json", ".md")]
    drawn = job.document and (str(job.document.source), job.document.stamp)
    tests = [[dataclasses.astuple(test) for test in tests] for tests in (job.tests, job.other_tests)]
    parts = [FORMAT, stamps, drawn, job.trouble, job.compare, tests]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def file_stamp(path: Path) -> tuple[int, int] | None:
    """None while a run that goes on has not written it."""
    try:
        return ocr.file_stamp(path)
    except OSError:
        return None


def row_on_disk(path: Path, stamp: str) -> PageRow | None:
    """The row of a page that was made before of the same things."""
    try:
        with open(path, encoding="utf-8") as file:
            head = json.loads(file.readline()[3:])
            return PageRow(*head["row"]) if head["stamp"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def script_json(value: Any) -> str:
    """JSON that is a JavaScript expression too."""
    return json.dumps(value, ensure_ascii=False).replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def has_page(folder: Path, number: int) -> bool:
    return any(ocr.page_file(folder, number, s).exists() for s in (".json", ".md", ".html"))


def absent() -> dict[str, Any]:
    return {"status": "absent", "reasons": [], "error": "the other run does not have this page", "notes": []} | {
        "blocks": [],
        "attempts": [],
        "md": "",
        "raw": "",
        "json": "",
        "text": "",
        "size": None,
    }


def read_page(folder: Path, number: int, view: Path) -> dict[str, Any]:
    """What the viewer shows of a page; whatever is missing or broken is told, not raised."""
    record = ocr.read_json(ocr.page_file(folder, number, ".json"))
    status = record.get("status")
    page = absent() | {"number": number, "status": status if status in STATUSES else UNFINISHED, "error": None}
    page["reasons"] = [str(item) for item in listed(record.get("reasons"))]
    page["notes"] = [str(item) for item in listed(record.get("notes"))]
    page["error"] = record.get("error") and str(record["error"])
    if page["status"] == UNFINISHED:
        page["error"] = "the run stopped before this page was done"
    page["attempts"] = [item for item in listed(record.get("attempts")) if isinstance(item, dict)]
    page["kept"] = record.get("kept")
    image = record.get("image") or {}
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        size = int(image["width"]), int(image["height"])
        page["size"] = size if min(size) > 0 and max(size) < 1_000_000 else None
    page["md"] = cut(read_text(ocr.page_file(folder, number, ".md")))
    page["json"] = cut(json.dumps({key: value for key, value in record.items() if key != "raw"}, ensure_ascii=False))
    with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
        page["raw"] = cut(str(ocr.raw_reply(folder, number)))
    if page["raw"]:
        try:
            page["images"] = address(folder / "images", view) + "/"
            named = [{"image": image_of(block)} for block in listed(record.get("blocks"))]
            blocks = ocr.page_blocks(folder, number, {"blocks": named}, "images/")
            page["blocks"] = [block_data(block) for block in blocks]
            page["text"] = " ".join(" ".join([*ocr.text_lines(block.element), *alt_texts(block)]) for block in blocks)
        except Exception as e:  # a reply that the client itself would trip over
            page["notes"].append(f"the reply cannot be shown as text: {type(e).__name__}: {ocr.reason(e)}")
    return page


def listed(value: Any) -> list[Any]:
    """A record's list; an empty one where it holds something else."""
    return value if isinstance(value, list) else []


def image_of(block: Any) -> str | None:
    """The file of a block's figure, as the record tells it."""
    name = block.get("image") if isinstance(block, dict) else None
    return name if isinstance(name, str) else None


def address(path: Path, view: Path) -> str:
    """A file's relative address from index.html; absolute where there is none (another drive)."""
    try:
        relative = os.path.relpath(path, view).replace(os.sep, "/")
    except ValueError:
        return path.absolute().as_uri()
    return urllib.parse.quote(relative.encode("utf-8", "surrogateescape"))


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "\n… (cut here by the viewer)"


def alt_texts(block: ocr.Block) -> Iterator[str]:
    return (alt for image in block.element.iter("img") if (alt := str(image.get("alt") or "").strip()))


def block_data(block: ocr.Block) -> dict[str, Any]:
    """A block for the viewer: its label, its box in per cent of the page, its HTML (formulas still as LaTeX)."""
    plain = dataclasses.replace(block, label="Text") if block.label == "Blank-Page" else block
    data: dict[str, Any] = {"label": block.label[:60], "html": ocr.to_html([plain], headers_footers=True)}
    if block.bbox:
        x0, y0, x1, y1 = (round(min(max(side / 10, 0.0), 100.0), 2) for side in block.bbox)
        data["box"] = [min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)]
    inside = [inner for inner in map(block_data, block.inside) if "box" in inner]
    return data | ({"inside": [{"label": inner["label"], "box": inner["box"]} for inner in inside]} if inside else {})


# What `ocr.to_html` wraps a block in.
BLOCK = re.compile(r'<div class="block [\w-]+">(.*)</div>', re.DOTALL)


def finish_blocks(blocks: Iterable[dict[str, Any]]) -> None:
    """Gives blocks the HTML that is shown: the viewer's classes and no others, formulas drawn."""
    for block in blocks:
        whole = BLOCK.fullmatch(block["html"])
        if whole and "class=" not in whole[1].replace('<span class="math">', ""):
            block["html"] = ocr.maths_drawn(whole[1])  # most blocks: `ocr.to_html` has sanitized them
            continue
        root = tree_of(block["html"])
        for element in root.iter():
            classes = [c for c in (element.get("class") or "").split() if c == "math" or c.startswith("language-")]
            element.attrib.pop("class", None)
            if classes:
                element.set("class", " ".join(classes))
        block["html"] = ocr.maths_drawn(ocr.sanitize(inner_html(root)))


def tree_of(markup: str) -> etree._Element:
    """The tree of HTML that `ocr.to_html` gives, under the div of its block."""
    from lxml import etree

    body = etree.fromstring(f"<html><body>{markup}</body></html>", etree.HTMLParser(huge_tree=True))
    root = body.find(".//div") if body is not None else None
    return root if root is not None else etree.Element("div")


def inner_html(root: etree._Element) -> str:
    from lxml import etree

    parts = [html.escape(root.text or "", quote=False)]
    return "".join(parts + [etree.tostring(child, encoding="unicode", method="html") for child in root])


def draw(job: PageJob) -> tuple[str, tuple[int, int]]:
    """Writes a page's picture and its thumbnail; the picture's name, and its size. Raises PageError."""
    assert job.document
    image = ocr.load_page(job.document, job.number, 72).image
    size = image.size
    short, long = PICTURE
    scale = min(1.0, short / min(size), long / max(size))
    if scale < 1:
        wanted = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
        image = image.resize(wanted, resample=3, reducing_gap=2.0)
    name = f"{job.number:04d}.webp"
    save(job.target / name, webp(image, 75))
    image.thumbnail(THUMBNAIL, reducing_gap=2.0)
    save(job.target / f"{job.number:04d}s.webp", webp(image, 60))
    return name, size


def webp(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------- Differences


def mark_differences(page: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
    """Marks the words that differ in both readings' HTML; how many, and of how many."""
    ours = [Marked(block) for block in page["blocks"]]
    theirs = [Marked(block) for block in other["blocks"]]
    a = [word for marked in ours for word in marked.words]
    b = [word for marked in theirs for word in marked.words]
    # Two identical ends are cut off first; the matcher's shortcut for common words is for very long pages only.
    start = common(a, b)
    end = common(a[start:][::-1], b[start:][::-1])
    middle = a[start : len(a) - end], b[start : len(b) - end]
    matcher = difflib.SequenceMatcher(None, *middle, autojunk=len(middle[0]) * len(middle[1]) > 4_000_000)
    gone, new = set(range(len(middle[0]))), set(range(len(middle[1])))
    for i, j, n in matcher.get_matching_blocks():
        gone -= set(range(i, i + n))
        new -= set(range(j, j + n))
    for blocks, changed in ((ours, gone), (theirs, new)):
        at = -start
        for marked in blocks:
            marked.mark({i - at for i in changed if at <= i < at + len(marked.words)})
            at += len(marked.words)
    page["differs"], other["differs"] = len(gone), len(new)
    return max(len(gone), len(new)), max(len(a), len(b))


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many words two lists begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


WORD = re.compile(r"\w+|[^\w\s]")


class Marked:
    """A block's HTML as its words, of which some are to be marked. A formula is one word."""

    def __init__(self, block: dict[str, Any]):
        self.block, self.root = block, tree_of(block["html"])
        self.words: list[str] = []
        self.spots: list[tuple[etree._Element, bool, int]] = []  # whose text, or whose tail; its first word
        self.collect(self.root)

    def collect(self, element: etree._Element) -> None:
        for node, is_tail in walk(element):
            self.spots.append((node, is_tail, len(self.words)))
            if is_formula(node) and not is_tail:
                self.words.append(" ".join((node.text or "").split()))
            else:
                self.words += WORD.findall((node.tail if is_tail else node.text) or "")

    def mark(self, changed: set[int]) -> None:
        if not changed:
            return
        for node, is_tail, first in reversed(self.spots):
            if is_formula(node) and not is_tail:
                if first in changed:
                    wrap_in_mark(node)
            else:
                mark_text(node, is_tail, first, changed)
        self.block["html"] = f"<div>{inner_html(self.root)}</div>"


def walk(element: etree._Element) -> Iterator[tuple[etree._Element, bool]]:
    """The places where an element holds text, in reading order: an element's text (False), or its tail (True)."""
    yield element, False
    for child in element:
        yield from walk(child)
        yield child, True


def is_formula(element: etree._Element) -> bool:
    return bool(element.tag == "span" and element.get("class") == "math")


def wrap_in_mark(node: etree._Element) -> None:
    parent = node.getparent()
    if parent is not None:
        mark = node.makeelement("mark")
        mark.tail, node.tail = node.tail, None
        parent.replace(node, mark)
        mark.append(node)


def mark_text(node: etree._Element, is_tail: bool, first: int, changed: set[int]) -> None:
    """Puts the changed words of one run of text into <mark> elements, neighbours into one."""
    text = (node.tail if is_tail else node.text) or ""
    runs: list[list[int]] = []
    for i, word in enumerate(WORD.finditer(text)):
        if first + i in changed:
            if runs and not text[runs[-1][1] : word.start()].strip():
                runs[-1][1] = word.end()
            else:
                runs.append([word.start(), word.end()])
    if not runs:
        return
    before, after = text[: runs[0][0]], [run[0] for run in runs[1:]] + [len(text)]
    marks = []
    for (start, end), until in zip(runs, after, strict=True):
        mark = node.makeelement("mark")
        mark.text, mark.tail = text[start:end], text[end:until]
        marks.append(mark)
    if is_tail:
        node.tail = before
        parent = node.getparent()
        at = parent.index(node) + 1 if parent is not None else 0
    else:
        node.text = before
        parent, at = node, 0
    for i, mark in enumerate(marks):
        parent.insert(at + i, mark)


# ------------------------------------------------------------------------------------------------------------- Index


@functools.cache
def letters() -> re.Pattern[str]:
    """What a searched word is made of: letters, digits and marks of every script."""
    ranges: list[list[int]] = []
    for point in range(0x20, 0x30000):
        if unicodedata.category(chr(point))[0] in "LNM":
            if ranges and ranges[-1][1] == point - 1:
                ranges[-1][1] = point
            else:
                ranges.append([point, point])
    return re.compile("[" + "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in ranges) + "]+")


# Scripts that put no spaces between words: their words are indexed as pairs of signs. viewer.js has the same list.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0002ffff]+"
)
LONGEST_WORD = 40


def search_words(text: str) -> set[str]:
    """The words a page is found by: small letters without accents; of unspaced scripts every pair of signs."""
    found: set[str] = set()
    for run in set(letters().findall(folded(text))):
        if run.isascii():
            found.add(run[:LONGEST_WORD])
            continue
        for part in UNSPACED.findall(run):
            found.update(part)
            found.update(part[i : i + 2] for i in range(len(part) - 1))
        found.update(word[:LONGEST_WORD] for word in UNSPACED.split(run) if word)
    return found


def folded(text: str) -> str:
    """Text as it is compared in a search."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return unicodedata.normalize("NFKC", re.sub("[\u0300-\u036f]", "", plain))


def shard_of(word: str, shards: int) -> int:
    """The file that words with this beginning stand in; viewer.js counts alike."""
    number = 0
    for c in word[:2]:
        number = (number * 31 + ord(c)) % 1_000_003
    return number % shards


class Index:
    """Writes the files that viewer.js loads as it needs them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.segments: list[list[int]] = []  # first page, pages, shards
        self.stale = {name for name in list_names(folder) if name.endswith(".js")}

    def put(self, key: str, value: Any) -> None:
        name = key.replace("/", "-") + ".js"
        self.stale.discard(name)
        save(self.folder / name, f"OCR.put({json.dumps(key)}, {script_json(value)});\n".encode("utf-8", "replace"))

    def chunks(self, name: str, items: Sequence[Any]) -> int:
        """Writes a list in chunks; how many."""
        starts = range(0, len(items), CHUNK)
        for i, start in enumerate(starts):
            self.put(f"{name}/{i}", items[start : start + CHUNK])
        return len(starts)

    def words(self, first: int, said: Sequence[str]) -> None:
        """Writes the words of a segment's pages: "word page,page" a line, pages as distances to the one before."""
        shards = max(1, len(said) // SHARD)
        pages: dict[str, list[int]] = {}
        for i, words in enumerate(said):
            for word in words.split():
                pages.setdefault(word, []).append(i)
        lines: list[list[str]] = [[] for _ in range(shards)]
        for word in sorted(pages):
            steps = (b - a for a, b in zip([0, *pages[word]], pages[word], strict=False))
            lines[shard_of(word, shards)].append(f"{word} {','.join(map(str, steps))}")
        for shard, part in enumerate(lines):
            self.put(f"words/{len(self.segments)}/{shard}", "\n".join(part))
        self.segments.append([first, len(said), shards])

    def finish(self) -> None:
        for name in self.stale:
            (self.folder / name).unlink(missing_ok=True)


class Viewer:
    """Makes the view of a run: every page in worker processes, then the index."""

    def __init__(self, run: Path, target: Path, args: argparse.Namespace):
        self.run, self.target, self.args = run, target, args
        self.entries = find_documents(run, args.data)
        if args.compare:
            self.entries = pair_up(self.entries, args.compare)
        self.tests = benchmark_tests(run, self.entries, args.data)
        self.other_tests: Tests = {}
        if args.compare and self.tests:
            self.other_tests = benchmark_tests(args.compare, find_documents(args.compare, args.data), args.data)
        self.by_tests = bool(self.tests) and not args.compare  # what "worst" means
        self.index = Index(target / "data")
        self.workers = ocr.Workers(args.workers or ocr.cores(), ocr.start_worker)
        self.rows: list[list[Any]] = []

    async def make(self) -> None:
        self.workers.start()
        try:
            words: list[str] = []
            async for row, said in self.pages():
                self.rows.append(row)
                words.append(said)
                if len(words) == SEGMENT:
                    self.index.words(len(self.rows) - SEGMENT, words)
                    words.clear()
            if words or not self.rows:
                self.index.words(len(self.rows) - len(words), words)
        finally:
            self.workers.stop()
        self.write_index()
        self.write_files()

    async def pages(self) -> AsyncIterator[tuple[list[Any], str]]:
        """Every page's row and words in order, a few batches made ahead."""
        from tqdm import tqdm

        total = sum(len(entry.numbers) for entry in self.entries)
        ahead: collections.deque[asyncio.Task[list[PageRow]]] = collections.deque()
        places = ((place, number) for place, entry in enumerate(self.entries) for number in entry.numbers)
        with tqdm(total=total, unit="page", disable=None, dynamic_ncols=True) as bar:
            try:
                async for jobs in self.batches():
                    ahead.append(asyncio.create_task(self.batch(jobs)))
                    while len(ahead) > 4 * self.workers.count:
                        for row in await ahead.popleft():
                            yield self.told(*next(places), row), row.words
                            bar.update()
                while ahead:
                    for row in await ahead.popleft():
                        yield self.told(*next(places), row), row.words
                        bar.update()
            finally:
                for task in ahead:
                    task.cancel()

    async def batches(self) -> AsyncIterator[list[PageJob]]:
        """The pages to make in order, some at a time."""
        jobs: list[PageJob] = []
        for entry in self.entries:
            document, trouble = await self.open(entry)
            for number in entry.numbers:
                jobs.append(self.job(entry, number, document, trouble))
                if len(jobs) == BATCH:
                    yield jobs
                    jobs = []
        if jobs:
            yield jobs

    def job(self, entry: Entry, number: int, document: ocr.Document | None, trouble: str | None) -> PageJob:
        tests = tuple(self.tests.get((entry.folder, number), ()))
        others = tuple(self.other_tests.get((entry.other, number), ())) if entry.other else ()
        target, compare = self.target / "pages" / entry.id, bool(self.args.compare)
        return PageJob(
            entry.folder, number, target, self.target, document, trouble, entry.other, compare, tests, others
        )

    async def batch(self, jobs: Sequence[PageJob]) -> list[PageRow]:
        """The rows of some pages; when one of them does not go well, each is made by itself."""
        try:
            return await self.workers.run(PAGE_LIMIT, make_pages, jobs)
        except (ocr.OutputError, ocr.BadUsage):
            raise
        except Exception:  # whatever a page can make PDFium, Pillow or the reader raise; a crash; too long a time
            return [await self.page(job) for job in jobs]

    async def open(self, entry: Entry) -> tuple[ocr.Document | None, str | None]:
        """The document's file to draw from, or why there is none."""
        if self.args.no_images or not entry.numbers:
            return None, None
        if not entry.source or not is_file(entry.source):
            return None, f"{ocr.show(entry.source) if entry.source else 'the source'} is not there any more"
        try:
            limit = 10 * ocr.RENDER_LIMIT
            return await self.workers.run(limit, open_source, entry.source, entry.sha256, self.args.password), None
        except Exception as e:  # whatever a file can make PDFium or Pillow raise
            return None, str(e) if isinstance(e, ocr.DocumentError) else f"{type(e).__name__}: {ocr.reason(e)}"

    async def page(self, job: PageJob) -> PageRow:
        """A page's row; a page whose picture cannot be drawn goes without."""
        why = job.trouble
        tries = [job.document, job.document and dataclasses.replace(job.document, forms=False), None]
        for document in dict.fromkeys(tries):
            try:
                return await self.workers.run(
                    PAGE_LIMIT, make_page, dataclasses.replace(job, document=document, trouble=why)
                )
            except (ocr.OutputError, ocr.BadUsage):
                raise
            except Exception as e:
                why = f"{type(e).__name__}: {ocr.reason(e)}"
        return PageRow(UNFINISHED, f"cannot be shown: {why}", (1000, 1414), False, None, None, "")

    def told(self, place: int, number: int, row: PageRow) -> list[Any]:
        """A row as viewer.js reads it."""
        status = STATUSES.index(row.status) if row.status in STATUSES else len(STATUSES) - 1
        return [place, number, status, row.why, *row.size, int(row.drawn), row.score or 0, row.tests or 0]

    def write_index(self) -> None:
        """The rows in order, those with a score also worst first; the documents; the summary."""
        order = sorted(range(len(self.rows)), key=lambda i: badness(self.rows[i][7], self.by_tests))
        ranks = {i: rank for rank, i in enumerate(order)}
        scored = any(row[7] for row in self.rows)
        rows = [[i, ranks[i] if scored else i, *row] for i, row in enumerate(self.rows)]
        lists = {"rows": rows} | ({"worst": [rows[i] for i in order]} if scored else {})
        for name, items in lists.items():
            self.index.chunks(name, items)
        documents = list(self.documents())
        self.index.chunks("docs", documents)
        self.index.put("run", self.summary(rows, lists, documents, scored))
        self.index.finish()

    def documents(self) -> Iterator[list[Any]]:
        first = 0
        for place, entry in enumerate(self.entries):
            own = self.rows[first : first + len(entry.numbers)]
            counts = [sum(row[2] == status for row in own) for status in range(len(STATUSES))]
            report = entry.folder / (ocr.short_name(entry.folder.name) + ".html")
            link = address(report, self.target) if entry.numbers and report.exists() else ""
            yield [place, entry.id, entry.name, entry.place, first, len(own), counts, entry.error or "", link]
            first += len(own)

    def summary(
        self, rows: Sequence[Sequence[Any]], lists: dict[str, Any], documents: Sequence[Any], scored: bool
    ) -> dict[str, Any]:
        record = ocr.read_json(self.run / "run.json")
        server = record.get("server") or {}
        model = server.get("model") if isinstance(server, dict) else None
        score = record["score"] if isinstance(record.get("score"), dict) else {}
        return {
            "name": run_name(self.run),
            "model": str(model or ""),
            "other": run_name(self.args.compare) if self.args.compare else "",
            "benchmark": str(record.get("benchmark") or ""),
            "headline": score.get("headline") if self.tests else None,
            "finished": record.get("finished", True) is not False,
            "images": not self.args.no_images,
            "statuses": STATUSES,
            "chunk": CHUNK,
            "pages": len(rows),
            "documents": len(documents),
            "unread": sum(entry.error is not None and not entry.numbers for entry in self.entries),
            "scored": ("tests" if self.by_tests else "words") if scored else "",
            # Of each chunk, how many pages have each status, are bad, have tests unlike: filters pass over the others.
            "counts": {
                name: [
                    [sum(row[4] == s for row in items[i : i + CHUNK]) for s in range(len(STATUSES))]
                    + [sum(is_bad(row[9], self.by_tests) for row in items[i : i + CHUNK])]
                    + [sum(bool(row[10]) for row in items[i : i + CHUNK])]
                    for i in range(0, len(items), CHUNK)
                ]
                for name, items in lists.items()
            },
            "segments": self.index.segments,
        }

    def write_files(self) -> None:
        """index.html and what it needs; pages of documents that are gone are removed."""
        known = {entry.id for entry in self.entries}
        for name in list_names(self.target / "pages"):
            if name not in known:
                shutil.rmtree(self.target / "pages" / name, ignore_errors=True)
        for name in ("viewer.css", "viewer.js"):
            save(self.target / name, (ASSETS / name).read_bytes())
        page = (ASSETS / "index.html").read_text("utf-8").replace("NONCE", secrets.token_urlsafe(18))
        save(self.target / "index.html", page.encode())


def run_name(run: Path) -> str:
    """A run as people call it: its folder, for a benchmark's inner one with the run's own."""
    path = run.resolve()
    return ocr.show(Path(path.parent.name, path.name) if path.name == "ocr" else Path(path.name))


def badness(score: Any, tests: bool) -> tuple[float, ...]:
    """Sorts pages worst first: most words that differ, or the smallest share of tests passed; those without last."""
    if not score:
        return (1, 0, 0)
    part, whole = score
    return (0, part / max(1, whole), part - whole) if tests else (0, -part, 0)


def is_bad(score: Any, tests: bool) -> bool:
    return bool(score and (score[0] < score[1] if tests else score[0] > 0))


# ----------------------------------------------------------------------------------------------------------- Command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="view.py", description="Makes a run's folder into pages to look at.")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the output folder of ocr.py, or a run folder of benchmark.py")
    add("--compare", type=Path, metavar="OTHER_RUN", help="show this run's reading of each page beside it")
    add("--data", type=Path, metavar="DIR", help="the benchmark's dataset, or where the sources lie now")
    add("--out", type=Path, metavar="DIR", help="where the pages go (default: RUN/view)")
    add("--no-images", action="store_true", help="draw no pages: boxes lie on blank ones, and it takes little time")
    add("--workers", type=int, metavar="N", help="worker processes (default: one a core)")
    password = parser.add_mutually_exclusive_group()
    password.add_argument("--password", metavar="PW", help="of the PDFs that need one")
    password.add_argument("--password-file", type=Path, metavar="FILE", help="the password is the file's first line")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises BadUsage for folders that are none, and for a number of workers that makes no sense."""
    for name, folder in (("RUN", args.run), ("--compare", args.compare), ("--data", args.data)):
        if folder is not None and not folder.is_dir():
            raise ocr.BadUsage(f"{name} {ocr.show(folder)}: there is no such folder")
    if args.workers is not None and not 1 <= args.workers <= 256:
        raise ocr.BadUsage("--workers: give a number from 1 to 256")
    if args.password_file:
        args.password = ocr.settings_of(
            argparse.Namespace(password=None, password_file=args.password_file, api_key=None, no_images=False)
        ).password
    runs = [folder for folder in (args.run, args.compare) if folder]
    for folder in runs:
        if not (folder / "run.json").exists() and next(document_folders(folder), None) is None:
            raise ocr.BadUsage(f"{ocr.show(folder)} holds no run: give the folder that ocr.py or benchmark.py wrote to")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code, as ocr.py counts them."""
    args = parse(argv)
    try:
        check_arguments(args)
        target = args.out or args.run / "view"
        viewer = Viewer(args.run, target, args)
        asyncio.run(viewer.make())
    except ocr.BadUsage as e:
        print(f"view.py: {e}", file=sys.stderr)
        return ocr.EXIT_USAGE
    except ocr.OutputError as e:
        print(f"view.py: {e}", file=sys.stderr)
        return ocr.EXIT_INCOMPLETE
    except OSError as e:
        print(f"view.py: {ocr.show(Path(e.filename or args.run))}: {ocr.reason(e)}", file=sys.stderr)
        return ocr.EXIT_INCOMPLETE
    except KeyboardInterrupt:
        print("\nview.py: interrupted. Run the same command again to go on where it stopped.", file=sys.stderr)
        return ocr.EXIT_INTERRUPTED
    print(f"{len(viewer.rows)} pages of {len(viewer.entries)} documents: open {ocr.show(target / 'index.html')}")
    return ocr.EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

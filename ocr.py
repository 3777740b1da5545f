"""Documents in, markdown and raw HTML out: a client for Chandra OCR 2 on a vLLM server.

    python ocr.py report.pdf scans/*.png --out ocr_out --url http://localhost:8000/v1

The file reads in the order a page travels:
    Settings     what a run is told, and the plain records that carry pages through it
    Inputs       files, folders and lists -> documents, each with a place of its own in the output folder
    Pages        a PDF page or an image -> the pixels Chandra was trained on -> PNG   (worker processes)
    Asking       one request, its answer, the retry schedule, faults, how many requests at once
    Checking     two pages of known text: whether the server reads at all
    Reading      a raw reply -> blocks -> markdown and clean HTML
    Writing      page files, resuming, the document put together                      (worker processes)
    Searchable   a copy of a document with its text under the pages                   (worker processes)
    CPU engine   RapidOCR behind the same interface as the server
    The run      one asyncio pipeline over the pages of all documents
    Command      arguments, progress, summary, exit codes

As a library: `ocr.run(["report.pdf"], "ocr_out", ocr.Settings(url=...), on_page=print)`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import copy
import dataclasses
import email.utils
import errno
import functools
import hashlib
import html.entities
import importlib.metadata
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import platform
import queue
import random
import re
import signal
import stat
import statistics
import struct
import sys
import threading
import time
import unicodedata
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

# Everything heavy (PDFium, Pillow, lxml, aiohttp, ...) is imported where it is used: the parent process never draws a
# page, a worker never opens a connection, and `--help` answers at once.
if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import aiohttp
    import pypdfium2 as pdfium
    from lxml import etree
    from PIL import Image

__version__ = "0.1.0"

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------------- Settings

DPI = 150  # the model card's
MIN_PDF_SIDE = 1024  # px; a PDF page's short side is drawn at least this long
MIN_IMAGE_SIDE = 1536  # px; an image file's short side is enlarged to this
GRID = 28  # px; both sides of what is sent are multiples of it
MIN_AREA, MAX_AREA = 1792 * 28, 3072 * 2048  # px; what is sent lies between them
MAX_ASPECT = 200  # vLLM's image processor refuses longer strips
MAX_DRAWN = 100_000_000  # px of one drawn PDF page; a larger page is drawn at a lower dpi
MAX_IMAGE = 178_956_970  # px of one image file; Pillow calls more a decompression bomb
MAX_TOKENS = 12_384  # of a reply, as Chandra asks
# The largest page is 6,144 image tokens, the prompt 567 and the chat template 14; with MAX_TOKENS it makes 19,200.
PROMPT_TOKENS = 6_816
RETRIES = 6  # after the greedy attempt
RENDER_LIMIT = 60.0  # s for one page
FORMS_LIMIT = 10.0  # s for PDFium to start a document's forms; some never do
READ_LIMIT = 60.0  # s to read a reply and write its page
WORKER_MEMORY = 4 << 30  # bytes of address space of one worker (Linux)
REOPEN_AFTER = 50  # pages; PDFium keeps all it has read of a document until that is closed
WORKER_TASKS = 1000  # then a fresh process takes its place, so that leaks do not add up
MOST_IN_FLIGHT = 1024
PAGE_FAULTS = 6  # faults of one page while the server answers others
CONNECT_LIMIT = 10.0  # s for a connection to the server
PORT_LOOK = 10.0  # s between looks at the port while replies are waited for
LAST_WORDS = 60.0  # s for the replies of a server whose port has closed
MAX_BODY = 64 << 20  # bytes of a server's answer
BACKOFF = 1.0  # s; the first pause after a fault, doubling to 30 times as long

OK, SUSPECT, FAILED = "ok", "suspect", "failed"


@dataclass(frozen=True)
class Settings:
    """What a run is told. Times are in seconds, sizes in pixels unless said otherwise."""

    url: str = "http://localhost:8000/v1"
    model: str | None = None  # None: the one the server lists
    api_key: str | None = None
    engine: str = "vllm"  # or "cpu": RapidOCR, in this process's children
    dpi: int = DPI
    max_tokens: int = MAX_TOKENS
    retries: int = RETRIES
    loop_stop: bool = False  # vLLM's repetition detector ends a looping reply early
    concurrency: int | None = None  # requests in flight; None: follow the server
    workers: int | None = None  # render processes; None: one a core
    pages: str | None = None  # "1-5,8,12-", of each PDF
    password: str | None = None
    headers_footers: bool = False
    images: bool = True
    math: str = "dollars"  # or "brackets"
    searchable_pdf: bool = False  # a copy of each document with invisible text
    overwrite: bool = False
    retry_suspect: bool = False
    patience: float = 1800.0  # with a server that stopped answering
    timeout: float = 1800.0  # for one reply: nothing is sent before it is whole
    wait: float = 0.0  # for a server that is still starting
    check: bool = True  # two test pages beside the first ones; nothing is written until they are read


class BadUsage(Exception):
    """The run was asked for something that makes no sense; exit code 2."""


class NoServer(Exception):
    """No usable server; exit code 3. `starting`: none yet, so that waiting may help."""

    def __init__(self, message: str, starting: bool = False):
        super().__init__(message)
        self.starting = starting


class OutputError(Exception):
    """The output cannot be written (disk full, no permission): going on would waste replies."""


class DocumentError(Exception):
    """A whole document cannot be read; the message says why and what to do."""


class PageError(Exception):
    """A page can have no reply; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file to read: its path as given or found, and the folder that its place in the output is relative to."""

    source: Path
    root: Path
    searched: bool  # found in a folder: skipped in silence when it is no document


@dataclass(frozen=True, slots=True)
class Document:
    """A file that opened: its kind, its pages and where they go."""

    source: Path
    kind: str  # "pdf" or "image"
    pages: int
    sha256: str
    stamp: tuple[int, int]  # size in bytes, mtime in ns: it must not change while it is read
    password: str | None = None
    forms: bool = True
    notes: tuple[str, ...] = ()
    folder: Path = Path()
    numbers: Sequence[int] = ()  # the pages asked for, from 1

    @property
    def name(self) -> str:
        return short_name(self.folder.name)


@dataclass(frozen=True, slots=True)
class Picture:
    """A page as it is sent: base64 of its PNG, and what is known of the drawing."""

    png: bytes
    size: tuple[int, int]  # as drawn; pixel boxes count in these
    sent: tuple[int, int]
    dpi: float | None  # None for an image file
    ink: float  # share of pixels that stand out from their surroundings
    fingerprint: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reply to a page: the sampling that asked for it, and how it ended."""

    seed: int
    temperature: float
    top_p: float
    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    repeats: bool

    @property
    def cut(self) -> bool:
        return self.finish_reason in ("length", "repetition")

    def record(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "text"}


@dataclass(frozen=True, slots=True)
class PageResult:
    """A page that is on disk."""

    source: Path
    folder: Path
    number: int
    status: str
    reasons: tuple[str, ...] = ()
    error: str | None = None
    attempts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cached: bool = False  # an earlier run's
    reply_hash: str | None = None
    fingerprint: str | None = None


@dataclass
class DocumentResult:
    """A document and its pages so far; `error` when it could not be opened."""

    source: Path
    folder: Path | None = None
    pages: dict[int, PageResult] = field(default_factory=dict)
    error: str | None = None
    notes: tuple[str, ...] = ()

    def count(self, status: str) -> int:
        return sum(page.status == status for page in self.pages.values())


@dataclass
class RunResult:
    """What a run did. `summary` is what run.json holds."""

    documents: list[DocumentResult] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None  # why it ended early
    exit_code: int = 0


# ------------------------------------------------------------------------------------------------------------ Inputs

IMAGE_SUFFIXES = frozenset(
    (
        ".apng .avif .avifs .bmp .blp .bw .cur .dcx .dds .dib .emf .eps .fit .fits .fli .flc .ftc .ftu .gbr .gif .heic "
        ".heif .hif .icns .ico .iim .im .j2c .j2k .jfif .jp2 .jpc .jpe .jpeg .jpf .jpg .jpx .mpo .msp .pbm .pcd .pcx "
        ".pfm .pgm .png .pnm .ppm .psd .pxr .qoi .ras .rgb .rgba .sgi .tga .tif .tiff .webp .wmf .xbm .xpm"
    ).split()
)
# The first bytes of a PDF and of the images people have, for files whose names say nothing or the wrong thing.
SIGNATURES = {
    b"%PDF-": "PDF",
    b"\x89PNG": "PNG image",
    b"\xff\xd8\xff": "JPEG image",
    b"GIF8": "GIF image",
    b"II*\0": "TIFF image",
    b"MM\0*": "TIFF image",
    b"BM": "BMP image",
    b"\0\0\0\x0cjP  ": "JPEG 2000 image",
    b"8BPS": "PSD image",
}


def signature(head: bytes) -> str | None:
    """What a file is, by its first 16 bytes; None for what is no PDF and no image that people commonly have."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP image"
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF image"
    if is_heif(head):
        return "HEIC/HEIF image"
    return next((name for start, name in SIGNATURES.items() if head.startswith(start)), None)


def is_heif(head: bytes) -> bool:
    """Whether the first bytes are a HEIC or HEIF container's (AVIF, its sibling, is Pillow's own)."""
    return head[4:8] == b"ftyp" and (head[8:10] == b"he" or head[8:12] in (b"mif1", b"msf1"))


def parse_pages(text: str) -> list[tuple[int, int | None]]:
    """Reads "1-5,8,12-" into inclusive ranges from 1; None is an open end. Raises BadUsage."""
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})?\s*(-)?\s*([0-9]{1,9})?\s*", part)
        first, dash, last = match.groups() if match else (None, None, None)
        if not match or not (first or (dash and last)) or (last and not dash):
            raise BadUsage(f"--pages: {part.strip()!r} is no page or range; write it like 1-5,8,12-")
        low = int(first or 1)
        high = (int(last) if last else None) if dash else low
        if low < 1 or (high is not None and high < low):
            raise BadUsage(f"--pages: {part.strip()!r} is no range; pages count from 1 and ranges go upwards")
        ranges.append((low, high))
    return ranges


def choose_pages(ranges: Sequence[tuple[int, int | None]], count: int) -> tuple[int, ...]:
    """The page numbers that `ranges` name in a document of `count` pages. Raises DocumentError for one outside."""
    chosen: set[int] = set()
    for low, high in ranges:
        if low > count or (high or 0) > count:
            said = str(low) if low == high else f"{low}-{high or ''}"
            raise DocumentError(f"has {count} page{'s' * (count != 1)}, so --pages {said} is out of range")
        chosen.update(range(low, (high or count) + 1))
    return tuple(sorted(chosen))


def read_list(name: str) -> list[str]:
    """The paths of `@list.txt`, or of standard input for `@-`: one a line, or between NULs. Raises BadUsage."""
    try:
        data = getattr(sys.stdin, "buffer", sys.stdin).read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError) as e:
        raise BadUsage(f"@{name}: the list cannot be read: {reason(e)}") from None
    if isinstance(data, bytes):
        # Windows' editors and shells put a byte order mark first; other bytes are the file system's own.
        wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        data = data.decode("utf-16" if wide else "utf-8-sig", "replace" if wide else "surrogateescape")
    if "\0" in data:  # find -print0: names may hold line ends
        return [path for path in data.split("\0") if path]
    return [path for line in data.split("\n") if (path := line.rstrip("\r"))]


def expand_lists(inputs: Iterable[str | Path]) -> list[str | Path]:
    """The inputs, each `@list` replaced by its paths unless a file of that very name exists. Raises BadUsage."""
    paths: list[str | Path] = []
    for item in inputs:
        text = str(item)
        paths += read_list(text[1:]) if text.startswith("@") and not os.path.lexists(text) else [item]
    return paths


def find_inputs(inputs: Iterable[str | Path], out: Path) -> Iterator[Found | tuple[Path, str]]:
    """The files of `inputs` in order, folders searched; (path, error) for what cannot be read."""
    for item in inputs:
        path = Path(item)
        try:
            if not str(item):
                raise FileNotFoundError
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode) and is_same_folder(path, out):
                yield path, "this is the output folder; give --out a folder of its own"
            elif stat.S_ISDIR(mode):
                yield from search(path, out)
            elif stat.S_ISREG(mode):
                yield Found(path, path.parent, searched=False)
            else:
                yield path, "is no regular file (a pipe or a device); save what it gives to a file first"
        except (OSError, ValueError) as e:
            yield path, why_absent(path, e)


def pour(found: Iterator[T], items: queue.Queue[T | Exception | None], enough: threading.Event) -> None:
    """Puts what is found into a queue, then None; an exception when it raises one. Ends early at `enough`."""

    def put(item: T | Exception | None) -> None:
        while not enough.is_set():
            with contextlib.suppress(queue.Full):
                items.put(item, timeout=0.2)
                return

    try:
        for item in found:
            put(item)
            if enough.is_set():
                break
    except Exception as e:
        put(e)
    put(None)
    with contextlib.suppress(queue.Full):
        items.put_nowait(None)  # for one who still waits after `enough`


def why_absent(path: Path, error: Exception) -> str:
    """Why a path leads to no file, for a person."""
    if isinstance(error, FileNotFoundError) and (path == Path() or not os.path.lexists(path)):
        return "there is no such file or folder"
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ELOOP:
        return "is a link that leads nowhere"
    return f"cannot be read: {reason(error)}"


def is_same_folder(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def search(root: Path, out: Path) -> Iterator[Found | tuple[Path, str]]:
    """The documents below a folder, by name. Links to folders are followed once each; outputs of runs are left out."""
    seen: set[tuple[int, int]] = set()
    # Not by recursion: folders may lie deeper in each other than Python's calls may.
    waiting: list[Path] = [root]
    while waiting:
        path = waiting.pop()
        try:
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                if stat.S_ISREG(status.st_mode) and looks_like_document(path):
                    yield Found(path, root, searched=True)
                continue
            # Where inode numbers are 0 (some Windows file systems) the real path tells folders apart.
            identity = (status.st_dev, status.st_ino or hash(path.resolve()))
            if identity in seen or is_same_folder(path, out) or (path != root and is_output(path)):
                continue
            seen.add(identity)
            names = sorted((name for name in os.listdir(path) if not name.startswith(".")), reverse=True)
            waiting += [path / name for name in names]
        except OSError as e:
            # Links that lead nowhere are common among things that are no documents.
            if e.errno not in (errno.ENOENT, errno.ELOOP) or looks_like_document(path):
                yield path, why_absent(path, e)


def is_output(folder: Path) -> bool:
    """Whether a folder is some run's output: its figures are no documents."""
    return {"ocr", "documents"} <= read_json(folder / "run.json").keys()


def looks_like_document(path: Path) -> bool:
    """Whether a file of a searched folder is worth opening: by its name, or by its first bytes."""
    if path.suffix.lower() == ".pdf" or path.suffix.lower() in IMAGE_SUFFIXES:
        return True
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError:
        return False
    return signature(head) is not None


def reason(error: BaseException) -> str:
    """What an exception says, in one short line without images' bytes."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return clip(said)


def clip(text: str, limit: int = 500) -> str:
    """One line of at most `limit` characters; base64 left out, as servers echo whole images in their errors."""
    text = re.sub(r"[A-Za-z0-9+/=]{100,}", "...", text)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show(path: Path) -> str:
    """A path as a person can read it on one line, whatever bytes its name holds."""
    text = str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])( *\..*)?", re.IGNORECASE)


def safe_part(part: str) -> str:
    """A file name made of `part` that every file system takes: no separators, control or direction marks, 150 bytes."""
    part = part.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    clean = "".join(
        "_" if c in '<>:"/\\|?*' or unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in part
    )
    clean = clean.lstrip(" ").rstrip(". ") or "_"
    return short_name("_" + clean if WINDOWS_DEVICES.fullmatch(clean) else clean)


def short_name(name: str, limit: int = 150) -> str:
    """`name`, or as much of it as fits `limit` bytes with a hash of the rest."""
    data = name.encode()
    if len(data) <= limit:
        return name
    return data[: limit - 9].decode("utf-8", "ignore") + "-" + hashlib.sha256(data).hexdigest()[:8]


# Names that a document's own folder holds: a document nested in it must not take them.
RESERVED = re.compile(r"(pages|images|view|.*\.(md|html|json|part|searchable\.pdf))", re.IGNORECASE)
DEEPEST = 600  # bytes of the folders above a document; more are put into one name, for a path has a limit


def free_part(part: str) -> str:
    """A safe name that is none of those a document's own folder holds."""
    part = safe_part(part)
    return part + "_" if RESERVED.fullmatch(part) else part


def places(found: Found) -> Iterator[str]:
    """Where a document may go, best first: its path below the root, with its extension, its root's name, a number."""
    relative = [free_part(part) for part in found.source.relative_to(found.root).parts[:-1]]
    if len("/".join(relative).encode()) > DEEPEST:
        relative = [short_name("_".join(relative))]
    stem, full = free_part(found.source.stem), free_part(found.source.name)
    if stem == safe_part(found.source.stem):
        yield "/".join([*relative, stem])
    yield "/".join([*relative, full])
    parents = [free_part(part) for part in Path(os.path.abspath(found.root)).parts[1:]]
    for depth in range(1, min(len(parents), 8) + 1):
        yield "/".join([*parents[-depth:], *relative, stem])
        yield "/".join([*parents[-depth:], *relative, full])
    for number in itertools.count(2):
        yield f"{full}-{number}"


class Places:
    """Gives each document a folder that no other document has, in this run or an earlier one into the same output."""

    def __init__(self, out: Path):
        self.out = out
        self.taken: set[str] = set()  # as a file system compares names that is blind to case and Unicode form
        self.sources: set[str] = set()
        self.earlier: dict[Path, dict[str, set[str]]] = {}

    def claim(self, found: Found) -> Path | None:
        """The document's folder; None when the same file was given before. Writes nothing."""
        source = self.identity(found.source)
        if source in self.sources:
            return None
        self.sources.add(source)
        likely = list(itertools.islice(places(found), 18))
        # First where an earlier run put it, whatever was given beside it then.
        before = (place for place in likely if self.owner(place) == source)
        for place in itertools.chain(before, (place for place in places(found) if self.is_free(place))):
            if folded(place) not in self.taken:
                self.taken.add(folded(place))
                return self.out / place
        raise AssertionError("places() never ends")

    def identity(self, source: Path) -> str:
        """The source's path relative to the output folder, so that both can be moved together."""
        path = os.path.join(os.path.realpath(source.parent), source.name)
        with contextlib.suppress(ValueError):  # on another drive
            path = os.path.relpath(path, os.path.realpath(self.out))
        return path.replace(os.sep, "/").encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    def owner(self, place: str) -> str | None:
        """The source of the document that an earlier run put at `place`."""
        return read_json(self.out / place / "source.json").get("source")

    def is_free(self, place: str) -> bool:
        """Whether a new document may go to `place`: no other lies there, nor anything of a person's own."""
        folder = self.out
        for part in place.split("/"):
            twins = self.names_in(folder).get(folded(part), set()) - {part}
            folder = folder / part
            # "Report" beside "report" is one folder once they are copied to a Mac.
            if twins and (folder == self.out / place or not os.path.lexists(folder)):
                return False
            if os.path.lexists(folder) and not os.path.isdir(folder):
                return False
        # Without these it is a folder above other documents, if it is there at all.
        name = short_name(folder.name)
        files = (name + ".md", name + ".html", name + ".json", "pages", "images", "source.json")
        return not any(os.path.lexists(folder / file) for file in files)

    def names_in(self, folder: Path) -> dict[str, set[str]]:
        """The names in a folder of the output before this run, by what a blind file system sees."""
        if folder not in self.earlier:
            self.earlier[folder] = {}
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    self.earlier[folder].setdefault(folded(name), set()).add(name)
        return self.earlier[folder]


def folded(name: str) -> str:
    """A name as a file system sees it that is blind to case and to Unicode's forms."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk; {} when it is absent, half written or something else."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


# ------------------------------------------------------------------------------------------------------------- Pages


class Survey(NamedTuple):
    """What a first look at a file tells."""

    kind: str  # "pdf" or "image"
    pages: int
    sha256: str
    stamp: tuple[int, int]
    has_forms: bool
    notes: tuple[str, ...]


def survey(source: Path, password: str | None) -> Survey:
    """Opens a file: what it is (by its bytes), how many pages. Raises DocumentError."""
    try:
        stamp, sha256 = file_stamp(source), ""
        with open(source, "rb") as file:
            head = file.read(1024)
            if not head:
                raise DocumentError("the file is empty")
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise DocumentError(f"cannot be read: {reason(e)}") from None
    # An image may hold a PDF's mark in its metadata; a PDF may have junk before it.
    if b"%PDF-" in head and signature(head) in (None, "PDF"):
        with contextlib.closing(open_pdf(source, password)) as pdf:
            pages, notes = count_pages(pdf)
            form = pdf.get_formtype()
        if form in (2, 3):
            notes += ("an XFA form: only what its PDF pages hold can be drawn",)
        return Survey("pdf", pages, sha256, stamp, form != 0, notes)
    try:
        frames, notes = survey_image(source)
    except OSError as e:
        raise DocumentError(f"cannot be read: {reason(e)}") from None
    return Survey("image", frames, sha256, stamp, False, notes)


MANY_PAGES = 100  # from here on a PDF's page count is not believed without its last page


def count_pages(pdf: pdfium.PdfDocument) -> tuple[int, tuple[str, ...]]:
    """The pages of a PDF, and a note when it claims far more than can be loaded; the first of those stands for all."""
    import pypdfium2 as pdfium

    claimed = len(pdf)

    def loads(index: int) -> bool:
        try:
            pdf[index].close()
        except pdfium.PdfiumError:
            return False
        return True

    if claimed < MANY_PAGES or loads(claimed - 1):
        return claimed, ()
    good, bad = -1, claimed - 1  # the last page known to load, and one after it that does not
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if loads(middle) else (good, middle)
    if any(loads(bad + (claimed - bad) * part // 64) for part in range(1, 64)):
        return claimed, ()  # damaged here and there
    return bad + 1, (f"the PDF claims {claimed} pages and none after page {bad} can be loaded",)


def file_stamp(source: Path) -> tuple[int, int]:
    status = source.stat()
    return status.st_size, status.st_mtime_ns


def open_pdf(source: Path, password: str | None) -> pdfium.PdfDocument:
    """A PDF opened by PDFium. Raises DocumentError with what is really wrong."""
    import pypdfium2 as pdfium
    from pypdfium2 import raw

    try:
        return pdfium.PdfDocument(source, password=password)
    except pdfium.PdfiumError:
        # A PDF without pages opens, and the error that PDFium then tells is an earlier file's: ask once more.
        secret = None if password is None else password.encode() + b"\0"
        handle = raw.FPDF_LoadDocument(str(source).encode("utf-8", "surrogateescape") + b"\0", secret)
        if handle:
            raw.FPDF_CloseDocument(handle)
            raise DocumentError(
                "the PDF has no pages: it is empty, or its page tree is damaged; try to repair it (qpdf, mutool clean)"
            ) from None
        code = raw.FPDF_GetLastError()
        if code == 4:
            need = (
                "needs a password: give it with --password" if password is None else "does not open with this password"
            )
            raise DocumentError(f"the PDF {need}") from None
        if code == 5:
            raise DocumentError(
                "the PDF is encrypted in a way PDFium does not know; decrypt it first (qpdf --decrypt)"
            ) from None
        raise DocumentError(
            "the PDF is damaged or cut off, PDFium finds no pages in it; try to repair it (qpdf, mutool clean)"
        ) from None


@functools.cache
def pillow() -> Any:
    """Pillow's Image module, ready for hostile files: its own limit on sizes is MAX_IMAGE, for pictures in pictures."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = MAX_IMAGE // 2  # Pillow warns here and refuses at twice as many
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return Image


# Formats that Pillow knows and cannot decode itself: with an outside program (Ghostscript!), on Windows, or not at all.
UNDECODED = frozenset(("EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG"))


@functools.cache
def image_formats() -> tuple[str, ...]:
    image_module = pillow()
    image_module.init()
    return tuple(name for name in image_module.ID if name not in UNDECODED)


def open_image(source: Path) -> Image.Image:
    """An image file opened, not decoded. Raises DocumentError."""
    try:
        return pillow().open(source, formats=image_formats())
    except Exception as e:  # Pillow's plugins raise whatever the file makes them raise
        with open(source, "rb") as file:
            head = file.read(64)
        if is_heif(head) and "HEIF" not in image_formats():
            raise DocumentError(
                "a HEIC/HEIF image: install the package that reads it, pip install pillow-heif"
            ) from None
        if isinstance(e, MemoryError) or type(e).__name__ == "DecompressionBombError":
            raise DocumentError(image_fault(e)) from None
        raise DocumentError(what_it_is(head)) from None


# What people take for a document or an image by mistake: its first bytes, what it is, and what to do with it.
FOREIGN = (
    (b"%!ps", "a PostScript file, which is a program to run; convert it to PDF (ps2pdf, Distiller)"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file, which is a program to run; convert it to PDF (ps2pdf, Distiller)"),
    (b"\xd7\xcd\xc6\x9a", "a Windows metafile, which only Windows draws; save it as PDF or PNG"),
    (b"<!doctype html", "a web page, not a PDF or image (a download that failed?)"),
    (b"<html", "a web page, not a PDF or image (a download that failed?)"),
    (b"<svg", "an SVG drawing; save it as PDF or PNG"),
    (b"<?xml", "an XML file, not a PDF or image; if it is a drawing, save it as PDF or PNG"),
    (b"at&tform", "a DjVu document; convert it to PDF (ddjvu -format=pdf)"),
    (b"\0\0\0\x0cjxl ", "a JPEG XL image, which Pillow does not decode; save it as PNG"),
    (b"\xff\x0a", "a JPEG XL image, which Pillow does not decode; save it as PNG"),
    (b"pk\3\4", "a ZIP archive or an Office document; unpack it, or save it as PDF"),
    (b"\xd0\xcf\x11\xe0", "an old Office document; save it as PDF"),
    (b"{\\rtf", "a text document (RTF); save it as PDF"),
    (b"\x1f\x8b", "a file compressed with gzip; unpack it"),
    (b"\0\0\1\xb3", "a film (MPEG), not a PDF or image"),
    (b"grib", "weather data (GRIB), not a PDF or image"),
    (b"bufr", "weather data (BUFR), not a PDF or image"),
    (b"\x89hdf", "a data file (HDF5), not a PDF or image"),
)


def what_it_is(head: bytes) -> str:
    """What to say of a file that is not read, by its first 64 bytes."""
    if head[40:44] == b" EMF":
        head = b"\xd7\xcd\xc6\x9a"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    for signs, said in FOREIGN:
        if start.startswith(signs):
            return said
    if kind := signature(head):
        return f"a damaged {kind}: its header cannot be read; make or download it again"
    if not head.strip(b"\0"):
        return "the file holds zeros where a document begins; copy or download it again"
    return f"no PDF, and no image that Pillow can read: its first bytes are {head[:8]!r}"


def image_fault(error: Exception) -> str:
    """What to say of an image that does not decode: what is wrong, then Pillow's own words for those they help."""
    if isinstance(error, MemoryError):
        return "the image needs more memory than a worker may use; scale it down"
    said = reason(error)
    if type(error).__name__ == "DecompressionBombError":
        claimed = int((re.findall(r"\d+", said) or ["0"])[0]) // 1_000_000
        return f"the image claims {claimed} megapixels, and {MAX_IMAGE // 1_000_000} are decoded at most; scale it down"
    if " " not in said:
        said = f"{type(error).__name__} {said}"
    return f"the image cannot be decoded: the file is damaged or cut off ({said})"


def importable(name: str) -> bool:
    try:
        importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def survey_image(source: Path) -> tuple[int, tuple[str, ...]]:
    """The pages of an image file (every frame of a TIFF, the first of anything else) and what to say of them."""
    with open_image(source) as image:
        check_image_size(image.size)
        frames = count_frames(image)
        if image.format in PAGED:
            return frames, ()
        return 1, (f"the first of its {frames} frames is read",) if frames > 1 else ()


PAGED = ("TIFF", "DCX")  # formats whose frames are pages, not a film's or other sizes


def count_frames(image: Image.Image) -> int:
    """The frames of an image file; where they end in a damaged one, that one counts, and fails when it is read."""
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:  # Pillow's plugins raise whatever the file makes them raise
        if image.format not in PAGED:
            return 1
    for frame in itertools.count(1):
        try:
            image.seek(frame)
        except EOFError:
            return frame
        except Exception:
            return frame + 1
    raise AssertionError("every file ends")


def check_image_size(size: tuple[int, int]) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise DocumentError("the image has no pixels")
    if width * height > MAX_IMAGE:
        raise DocumentError(
            f"the image claims {width} x {height} px, and {MAX_IMAGE // 1_000_000} megapixels are decoded at most; "
            "scale it down"
        )


# A worker keeps its last documents open: their pages come in turn, and fonts and tables are read once.
OPEN_PDFS: collections.OrderedDict[tuple[Any, ...], pdfium.PdfDocument] = collections.OrderedDict()
OPENED_FOR: collections.Counter[tuple[Any, ...]] = collections.Counter()  # pages asked of each open document


def opened_pdf(document: Document) -> pdfium.PdfDocument:
    key = (document.source, document.stamp, document.password, document.forms)
    if OPENED_FOR[key] >= REOPEN_AFTER or (key not in OPEN_PDFS and len(OPEN_PDFS) >= 2):
        close_pdf(key if key in OPEN_PDFS else next(iter(OPEN_PDFS)))
    if key not in OPEN_PDFS:
        pdf = open_pdf(document.source, document.password)
        if document.forms:
            pdf.init_forms()
        OPEN_PDFS[key] = pdf
    OPENED_FOR[key] += 1
    OPEN_PDFS.move_to_end(key)
    return OPEN_PDFS[key]


def close_pdf(key: tuple[Any, ...]) -> None:
    OPEN_PDFS.pop(key).close()
    del OPENED_FOR[key]


def start_forms(document: Document) -> None:
    """Opens a PDF with its forms, in a worker that is ended when PDFium never comes back from it.

    PDFium sorts the form's fields when the first page is loaded: that is where some documents hold it for ever.
    """
    opened_pdf(document)[document.numbers[0] - 1].close()


class Loaded(NamedTuple):
    """A page's RGB pixels as Chandra loads them, before they are scaled."""

    image: Image.Image
    dpi: float | None
    notes: tuple[str, ...]


def load_page(document: Document, number: int, dpi: int) -> Loaded:
    """One page of a document, drawn or decoded. Raises PageError."""
    try:
        if file_stamp(document.source) != document.stamp:
            raise PageError("the file changed during the run; run again when it is whole")
        if document.kind == "pdf":
            return draw_page(document, number - 1, dpi)
        return load_image(document.source, number - 1)
    except DocumentError as e:
        raise PageError(str(e)) from None
    except MemoryError:
        raise PageError("the page needs more memory than a worker may use") from None
    except OSError as e:
        raise PageError(f"the file cannot be read any more: {reason(e)}") from None


def draw_page(document: Document, index: int, dpi: int) -> Loaded:
    """A PDF page drawn as Chandra draws it: forms and annotations flattened into it, at `dpi` or more."""
    import pypdfium2 as pdfium
    from pypdfium2 import raw

    pdf = opened_pdf(document)
    notes: tuple[str, ...] = ()
    try:
        page = pdf[index]
    except pdfium.PdfiumError:
        raise PageError("PDFium cannot load this page; the PDF is damaged there") from None
    try:
        width, height = page.get_size()
        scale, notes = drawing_scale(width, height, dpi)
        # A page that was flattened shows it only when it is loaded again.
        if raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY) != raw.FLATTEN_NOTHINGTODO:
            page.close()
            page = pdf[index]
        try:
            # PDFium writes RGB in the order Pillow wants it: no conversion of the whole page after.
            bitmap = page.render(scale=scale, rev_byteorder=True)
        except (pdfium.PdfiumError, ValueError) as e:
            raise PageError(f"PDFium cannot draw this page: {reason(e)}") from None
        image = bitmap.to_pil()
        bitmap.close()
        if is_xfa_placeholder(pdf, page):
            notes += (XFA_PLACEHOLDER,)
        elif not raw.FPDFPage_CountObjects(page) and needs_rendering(document.source, document.password):
            notes += (NEEDS_RENDERING,)
    except pdfium.PdfiumError:
        raise PageError("PDFium cannot load this page; the PDF is damaged there") from None
    finally:
        page.close()
    return Loaded(image if image.mode == "RGB" else image.convert("RGB"), scale * 72, notes)


def drawing_scale(width: float, height: float, dpi: int) -> tuple[float, tuple[str, ...]]:
    """Pixels a point for a page of this size in points, and a note when that is less than asked. Raises PageError."""
    if not (width > 0 and height > 0 and 0 < width * height < math.inf):
        raise PageError("the page has no area: its boxes do not overlap or are empty")
    check_aspect(width, height)
    scale = max(MIN_PDF_SIDE / min(width, height) * 72, dpi) / 72
    if math.ceil(width * scale) * math.ceil(height * scale) <= MAX_DRAWN:
        return scale, ()
    lower = math.sqrt(MAX_DRAWN / (width * height)) * 0.9999
    return lower, (
        f"drawn at {lower * 72:.0f} dpi, not {scale * 72:.0f}: the page measures {width:.0f} x {height:.0f} pt",
    )


def check_aspect(width: float, height: float) -> None:
    """Raises PageError for a strip that the server refuses."""
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PageError(
            f"the page is {max(width, height) / min(width, height):.0f} times as long as wide ({width:.0f} x "
            f"{height:.0f}) and the model takes {MAX_ASPECT} times at most; cut it into shorter pages"
        )


XFA_PLACEHOLDER = "an XFA form of which only the placeholder page can be drawn; print it to PDF in Adobe Reader first"


NEEDS_RENDERING = (
    "a dynamic form whose page is drawn only by Adobe Reader, and is empty here; print it to PDF there first"
)
FORM_NOTES = (XFA_PLACEHOLDER, NEEDS_RENDERING)  # the page that a person sees was not read


@functools.lru_cache(maxsize=8)
def needs_rendering(source: Path, password: str | None) -> bool:
    """Whether a PDF says that its pages are made when it is opened: a dynamic form. Asked of empty pages."""
    import pikepdf

    try:
        with pikepdf.open(source, password=password or "") as pdf:
            return bool(pdf.Root.get("/NeedsRendering", False))
    except Exception:  # whatever a damaged file makes qpdf raise: PDFium has opened it, and its page is empty
        return False


def is_xfa_placeholder(pdf: pdfium.PdfDocument, page: pdfium.PdfPage) -> bool:
    """Whether a page is the "Please wait..." that XFA forms show in readers without XFA."""
    import pypdfium2 as pdfium

    if pdf.get_formtype() not in (2, 3):
        return False
    try:
        with contextlib.closing(page.get_textpage()) as words:
            text = words.get_text_range(0, 400).lower()
    except pdfium.PdfiumError:
        return False
    return "please wait" in text or ("adobe reader" in text and "upgrade" in text)


def load_image(source: Path, frame: int) -> Loaded:
    """An image file's frame as RGB, the right way up, enlarged as Chandra enlarges it. Raises PageError."""
    image_module = pillow()
    with open_image(source) as opened:
        try:
            if frame:
                opened.seek(frame)
            check_image_size(opened.size)
            check_aspect(*opened.size)
            opened.load()
            image = to_rgb(turn_upright(opened))
        except (DocumentError, PageError):
            raise
        except Exception as e:  # Pillow's plugins raise whatever the file makes them raise
            raise PageError(image_fault(e)) from None
    width, height = image.size
    notes: tuple[str, ...] = ()
    if min(width, height) < MIN_IMAGE_SIDE:
        scale = MIN_IMAGE_SIDE / min(width, height)
        if width * height * scale * scale > MAX_DRAWN:
            scale = max(1.0, math.sqrt(MAX_DRAWN / (width * height)))
            notes = (f"enlarged {scale:.1f} times only: the image measures {width} x {height} px",)
        image = image.resize((int(width * scale), int(height * scale)), image_module.Resampling.LANCZOS)
    return Loaded(image, None, notes)


def turn_upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF says; as it is when the EXIF is damaged, for that harms no pixel."""
    from PIL.Image import Transpose as Turn

    turns: list[Turn | None] = [None, None, Turn.FLIP_LEFT_RIGHT, Turn.ROTATE_180, Turn.FLIP_TOP_BOTTOM]
    turns += [Turn.TRANSPOSE, Turn.ROTATE_270, Turn.TRANSVERSE, Turn.ROTATE_90]
    orientation: Any = None
    with contextlib.suppress(Exception):
        orientation = image.getexif().get(0x0112)
    turn = turns[orientation] if isinstance(orientation, int) and 0 <= orientation < len(turns) else None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any of Pillow's modes as RGB: what is transparent on white, deep greys by the range they use."""
    image_module = pillow()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        if image.mode not in ("I", "F", "I;16"):
            image = image.convert("I")  # big-endian, of which Pillow can do little else
        low, high = (float(value) for value in image.getextrema())  # type: ignore[arg-type]
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("the image holds infinite values")
        scale = 255 / (high - low) if high > low else 0.0
        flat = 0 if high > low else 255  # one grey all over is paper
        deep = image.convert("F") if image.mode != "F" else image
        return deep.point(lambda v: v * scale + (flat - low * scale)).convert("L").convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        straight = image if image.mode == "RGBA" else image.convert("RGBA")
        paper = image_module.new("RGBA", straight.size, "white")
        return image_module.alpha_composite(paper, straight).convert("RGB")
    return image.convert("RGB")


def sent_size(width: int, height: int) -> tuple[int, int]:
    """The size in pixels that Chandra scales a page to: whole blocks of GRID, area within its bounds."""
    scale = 1.0
    if width * height > MAX_AREA:
        scale = (MAX_AREA / (width * height)) ** 0.5
    elif width * height < MIN_AREA:
        scale = (MIN_AREA / (width * height)) ** 0.5
    across, down = max(1, round(width * scale / GRID)), max(1, round(height * scale / GRID))
    aspect = width / height
    while across * down * GRID * GRID > MAX_AREA and across * down > 1:
        # The side whose loss keeps the aspect ratio better loses a block.
        if down == 1 or (across > 1 and abs((across - 1) / down - aspect) < abs(across / (down - 1) - aspect)):
            across -= 1
        else:
            down -= 1
    return across * GRID, down * GRID


def scale_page(image: Image.Image, small: Image.Image) -> Image.Image:
    """An RGB page at the size it is sent in; as one grey channel when it has no colour. `small`: the page reduced.

    Channels that are equal, as on most pages of print, are scaled once: the pixels are the same for a third or two
    thirds of the work. The reduced page tells at once which cannot be equal.
    """
    from PIL import ImageChops

    def equal(one: int, other: int) -> bool:
        pages = ((near[one], near[other]), (full[one], full[other]))
        return not any(ImageChops.difference(*pair).getbbox() for pair in pages)

    image_module, size = pillow(), sent_size(*image.size)
    full, near = image.split(), small.split()
    like = [0, 0 if equal(0, 1) else 1, 2]  # the first channel that each one equals
    like[2] = next((channel for channel in sorted({*like[:2]}) if equal(channel, 2)), 2)
    if like == [0, 1, 2]:
        return image if image.size == size else image.resize(size, image_module.Resampling.LANCZOS)
    scaled = {channel: full[channel].resize(size, image_module.Resampling.LANCZOS) for channel in set(like)}
    return scaled[0] if len(scaled) == 1 else image_module.merge("RGB", [scaled[channel] for channel in like])


def encode_png(image: Image.Image) -> bytes:
    """An RGB or grey image as PNG: no filter and ISA-L's fast deflate, a twentieth of the time of Pillow's own."""
    from isal import isal_zlib

    width, height = image.size
    channels, colour_type = (3, 2) if image.mode == "RGB" else (1, 0)
    # Pillow pads every row to the stride with a zero, which is the next row's filter byte ("none") one place early.
    rows = b"\0" + image.tobytes("raw", image.mode, channels * width + 1, 1)[:-1]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", isal_zlib.crc32(data, zlib.crc32(kind)))

    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    data = isal_zlib.compress(rows, 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


INK = 0.0001  # share of pixels: less is dust, or a page with nothing on it


def ink_share(small: Image.Image) -> float:
    """The share of a reduced page's pixels that stand out from what surrounds them: letters do, shadows do not."""
    from PIL import ImageChops, ImageFilter

    grey = small.convert("L")
    contrast = ImageChops.difference(grey, grey.filter(ImageFilter.BoxBlur(8)))
    return float(sum(contrast.histogram()[40:]) / (grey.width * grey.height))


def picture_of(document: Document, number: int, dpi: int) -> Picture:
    """A page ready to be sent. Raises PageError."""
    loaded = load_page(document, number, dpi)
    size = sent_size(*loaded.image.size)
    check_aspect(*size)
    small = loaded.image.reduce(4)
    png = encode_png(scale_page(loaded.image, small))
    # The checksum of the pixels as they were deflated tells pages apart; it is there already.
    fingerprint = f"{png[-16:-12].hex()}-{len(png)}"
    return Picture(
        base64.b64encode(png), loaded.image.size, size, loaded.dpi, ink_share(small), fingerprint, loaded.notes
    )


def start_worker(memory: int | None = WORKER_MEMORY) -> None:
    """Runs first in a worker: a limit on its memory, and no connections or commands of its own.

    The hook stops Python code only; a document that takes over PDFium is for the container to hold (see the README).
    """
    keep_freed_memory()
    if memory and sys.platform == "linux":
        import resource

        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    logging.disable(logging.CRITICAL)  # pypdfium2 and Pillow warn about files that are reported here already
    import warnings

    warnings.simplefilter("ignore")
    sys.addaudithook(refuse_network)


def keep_freed_memory() -> None:
    """Makes glibc hold on to freed pages of memory: a fifth of a page's time went into getting fresh ones zeroed."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, bytes: smaller blocks come from the heap
            mallopt(-1, 128 << 20)  # M_TRIM_THRESHOLD, bytes: that much stays at its top


def refuse_network(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        raise PermissionError(f"a render worker may not call {event}")


# ------------------------------------------------------------------------------------------------------------ Asking


@functools.cache
def prompt() -> str:
    """Chandra's layout prompt, to the letter: the model was trained on it."""
    from chandra.prompts import OCR_LAYOUT_PROMPT

    return str(OCR_LAYOUT_PROMPT)


class Sampling(NamedTuple):
    """How one attempt is sampled."""

    temperature: float
    top_p: float
    seed: int


def sampling(attempt: int) -> Sampling:
    """Chandra's schedule: greedy first, then warmer; the seed is the attempt's number, so a rerun asks the same."""
    if attempt == 0:
        return Sampling(0.0, 0.1, 0)
    return Sampling(min(round(0.2 * attempt, 1), 0.8), 0.95, attempt)


@functools.lru_cache(maxsize=64)
def request_frame(model: str, max_tokens: int, sampled: Sampling, loop_stop: bool) -> tuple[bytes, bytes]:
    """The JSON body of a request, in two parts with the image's base64 between them: it is never parsed or copied.

    Only fields that every server takes, no nulls: vLLM, mlx_vlm.server and llama.cpp refuse or ignore different ones.
    """
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": prompt()}]}],
        "max_tokens": max_tokens,
        "temperature": sampled.temperature,
        "top_p": sampled.top_p,
        "seed": sampled.seed,
    }
    if loop_stop:
        body["repetition_detection"] = {"max_pattern_size": 64, "min_pattern_size": 1, "min_count": 64}
    head, tail = json.dumps(body).encode().split(b"base64,@", 1)
    return head + b"base64,", tail


def repeats_at_end(text: str, cut: int = 0) -> bool:
    """Chandra's rule: for an n up to 250, the last n characters stand there over int(4 (1 + 3 / n)) times in a row."""
    text = text[:-cut] if cut else text
    for n in range(1, min(250, len(text)) + 1):
        times = int(4 * (1 + 3 / n)) + 1
        # The cheap half of the test first: hardly any n gets past it.
        if text[-2 * n : -n] == text[-n:] and text[-n * times :] == text[-n:] * times:
            return True
    return False


def repeats(text: str) -> bool:
    """Whether a reply is asked for again as it loops: the rule, for all of it and without its last 50 characters."""
    return repeats_at_end(text) or (len(text) > 50 and repeats_at_end(text, cut=50))


def repeated_tail(text: str) -> tuple[int, str]:
    """Where the loop at a text's end begins, and what is repeated; (len(text), "") without one."""
    best = (len(text), "")
    for cut in (0, 50):
        body = text[: len(text) - cut] if len(text) > cut else ""
        for n in range(1, min(250, len(body)) + 1):
            if body[-2 * n : -n] != body[-n:]:
                continue
            unit, start = body[-n:], len(body) - n
            while start >= n and body[start - n : start] == unit:
                start -= n
            if (len(body) - start) // n > int(4 * (1 + 3 / n)):
                best = min(best, (start, unit))
                break
    return best


TAGS = re.compile(r"<[^<>]*>")


def says_nothing(unit: str) -> bool:
    """Whether a repeated unit holds no letter or digit: a form's blank rows, a contents page's dot leaders."""
    # The unit may begin or end inside a tag, so what is left of a torn tag goes too.
    text = TAGS.sub("", re.sub(r"^[^<>]*>", "", re.sub(r"<[^<>]*$", "", unit)))
    return not any(c.isalnum() for c in text)


def confirmed(first: Attempt, second: Attempt) -> bool:
    """Whether the first retry says what the greedy reply said, whole, and only blank cells or leaders repeat in it."""
    if first.cut or second.cut or not (first.repeats and second.repeats):
        return False
    words = re.findall(r"\w+", TAGS.sub(" ", first.text))
    return words == re.findall(r"\w+", TAGS.sub(" ", second.text)) and all(
        says_nothing(repeated_tail(attempt.text)[1]) for attempt in (first, second)
    )


def settled(attempts: Sequence[Attempt], retries: int) -> bool:
    """Whether a page needs no further attempt."""
    last = attempts[-1]
    if not (last.cut or last.repeats) or len(attempts) > retries:
        return True
    return len(attempts) == 2 and confirmed(*attempts)


def best_attempt(attempts: Sequence[Attempt]) -> int:
    """Which attempt to keep: whole before cut off, not repeating before repeating, then the longer before its loop."""

    def merit(index: int) -> tuple[bool, bool, int, int]:
        attempt = attempts[index]
        return not attempt.cut, not attempt.repeats, repeated_tail(attempt.text)[0], -index

    return max(range(len(attempts)), key=merit)


def least_loop(unit: str) -> float:
    """How many characters a repeated unit must fill to be a loop."""
    letters = sum(c.isalnum() for c in TAGS.sub("", unit))
    return math.inf if says_nothing(unit) else 200 if letters > 3 else 1000


LOOP_TOKENS = re.compile(r"<[^<>]*>|\w{1,16}|[^\w\s]")


def looping_share(text: str) -> float:
    """The share of a reply's characters that lie in loops, wherever they are and however long the repeated unit.

    A loop says the same tokens at least four times in a row over 200 characters, letters or digits among them; over
    1,000 where it says one or two ("0", "no") as cells of a table do.
    """
    tokens = LOOP_TOKENS.findall(text)
    seen: dict[int, dict[tuple[str, ...], int]] = {4: {}, 32: {}}  # where so many tokens stood last
    compared: dict[int, int] = {}  # how far a distance between equal tokens has been followed
    loops = done = 0
    for i in range(len(tokens)):
        for width, places in seen.items():
            if i + 1 < width:
                continue
            key = tuple(tokens[i + 1 - width : i + 1])
            period = i - places.get(key, i)
            places[key] = i
            if i < done or not period or compared.get(period, 0) > i:
                continue
            start, end = i + 1 - width, i + 1
            while start > max(done, period) and tokens[start - 1] == tokens[start - 1 - period]:
                start -= 1
            while end < len(tokens) and tokens[end] == tokens[end - period]:
                end += 1
            compared[period] = end
            said = "".join(tokens[max(done, start - period) : end])
            if end - start >= 3 * period and len(said) >= least_loop("".join(tokens[start - period : start])):
                loops += len(said)
                done = end
    return min(1.0, loops / max(1, sum(map(len, tokens))))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said to one request."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float


class Fault(Exception):
    """A request that got no reply for a reason that may pass: it is asked again, on the transport's patience.

    `stale`: a kept connection was gone; `own`: it may be this page's own trouble; `status`: HTTP's, when there was one.
    """

    def __init__(
        self,
        message: str,
        retry_after: float | None = None,
        stale: bool = False,
        status: int | None = None,
        own: bool = True,
    ):
        super().__init__(message)
        self.retry_after, self.stale, self.status, self.own = retry_after, stale, status, own


class Refused(Exception):
    """The server will never take this page; the message holds its words."""


def error_words(body: str) -> str:
    """The message in a server's error body, whatever its shape: vLLM's, FastAPI's, a proxy's text or HTML."""
    with contextlib.suppress(ValueError):
        data = json.loads(body)
        if isinstance(data, dict):
            said = data.get("error", data.get("detail", data.get("message", data)))
            if isinstance(said, dict):
                said = said.get("message", said)
            return clip(said if isinstance(said, str) else json.dumps(said))
    return clip(html.unescape(TAGS.sub(" ", re.sub(r"(?is)<(style|script|head)\b.*?</\1>", " ", body)))) or "no words"


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number or a date."""
    if not value:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def read_answer(body: bytes, seconds: float) -> Answer:
    """A chat completion's JSON as an Answer. Raises Fault for half a reply, or one that its server gave up."""
    try:
        data = json.loads(body)
        choice = data["choices"][0]
        message = choice["message"]
        content, finish = message.get("content"), choice.get("finish_reason")
        usage = data.get("usage") or {}
        tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Fault(f"the reply is no chat completion: {clip(body[:200].decode('utf-8', 'replace'))}") from None
    if finish not in ("stop", "length", "repetition"):
        # vLLM answers 200 with half a text and "abort" when it is being stopped.
        raise Fault(f"the server gave the reply up (finish_reason {clip(repr(finish), 40)})", own=finish != "abort")
    if isinstance(content, list):  # some proxies return content in parts
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    counts = [n if isinstance(n, int) and not isinstance(n, bool) else None for n in tokens]
    return Answer(content if isinstance(content, str) else "", finish, counts[0], counts[1], seconds)


class Model(NamedTuple):
    """What /v1/models says of the model that answers."""

    name: str
    root: str | None
    max_model_len: int | None


class Server:
    """A server that speaks the OpenAI API: vLLM, mlx_vlm.server, llama.cpp, or a router before several."""

    width: int | None = None  # as many requests in flight as it takes
    limits: str | None = None

    def __init__(self, settings: Settings):
        self.settings = settings
        self.url = settings.url.rstrip("/")
        self.model = Model("", None, None)
        self.others: tuple[str, ...] = ()  # names that it lists beside the model's
        self.version: str | None = None
        self.session: aiohttp.ClientSession | None = None
        self.fresh: aiohttp.ClientSession | None = None
        self.pending: set[asyncio.Timeout] = set()  # of the replies that are waited for

    async def __aenter__(self) -> Server:
        import aiohttp

        headers = {"authorization": f"Bearer {self.settings.api_key}"} if self.settings.api_key else {}
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(note_kept)

        def session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
            timeout = aiohttp.ClientTimeout(total=self.settings.timeout, sock_connect=CONNECT_LIMIT)
            # Not trust_env: it reads ~/.netrc for each request, and an entry there would replace the API key.
            proxy = environment_proxy(self.url)
            return aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=headers, proxy=proxy, trace_configs=[trace]
            )

        # One session for all: aiohttp's pool costs the same at 1,024 connections as at 1 (httpx's does not: 26 ms of
        # CPU a request at 640). vLLM closes idle connections after 5 s, so they are not kept that long here.
        self.session = session(aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0))
        # Each request on a connection of its own: after a kept one was found closed, and for what is no page.
        self.fresh = session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(self, *error: object) -> None:
        for session in (self.session, self.fresh):
            if session:
                await session.close()

    async def get(self, url: str, timeout: float = 10.0) -> tuple[int, str]:
        """Status and body of a GET. Raises OSError or TimeoutError."""
        import aiohttp

        assert self.fresh
        try:
            async with self.fresh.get(url, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
                return response.status, (await read_body(response)).decode("utf-8", "replace")
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:.0f} s") from None
        except (aiohttp.ClientError, Fault) as e:
            raise OSError(reason(e)) from None

    async def connect(self, say: Callable[[str, str], None] | None = None) -> None:
        """Finds the model to ask for. Raises NoServer, after `--wait` when the server is not up yet."""
        deadline = time.monotonic() + self.settings.wait
        while True:
            try:
                self.model = await self.find_model()
                break
            except NoServer as e:
                left = deadline - time.monotonic()
                if left <= 0 or not e.starting:
                    raise
                if say:
                    say("info", f"{e}; waiting for it, {left:.0f} s at most")
                    say = None
                await asyncio.sleep(min(2 * BACKOFF, left))
        with contextlib.suppress(OSError, TimeoutError, ValueError, AttributeError):
            self.version = json.loads((await self.get(self.root + "/version"))[1]).get("version")
        if self.version is None:
            await self.ask_llama()

    async def ask_llama(self) -> None:
        """llama.cpp's version, and the context of one of its slots where its list of models does not tell it."""
        with contextlib.suppress(OSError, TimeoutError, ValueError, AttributeError):
            props = json.loads((await self.get(self.root + "/props"))[1])
            self.version = props.get("build_info")
            length = (props.get("default_generation_settings") or {}).get("n_ctx")
            if isinstance(length, int) and self.model.max_model_len is None:
                self.model = self.model._replace(max_model_len=length)

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    async def find_model(self, timeout: float = 10.0) -> Model:
        """The model that --model names or the only one served. Raises NoServer."""
        status, body, at = 0, "", bare_url(self.url)
        try:
            status, body = await self.get(self.url + "/models", timeout)
            for _ in range(3):
                if status < 500:
                    break
                await asyncio.sleep(BACKOFF / 5)  # a router asks another of its hosts the next time
                status, body = await self.get(self.url + "/models", timeout)
            if status == 404 and not self.url.endswith("/v1"):
                with_v1, answer = self.url + "/v1", await self.get(self.url + "/v1/models", timeout)
                if answer[0] != 404:
                    self.url, at, (status, body) = with_v1, bare_url(with_v1), answer
        except (OSError, TimeoutError, ValueError) as e:
            raise NoServer(f"no server answers at {at}/models: {reason(e)}", starting=True) from None
        if status in (401, 403):
            raise NoServer(f"the server at {at} wants an API key: give the right one in OCR_API_KEY or --api-key")
        try:
            models = list(listed_models(json.loads(body)))
        except (ValueError, LookupError, TypeError, AttributeError):
            words = f"{at}/models answered HTTP {status}, not a list of models: {self.bare_words(body)}"
            raise NoServer(words, starting=True) from None
        picked = pick_model(models, self.settings.model, at)
        self.others = tuple(model.name for model in models if model.name != picked.name)
        return picked

    async def check_model(self) -> None:
        """After a time without answers: the server must be back with the same model. Raises NoServer, or Fault."""
        try:
            model = await self.find_model(timeout=60.0)
        except NoServer as e:
            if e.starting:
                raise Fault(str(e), own=False) from None
            raise
        if model[:2] != self.model[:2]:
            now, before = (f"{m.name} ({m.root or 'root unknown'})" for m in (model, self.model))
            raise NoServer(
                f"the server came back with another model: {now}, not {before}. Start the one it had and run the same "
                "command again, or use another --out"
            )

    def bare_words(self, body: str) -> str:
        """A server's own words without the API key, should it repeat it."""
        key = self.settings.api_key
        return error_words(body.replace(key, "(key)") if key else body)

    async def ask(
        self,
        png: list[bytes],
        sampled: Sampling,
        sent: Callable[[], None],
        fresh: bool = False,
        max_tokens: int | None = None,
    ) -> Answer:
        """One request. `png` (one base64 string) is emptied once it is sent, then `sent` is called.

        `fresh`: on a connection of its own; `max_tokens`: instead of the settings'. Raises Fault, Refused or NoServer.
        """
        import aiohttp

        session = self.fresh if fresh else self.session
        assert session
        limit = max_tokens or self.settings.max_tokens
        frame = request_frame(self.model.name, limit, sampled, self.settings.loop_stop)
        size = len(frame[0]) + len(png[0]) + len(frame[1])

        async def body() -> AsyncIterator[bytes]:
            image = memoryview(png.pop())
            yield frame[0]
            for start in range(0, len(image), 1 << 18):
                yield image[start : start + (1 << 18)]  # type: ignore[misc]
            yield frame[1]
            del image
            sent()

        started = time.monotonic()
        known = {"kept": False, "answered": False}
        wait = asyncio.timeout(None)  # watch_port ends it
        try:
            async with wait:
                self.pending.add(wait)
                async with session.post(
                    self.url + "/chat/completions",
                    data=body(),
                    headers={"content-type": "application/json", "content-length": str(size)},
                    trace_request_ctx=known,
                ) as response:
                    known["answered"] = True
                    said = await read_body(response)
        except aiohttp.ConnectionTimeoutError:
            raise Fault(f"no connection within {CONNECT_LIMIT:.0f} s", own=False) from None
        except TimeoutError:
            if wait.expired():
                raise Fault(f"no reply within {LAST_WORDS:g} s after the server closed its port", own=False) from None
            raise Fault(f"no reply within {self.settings.timeout:g} s (--timeout)") from None
        except (aiohttp.ClientError, OSError) as e:
            # A kept connection that the server closed meanwhile says nothing about the server.
            stale = known["kept"] and not known["answered"]
            cannot_connect = isinstance(e, aiohttp.ClientConnectorError)
            raise Fault(f"{type(e).__name__}: {reason(e)}", stale=stale, own=not cannot_connect) from None
        finally:
            self.pending.discard(wait)
        if response.status == 200:
            return read_answer(said, time.monotonic() - started)
        words = f"HTTP {response.status}: {self.bare_words(said.decode('utf-8', 'replace'))}"
        if response.status in (401, 403):
            raise NoServer(f"the server refuses the API key ({words}): give the right one in OCR_API_KEY or --api-key")
        if response.status == 404:
            await self.check_model()  # raises when the model is gone
            raise Fault(words, status=404)
        if 400 <= response.status < 500 and response.status not in (408, 409, 425, 429):
            raise Refused(f"the server refuses the page ({words})")
        busy = response.status in (429, 503)
        raise Fault(words, retry_after(response.headers.get("retry-after")), status=response.status, own=not busy)

    async def watch_port(self) -> None:
        """Gives up replies that cannot come any more.

        A vLLM that is told to stop ends its engine, closes its port and waits for its clients to hang up, while they
        wait for it. Others finish what they began, so there is some time for that.
        """
        while True:
            await asyncio.sleep(PORT_LOOK)
            if self.pending and await self.refuses():
                deadline = asyncio.get_running_loop().time() + LAST_WORDS
                for wait in self.pending:
                    if wait.when() is None:
                        wait.reschedule(deadline)

    async def refuses(self) -> bool:
        """Whether nobody listens at the port. A host that cannot be reached at the moment may be at work."""
        import aiohttp

        assert self.fresh
        try:
            async with self.fresh.get(self.url + "/models", timeout=aiohttp.ClientTimeout(total=CONNECT_LIMIT)):
                return False
        except aiohttp.ClientConnectorError as e:
            return isinstance(e.os_error, ConnectionRefusedError)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def alive(self) -> bool:
        """Whether the server answers another, tiny page: then a page it keeps failing on is the page's own trouble."""
        with contextlib.suppress(Fault, Refused):
            from PIL import Image

            png = base64.b64encode(encode_png(Image.new("RGB", (224, 224), "white")))
            head, tail = request_frame(self.model.name, 1, sampling(0), False)
            import aiohttp

            assert self.fresh
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self.fresh.post(
                    self.url + "/chat/completions",
                    data=head + png + tail,
                    headers={"content-type": "application/json"},
                    timeout=aiohttp.ClientTimeout(total=120),
                ) as response:
                    await response.read()
                    return response.status == 200
        return False


def environment_proxy(url: str) -> str | None:
    """The proxy that the environment names for a server (HTTP_PROXY and its like), never for this machine."""
    import urllib.parse
    import urllib.request

    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)


async def note_kept(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    """Notes that a request went out on a connection that was kept from an earlier one."""
    if context.trace_request_ctx is not None:
        context.trace_request_ctx["kept"] = True


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """A response's body. Raises Fault for one that is larger than any reply."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise Fault(f"the server sent more than {MAX_BODY >> 20} MB")
    return b"".join(parts)


def listed_models(data: Any) -> Iterator[Model]:
    """The models in what /v1/models answers; the context length is vLLM's or llama.cpp's.

    mlx_vlm.server lists all models on its disk and says which is loaded: to ask for another one would unload that.
    """
    entries = data["data"]
    for entry in [entry for entry in entries if entry.get("loaded")] or entries:
        length = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
        root = entry.get("root")
        yield Model(str(entry["id"]), str(root) if root else None, length if isinstance(length, int) else None)


def pick_model(models: Sequence[Model], wanted: str | None, url: str) -> Model:
    """The model to ask for, never a guess: some servers unload their model when another is named. Raises NoServer."""
    names = ", ".join(model.name for model in models) or "none"
    if wanted is not None:
        for model in models:
            if model.name == wanted:
                return model
        raise NoServer(f"the server at {url} does not serve {wanted!r}; it serves: {names}", starting=not models)
    if len(models) == 1:
        return models[0]
    likely = [model for model in models if "chandra" in model.name.lower()]
    if len(likely) == 1:
        return likely[0]
    if not models:
        raise NoServer(f"the server at {url} serves no model", starting=True)
    raise NoServer(f"the server at {url} serves: {names}; name one with --model")


class Gate:
    """Stops the sending when the server stops answering, and lets one page at a time through to try it again.

    After `LIMIT` faults in a row, or as many as fill `patience`, the gate closes; the first answer opens it. A fault
    while it is closed makes the pause before the next try longer. After `patience` seconds without an answer it raises
    NoServer. After a broken connection one page asks first whether the server is still the one it was.
    """

    LIMIT = 8  # faults in a row; a busy server's odd 503 does not close the gate

    def __init__(self, patience: float, say: Callable[[str, str], None]):
        self.patience, self.say = patience, say
        self.open = asyncio.Event()
        self.open.set()
        self.sure = True  # False after a broken connection: perhaps the server is another since
        self.trying = False  # whether a page tries the server, alone
        self.moved = asyncio.Event()  # wakes those that wait to look again
        self.in_row = 0
        self.replies = 0
        self.since = 0.0  # when the first fault in a row came
        self.pause_until = 0.0  # as the server's Retry-After asked
        self.last = ""
        self.wake: Callable[[], Awaitable[None]] | None = None  # checks the server: raises Fault or NoServer

    @contextlib.asynccontextmanager
    async def passing(self, forgive_stale: bool = False) -> AsyncIterator[None]:
        """Waits until a request may be sent; when the gate is closed, as the only one that tries."""
        alone = await self.turn()
        try:
            if alone:
                await self.check()
                if self.open.is_set():  # only the model was in doubt: the others need not wait for this one's reply
                    alone = self.leave()
            yield
        except Fault as e:
            self.sure = self.sure and e.status is not None
            if not (e.stale and forgive_stale):
                self.failed(e)
            raise
        except Refused:  # an answer too
            self.answered()
            raise
        else:
            self.replies += 1
            self.answered()
        finally:
            if alone:
                self.leave()

    async def turn(self) -> bool:
        """Waits until a request may be sent. True: alone, to try the server."""
        while not (self.open.is_set() and self.sure):
            if not self.trying:
                self.trying = True
                return True
            self.moved.clear()
            await self.moved.wait()
        return False

    def leave(self) -> bool:
        self.trying = False
        self.moved.set()
        return False

    async def check(self) -> None:
        """Pauses while the gate is closed, then asks whether the server is there. Raises NoServer or Fault."""
        if not self.open.is_set():
            left = self.patience - (time.monotonic() - self.since)
            if left <= 0:
                raise NoServer(f"no reply for {self.patience:.0f} s (--patience): {self.last}")
            pause = max(backoff(self.in_row - self.LIMIT), self.pause_until - time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.open.wait(), min(left, pause))
        if self.wake:
            await self.wake()
        self.sure = True

    def failed(self, fault: Fault) -> None:
        now = time.monotonic()
        if not self.in_row:
            self.since = now
        self.in_row += 1
        self.last = str(fault)
        self.pause_until = max(self.pause_until, now + min(fault.retry_after or 0.0, 600.0))
        too_long = self.in_row > 1 and now - self.since >= self.patience
        if (self.in_row >= self.LIMIT or too_long) and self.open.is_set():
            self.open.clear()
            self.say("warning", f"the server stopped answering ({fault}); trying it with one page until it does")

    def answered(self) -> None:
        self.in_row = 0
        if not self.open.is_set():
            self.open.set()
            self.moved.set()
            self.pause_until = 0.0
            self.say("info", "the server answers again")


def backoff(tries: int) -> float:
    """Seconds before try `tries` (from 0): doubling to thirtyfold, with jitter so that pages do not march in step."""
    return BACKOFF * float(min(30.0, 2.0 ** min(tries, 5)) * random.uniform(0.5, 1.0))


class Sample(NamedTuple):
    """A reply as the pace judges it."""

    order: int  # of sending
    cost: float  # s a token, a page's fixed share included
    seconds: float


class Pace:
    """How many requests are in flight at once: a fixed number, or one that follows the server.

    Where the server tells how many requests wait (vLLM's /metrics), the limit doubles while none does and shrinks when
    many do. Elsewhere, and behind a router, whose counts are one host's, it is judged by replies, an epoch at a time:
    it grows while that brings more, fourfold at first, and falls back when it does not, or when replies come as from
    a queue.
    """

    BLIND = 5  # looks at such counts; then they are another host's

    def __init__(self, fixed: int | None):
        self.limit = fixed or 32
        self.fixed = fixed is not None
        self.in_flight = 0
        self.most = 0
        self.waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self.metrics = False  # whether the server tells its queue; then replies are not judged
        self.unseen = 0  # looks in a row at counts that were not of all that was sent
        self.epoch = 0
        self.samples: list[Sample] = []  # of this epoch's requests
        self.sent = self.first = 0  # requests so far, and when the epoch began
        self.before: tuple[int, float] | None = None  # limit and rate of the epoch before
        self.holding = 0  # epochs to wait before the next try to grow
        self.growth = 4.0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Callable[[Answer], None]]:
        """Waits for a place among the requests in flight; the block calls what it gets with the answer."""
        if self.in_flight >= self.limit or self.waiters:
            future = asyncio.get_running_loop().create_future()
            self.waiters.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self.leave()
                raise
        else:
            self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        order, epoch = self.sent, self.epoch
        self.sent += 1

        def answered(answer: Answer) -> None:
            if not self.fixed and not self.metrics and epoch == self.epoch:
                size = (answer.completion_tokens or len(answer.text) / 3) + 100
                self.samples.append(Sample(order, answer.seconds / size, answer.seconds))
                self.judge()

        try:
            yield answered
        except Fault as e:
            if e.status in (429, 503) and epoch == self.epoch:  # once for all that were sent at this pace
                self.fall_back(self.limit / 2)
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        self.in_flight -= 1
        self.admit()

    def admit(self) -> None:
        while self.waiters and self.in_flight < self.limit:
            future = self.waiters.popleft()
            if not future.done():
                self.in_flight += 1
                future.set_result(None)

    def change(self, limit: float) -> None:
        self.limit = int(min(MOST_IN_FLIGHT, max(1, limit)))
        self.epoch += 1
        self.first = self.sent
        self.samples.clear()
        self.admit()

    def follow(self, running: float, waiting: float) -> None:
        """The server's own counts of requests it runs and holds in its queue."""
        # What was sent and is not counted yet is still being decoded: it may be the queue of a moment later.
        seen = running + waiting >= 0.75 * self.in_flight
        self.unseen = 0 if seen else self.unseen + bool(self.waiters)
        if self.unseen == self.BLIND:
            self.change(self.limit)  # an epoch to judge by
        self.metrics = self.unseen < self.BLIND
        if not self.metrics:
            return
        if waiting > max(4.0, running / 2):
            self.change(running + max(4.0, running / 4))
        elif waiting <= max(1.0, running / 16) and self.waiters and seen:
            self.change(self.limit * 2)

    def judge(self) -> None:
        """Ends an epoch when a quarter of its requests have their reply."""
        count = len(self.samples)
        if count < max(8, self.limit // 4):
            return
        samples = sorted(self.samples)
        seconds = [sample.seconds for sample in samples]
        cost = statistics.median(sample.cost for sample in samples)
        rate = self.limit / cost
        full = self.waiters or self.in_flight >= self.limit
        grown = self.limit / self.before[0] if self.before else 1.0
        if full and queued(samples, self.first, self.sent):
            # Little's law: what leaves a second times the time that the first ones took, before there was a queue.
            useful = 1.5 * count / max(seconds) * statistics.fmean(seconds[:4])
            self.fall_back(max(useful + 1, self.limit / math.sqrt(grown) if grown > 1 else 1))
        elif grown > 1 and self.before and rate < (1 + 0.1 * (grown - 1)) * self.before[1]:
            self.fall_back(self.limit / math.sqrt(grown))
        elif self.holding or not full:
            self.holding = max(0, self.holding - 1)
            self.change(self.limit)
        else:
            self.before = (self.limit, rate)
            self.change(self.limit * self.growth)

    def fall_back(self, limit: float) -> None:
        """Too many were in flight: fewer from now on, and slower growth after a while."""
        if self.fixed:
            return
        self.growth, self.holding, self.before = 1.5, 3, None
        self.change(min(self.limit, math.ceil(limit)))


def queued(samples: Sequence[Sample], first: int, sent: int) -> bool:
    """Whether replies come as from a queue: the first sent are answered first, and the later sent the slower.

    Without a queue the fastest come first, whenever they were sent.
    """
    places = [(sample.order - first) / max(1, sent - first) for sample in samples]
    costs = [sample.cost for sample in samples]
    if statistics.fmean(places) > 0.35 or max(costs) < 1.5 * min(costs):
        return False
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    ranks = sorted(range(len(costs)), key=by_cost.__getitem__)
    return statistics.correlation(range(len(costs)), ranks) > 0.35


METRIC = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[-+.\deE]+|NaN|\+?Inf)", re.MULTILINE
)


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text as name -> value, summed over engines; vLLM's names lose their "vllm:"."""
    totals: dict[str, float] = {}
    for match in METRIC.finditer(text):
        with contextlib.suppress(ValueError):
            name = match["name"].removeprefix("vllm:")
            totals[name] = totals.get(name, 0.0) + float(match["value"])
    return totals


# ----------------------------------------------------------------------------------------------- Checking the server

CANARY_TOKENS = 256  # a reply to a test page ends well below
CANARY_LIMIT = 600.0  # s for such a reply
CANARY_LINES = (
    ("Harbour ledger 4719", "Seven copper lanterns crossed", "the frozen river at dawn"),
    ("Orchard survey 8352", "Twelve amber marbles rolled", "behind the walnut door"),
)
CANARY_SIZES = ((896, 448), (672, 896))  # px: whole cells of Chandra's grid and of the server's
CANARY_TOPS = (60, 480)  # px: they differ in shape and in where their text is, too
LARGE_PAGE = 3  # the second one's scale in a thorough check: a page near the largest that is sent
CELL = 32  # px a side of what one image token shows
OLDEST_VLLM = (0, 19, 1)  # the first that runs the W4A4 checkpoints right
SLOW_PAGE = 60.0  # s

GOOD, NOTE, DOUBT, FAULT = "ok", "note", "doubt", "FAULT"


class Finding(NamedTuple):
    """A line of the check. DOUBT: `--check` fails, a run says it and goes on. FAULT: a run ends before it writes."""

    grade: str
    said: str  # what was found, why it matters, and what to do


class Canary(NamedTuple):
    """A test page: base64 of its PNG, its size, and the words on it."""

    png: bytes
    size: tuple[int, int]
    words: frozenset[str]

    def share_in(self, text: str) -> float:
        """How many of its words are in a reply, from 0 to 1."""
        return len(self.words & words_of(text)) / len(self.words)


def words_of(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w{4,}", html.unescape(TAGS.sub(" ", text)).casefold()))


def draw_canaries(thorough: bool = False) -> list[Canary]:
    """Two pages of known, different text, the same in every run."""
    from PIL import Image, ImageDraw, ImageFont

    canaries = []
    for lines, size, y, scale in zip(CANARY_LINES, CANARY_SIZES, CANARY_TOPS, (1, LARGE_PAGE), strict=True):
        scale = scale if thorough else 1
        image = Image.new("RGB", (size[0] * scale, size[1] * scale), "white")
        for line, height in zip(lines, (64, 44, 44), strict=True):
            font = ImageFont.load_default(size=height * scale)
            ImageDraw.Draw(image).text((48 * scale, y * scale), line, fill="black", font=font)
            y += height * 8 // 5
        canaries.append(Canary(base64.b64encode(encode_png(image)), image.size, words_of(" ".join(lines))))
    return canaries


async def ask_canary(server: Server, canary: Canary, tries: int) -> Answer | Finding:
    """The reply to a test page, or why there is none. Raises NoServer."""
    limit = min(CANARY_TOKENS, server.settings.max_tokens)
    why = ""
    for attempt in range(tries):
        if attempt:
            await asyncio.sleep(backoff(attempt - 1))
        try:
            asked = server.ask([canary.png], sampling(0), lambda: None, fresh=attempt > 0, max_tokens=limit)
            return await asyncio.wait_for(asked, CANARY_LIMIT)
        except TimeoutError:
            why = f"nothing within {CANARY_LIMIT:.0f} s"
        except Refused as e:
            return Finding(DOUBT, f"a test page has no reply: {e}. Your pages will have none: see the server's log")
        except Fault as e:
            why = str(e)
    said = f"a test page has no reply: {why}. The engine may be dead while its port answers: see its log"
    return Finding(DOUBT, said)


def judge_canaries(canaries: Sequence[Canary], answers: Sequence[Answer]) -> Iterator[Finding]:
    """What the replies to two pages of known text say of the server."""
    texts = [answer.text for answer in answers]
    shares = [canary.share_in(text) for canary, text in zip(canaries, texts, strict=True)]
    swapped = [canary.share_in(text) for canary, text in zip(canaries, reversed(texts), strict=True)]
    if max(shares) < 0.5 and all(says_nothing(text) or repeats(text) for text in texts):
        yield Finding(
            FAULT,
            f"two test pages were read as {quoted(texts)}: the model computes garbage (an FP4 kernel that does not fit "
            "the GPU, a damaged checkpoint), and would for every page. Serve the bf16 checkpoint, or another vLLM",
        )
    elif max(shares) < 0.5 and texts[0].strip() == texts[1].strip():
        yield Finding(
            FAULT,
            f"two test pages with different text got the same reply, with the words of neither: {quoted(texts)}. The "
            "image does not reach the model (a text-only mode, a wrong chat template), so every page would read like "
            "this. Start the server as the README says",
        )
    elif max(swapped) >= 0.75 and min(shares) < 0.5:
        yield Finding(
            FAULT,
            "a test page got the text of the other one: the server mixes images or replies up (a stale image cache, a "
            "caching proxy), and would with your pages. Restart it without that cache",
        )
    else:
        for canary, answer, share in zip(canaries, answers, shares, strict=True):
            yield judge_words(canary, answer, share)


def judge_words(canary: Canary, answer: Answer, share: float) -> Finding:
    """Whether a reply holds the words of its page, and ends."""
    if share < 0.75:
        missing = clip(", ".join(sorted(canary.words - words_of(answer.text))), 60)
        return Finding(
            DOUBT,
            f"a test page is misread: {share:.0%} of its words are there, not {missing}; the reply: "
            f"{quoted([answer.text])}. Your pages may be misread too: is this the model that you meant?",
        )
    if answer.finish_reason != "stop":
        return Finding(
            DOUBT,
            f"the reply to a test page does not end (finish_reason {answer.finish_reason}), and others may not. Serve "
            "the checkpoint with its own chat template and generation_config.json",
        )
    return Finding(GOOD, f"a test page of {canary.size[0]} x {canary.size[1]} px is read: {share:.0%} of its words")


def quoted(texts: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(repr(clip(TAGS.sub(" ", text), 60)) for text in texts))


TEXT_TOKENS = 700  # the prompt without an image is shorter


def counts_images(answers: Sequence[Answer]) -> bool:
    """Whether the prompts' tokens follow the pictures, as a model server's do: two sizes differ, or none is counted.

    A server that tells any picture the same was put there to answer so (a test's, a recording's): a run warns of its
    replies and goes on.
    """
    counts = [answer.prompt_tokens for answer in answers]
    return None not in counts and (len(set(counts)) > 1 or any((count or 0) < TEXT_TOKENS for count in counts))


def judge_sight(canaries: Sequence[Canary], answers: Sequence[Answer]) -> Finding:
    """Whether the server scales large images down: their prompt then has fewer tokens than their size needs."""
    (small, large), (few, many) = canaries, (answer.prompt_tokens for answer in answers)
    if few is None or many is None:
        return Finding(NOTE, "the server does not count tokens (no usage): whether it scales images down is unknown")
    if many - few >= 0.9 * (image_tokens(large.size) - image_tokens(small.size)):
        return Finding(GOOD, f"images are seen in full: {many} prompt tokens for a page of {image_tokens(large.size)}")
    return Finding(DOUBT, scales_down(many, image_tokens(large.size)))


def image_tokens(size: tuple[int, int]) -> int:
    return size[0] * size[1] // CELL**2


def scales_down(tokens: int, needed: int) -> str:
    return (
        f"{tokens} prompt tokens for an image that needs {needed}: the server scales images down, and small print is "
        "lost. vLLM: --mm-processor-kwargs '{\"max_pixels\": 6291456}'; llama.cpp: --image-max-tokens 16384"
    )


def judge_drafts(before: dict[str, float], after: dict[str, float], root: str | None) -> Finding | None:
    """Whether speculative decoding earns its keep, by the server's counters. None: it has no such counters."""
    names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    if names[0] not in after:
        if "generation_tokens_total" not in after or "mtp" not in (root or "").lower():
            return None
        return Finding(
            NOTE,
            "the checkpoint brings an MTP head that the server does not use: replies take up to twice as long. Start "
            'vLLM with --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'',
        )
    drafts, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in names)
    if min(drafts, accepted) < 0:
        return Finding(NOTE, "MTP: the counters are not one server's (a router?), so they say nothing: check each host")
    if drafts < 8:
        return Finding(NOTE, f"MTP: {drafts:.0f} drafts over the test pages, too few to judge it")
    if accepted / drafts >= 0.05:
        return Finding(GOOD, f"MTP: {1 + accepted / drafts:.2f} tokens a step")
    return Finding(
        DOUBT,
        f"MTP: {accepted:.0f} tokens accepted of {drafts:.0f} drafts: its weights are missing or another model's, and "
        "replies are slower than without. Serve ragarwal/chandra-ocr-2-nvfp4-mtp, or leave --speculative-config out",
    )


def judge_version(version: str | None) -> Finding | None:
    """Whether vLLM is too old; other servers tell other versions, or none."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)\b.*", version or "")
    if not match or tuple(map(int, match.groups())) >= OLDEST_VLLM:
        return None
    oldest = ".".join(map(str, OLDEST_VLLM))
    said = f"vLLM {version} is older than {oldest}: NVFP4 checkpoints of this model may read wrong. Run 0.33.0"
    return Finding(NOTE, said)


def judge_context(model: Model, settings: Settings) -> Finding:
    """Whether the largest page and the longest reply fit."""
    needed = settings.max_tokens + PROMPT_TOKENS
    try:
        warning = check_context(model, settings)
    except NoServer as e:
        return Finding(FAULT, str(e))
    if warning:
        return Finding(DOUBT, warning)
    if not model.max_model_len:
        return Finding(NOTE, f"context: not told; {needed} tokens are needed. {more_context(settings)}")
    return Finding(GOOD, f"context: {model.max_model_len} tokens, {needed} needed")


def judge_pace(answer: Answer) -> Finding:
    """The time of a large page with a short reply."""
    said = f"a large page: {answer.seconds:.1f} s, {answer.completion_tokens or 'unknown'} tokens"
    if answer.seconds < SLOW_PAGE:
        return Finding(GOOD, said)
    return Finding(NOTE, f"{said}: slow. Is the model on the GPU, and is nobody else asking? If so, raise --timeout")


async def counters(server: Server) -> dict[str, float]:
    """The server's /metrics; none where it has no such page, or not Prometheus' text."""
    with contextlib.suppress(OSError, TimeoutError):
        status, text = await server.get(server.root + "/metrics")
        return read_metrics(text) if status == 200 else {}
    return {}


async def examine(
    server: Server,
    canaries: Sequence[Canary],
    tries: int,
    slot: Callable[[], contextlib.AbstractAsyncContextManager[Any]],
) -> tuple[list[Finding], list[Answer]]:
    """Asks for the test pages and judges the replies; no replies when one is missing. Raises NoServer."""

    async def ask(canary: Canary) -> Answer | Finding:
        async with slot():
            return await ask_canary(server, canary, tries)

    before = await counters(server)
    said = await asyncio.gather(*map(ask, canaries))
    if failed := [finding for finding in said if isinstance(finding, Finding)]:
        return failed[:1], []
    answers = [answer for answer in said if isinstance(answer, Answer)]
    drafts = judge_drafts(before, await counters(server), server.model.root)
    findings = [*judge_canaries(canaries, answers), drafts, judge_version(server.version)]
    return [finding for finding in findings if finding], answers


async def examine_all(server: Server) -> list[Finding]:
    """Everything that `--check` says of a server that serves the model. Raises NoServer."""
    model, version = server.model, server.version or "unknown"
    at = f"{bare_url(server.url)}: model {model.name} ({model.root or 'root unknown'}), version {version}"
    findings = [Finding(GOOD, at)]
    if server.others:
        others = clip(", ".join(server.others), 200)
        findings.append(Finding(NOTE, f"it serves others too: {others}. Give --model, so that yours is asked for"))
    findings.append(judge_context(model, server.settings))
    canaries = await asyncio.to_thread(draw_canaries, True)
    one = asyncio.Lock()  # one after the other: the time of the second is a page's own

    seen, answers = await examine(server, canaries, 2, lambda: one)
    findings += seen
    if answers and all(finding.grade != FAULT for finding in seen):
        findings += [judge_sight(canaries, answers), judge_pace(answers[-1])]
    return findings


async def check(settings: Settings) -> int:
    """`--check`: says what the server is and whether it can do the job, a line a finding. Raises NoServer."""
    if settings.engine == "cpu":
        async with CpuEngine(settings) as engine:
            await engine.connect()
            print(f"RapidOCR {engine.version}: {engine.limits}")
        return EXIT_OK
    async with Server(settings) as server:
        await server.connect(lambda level, text: print(f"ocr.py: {text}", file=sys.stderr))
        findings = await examine_all(server)
    for finding in findings:
        print(f"{finding.grade:5} {finding.said}")
    return EXIT_NO_SERVER if any(finding.grade in (DOUBT, FAULT) for finding in findings) else EXIT_OK


# ----------------------------------------------------------------------------------------------------------- Reading

FIGURES = frozenset({"Image", "Figure"})
RUNNING = frozenset({"Page-Header", "Page-Footer"})
# Blocks that never hold others: a labelled div inside one means that its end tag is missing.
LEAVES = RUNNING | {"Text", "Section-Header", "Caption", "Footnote", "Equation-Block", "Code-Block", "Blank-Page"}

HTML_TAGS = frozenset(
    (
        "a abbr address article aside b bdi bdo big blockquote body br button caption center chem cite code col "
        "colgroup "
        "dd del details dfn div dl dt em fieldset figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr "
        "html i img input ins kbd label legend li link main map mark math menu meta nav ol optgroup option p pre q rp "
        "rt ruby s samp section select small span strike strong style sub summary sup table tbody td textarea tfoot th "
        "thead time title tr tt u ul var wbr"
    ).split()
)
# Gone with all they hold: nothing in them was read from a page.
ACTIVE_TAGS = frozenset(
    "script style iframe frame object embed applet template noscript base link meta head title".split()
)
STRAY_LESS_THAN = re.compile(
    rf"<(?!/?(?:{'|'.join(sorted(HTML_TAGS | ACTIVE_TAGS))}|svg)(?![\w@.:-])|!--)", re.IGNORECASE
)
MATHS = re.compile(r"(<math\b[^<>]*>)([^<]*(?:<(?!/?math\b)[^<]*)*)(</math\s*>)", re.IGNORECASE)
MATHML = re.compile(r"<(?!/?(?:m[a-z]+|semantics|annotation|br|i|b|sub|sup|span)\b[^<>]*>)", re.IGNORECASE)
FENCE = re.compile(r"\A\s*```(?:html)?[ \t]*\n(?=\s*<)(.*?)(?:\n?```\s*)?\Z", re.DOTALL | re.IGNORECASE)
# Never read from a page: control characters, soft hyphens, zero-width spaces, and the marks that are used below.
UNSEEN = [*range(9), 11, 12, *range(14, 32), *range(127, 160), 0xAD, 0x200B, 0xFEFF, *range(0xFDD0, 0xFDF0)]
CONTROL = dict.fromkeys(UNSEEN)

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the page: its label, its box (0-1000 on each axis; None when the reply gives none), what it holds.

    `image` is the figure's file name once it is cropped; `inside` the labelled divs within.
    """

    label: str
    bbox: Box | None
    element: etree._Element
    inside: tuple[Block, ...] = ()
    image: str | None = None

    @property
    def html(self) -> str:
        from lxml import etree

        parts = [html.escape(self.element.text or "", quote=False)]
        parts += [etree.tostring(child, encoding="unicode", method="html") for child in self.element]
        return "".join(parts).strip()

    @property
    def text(self) -> str:
        return " ".join("".join(self.element.itertext()).split())


def read_reply(raw: str) -> list[Block]:
    """The blocks of a raw reply in order, by one parse. What lies outside the divs is kept as blocks without a box."""
    root = parse_html(raw)
    blocks: list[Block] = []
    for element in top_level(root):
        blocks.extend(block_of(element))
    return blocks


def parse_html(raw: str) -> etree._Element:
    """A reply's tree under one div. Active elements are gone; a "<" that starts no tag is text."""
    from lxml import etree

    fenced = FENCE.match(raw)
    text = (fenced[1] if fenced else raw).encode("utf-8", "replace").decode().translate(CONTROL)
    text = re.sub(r"<!DOCTYPE[^<>]*>", "", text, flags=re.IGNORECASE)
    before, end, after = text.rpartition("-->")
    text = before + end + after.replace("<!--", "&lt;!--")  # a comment without end would hide the rest
    text = MATHS.sub(lambda m: m[1] + MATHML.sub("&lt;", m[2]) + m[3], text)
    text = STRAY_LESS_THAN.sub("&lt;", text)
    if nesting(text) > 100:  # a reply that opens tags without end would exhaust the parser
        text = html.escape(html.unescape(TAGS.sub(" ", text)), quote=False)
    parser = etree.HTMLParser(remove_comments=True, remove_pis=True, huge_tree=True, no_network=True)
    body = etree.fromstring(f"<html><body><div>{text}</div></body></html>", parser)
    root = etree.Element("div")
    if body is None:
        return root
    for element in list(body.iter(*ACTIVE_TAGS, "svg")):
        if (parent := element.getparent()) is not None and element is not body:
            keep_tail(element)
            parent.remove(element)
    # A stray </div> ends the wrapper early: whatever follows is its sibling.
    for part in body.findall("body") or [body]:
        for child in list(part):
            append_contents(root, child) if child.tag == "div" and not child.attrib else root.append(child)
    return root


def nesting(text: str) -> int:
    """How deep a text's tags nest, void tags aside."""
    depth = deepest = 0
    for match in re.finditer(r"<(/?)([a-zA-Z][\w-]*)", text):
        if match[2].lower() in ("br", "hr", "img", "input", "wbr", "col"):
            continue
        depth = max(0, depth - 1) if match[1] else depth + 1
        deepest = max(deepest, depth)
    return deepest


def keep_tail(element: etree._Element) -> None:
    """Moves the text that follows an element to before it, so that it stays when the element goes."""
    tail, before, parent = element.tail or "", element.getprevious(), element.getparent()
    if not tail:
        return
    if before is not None:
        before.tail = (before.tail or "") + tail
    elif parent is not None:
        parent.text = (parent.text or "") + tail
    element.tail = None


def append_contents(root: etree._Element, element: etree._Element) -> None:
    """Puts what an element holds at the end of `root`, and what follows it."""

    def add_text(text: str | None) -> None:
        if text and len(root):
            root[-1].tail = (root[-1].tail or "") + text
        elif text:
            root.text = (root.text or "") + text

    add_text(element.text)
    for child in list(element):
        root.append(child)
    add_text(element.tail)


def top_level(root: etree._Element) -> Iterator[etree._Element]:
    """The divs of a reply, and the runs of anything between them, each wrapped in a div of its own."""
    from lxml import etree

    stray = etree.Element("div")
    stray.text = root.text
    for child in list(root):
        tail, child.tail = child.tail, None
        if child.tag == "div":
            if says_something(stray):
                yield stray
            stray = etree.Element("div")
            if not child.get("data-label") and child.xpath(".//div[@data-label]"):
                yield from top_level(child)  # a wrapper around the blocks
            else:
                yield child
            stray.text = tail
        else:
            stray.append(child)
            child.tail = tail
    if says_something(stray):
        yield stray


def says_something(element: etree._Element) -> bool:
    return bool("".join(element.itertext()).strip()) or element.find(".//img") is not None


def block_of(element: etree._Element) -> Iterator[Block]:
    """A block, followed by those that only a missing end tag put inside it."""
    label = (element.get("data-label") or "Text").strip()
    nested = list(labelled_below(element))
    if label in LEAVES:
        for inner in reversed(nested):
            keep_tail(inner)
            inner.getparent().remove(inner)
            if element.getparent() is not None:  # a block around both still holds them
                element.addnext(inner)
        yield Block(label, parse_box(element.get("data-bbox")), element)
        for inner in nested:
            yield from block_of(inner)
    else:
        inside = tuple(block for inner in nested for block in block_of(inner))
        yield Block(label, parse_box(element.get("data-bbox")), element, inside)


def labelled_below(element: etree._Element) -> Iterator[etree._Element]:
    """The labelled divs within an element that lie in no other labelled div within it."""
    for child in element:
        if child.tag == "div" and child.get("data-label"):
            yield child
        else:
            yield from labelled_below(child)


def parse_box(text: str | None) -> Box | None:
    """Four numbers as a box; None for anything else (int() would take "1_0")."""
    parts = re.findall(r"\S+", (text or "").replace(",", " "))
    if len(parts) != 4 or not all(re.fullmatch(r"-?[0-9]{1,6}(\.[0-9]{1,6})?", part) for part in parts):
        return None
    x0, y0, x1, y1 = (float(p) if "." in p else int(p) for p in parts)
    return x0, y0, x1, y1


def pixel_box(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A 0-1000 box in the pixels of a page of `size`, cut to the page."""
    x, y = size[0] / 1000, size[1] / 1000
    x0, y0, x1, y1 = int(box[0] * x), int(box[1] * y), int(box[2] * x), int(box[3] * y)
    return max(0, min(x0, size[0])), max(0, min(y0, size[1])), max(0, min(x1, size[0])), max(0, min(y1, size[1]))


# Characters that mean something in markdown travel as noncharacters while a run of text is put together, so that what
# the page says and what the markdown needs stay apart; `settle` turns them back, with a backslash only where a reader
# would take the character for markup.
SPECIAL = "\\`*_$[<&~"
MARKS = {ord(c): chr(0xFDD0 + i) for i, c in enumerate(SPECIAL)}
UNMARKS = {0xFDD0 + i: c for i, c in enumerate(SPECIAL)}
BACKSLASH, TICK, STAR, UNDERSCORE, DOLLAR, BRACKET, LESS, AMPERSAND, TILDE = MARKS.values()
HELD = re.compile("\ufde0([0-9]+)\ufde1")  # a formula or a code span, put in last
PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


@dataclass(frozen=True, slots=True)
class Style:
    """How markdown is written. `ambiguous`: the page has $-maths, so that a bare dollar sign needs its backslash."""

    headers_footers: bool = False
    images: bool = True
    math: str = "dollars"
    ambiguous: bool = False
    image: str | None = None  # the file of the figure being written

    @property
    def delimiters(self) -> tuple[str, str, str, str]:
        return ("\\(", "\\)", "\\[", "\\]") if self.math == "brackets" else ("$", "$", "$$", "$$")


def to_markdown(
    blocks: Sequence[Block], *, headers_footers: bool = False, images: bool = True, math: str = "dollars"
) -> str:
    """Markdown of a page's blocks: Chandra's text and structure without needless backslashes and entities.

    `math`: "dollars" for $x$ and $$x$$, "brackets" for \\(x\\) and \\[x\\]. Tables stay HTML.
    """
    ambiguous = math == "dollars" and any(block.element.find(".//math") is not None for block in blocks)
    style = Style(headers_footers, images, math, ambiguous)
    parts: list[str] = []
    for block in blocks:
        if block.label == "Blank-Page" or (block.label in RUNNING and not headers_footers):
            continue
        try:
            parts += block_markdown(block, style)
        except RecursionError:
            parts.append(block.text)
    return "\n\n".join(part for part in parts if part.strip()).strip("\n")


def block_markdown(block: Block, style: Style) -> list[str]:
    """The paragraphs of one block."""
    element = block.element
    if block.label == "Code-Block" and element.find(".//pre") is None:
        coded = sum(len("".join(element_text(code).split())) for code in element.iter("code"))
        if coded in (0, len("".join(element_text(element).split()))):  # all of it, marked as code or not
            return [code_block(code_text(element), code_language(element))]
    if block.label == "Section-Header" and not any(child.tag in HEADINGS for child in element.iter()):
        return heading(2, inline(element, style))
    if block.label in FIGURES:
        return figure_markdown(block, style)
    return flow(element, style)


def figure_markdown(block: Block, style: Style) -> list[str]:
    """A figure: its image where the reply has one (else last), its description, its data."""
    element = copy.deepcopy(block.element)
    images = list(element.iter("img")) if style.images else []
    for i, image in enumerate(images):
        if i == 0 and block.image:
            image.set("src", block.image)
        else:  # one figure is one file; what else it says of images is text
            image.tag, image.text = "span", image.get("alt")
    parts = flow(element, dataclasses.replace(style, image=block.image))
    return [*parts, f"![]({block.image})"] if block.image and style.images and not images else parts


HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 5, "h6": 6}
BLOCK_TAGS = frozenset(
    (
        "address article aside blockquote body center dd details div dl dt fieldset figcaption figure footer form h1 "
        "h2 h3 h4 h5 h6 header hr legend li main menu nav ol p pre section summary table ul"
    ).split()
)


def is_block(element: etree._Element) -> bool:
    return element.tag in BLOCK_TAGS or (element.tag == "math" and element.get("display") == "block")


def flow(element: etree._Element, style: Style) -> list[str]:
    """An element's contents as paragraphs: runs of inline content, and the blocks between them."""
    parts: list[str] = []
    run: list[str] = []
    held: list[str] = []

    def flush() -> None:
        text = paragraph("".join(run), held, style)
        if text:
            parts.append(text)
        run.clear()
        held.clear()

    run.append(marked(element.text))
    for child in element:
        if is_block(child):
            flush()
            parts += block_element(child, style)
        elif any(is_block(inner) for inner in child.iterdescendants()) and child.tag not in ("math", "code"):
            flush()  # <b><p>...</p></b>: the markup cannot span paragraphs, the text stays
            parts += flow(child, style)
        else:
            run.append(inline_element(child, held, style))
        run.append(marked(child.tail))
    flush()
    return parts


def block_element(element: etree._Element, style: Style) -> list[str]:
    """A block-level element as paragraphs."""
    tag = str(element.tag)
    if tag in HEADINGS:
        return heading(HEADINGS[tag], inline(element, style))
    if tag in ("ul", "ol", "menu"):
        return [text] if (text := list_markdown(element, style)) else []
    if tag == "table":
        return [table_html(element, style)]
    if tag == "pre":
        return [code_block(code_text(element), code_language(element))]
    if tag == "hr":
        return ["---"]
    if tag == "math":
        return [math_block(element, style)] if element_text(element).strip() else []
    if tag == "blockquote":
        return ["\n".join(f"> {line}".rstrip() for line in "\n\n".join(flow(element, style)).split("\n"))]
    if tag == "div" and (label := (element.get("data-label") or "").strip()):
        left_out = label == "Blank-Page" or (label in RUNNING and not style.headers_footers)
        return [] if left_out else block_markdown(Block(label, None, element), style)
    return flow(element, style)


def element_text(element: etree._Element) -> str:
    return "".join(element.itertext())


def code_text(element: etree._Element) -> str:
    """Code as it stands: a line ends where the text, a <br> or a paragraph ends it."""
    text = element.text or ""
    for child in element:
        tail = child.tail or ""
        if child.tag == "br":
            text += "\n"
        elif child.tag in BLOCK_TAGS:
            text += "\n" if text.strip() and not text.endswith("\n") else ""
            text += code_text(child).strip("\n") + "\n"
            tail = tail if tail.strip() else ""
        else:
            text += code_text(child)
        text += tail
    return text


def marked(text: str | None) -> str:
    """A text node with its white space folded and its special characters marked."""
    if not text:
        return ""
    folded = re.sub(r"[ \t]+", " ", text.replace("\r", "\n"))
    return re.sub(r" ?\n[ \n]*", "\n", folded).translate(MARKS)


def inline(element: etree._Element, style: Style) -> str:
    """An element's contents as one run of markdown, settled."""
    held: list[str] = []
    run = [marked(element.text)]
    for child in element:
        run += [inline_element(child, held, style), marked(child.tail)]
    return settle("".join(run).strip(), held, style)


WRAPS = {"b": "b", "strong": "b", "i": "i", "em": "i", "del": "del", "s": "del", "strike": "del"}
SIGNS = {"b": "**", "i": "*", "del": "~~"}
# Emphasis travels between marks of its own; `settle` writes signs for them.
OPENINGS = {"b": "\ufde2", "i": "\ufde4", "del": "\ufde6"}
WRAPPINGS = {mark: name for name, first in OPENINGS.items() for mark in (first, chr(ord(first) + 1))}


def inline_element(element: etree._Element, held: list[str], style: Style) -> str:
    """An inline element as marked text. Formulas and code are kept in `held` and named by their place there."""
    tag = str(element.tag)
    if tag == "math":
        text = element_text(element).strip()
        return hold(math_inline(element, style), held) if text else ""
    if tag in ("code", "kbd", "samp", "tt"):
        text = " ".join(element_text(element).split())
        return hold(code_span(text), held) if text else ""
    if tag == "br":
        return "  \n"
    if tag == "img":
        if style.image and element.get("src") == style.image:
            return hold(f"![{alt_text(element, style)}]({style.image})", held)
        return marked(element.get("alt")) if style.images and element.get("src") else ""  # it leads to no file
    if tag == "input":
        return marked(input_text(element))
    text = marked(element.text) + "".join(inline_element(child, held, style) + marked(child.tail) for child in element)
    if tag in WRAPS and not inside_same(element):
        return wrap(text, WRAPS[tag])
    if tag == "sup" and ORDINAL.fullmatch(text) and (text_before(element)[-1:]).isdigit():
        return text  # 10th
    if tag in ("sub", "sup") and text.strip():
        return hold(f"<{tag}>", held) + text + hold(f"</{tag}>", held)
    if tag == "a" and leads_somewhere(element.get("href")):
        return link(text, str(element.get("href")), held)
    return f" {text} " if is_block(element) else text


ORDINAL = re.compile(r"st|nd|rd|th|er|re|e|ème|o|a|º|ª")


def text_before(element: etree._Element) -> str:
    """The text right before an element, within its parent."""
    before, parent = element.getprevious(), element.getparent()
    return str((before.tail if before is not None else parent.text if parent is not None else "") or "")


def inside_same(element: etree._Element) -> bool:
    """Whether an element that means the same is around this one: `****x****` is not bold."""
    return any(WRAPS.get(str(parent.tag)) == WRAPS[str(element.tag)] for parent in element.iterancestors())


WRAP_MARKS = re.compile(f"[{''.join(WRAPPINGS)}]")
ALL_MARKS = re.compile(f"[{''.join([*MARKS.values(), *WRAPPINGS])}]")


def wrap(text: str, name: str) -> str:
    """Text between an emphasis's marks, each of its paragraphs by itself, with outer white space outside them."""
    opening = OPENINGS[name]
    parts = re.split(r"(\n[ \t]*\n)", text)
    for i, part in enumerate(parts):
        if inner := part.strip():
            start = part.index(inner[0])
            parts[i] = part[:start] + opening + inner + chr(ord(opening) + 1) + part[start + len(inner) :]
    return "".join(parts)


def hold(text: str, held: list[str]) -> str:
    held.append(text)
    return f"\ufde0{len(held) - 1}\ufde1"


def leads_somewhere(href: str | None) -> bool:
    return bool(href and re.match(r"(https?://|mailto:)[^\s<>]+$", href.strip(), re.IGNORECASE))


def link(text: str, href: str, held: list[str]) -> str:
    href = re.sub(r"[\s<>]", "", href.strip())
    said = text.translate(UNMARKS).strip()
    if not said or said in (href, re.sub(r"^(https?://|mailto:)", "", href)):
        return text  # the address reads as itself
    target = f"<{href}>" if re.search(r"[()\\]", href) else href
    return hold("[", held) + link_text(text.strip()) + hold(f"]({target})", held)


def link_text(text: str) -> str:
    """Marked text between a link's brackets: its own get backslashes unless each has its partner."""
    depth = 0
    for c in re.findall(rf"{BRACKET}|\]", text):
        depth += 1 if c == BRACKET else -1
        if depth < 0:
            break
    return text.replace(BRACKET, "\\[").replace("]", "\\]") if depth else text


def alt_text(element: etree._Element, style: Style) -> str:
    """An image's description on one line, as a link's text."""
    return settle(link_text(marked(" ".join((element.get("alt") or "").split()))), [], style)


def input_text(element: etree._Element) -> str:
    """A form field as text: boxes as people type them, a field by its value."""
    kind = (element.get("type") or "text").lower()
    checked = element.get("checked") is not None and str(element.get("checked")).lower() != "false"
    if kind == "checkbox":
        return "[x]" if checked else "[ ]"
    if kind == "radio":
        return "(x)" if checked else "( )"
    return element.get("value") or ""


def latex(element: etree._Element) -> str:
    """A formula's LaTeX without blank lines, which would end it, or delimiters of its own."""
    text = re.sub(r" ?\n\s*", "\n", re.sub(r"[^\S\n]+", " ", element_text(element).strip()))
    text = re.sub(r"(?<!\\)((?:\\\\)+)(?=[()\]])", r"\1 ", text)  # a line break and "(" are no opening \(
    for before, after in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")):
        if text.startswith(before) and text.endswith(after) and len(text) > len(before + after):
            inner = text[len(before) : -len(after)]
            if before not in inner and after not in inner:
                return inner.strip()
    return text


def math_inline(element: etree._Element, style: Style) -> str:
    if element.get("display") == "block":
        return math_block(element, style)
    opening, closing, _, _ = style.delimiters
    return f"{opening}{' '.join(formula(element, style).split())}{closing}"


def math_block(element: etree._Element, style: Style) -> str:
    _, _, opening, closing = style.delimiters
    return f"{opening}{formula(element, style)}{closing}"


def formula(element: etree._Element, style: Style) -> str:
    """A formula's LaTeX in which nothing reads as the delimiter around it: maths within its text has the other kind."""
    text = latex(element)
    if style.math == "brackets":
        return re.sub(r"(?<!\\)\\\((.*?)(?<!\\)\\\)", r"$\1$", text, flags=re.DOTALL)
    text = re.sub(r"(?<!\\)\$([^$]+?)(?<!\\)\$", r"\\(\1\\)", text)
    return re.sub(r"(?<!\\)\$", r"\\$", text)


def code_span(text: str) -> str:
    """Inline code between more backticks than it holds in a row."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * (longest + 1)
    return f"{ticks} {text} {ticks}" if longest and (text[0] == "`" or text[-1] == "`") else f"{ticks}{text}{ticks}"


def code_block(text: str, language: str) -> str:
    """Fenced code; the fence is longer than any in it."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`{3,}", text)), 3)
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}" if text.strip() else ""


def code_language(element: etree._Element) -> str:
    for part in (element, *element.iter("code")):
        if match := re.search(r"(?:language-|lang-)?([\w+#-]{1,20})", part.get("class") or ""):
            return match[1].removeprefix("language-").removeprefix("lang-")
    return ""


def list_markdown(element: etree._Element, style: Style) -> str:
    """A list, its items tight, inner lists and paragraphs indented below their item."""
    ordered = element.tag == "ol"
    start = str(element.get("start") or "1")
    number = int(start) if re.fullmatch(r"[0-9]{1,9}", start) else 1
    lines: list[str] = []
    if element.text and element.text.strip():
        lines.append(paragraph(marked(element.text), [], style))
    for child in element:
        bullet = f"{number}. " if ordered else "- "
        parts = (
            flow(child, style)
            if child.tag == "li"
            else (block_element(child, style) if is_block(child) else [inline(child, style)])
        )
        if child.tag == "li":
            number += 1
        text = join_item(parts)
        if text:
            indent = " " * len(bullet)
            lines.append(bullet + "\n".join(indent + line if line else "" for line in text.split("\n")).lstrip())
        if child.tail and child.tail.strip():
            lines.append(paragraph(marked(child.tail), [], style))
    return "\n".join(lines)


def join_item(parts: Sequence[str]) -> str:
    """A list item's paragraphs: an inner list follows its text at once, anything else after a blank line."""
    text = ""
    for part in parts:
        tight = re.match(r"(- |[0-9]+\. )", part)
        text += ("\n" if tight else "\n\n") + part if text else part
    return text


TABLE_ATTRIBUTES = frozenset({"colspan", "rowspan", "align", "valign", "border", "scope", "class", "start", "type"})
VOID = frozenset({"br", "hr", "img", "input", "wbr", "col"})


def table_html(element: etree._Element, style: Style) -> str:
    """A table as HTML without blank lines (they would end it in markdown), its maths delimited as outside."""
    return re.sub(r"\s*\n\s*", "\n", "".join(clean_html(element, style))).strip()


def clean_html(element: etree._Element, style: Style, lone: bool = False) -> Iterator[str]:
    """An element as HTML text: harmless attributes only, form fields and maths as text. `lone`: see cell_text."""
    tag = CELL_TAGS.get(str(element.tag), str(element.tag))
    if tag == "math":
        yield cell_text(re.sub(r"([<&])(?=[A-Za-z#/!?])", r"\1 ", math_inline(element, style)))
        return
    if tag == "input":
        yield cell_text(input_text(element))
        return
    if tag == "img":
        return
    kept = tag not in UNWRAPPED and (tag != "a" or leads_somewhere(element.get("href")))
    if kept:
        yield f"<{tag}{attributes(element)}>"
    if tag in VOID:
        return
    if tag == "pre":
        yield html.escape(code_text(element).strip("\n"), quote=False).replace("\n", "<br>")
    else:
        if tag in ("td", "th", "caption"):
            lone = style.ambiguous and (element.find(".//math") is not None or element_text(element).count("$") > 1)
        yield cell_text(element.text, lone)
        for child in element:
            yield from clean_html(child, style, lone)
            yield cell_text(child.tail, lone)
    if kept:
        yield f"</{tag}>"


CELL_TAGS = {"strong": "b", "em": "i", "s": "del", "strike": "del"}
UNWRAPPED = frozenset({"chem", "span", "font", "label", "u", "small", "big", "mark", "ins", "center"})


def attributes(element: etree._Element) -> str:
    """An element's harmless attributes; spans only as the whole numbers they must be."""
    said = []
    for name, value in element.items():
        if name in ("colspan", "rowspan"):
            if re.fullmatch(r"[1-9][0-9]{0,2}|1000", value.strip()):
                said.append(f' {name}="{value.strip()}"')
        elif name in TABLE_ATTRIBUTES or (name == "href" and element.tag == "a"):
            said.append(f' {name}="{html.escape(value)}"')
    return "".join(said)


def cell_text(text: str | None, lone_dollars: bool = False) -> str:
    """A table's text: "<" and "&" as they are wherever HTML reads them so, as people and scorers search the markdown.

    Beside maths a bare dollar sign gets an element of its own: a backslash would show in HTML.
    """
    text = re.sub(r"[ \t\r]+", " ", text or "")
    escaped = re.sub(r"&(?=[A-Za-z#])", "&amp;", text)
    escaped = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", escaped)
    return escaped.replace("$", "<span>$</span>") if lone_dollars else escaped


def paragraph(text: str, held: list[str], style: Style) -> str:
    """A run of inline content as a paragraph: settled, and with no line that reads as something else."""
    text = re.sub(r"[ \t]*\n(?:[ \t]*\n)+", "\n\n", text.strip())
    lines = settle(text, held, style).split("\n")
    return "\n".join(guard_line(line.lstrip(" \t"), bool(i)) for i, line in enumerate(lines))


# A heading, quote, list, rule, fence or link target; "-" and "1." read as themselves in a list too.
LINE_MARKUP = re.compile(
    r"#{1,6}(?:\s|$)|>|[+*](?:\s|$)|(?:(?:-\s*){3,}|(?:_\s*){3,}|(?:\*\s*){3,})$|`{3,}[^`]*$|~{3,}|\[[^\]]+\]:"
)
# Below another line: what would make a heading of it, or a table's head.
UNDERLINE = re.compile(r"=+\s*$|\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")


def guard_line(line: str, goes_on: bool = False) -> str:
    """A line of text with a backslash before it when markdown would read it as markup."""
    if LINE_MARKUP.match(line) or (goes_on and UNDERLINE.match(line)):
        return "\\" + line
    return line


def heading(level: int, text: str) -> list[str]:
    """A heading on one line; number signs at its end would be taken for its closing."""
    text = re.sub(r"(^| )(#+)$", r"\1\\\2", " ".join(text.split()))
    return [f"{'#' * level} {text}"] if text else []


def settle(text: str, held: Sequence[str], style: Style) -> str:
    """Marked text as markdown: special characters get a backslash only where a reader would take them for markup."""
    if not text:
        return ""
    held = list(held)
    if WRAP_MARKS.search(text):
        text = tags_for_signs(text, held)
    escaped = {*paired(text, STAR, "bi"), *paired(text, UNDERSCORE, ""), *paired(text, TILDE, ("del",))}
    escaped |= {*dollars(text, style), *ticks(text, held), *links(text), *tags(text)}
    out: list[str] = []
    done = 0
    for match in ALL_MARKS.finditer(text):
        i, c = match.start(), match[0]
        out.append(text[done:i])
        done = i + 1
        if c in WRAPPINGS:
            out.append(SIGNS[WRAPPINGS[c]])
            continue
        literal, follows = UNMARKS[ord(c)], text[i + 1 : i + 2]
        if (
            i in escaped
            or (c == BACKSLASH and (follows == "\n" or (follows and kind_of(follows) == 1)))
            or (c == AMPERSAND and is_entity(text[i + 1 : i + 40]))
        ):
            out.append("\\")
        out.append(literal)
    said = "".join([*out, text[done:]])
    return HELD.sub(lambda m: spaced(m, held), said) if held else said


def plain(text: str) -> str:
    return text.translate(UNMARKS)


def is_entity(text: str) -> bool:
    """Whether a reader takes "&" before this text for a character reference."""
    match = re.match(r"#[0-9]{1,7};|#[xX][0-9a-fA-F]{1,6};|([A-Za-z][A-Za-z0-9]*;)", text)
    return bool(match and (match[1] is None or match[1] in html.entities.html5))


def spaced(match: re.Match[str], held: Sequence[str]) -> str:
    """What was held, apart from a letter or digit next to a formula's dollar sign, which would undo it."""
    said = held[int(match[1])]
    if not said.startswith("$"):
        return said
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return (" " if before.isalnum() or before == "$" else "") + said + (" " if after.isalnum() or after == "$" else "")


def kind_of(c: str) -> int:
    """0: white space or nothing, 1: punctuation or a sign of markup, 2: a letter or digit (CommonMark 2.1)."""
    if not c or c.isspace():
        return 0
    return 1 if c in PUNCTUATION or "\ufdd0" <= c <= "\ufdef" or unicodedata.category(c)[0] in "PS" else 2


def flanks(text: str, start: int, end: int) -> tuple[bool, bool]:
    """Whether a run of delimiters text[start:end] is left- and right-flanking (CommonMark 6.2)."""
    left, right = kind_of(text[end : end + 1]), kind_of(text[max(0, start - 1) : start])
    return bool(left == 2 or (left == 1 and right < 2)), bool(right == 2 or (right == 1 and left < 2))


def tags_for_signs(text: str, held: list[str]) -> str:
    """Text in which emphasis that stars or tildes could not show where it stands (`**a:**b`) has tags instead."""
    marks = list(text)
    opened: list[int] = []
    for match in WRAP_MARKS.finditer(text):
        i, c = match.start(), match[0]
        name = WRAPPINGS[c]
        if c == OPENINGS[name]:
            opened.append(i)
            continue
        start = opened.pop()
        # Marks next to each other make one run: its neighbours count.
        first, last = (start, start), (i, i)
        if name != "del":
            first, last = star_run(marks, start), star_run(marks, i)
        apart = "".join(marks[max(0, first[0] - 1) : first[0]] + marks[last[1] + 1 : last[1] + 2])
        opens, closes_too = flanks(text, first[0], first[1] + 1)
        opens_too, closes = flanks(text, last[0], last[1] + 1)
        if (
            not (opens and closes)
            or (opened and (opens_too or closes_too))  # stars within stars might pair up otherwise
            or any(WRAPPINGS.get(near) for near in apart)
        ):
            marks[start], marks[i] = hold(f"<{name}>", held), hold(f"</{name}>", held)
    return "".join(marks)


def star_run(marks: Sequence[str], at: int) -> tuple[int, int]:
    """Where the run of equal-sided star marks around a place begins and ends."""
    start = end = at
    opening = marks[at] in OPENINGS.values()

    def joins(c: str) -> bool:
        return WRAPPINGS.get(c) in ("b", "i") and (c in OPENINGS.values()) == opening

    while start > 0 and joins(marks[start - 1]):
        start -= 1
    while end + 1 < len(marks) and joins(marks[end + 1]):
        end += 1
    return start, end


def paired(text: str, sign: str, wraps: Iterable[str]) -> Iterator[int]:
    """Where literal stars, underscores or tildes would pair up as emphasis, with each other or with real marks."""
    if sign not in text:
        return
    real = {OPENINGS[name]: 1 for name in wraps} | {chr(ord(OPENINGS[name]) + 1): -1 for name in wraps}
    last_closing = max((text.rfind(mark) for mark in real), default=-1)
    runs: list[tuple[int, int, bool, bool]] = []
    depth = 0
    for match in re.finditer(f"{sign}+|[{''.join(real)}]" if real else f"{sign}+", text):
        start, end = match.span()
        if match[0] in real:
            depth += real[match[0]]
            continue
        left, right = flanks(text, start, end)
        before, after = text[max(0, start - 1) : start], text[end : end + 1]
        if sign == UNDERSCORE:  # inside a word an underscore is a letter
            left, right = left and (not right or kind_of(before) == 1), right and (not left or kind_of(after) == 1)
        if right:
            last_closing = max(last_closing, start)
        runs.append((start, end, left, before in real or after in real or (right and depth > 0)))
    for start, end, opens, harms in runs:
        if harms or (opens and last_closing > start):
            yield from range(start, end)


def dollars(text: str, style: Style) -> Iterator[int]:
    """Where bare dollar signs would be read as maths: on a page with $-maths, or where two of them pair up."""
    if style.math == "brackets" or DOLLAR not in text:
        return
    runs = [match.span() for match in re.finditer(DOLLAR + "+", text)]
    closing = [
        start
        for start, end in runs
        if end - start > 1 or (kind_of(text[max(0, start - 1) : start]) and not text[end : end + 1].isdigit())
    ]
    for start, end in runs:
        opens = end - start > 1 or kind_of(text[end : end + 1])
        if style.ambiguous or (opens and closing and closing[-1] > start):
            yield from range(start, end)


def ticks(text: str, held: Sequence[str]) -> Iterator[int]:
    """Where literal backticks would make code: before as many others."""
    if TICK not in text:
        return
    later: set[int] = set()
    for match in reversed(list(re.finditer(f"{TICK}+|{HELD.pattern}", text))):
        if match[1]:
            said = held[int(match[1])]
            later.add(len(said) - len(said.lstrip("`")))
            continue
        if len(match[0]) in later:
            yield from range(match.start(), match.end())
        later.add(len(match[0]))


# What makes a link of "[...]" before it: an address, or nothing, and perhaps a title.
LINK_END = re.compile(r"\(\s*(?:<[^<>\n]*>|[^\s<]\S*)?(?:\s+[\"'(].*[\"')])?\s*\)")


def links(text: str) -> Iterator[int]:
    """Where literal brackets would make a link."""
    opened: list[int] = []
    for match in re.finditer(rf"{BRACKET}|\]", text):
        if match[0] == BRACKET:
            opened.append(match.start())
        elif opened:
            rest = text[match.end() : match.end() + 300]
            if rest.startswith("(") and (len(rest) == 300 or LINK_END.match(plain(rest))):
                yield from opened  # each of them, once those within have their backslash
                opened.clear()
            else:
                opened.pop()


# What begins a block of HTML at a line's start, whole tag or not (CommonMark 4.6).
HTML_START = re.compile(
    r"(?:!--|\?|![A-Za-z]|!\[CDATA\[|(?:pre|script|style|textarea)(?:[\s>]|$)|/?(?:address|article|aside|base|basefont|"
    r"blockquote|body|caption|center|col|colgroup|dd|details|dialog|dir|div|dl|dt|fieldset|figcaption|figure|footer|"
    r"form|frame|frameset|h[1-6]|head|header|hr|html|iframe|legend|li|link|main|menu|menuitem|nav|noframes|ol|"
    r"optgroup|option|p|param|search|section|summary|table|tbody|td|tfoot|th|thead|title|tr|track|ul)(?:\s|/?>|$))",
    re.IGNORECASE,
)


def tags(text: str) -> Iterator[int]:
    """Where a literal "<" would begin a tag, a comment or an address."""
    last_greater = text.rfind(">")
    for match in re.finditer(LESS, text):
        start, follows = match.start(), plain(text[match.end() : match.end() + 20])
        line = text[text.rfind("\n", 0, start) + 1 : start]
        begins = not line.strip() and HTML_START.match(follows)
        if begins or (start < last_greater and re.match(r"[A-Za-z/!?]", follows)):
            yield start


# --- clean HTML

SHOWN_TAGS = (
    HTML_TAGS
    - {"body", "head", "html", "main", "map", "math", "meta", "nav", "button", "fieldset", "form"}
    - {"legend", "link", "select", "style", "textarea", "time", "optgroup", "option", "input", "bdi", "bdo"}
)
SHOWN_ATTRIBUTES = {
    "*": {"class", "align"},
    "a": {"href"},
    "img": {"src", "alt"},
    "li": {"value"},
    "ol": {"start", "type"},
    "table": {"border"},
    "td": {"colspan", "rowspan", "valign"},
    "th": {"colspan", "rowspan", "valign", "scope"},
}


CUT_FIGURE = re.compile(r"(?:\.\./)?images/[\w.-]+")


def only_known_addresses(tag: str, name: str, value: str) -> str | None:
    """An attribute's value, unless it is the address of anything but a figure cut out here, a web page or this page."""
    if name == "src" and not CUT_FIGURE.fullmatch(value):
        return None
    return value if name != "href" or value.startswith("#") or leads_somewhere(value) else None


def sanitize(text: str) -> str:
    """HTML in which nothing runs and nothing is fetched: a browser may open it."""
    return str(sanitizer().clean(text.encode("utf-8", "replace").decode()))


@functools.cache
def sanitizer() -> Any:
    import nh3

    return nh3.Cleaner(
        tags=set(SHOWN_TAGS),
        attributes=SHOWN_ATTRIBUTES,
        url_schemes={"http", "https", "mailto"},
        attribute_filter=only_known_addresses,
        strip_comments=True,
    )


def to_html(blocks: Sequence[Block], *, headers_footers: bool = False, images: bool = True) -> str:
    """Clean HTML of a page's blocks, each in a div of its label; maths as LaTeX between \\( and \\)."""
    parts = []
    for block in blocks:
        if block.label == "Blank-Page" or (block.label in RUNNING and not headers_footers):
            continue
        element = copy.deepcopy(block.element)
        for inner in list(labelled_below(element)):
            if inner.get("data-label").strip() in RUNNING and not headers_footers:
                keep_tail(inner)
                inner.getparent().remove(inner)
        for image in element.iter("img"):
            image.attrib.pop("src", None)  # a reply may name any address; only files cut from the page are shown
        pictures = list(element.iter("img"))
        if block.image and images:
            picture = pictures[0] if pictures else element.makeelement("img")
            if not pictures:
                element.append(picture)
            picture.set("src", block.image)
        for maths in list(element.iter("math")):
            said = math_inline(maths, Style(math="brackets"))
            for child in list(maths):
                maths.remove(child)
            maths.tag, maths.text = "span", said
            maths.attrib.clear()
            maths.set("class", "math")
        for box in element.iter("input"):
            box.tag, box.text = "span", input_text(box)
        label = re.sub(r"[^\w-]", "", block.label) or "Text"
        inner = Block(block.label, None, element).html
        parts.append(sanitize(f'<div class="block {label}">{inner}</div>'))
    return "\n".join(parts)


SPAN_OF_MATHS = re.compile(r'<span class="math">\\([(\[])([^<]*)\\[)\]]</span>')


def maths_drawn(text: str) -> str:
    """The formulas of `to_html` as MathML, which browsers draw; those that cannot be converted stay LaTeX."""

    def drawn(match: re.Match[str]) -> str:
        said = to_mathml(html.unescape(match[2]), block=match[1] == "[")
        return f'<span class="math">{said}</span>' if said else match[0]

    return SPAN_OF_MATHS.sub(drawn, text) if "\\" in text else text


MATHML_TAGS = frozenset(
    (
        "math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts "
        "mprescripts none mtable mtr mtd mlabeledtr mstyle mpadded mphantom menclose merror"
    ).split()
)
MATHML_ATTRIBUTES = frozenset(
    (
        "accent accentunder columnalign columnlines columnspacing depth displaystyle fence form height largeop "
        "linethickness lspace mathcolor mathsize mathvariant maxsize minsize movablelimits notation rowlines "
        "rowspacing rspace scriptlevel separator stretchy symmetric voffset width"
    ).split()
)
# Environments by the name under which latex2mathml knows their like.
ENVIRONMENTS = {"aligned": "align*", "eqnarray": "align*", "eqnarray*": "align*", "gathered": "matrix"}
ENVIRONMENTS |= {"gather": "matrix", "gather*": "matrix", "multline": "matrix", "multline*": "matrix"}
ENVIRONMENTS |= {"dcases": "cases", "tabular": "array"}
DEFINITION = re.compile(r"\\(?:(?:re|provide)?newcommand|[egx]?def|let)(?![a-zA-Z])")  # could grow without end
LONGEST_FORMULA = 4000  # characters; a longer one stays LaTeX


def to_mathml(latex: str, block: bool = False) -> str | None:
    """A formula as MathML that carries its LaTeX; None when latex2mathml is not there or does not understand it."""
    try:
        from latex2mathml.converter import convert_to_element
    except ImportError:
        return None
    if not latex.strip() or len(latex) > LONGEST_FORMULA or DEFINITION.search(latex):
        return None
    said = re.sub(r"\\(begin|end)\{(equation\*?|displaymath|math)\}|\\nonumber(?![a-zA-Z])", " ", latex)
    said = re.sub(r"\\begin\{(aligned|gathered|split)\}\[[tbc]\]", r"\\begin{\1}", said)
    said = re.sub(r"\\(begin|end)\{([a-z]+\*?)\}", lambda m: f"\\{m[1]}{{{ENVIRONMENTS.get(m[2], m[2])}}}", said)
    try:
        drawn = "".join(mathml(child) for child in convert_to_element(said.replace("\\bm{", "\\boldsymbol{")))
    except Exception:  # its errors are of many kinds, and each means that the formula is shown as it was read
        return None
    source = html.escape(latex)
    kind = ' display="block"' if block else ""
    return (
        f'<math xmlns="http://www.w3.org/1998/Math/MathML"{kind} alttext="{source}"><semantics>{drawn}'
        f'<annotation encoding="application/x-tex">{source}</annotation></semantics></math>'
    )


def mathml(element: Any) -> str:
    """An element of latex2mathml's as text, with known tags and attributes only. Raises ValueError for others."""
    words = html.unescape(element.text or "")  # it writes characters as references of its own
    if element.tag not in MATHML_TAGS or re.match(r"\\[a-zA-Z]", words):
        raise ValueError(f"{element.tag}: {words}")
    known = (
        f' {name}="{value}"'
        for name, value in element.attrib.items()
        if name in MATHML_ATTRIBUTES and re.fullmatch(r"[\w#.%+ -]*", value)
    )
    inside = "".join(mathml(child) for child in element)
    return f"<{element.tag}{''.join(known)}>{html.escape(words, quote=False)}{inside}</{element.tag}>"


REPLY_TAG = "|".join(sorted(SHOWN_TAGS | {"math", "input"}))
REPLY_ATTRIBUTE = (
    "class|colspan|rowspan|display|checked|type|border|value|alt|align|data-bbox|data-label|start|scope|valign|"
    r"href(?==\"(?:https?:|mailto:|#|\"))|href(?='(?:https?:|mailto:|#|'))"
)
PLAIN_MARKUP = re.compile(
    rf"""[^<]*(?:<(?:/?(?:{REPLY_TAG})(?:\s+(?:{REPLY_ATTRIBUTE})(?:="[^"<>]*"|='[^'<>]*')?)*\s*/?>|(?=[\s\d=.,;:)\-]))[^<]*)*""",
    re.IGNORECASE,
)


def is_plain_markup(raw: str) -> bool:
    """Whether a raw reply holds only the tags and attributes Chandra writes, so that a browser may open it as it is."""
    return PLAIN_MARKUP.fullmatch(raw) is not None


# ----------------------------------------------------------------------------------------------------------- Writing


def write_atomic(path: Path, data: str | bytes) -> None:
    """Writes a file whole or not at all. Text is UTF-8 with \\n line ends."""
    with written_whole(path) as part:
        part.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file to write, renamed to `path` at the end. Its name is this process's own: two runs may write
    into one folder at a time, and neither gets the other's half."""
    part = path.with_name(f"{path.name}.{machine()}-{os.getpid():x}-{time.time_ns() & 0xFFFFFFFF:08x}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


@functools.cache
def machine() -> str:
    """Names where this process's number counts: the host and, in a container, its own list of processes."""
    space = ""
    with contextlib.suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


STALE = 24 * 3600.0  # s after which a temporary file is one that a killed run left, wherever that ran
PART = re.compile(r"\.([0-9a-f]{8})-([0-9a-f]+)-[0-9a-f]{8}\.part")


def remove_stale_parts(folder: Path) -> None:
    """Removes the temporary files of processes that are no more."""
    for part in (path for place in (folder, folder / "pages", folder / "images") for path in place.glob("*.part")):
        with contextlib.suppress(OSError):
            if was_left(part) or time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def was_left(part: Path) -> bool:
    """Whether the process that began a temporary file is known to have ended."""
    match = PART.search(part.name)
    if os.name != "posix" or not match or match[1] != machine():  # on Windows os.kill ends processes
        return False
    try:
        os.kill(int(match[2], 16), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def write_json(path: Path, data: dict[str, Any], indent: int | None = None) -> None:
    write_atomic(path, json.dumps(data, ensure_ascii=False, indent=indent) + "\n")


def page_file(folder: Path, number: int, suffix: str) -> Path:
    """pages/0001.md and its like."""
    return folder / "pages" / f"{number:04d}{suffix}"


def raw_reply(folder: Path, number: int) -> str:
    """The exact reply that a page on disk was read from."""
    record = read_json(page_file(folder, number, ".json"))
    return record["raw"] if "raw" in record else page_file(folder, number, ".html").read_bytes().decode("utf-8")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What decides a page's reply and its files: equal settings give equal files."""

    model: str
    engine: str
    dpi: int
    max_tokens: int
    retries: int
    loop_stop: bool
    headers_footers: bool
    images: bool
    math: str
    prompt_sha256: str

    def key(self, sha256: str, number: int) -> str:
        """Names everything that changes a page's reply; a page with another key is asked for anew."""
        asked = [self.model, self.engine, self.dpi, self.max_tokens, self.retries, self.loop_stop, self.prompt_sha256]
        return hashlib.sha256(json.dumps([sha256, number, *asked]).encode()).hexdigest()[:32]

    def output(self) -> dict[str, Any]:
        """What changes a page's files only: they are written again from the reply that is there."""
        return {"headers_footers": self.headers_footers, "images": self.images, "math": self.math}


@dataclass(frozen=True, slots=True)
class PageJob:
    """A page whose asking is over, on its way to disk."""

    document: Document
    number: int
    wanted: Wanted
    picture: Picture | None  # without its PNG
    attempts: tuple[Attempt, ...]
    error: str | None = None
    reply_hash: str | None = None
    twin: bool = False  # another page of the run has the same reply


def finish_page(job: PageJob) -> PageResult:
    """Reads a page's best reply and writes its files, the JSON last. Raises OutputError."""
    folder, number = job.document.folder, job.number
    try:
        page_file(folder, number, ".json").parent.mkdir(parents=True, exist_ok=True)
        record = failed_record(job) if job.error is not None else page_record(job)
        write_json(page_file(folder, number, ".json"), record)
        with contextlib.suppress(FileNotFoundError):
            page_file(folder, number, ".attempts.json").unlink()
    except OSError as e:
        raise OutputError(f"{show(folder)}: cannot be written: {reason(e)}") from None
    return result_of(record, job.document.source, folder, number)


def failed_record(job: PageJob) -> dict[str, Any]:
    for suffix in (".md", ".html"):
        with contextlib.suppress(FileNotFoundError):
            page_file(job.document.folder, job.number, suffix).unlink()
    return {
        "page": job.number,
        "status": FAILED,
        "reasons": [],
        "error": job.error,
        "key": job.wanted.key(job.document.sha256, job.number),
        "attempts": [attempt.record() for attempt in job.attempts],
    }


def page_record(job: PageJob) -> dict[str, Any]:
    """Writes a page's images, markdown and HTML and gives the JSON that makes it done."""
    document, number, wanted = job.document, job.number, job.wanted
    picture = job.picture
    assert picture and job.attempts
    kept = best_attempt(job.attempts)
    raw = job.attempts[kept].text
    blocks, notes = cut_figures(read_reply(raw), document, number, wanted)
    markdown = to_markdown(blocks, **wanted.output())
    folder = document.folder
    write_atomic(page_file(folder, number, ".md"), markdown + "\n" if markdown else "")
    plain_markup = is_plain_markup(raw)
    encodable = raw.encode("utf-8", "surrogatepass").decode("utf-8", "replace") == raw
    write_atomic(page_file(folder, number, ".html"), raw if plain_markup and encodable else to_html(blocks))
    reasons = doubts(job, kept, blocks)
    record = {
        "page": number,
        "status": SUSPECT if reasons else OK,
        "reasons": reasons,
        "error": None,
        "notes": [*picture.notes, *notes],
        "key": wanted.key(document.sha256, number),
        "output": wanted.output(),
        "image": {
            "width": picture.size[0],
            "height": picture.size[1],
            "sent": list(picture.sent),
            "dpi": round(picture.dpi, 2) if picture.dpi else None,
            "ink": round(picture.ink, 6),
            "fingerprint": picture.fingerprint,
        },
        "kept": kept,
        "attempts": [attempt.record() for attempt in job.attempts],
        "reply_hash": job.reply_hash,
        "blocks": [block_record(block, picture.size) for block in blocks],
    }
    if not (plain_markup and encodable):
        record["raw"] = raw if encodable else raw.encode("utf-8", "backslashreplace").decode()
    return record


def block_record(block: Block, size: tuple[int, int]) -> dict[str, Any]:
    """A block as JSON: `bbox` in 0-1000, `box` in pixels of the page as drawn."""
    record: dict[str, Any] = {
        "label": block.label,
        "bbox": list(block.bbox) if block.bbox else None,
        "box": list(pixel_box(block.bbox, size)) if block.bbox else None,
        "html": block.html,
    }
    if block.image:
        record["image"] = block.image.rpartition("/")[2]
    if block.inside:
        record["inside"] = [block_record(inner, size) for inner in block.inside]
    return record


MAX_FIGURES = 500  # of a page: a reply that runs wild tells of thousands
MAX_FIGURE_AREA = 8  # pages: and each may be as large as the page


def cut_figures(
    blocks: Sequence[Block], document: Document, number: int, wanted: Wanted
) -> tuple[list[Block], tuple[str, ...]]:
    """Crops the page's figures to images/0001-01.webp and names them in their blocks."""
    if not wanted.images or not any(block.label in FIGURES and block.bbox for block in blocks):
        return list(blocks), ()
    try:
        page = load_page(document, number, wanted.dpi).image
    except PageError as e:
        return list(blocks), (f"figures not cut out: {e}",)
    folder, count = document.folder / "images", 0
    found: list[Block] = []
    notes: tuple[str, ...] = ()
    room = MAX_FIGURE_AREA * page.width * page.height
    for block in blocks:
        box = pixel_box(block.bbox, page.size) if block.label in FIGURES and block.bbox else None
        if box and box[2] > box[0] and box[3] > box[1]:
            room -= (box[2] - box[0]) * (box[3] - box[1])
            if room < 0 or count == MAX_FIGURES:
                notes = (*notes, f"figures not cut out: the reply tells of more than {count} that overlap or are tiny")
                return found + list(blocks[len(found) :]), notes
            count += 1
            name = f"{number:04d}-{count:02d}.webp"
            try:
                data = encode_webp(page.crop(box))
            except (OSError, ValueError) as e:  # the encoder's, not the disk's: the page stands without this figure
                notes += (f"figures not cut out: {name}: {reason(e)}",)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / name, data)
                block = dataclasses.replace(block, image=f"../images/{name}")
        found.append(block)
    return found, notes


def encode_webp(image: Image.Image) -> bytes:
    import io

    image.thumbnail((16383, 16383))  # WebP's limit
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=90)
    return buffer.getvalue()


def doubts(job: PageJob, kept: int, blocks: Sequence[Block]) -> list[str]:
    """Why a page's reply is not to be trusted as it is; [] for one that is ok."""
    attempt, picture = job.attempts[kept], job.picture
    assert picture
    reasons = []
    if attempt.finish_reason == "length":
        reasons.append(f"cut off after {attempt.completion_tokens or job.wanted.max_tokens} tokens")
    elif attempt.finish_reason == "repetition":
        reasons.append("stopped by the server's loop detector")
    accepted = len(job.attempts) == 2 and confirmed(job.attempts[0], job.attempts[1])
    if attempt.repeats and not accepted:
        reasons.append("repeats itself at its end")
    elif (share := looping_share(attempt.text)) >= 0.2:
        reasons.append(f"{share:.0%} of the reply is a loop")
    visible = sum(len(block.text) for block in blocks if block.label != "Blank-Page")
    pictured = any(
        block.label not in ("Text", "Blank-Page") and block.element.find(".//img") is not None for block in blocks
    )
    if not visible and not pictured and picture.ink >= INK:
        reasons.append("an empty reply for a page with ink")
    if visible > 100 and picture.ink < INK / 10:
        reasons.append("much text for a page without ink")
    if any(outside(block.bbox) for block in blocks if block.bbox):
        reasons.append("boxes outside the page")
    reasons += [note for note in picture.notes if note in FORM_NOTES]
    reasons += [TWIN] * job.twin
    return reasons


TWIN = "the same reply as another page of this run"


def reply_hash(text: str) -> str | None:
    """Names a reply, to find pages that got the same one; None for a few characters, which pages may well share."""
    if len(TAGS.sub("", text).strip()) < 16:
        return None
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def outside(box: Box) -> bool:
    """Whether a box reaches past the page, or is turned inside out."""
    x0, y0, x1, y1 = box
    return min(x0, y0) < 0 or max(x1, y1) > 1000 or x0 > x1 or y0 > y1


def result_of(record: dict[str, Any], source: Path, folder: Path, number: int, cached: bool = False) -> PageResult:
    """A page's JSON as a PageResult."""
    attempts = record.get("attempts") or []
    return PageResult(
        source,
        folder,
        number,
        record["status"],
        tuple(record.get("reasons") or ()),
        record.get("error"),
        len(attempts),
        sum(attempt.get("completion_tokens") or 0 for attempt in attempts),
        sum(attempt.get("seconds") or 0.0 for attempt in attempts),
        cached,
        record.get("reply_hash"),
        (record.get("image") or {}).get("fingerprint"),
    )


def pages_done(document: Document, wanted: Wanted, retry_suspect: bool) -> tuple[dict[int, PageResult], bool]:
    """The pages of an earlier run that stand, and whether the document was put together of them since.

    Pages of which only the files are to differ are written again here.
    """
    done, newest = {}, 0
    remove_stale_parts(document.folder)
    for number in document.numbers:
        record = read_json(page_file(document.folder, number, ".json"))
        if record.get("key") != wanted.key(document.sha256, number) or record.get("status") not in (OK, SUSPECT):
            continue
        if retry_suspect and record["status"] == SUSPECT:
            continue
        if not page_file(document.folder, number, ".html").exists():
            continue
        if record.get("output") != wanted.output() or not page_file(document.folder, number, ".md").exists():
            record = rewrite_page(document, number, wanted, record)
        done[number] = result_of(record, document.source, document.folder, number, cached=True)
        newest = max(newest, page_file(document.folder, number, ".json").stat().st_mtime_ns)
    together = document.folder / (document.name + ".json")
    whole = read_json(document.folder / "source.json").get("pages") == spans(document.numbers)
    return done, whole and together.exists() and together.stat().st_mtime_ns >= newest


def spans(numbers: Sequence[int]) -> str:
    """Page numbers as --pages takes them: 1-5,8."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def rewrite_page(document: Document, number: int, wanted: Wanted, record: dict[str, Any]) -> dict[str, Any]:
    """Writes a page's files again from its reply, for other output settings."""
    try:
        blocks, notes = cut_figures(read_reply(raw_reply(document.folder, number)), document, number, wanted)
        markdown = to_markdown(blocks, **wanted.output())
        write_atomic(page_file(document.folder, number, ".md"), markdown + "\n" if markdown else "")
        size = (record["image"]["width"], record["image"]["height"])
        record |= {"output": wanted.output(), "blocks": [block_record(block, size) for block in blocks]}
        record["notes"] = [note for note in record.get("notes", []) if not note.startswith("figures not")] + list(notes)
        write_json(page_file(document.folder, number, ".json"), record)
    except OSError as e:
        raise OutputError(f"{show(document.folder)}: cannot be written: {reason(e)}") from None
    return record


def save_attempts(document: Document, number: int, key: str, attempts: Sequence[Attempt]) -> None:
    """Keeps the replies of a page that is asked again, so that a killed run does not ask for them twice."""
    path = page_file(document.folder, number, ".attempts.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, "attempts": [dataclasses.asdict(attempt) for attempt in attempts]})
    except OSError as e:
        raise OutputError(f"{show(path)}: cannot be written: {reason(e)}") from None


def load_attempts(document: Document, number: int, key: str) -> list[Attempt]:
    record = read_json(page_file(document.folder, number, ".attempts.json"))
    if record.get("key") != key:
        return []
    with contextlib.suppress(TypeError, KeyError):
        return [Attempt(**attempt) for attempt in record["attempts"]]
    return []


def add_doubt(result: PageResult, doubt: str) -> PageResult:
    """Makes a page on disk suspect for what other pages told. Raises OutputError."""
    path = page_file(result.folder, result.number, ".json")
    record = read_json(path)
    if record.get("status") in (OK, SUSPECT) and doubt not in record["reasons"]:
        record["status"] = SUSPECT
        record["reasons"].append(doubt)
        try:
            write_json(path, record)
        except OSError as e:
            raise OutputError(f"{show(path)}: cannot be written: {reason(e)}") from None
    return result_of(record, result.source, result.folder, result.number, result.cached)


def claim_folder(document: Document, source: str) -> None:
    """Makes a document's folder and writes whose it is. Raises OutputError."""
    try:
        document.folder.mkdir(parents=True, exist_ok=True)
        if read_json(document.folder / "source.json").get("source") != source:
            write_json(document.folder / "source.json", {"source": source})
    except OSError as e:
        raise OutputError(f"{show(document.folder)}: cannot be written: {reason(e)}") from None


PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1d1c1a; --soft: #66625b; --line: #d9d5cc; --tint: #f5f3ee; --paper: #fffefb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e2da; --soft: #a39d92; --line: #45423c; --tint: #262420; --paper: #1b1a17; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 48rem; padding: 0 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 1.0625rem/1.55 "Iowan Old Style", "Palatino Linotype", Palatino, Georgia, serif; overflow-wrap: break-word; }
header, .mark { font: .8125rem/1.4 system-ui, sans-serif; color: var(--soft); }
header { padding: 1.5rem 0 0; }
.page { border-top: 1px solid var(--line); margin-top: 2rem; }
.mark { margin: .4rem 0 1.5rem; text-align: right; } .mark a { color: inherit; text-decoration: none; }
h1, h2, h3, h4, h5, h6 { line-height: 1.25; margin: 1.6em 0 .5em; text-wrap: balance; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.4rem; } h3 { font-size: 1.2rem; } h4, h5, h6 { font-size: 1.05rem; }
p, ul, ol, pre, blockquote, .block { margin: 0 0 .9em; } .block > :last-child { margin-bottom: 0; }
.Table, .Form, .Equation-Block, .block:has(math) { overflow-x: auto; overflow-y: hidden; }
table { border-collapse: collapse; font-size: .95em; line-height: 1.35; margin: 1.2rem 0; }
td, th { border: 1px solid var(--line); padding: .35em .65em; vertical-align: top; text-align: left; }
th { background: var(--tint); }
pre, code, .math { font-family: ui-monospace, "Cascadia Code", Menlo, Consolas, monospace; font-size: .9em; }
pre { background: var(--tint); border-radius: 4px; padding: .8em 1em; overflow-x: auto; }
math { font-size: 1.1rem; } .math:has(math) { font-family: inherit; font-size: inherit; }
math[display="block"] { margin: .8em 0; } mtd[columnalign="left"] { text-align: left; }
mtd[columnalign="right"] { text-align: right; }
mtable[columnspacing^="0em"] mtd { padding-inline: 0; }
mtable[columnspacing^="0em"] mtd:nth-child(odd):not(:first-child) { padding-left: 2em; }
img { display: block; max-width: 100%; height: auto; margin: 1rem auto; }
.Caption { font-size: .9em; color: var(--soft); text-align: center; }
.Footnote, .Page-Header, .Page-Footer { font-size: .85em; color: var(--soft); }
.error { border-left: 3px solid #c62828; background: var(--tint); padding: .6em 1em; }
@page { margin: 18mm 16mm; }
@media print {
  :root { --ink: #000; --soft: #444; --line: #999; --tint: #f4f4f4; --paper: #fff; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  .page + .page { break-before: page; } .page { margin-top: 0; border: 0; }
  h1, h2, h3, h4, h5, h6 { break-after: avoid; } tr, img, math, pre { break-inside: avoid; }
  thead { display: table-header-group; }
  .Table, .Form, .Equation-Block, .block:has(math) { overflow: visible; } p { orphans: 3; widows: 3; }
  td, th { overflow-wrap: anywhere; } math { max-width: 100%; }
}
""".strip()


def assemble(document: Document, wanted: Wanted) -> None:
    """Puts a document together from its pages on disk: markdown, HTML, JSON, a page at a time. Raises OutputError."""
    try:
        for suffix, parts in (
            (".md", markdown_parts(document)),
            (".html", html_parts(document, wanted)),
            (".json", json_parts(document)),
        ):
            path = document.folder / (document.name + suffix)
            with (
                written_whole(path) as part,
                open(part, "w", encoding="utf-8", newline="\n", errors="replace") as file,
            ):
                file.writelines(parts)
        # Last, and read by the next run: which pages the document was put together of.
        write_json(
            document.folder / "source.json",
            read_json(document.folder / "source.json") | {"pages": spans(document.numbers)},
        )
    except OSError as e:
        raise OutputError(f"{show(document.folder)}: cannot be written: {reason(e)}") from None


def markdown_parts(document: Document) -> Iterator[str]:
    for i, number in enumerate(document.numbers):
        path = page_file(document.folder, number, ".md")
        text = path.read_text("utf-8").replace("](../images/", "](images/") if path.exists() else ""
        said = "" if path.exists() else ": failed"
        if i or number > 1 or said:
            yield f"{chr(10) if i else ''}<!-- page {number}{said} -->\n{chr(10) if text else ''}"
        yield text


def html_parts(document: Document, wanted: Wanted) -> Iterator[str]:
    title = html.escape(show(Path(document.source.name)))
    policy = "default-src 'none'; img-src 'self' file: data:; style-src 'unsafe-inline'"
    yield '<!DOCTYPE html>\n<html lang="mul">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
    yield f'<style>\n{PAGE_STYLE}\n</style>\n</head>\n<body>\n<header lang="en">{title}</header>\n<main>\n'
    for number in document.numbers:
        record = read_json(page_file(document.folder, number, ".json"))
        yield f'<section class="page" id="page-{number}" aria-label="Page {number}">\n'
        yield f'<p class="mark" lang="en"><a href="#page-{number}">Page {number}</a></p>\n'
        if record.get("status") == FAILED or not record:
            yield f'<p class="error" lang="en">Failed: {html.escape(str(record.get("error", "not read")))}</p>\n'
        else:
            blocks = page_blocks(document.folder, number, record, "images/")
            shown = to_html(blocks, headers_footers=wanted.headers_footers, images=wanted.images)
            yield maths_drawn(shown) + "\n"
        yield "</section>\n"
    yield "</main>\n</body>\n</html>\n"


def page_blocks(folder: Path, number: int, record: dict[str, Any], images: str) -> list[Block]:
    """The blocks of a page on disk, with its figures' files under the address `images`."""
    blocks = read_reply(raw_reply(folder, number))
    names = [block.get("image") for block in record["blocks"]]
    return [
        dataclasses.replace(block, image=images + name) if name else block
        for block, name in itertools.zip_longest(blocks, names[: len(blocks)])
    ]


def json_parts(document: Document) -> Iterator[str]:
    head = {
        "source": show(document.source),
        "sha256": document.sha256,
        "kind": document.kind,
        "page_count": document.pages,
    }
    yield json.dumps(head | {"notes": list(document.notes)}, ensure_ascii=False)[:-1] + ', "pages": [\n'
    for i, number in enumerate(document.numbers):
        record = read_json(page_file(document.folder, number, ".json")) or {
            "page": number,
            "status": FAILED,
            "error": "not read",
        }
        record.pop("raw", None)
        attempts = record.get("attempts") or []
        record["tokens"] = sum(attempt.get("completion_tokens") or 0 for attempt in attempts)
        record["seconds"] = round(sum(attempt.get("seconds") or 0 for attempt in attempts), 3)
        yield (",\n" if i else "") + json.dumps(record, ensure_ascii=False)
    yield "\n]}\n"


# --------------------------------------------------------------------------------------------------- Searchable PDFs
#
# A copy of a document whose pages carry what was read as invisible text, so that a viewer's search finds it in its
# place. pikepdf writes it: qpdf, under it, keeps every object of the original, where PDFium would write pages anew.

ALREADY_SAID = 0.9  # share of what was read that a page's own text says: then it needs no second copy of it
SCAN_DPI = 150  # of images that do not say theirs


class Row(NamedTuple):
    """A row of text and its place in shares of the page: start, baseline, length and height."""

    text: str
    left: float
    base: float
    width: float
    height: float


def searchable_file(document: Document) -> Path:
    return document.folder / (document.name + ".searchable.pdf")


def has_searchable(document: Document) -> bool:
    """Whether the searchable copy is there and no older than the document was put together."""
    try:
        made = searchable_file(document).stat().st_mtime_ns
        return made >= (document.folder / (document.name + ".json")).stat().st_mtime_ns
    except OSError:
        return False


def write_searchable(document: Document) -> None:
    """Writes the document's searchable copy. Raises DocumentError or OutputError."""
    import pikepdf

    path = searchable_file(document)
    try:
        with written_whole(path) as part, contextlib.closing(searchable_pdf(document)) as pdf:
            pdf.save(part, encryption=pdf.is_encrypted, deterministic_id=not pdf.is_encrypted)
    except pikepdf.PasswordError:
        raise DocumentError("qpdf does not open it with this password") from None
    except pikepdf.PdfError as e:
        raise DocumentError(f"qpdf cannot read or write it: {reason(e)}") from None
    except OSError as e:
        raise OutputError(f"{show(path)}: cannot be written: {reason(e)}") from None


def searchable_pdf(document: Document) -> Any:
    """A pikepdf.Pdf of the document, with the text of each page that was read."""
    import pikepdf

    if file_stamp(document.source) != document.stamp:
        raise DocumentError("the file changed during the run; run again when it is whole")
    if document.kind == "image":
        pdf = pikepdf.new()
        for number in document.numbers:
            add_image_page(pdf, document.source, number - 1)
        places = [(0.0, 0.0, *(float(side) for side in page.mediabox[2:]), 0) for page in pdf.pages]
        own = [""] * len(places)
    else:
        pdf = pikepdf.open(document.source, password=document.password or "")
        places, own = visible_parts(document)
    font = InvisibleFont(pdf)
    for i, number in enumerate(document.numbers):
        index = i if document.kind == "image" else number - 1
        record = read_json(page_file(document.folder, number, ".json"))
        if record.get("status") not in (OK, SUSPECT) or index >= len(pdf.pages) or places[index] is None:
            continue
        rows = list(text_rows(read_reply(raw_reply(document.folder, number))))
        if rows and not says_already(own[index], rows):
            left, bottom, right, top, turn = places[index]
            content = font.content(rows, (left, bottom, right, top), int(turn))
            font.put_under(pdf.pages[index], content)
    font.finish()
    return pdf


def visible_parts(document: Document) -> tuple[list[Any], list[str]]:
    """Of each page of a PDF: the box that is drawn and its rotation, None when it does not load; and its own text."""
    import pypdfium2 as pdfium

    places: list[Any] = []
    texts: list[str] = []
    asked = set(document.numbers)
    with contextlib.closing(open_pdf(document.source, document.password)) as pdf:
        for index in range(len(pdf)):
            place, text = None, ""
            if index + 1 in asked:
                with contextlib.suppress(pdfium.PdfiumError), contextlib.closing(pdf[index]) as page:
                    place = (*page.get_bbox(), page.get_rotation())
                    with contextlib.closing(page.get_textpage()) as words:
                        text = words.get_text_range()
            places.append(place)
            texts.append(text)
    return places, texts


def says_already(own: str, rows: Sequence[Row]) -> bool:
    """Whether a page's own text holds nearly all words that were read from it."""
    known = set(re.findall(r"\w+", own.casefold()))
    words = re.findall(r"\w+", " ".join(row.text for row in rows).casefold())
    return bool(words) and sum(word in known for word in words) >= ALREADY_SAID * len(words)


def add_image_page(pdf: Any, source: Path, frame: int) -> None:
    """Adds an image's frame as a page of its size: a JPEG as it is, other pixels deflated."""
    import pikepdf

    with open_image(source) as opened:
        if frame:
            opened.seek(frame)
        check_image_size(opened.size)
        dpi = opened.info.get("dpi") or ()
        dpis = [float(d) if math.isfinite(float(d)) and 30 <= float(d) <= 4800 else SCAN_DPI for d in dpi][:2]
        opened.load()
        upright = turn_upright(opened)
        if opened.format == "JPEG" and opened.mode in ("L", "RGB") and upright is opened:
            data, bits, mode, coding = source.read_bytes(), 8, opened.mode, "/DCTDecode"
        else:
            image = upright if upright.mode in ("1", "L") and "transparency" not in upright.info else to_rgb(upright)
            data, bits, mode = zlib.compress(image.tobytes(), 6), 1 if image.mode == "1" else 8, image.mode
            coding = "/FlateDecode"
        across, down = upright.size
    picture = pdf.make_stream(
        data,
        Type=pikepdf.Name.XObject,
        Subtype=pikepdf.Name.Image,
        Width=across,
        Height=down,
        BitsPerComponent=bits,
        ColorSpace=pikepdf.Name.DeviceRGB if mode == "RGB" else pikepdf.Name.DeviceGray,
        Filter=pikepdf.Name(coding),
    )
    x_dpi, y_dpi = dpis if len(dpis) == 2 else (SCAN_DPI, SCAN_DPI)
    width, height = round(across * 72 / x_dpi, 2), round(down * 72 / y_dpi, 2)
    page = pikepdf.Dictionary(
        Type=pikepdf.Name.Page,
        MediaBox=[0, 0, width, height],
        Resources=pikepdf.Dictionary(XObject=pikepdf.Dictionary(Im0=picture)),
        Contents=pdf.make_stream(f"q {width} 0 0 {height} 0 0 cm /Im0 Do Q".encode()),
    )
    pdf.pages.append(pikepdf.Page(pdf.make_indirect(page)))


def text_rows(blocks: Sequence[Block]) -> Iterator[Row]:
    """The rows of text that fill the blocks' boxes; a table's cells stand in theirs."""
    for block in blocks:
        element = copy.deepcopy(block.element)
        for inner in list(labelled_below(element)):
            keep_tail(inner)
            inner.getparent().remove(inner)
        x0, y0, x1, y1 = (min(max(side / 1000, 0.0), 1.0) for side in block.bbox or (0, 0, 1000, 1000))
        if x1 <= x0 or y1 <= y0:
            x0, y0, x1, y1 = 0.0, 0.0, 1.0, 1.0
        tables = element.findall(".//table")
        if len(tables) == 1 and block.bbox:
            yield from cell_rows(tables[0], (x0, y0, x1, y1))
            keep_tail(tables[0])
            tables[0].getparent().remove(tables[0])
        yield from fill(text_lines(element), (x0, y0, x1, y1))
        yield from text_rows(block.inside)


def text_lines(element: etree._Element) -> list[str]:
    """The lines that an element's text has of itself, formulas as LaTeX, without what is only said of pictures."""
    said: list[str] = []

    def walk(node: etree._Element) -> None:
        if node.tag == "math":
            said.append(" ".join(latex(node).split()))
        elif node.tag == "br":
            said.append("\n")
        elif node.tag == "input":
            said.append(input_text(node))
        elif node.tag != "img":
            edge = "\n" if node.tag in BLOCK_TAGS or node.tag == "tr" else " " if node.tag in ("td", "th") else ""
            said.append(edge + re.sub(r"\s", " ", node.text or ""))
            for child in node:
                walk(child)
                said.append(re.sub(r"\s", " ", child.tail or ""))
            said.append(edge)

    walk(element)
    return [line for part in "".join(said).split("\n") if (line := " ".join(part.split()))]


def cell_rows(table: etree._Element, box: Box) -> Iterator[Row]:
    """A table's cells as rows of text, on a grid of equal rows and columns over its box."""
    rows = table.findall(".//tr")
    taken: set[tuple[int, int]] = set()
    cells: list[tuple[int, int, int, int, etree._Element]] = []
    for y, row in enumerate(rows):
        x = 0
        for cell in row:
            if cell.tag not in ("td", "th"):
                continue
            while (y, x) in taken:
                x += 1
            across, down = (min(span_of(cell, name), 60) for name in ("colspan", "rowspan"))
            down = min(down, len(rows) - y)
            taken |= {(y + j, x + i) for j in range(down) for i in range(across)}
            cells.append((x, y, across, down, cell))
            x += across
    columns = max((x + across for x, _, across, _, _ in cells), default=1)
    width, height = (box[2] - box[0]) / columns, (box[3] - box[1]) / max(1, len(rows))
    for x, y, across, down, cell in cells:
        left, top = box[0] + x * width, box[1] + y * height
        yield from fill(text_lines(cell), (left, top, left + across * width * 0.95, top + down * height))


def span_of(cell: etree._Element, name: str) -> int:
    said = (cell.get(name) or "").strip()
    return max(1, int(said)) if re.fullmatch(r"[0-9]{1,4}", said) else 1


def fill(lines: Sequence[str], box: Box) -> Iterator[Row]:
    """Lines broken into rows so that together they fill a box, as letters twice as high as wide would."""
    x0, y0, x1, y1 = box
    if not lines:
        return
    # As many rows as give letters of their usual shape: found by trying sizes, the largest first.
    size = (y1 - y0) / len(lines)
    rows = break_lines(lines, (x1 - x0) / size)
    while len(rows) * size > (y1 - y0) * 1.001 and len(rows) < 2000:
        size *= 0.93
        rows = break_lines(lines, (x1 - x0) / size)
    height = (y1 - y0) / len(rows)
    for i, row in enumerate(rows):
        # The last row of a paragraph is short; others, and what is too long, fit the width.
        width = min(x1 - x0, text_width(row) * size * 0.8)
        yield Row(row, x0, y0 + (i + 0.8) * height, max(width, 1e-4), height)


WORD_OR_SQUARE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60]|[^\s\u2e80-\u9fff]+\s*")


def break_lines(lines: Iterable[str], width: float) -> list[str]:
    """Lines broken at spaces, and between signs that take a square each, into rows of a width in letter heights."""
    rows = []
    for line in lines:
        row, used = "", 0.0
        for word in WORD_OR_SQUARE.findall(line):
            length = text_width(word.rstrip()) * 0.8
            if row and used + length > width:
                rows.append(row)
                row, used = "", 0.0
            row += word
            used += text_width(word) * 0.8
        rows.append(row)
    return rows


def text_width(text: str) -> float:
    return sum(map(sign_width, text)) / 1000


def sign_width(c: str) -> int:
    """A sign's width in thousandths of its height: squares are whole, marks on letters have none."""
    if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me", "Cf"):
        return 0
    return 1000 if unicodedata.east_asian_width(c) in "WF" else 500


def reads_leftwards(text: str) -> bool:
    """Whether most of a text's letters are of a script that is written from right to left."""
    ways = [unicodedata.bidirectional(c) for c in text]
    return sum(way in ("R", "AL") for way in ways) > sum(way == "L" for way in ways)


class InvisibleFont:
    """A font that draws nothing and says which character each of its codes is: it knows every script."""

    NAME = "/InvisibleOCR"

    def __init__(self, pdf: Any):
        import pikepdf

        self.pdf = pdf
        self.codes: dict[str, int] = {}
        self.font = pdf.make_indirect(pikepdf.Dictionary(Type=pikepdf.Name.Font))

    def encode(self, text: str) -> str:
        codes = []
        for c in text.encode("utf-8", "replace").decode():
            if c not in self.codes and len(self.codes) < 0xFFFE:
                self.codes[c] = len(self.codes) + 1
            codes.append(self.codes.get(c, 0))
        return "".join(f"{code:04X}" for code in codes)

    def content(self, rows: Sequence[Row], box: Box, turn: int) -> bytes:
        """The drawing commands of a page's rows; `box` and `turn` are those of the page as a viewer shows it."""
        left, bottom, right, top = box
        across, up = {0: ((1, 0), (0, 1)), 90: ((0, 1), (-1, 0)), 180: ((-1, 0), (0, -1)), 270: ((0, -1), (1, 0))}[turn]
        x0, y0 = {0: (left, top), 90: (left, bottom), 180: (right, bottom), 270: (right, top)}[turn]
        width, height = (top - bottom, right - left) if turn in (90, 270) else (right - left, top - bottom)
        said = ["q BT 3 Tr"]
        for row in rows:
            size = max(row.height * height * 0.85, 0.01)
            natural = max(text_width(row.text), 0.001) * size
            stretch = 100 * row.width * width / natural
            u, v = row.left * width, -row.base * height
            way = across
            if reads_leftwards(row.text):  # it starts at its right end, as its readers do
                u, way = u + row.width * width, (-across[0], -across[1])
            x, y = x0 + across[0] * u + up[0] * v, y0 + across[1] * u + up[1] * v
            matrix = " ".join(map(str, (*way, *up)))
            said.append(
                f"{self.NAME} {size:.3f} Tf {stretch:.2f} Tz {matrix} {x:.3f} {y:.3f} Tm <{self.encode(row.text)}> Tj"
            )
        return "\n".join([*said, "ET Q\n"]).encode()

    def put_under(self, page: Any, content: bytes) -> None:
        """Puts the text before all else of a page, where nothing of the page's own can change how it is written."""
        import pikepdf

        resources = pikepdf.Dictionary(dict(inherited(page.obj, "/Resources") or {}))
        fonts = resources.get("/Font")
        fonts = pikepdf.Dictionary(dict(fonts) if isinstance(fonts, pikepdf.Dictionary) else {})
        fonts[self.NAME] = self.font
        resources["/Font"] = fonts
        page.obj["/Resources"] = resources
        page.contents_add(self.pdf.make_stream(content), prepend=True)

    def finish(self) -> None:
        """Writes the font for the characters that were used."""
        import pikepdf
        from pikepdf import Dictionary, Name

        widths: list[Any] = []
        for c, code in self.codes.items():
            if (width := sign_width(c)) != 500:
                widths += [code, pikepdf.Array([width])]
        descriptor = Dictionary(
            Type=Name.FontDescriptor,
            FontName=Name.InvisibleOCR,
            Flags=4,
            FontBBox=[0, -200, 1000, 800],
            Ascent=800,
            Descent=-200,
            CapHeight=700,
            StemV=80,
            ItalicAngle=0,
            FontFile2=self.pdf.make_stream(block_font()),
        )
        below = Dictionary(
            Type=Name.Font,
            Subtype=Name.CIDFontType2,
            BaseFont=Name.InvisibleOCR,
            CIDSystemInfo=Dictionary(Registry="Adobe", Ordering="Identity", Supplement=0),
            CIDToGIDMap=self.pdf.make_stream(bytes(2) + b"".join(bytes((0, sign_width(c) // 500)) for c in self.codes)),
            FontDescriptor=self.pdf.make_indirect(descriptor),
            DW=500,
            W=widths,
        )
        self.font["/Subtype"], self.font["/BaseFont"] = Name.Type0, Name.InvisibleOCR
        self.font["/Encoding"] = Name("/Identity-H")
        self.font["/DescendantFonts"] = [self.pdf.make_indirect(below)]
        self.font["/ToUnicode"] = self.pdf.make_stream(to_unicode(self.codes))


def inherited(page: Any, name: str) -> Any:
    """An attribute of a page, or of the nodes above it."""
    for _ in range(50):
        if page is None or name in page:
            return page[name] if page is not None else None
        page = page.get("/Parent")
    return None


def to_unicode(codes: dict[str, int]) -> bytes:
    """The CMap that says which character a code is."""
    lines = ["/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /OCR def /CMapType 2 def"]
    lines.append("1 begincodespacerange <0000> <FFFF> endcodespacerange")
    pairs = [f"<{code:04X}> <{c.encode('utf-16-be').hex().upper()}>" for c, code in codes.items()]
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        lines += [f"{len(part)} beginbfchar", *part, "endbfchar"]
    return "\n".join([*lines, "endcmap CMapName currentdict /CMap defineresource pop end end\n"]).encode()


def block_font() -> bytes:
    """A TrueType font of three glyphs: nothing, half a square and a square, which viewers mark when text is chosen."""

    def block(width: int) -> bytes:
        head = struct.pack(">hhhhhHH", 1, 0, -200, width, 800, 3, 0)
        return head + b"\1\1\1\1" + struct.pack(">hhhhhhhh", 0, 0, width, 0, -200, 1000, 0, -1000) + b"\0\0"

    half, whole = block(500), block(1000)
    tables = {
        b"cmap": struct.pack(">HHHHIHHHHHH", 0, 1, 3, 1, 12, 6, 12, 0, 0, 1, 0),
        b"glyf": half + whole,
        b"head": struct.pack(
            ">IIIIHHqqhhhhHHhhh", 0x10000, 0x10000, 0, 0x5F0F3CF5, 3, 1000, 0, 0, 0, -200, 1000, 800, 0, 8, 2, 1, 0
        ),
        b"hhea": struct.pack(">IhhhHhhhhhhhhhhhH", 0x10000, 800, -200, 0, 1000, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3),
        b"hmtx": struct.pack(">HhHhHh", 500, 0, 500, 0, 1000, 0),
        b"loca": struct.pack(">IIII", 0, 0, len(half), len(half + whole)),
        b"maxp": struct.pack(">IHHHHHHHHHHHHHH", 0x10000, 3, 4, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0),
        b"post": struct.pack(">IIhhIIIII", 0x30000, 0, 0, 0, 0, 0, 0, 0, 0),
    }
    directory, body = b"", b""
    for tag, data in tables.items():
        padded = data + bytes(-len(data) % 4)
        sum_ = sum(struct.unpack(f">{len(padded) // 4}I", padded)) & 0xFFFFFFFF
        directory += struct.pack(">4sIII", tag, sum_, 12 + 16 * len(tables) + len(body), len(data))
        body += padded
    return struct.pack(">IHHHH", 0x10000, len(tables), 128, 3, 0) + directory + body


# -------------------------------------------------------------------------------------------------------- CPU engine


BULLET = re.compile(r"[•‣◦●○▪■□◆►➢✓·∙*–-]\s+(?=\S)|[•●▪■►➢](?=\S)")
NUMBERED = re.compile(r"(\(?\d{1,3}[.)]|\([a-z]{1,4}\)|[a-zA-Z][.)])\s+\S")
BLANK_PAGE = '<div data-bbox="0 0 1000 1000" data-label="Blank-Page"></div>'


# --- lines to blocks


@dataclass(frozen=True)
class Line:
    """One line of text, or one cell of a row, with its upright box in pixels."""

    text: str
    x0: float
    y0: float
    x1: float
    y1: float
    cells: int = 1  # pieces that stood apart on the row and were joined into this line

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    @property
    def width(self) -> float:
        return self.x1 - self.x0

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2


class Region(NamedTuple):
    """Rows that are read from top to bottom: a column, a stretch across the page, or a table."""

    rows: list[Line]
    is_table: bool


@dataclass
class Paragraph:
    kind: str  # h1, h2, li, p, or row for the rows of a table
    rows: list[Line] = field(default_factory=list)


class TextBlock(NamedTuple):
    label: str
    box: Box  # pixels
    html: str


def group_lines(lines: list[Line], width: int, height: int) -> list[TextBlock]:
    """Blocks of a page in reading order; `lines` in any order, boxes upright, in pixels of a width x height page."""
    drawn = re.compile(r"[\s_|]*")  # rules of a drawing or a form, read as letters
    lines = [line for line in lines if not drawn.fullmatch(line.text) and line.width > 0 and line.height > 0]
    if not lines:
        return []
    regions = [region for part in off_running_heads(lines, height) for region in read_regions(part)]
    body = body_type(lines)
    leading = usual_pitch([pitch for region in regions for pitch in line_pitches(region)] or [1.3])
    paragraphs = [p for region in regions for p in split_paragraphs(region, body, leading)]
    return list(write_blocks(paragraphs, width))


def bounds(lines: list[Line]) -> Box:
    return (min(n.x0 for n in lines), min(n.y0 for n in lines), max(n.x1 for n in lines), max(n.y1 for n in lines))


def median_height(lines: list[Line]) -> float:
    return statistics.median(line.height for line in lines)


def in_rows(lines: list[Line]) -> list[Line]:
    """Lines side by side become one, left to right. By their middles: two-line cells overlap their neighbours."""
    rows: list[list[Line]] = []
    usual = median_height(lines)  # bounds what a drop cap, two lines high, takes with it
    for line in sorted(lines, key=lambda n: n.middle):
        height = min(usual, max(line.height, rows[-1][0].height)) if rows else usual
        if rows and line.middle - statistics.fmean(n.middle for n in rows[-1]) < 0.5 * height:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [join_row(sorted(row, key=lambda n: n.x0)) for row in rows]


def join_row(row: list[Line]) -> Line:
    gap = 0.7 * median_height(row)
    cells = 1 + sum(right.x0 - left.x1 > gap for left, right in itertools.pairwise(row))
    return Line(" ".join(line.text.strip() for line in row), *bounds(row), cells=cells)


# Reading order: a recursive cut into strips (white from side to side) and columns (white from top to bottom).


def off_running_heads(lines: list[Line], height: int) -> list[list[Line]]:
    """The first and last row apart where they stand in the page's margins: a column would take them in."""
    strips, space = cut_strips(lines), 1.2 * median_height(lines)
    head = len(strips) > 2 and bounds(strips[0])[3] < 0.1 * height and strip_gap(strips[0], strips[1]) > space
    foot = len(strips) > 3 and bounds(strips[-1])[1] > 0.9 * height and strip_gap(strips[-2], strips[-1]) > space
    parts = strips[:head], strips[head : len(strips) - foot], strips[len(strips) - foot :]
    return [list(itertools.chain(*part)) for part in parts if part]


def cut_strips(lines: list[Line]) -> list[list[Line]]:
    """Horizontal strips with white between them. A quarter of each height is left out: neighbours' boxes overlap."""
    strips: list[list[Line]] = []
    bottom = -math.inf
    for line in sorted(lines, key=lambda n: n.y0 + 0.25 * n.height):
        if line.y0 + 0.25 * line.height >= bottom:
            strips.append([])
        strips[-1].append(line)
        bottom = max(bottom, line.y1 - 0.25 * line.height)
    return strips


def strip_gap(upper: list[Line], lower: list[Line]) -> float:
    return bounds(lower)[1] - bounds(upper)[3]


def gutters(lines: list[Line]) -> list[float]:
    """Where white runs through all the lines from top to bottom, the widest first, as x to cut at.

    Lines are taken up to a height shorter at both ends: columns of old newspapers touch, and their pages bend.
    """
    height = median_height(lines)
    found: list[tuple[float, float]] = []
    right: float | None = None
    for line in sorted(lines, key=lambda n: n.x0):
        inset = min(height, 0.15 * line.width)
        left = line.x0 + inset
        if right is not None and left - right >= 0.8 * height:
            found.append((left - right, (left + right) / 2))
        right = max(line.x1 - inset, right or 0)
    return [x for _, x in sorted(found, reverse=True)]


def sides(lines: list[Line], x: float) -> tuple[list[Line], list[Line]]:
    return [n for n in lines if (n.x0 + n.x1) / 2 < x], [n for n in lines if (n.x0 + n.x1) / 2 >= x]


def is_prose(lines: list[Line]) -> bool:
    """Lines of text of which many are about as long as the longest, unlike the cells of a table."""
    widths = sorted(line.width for line in lines)
    full = 0.85 * widths[int(0.9 * (len(widths) - 1))]
    return (
        len(lines) > 2
        and statistics.fmean(w > full for w in widths) > 0.3
        and statistics.fmean(len(n.text) for n in lines) >= 18
    )


def are_columns(left: list[Line], right: list[Line]) -> bool:
    """Whether to read left before right; otherwise they are cells of the same rows, level with each other."""
    fewer, more = sorted((left, right), key=len)
    level = []
    for line in fewer:
        beside = [n for n in more if n.y0 < line.middle < n.y1]
        nearest = min(beside, key=lambda n: abs(n.x0 + n.x1 - line.x0 - line.x1), default=None)
        level.append(nearest is not None and abs(nearest.middle - line.middle) < 0.25 * line.height)
    prose = is_prose(left) + is_prose(right)
    return prose == 2 or (prose == 1 and statistics.fmean(level) < 0.6)


def read_regions(lines: list[Line]) -> Iterator[Region]:
    """The regions of a part of the page, in reading order."""
    strips = cut_strips(lines)
    plain: list[Line] = []
    at = 0
    while at < len(strips):
        start, end = column_band(strips, at)
        plain += itertools.chain(*strips[at:start])
        if start < end:
            if plain:
                yield from read_plain(plain)
            plain = []
            yield from read_columns(list(itertools.chain(*strips[start:end])))
        at = end
    if plain:
        yield from read_plain(plain)


def column_band(strips: list[list[Line]], at: int) -> tuple[int, int]:
    """The next run of strips, from `at` on, that one gutter goes through, as (start, end); at the end (n, n)."""
    for seed in range(at, len(strips)):
        start, end, run = seed, seed + 1, strips[seed]
        if not gutters(run):
            continue
        while end < len(strips) and gutters(run + strips[end]):
            run, end = run + strips[end], end + 1
        while start > at and gutters(strips[start - 1] + run):
            run, start = strips[start - 1] + run, start - 1
        rows = in_rows(run)
        if len(rows) > 2 or any(row.cells > 1 for row in rows):  # else a line of running text, found in pieces
            return trim_band(strips, start, seed, end)
    return len(strips), len(strips)


def trim_band(strips: list[list[Line]], start: int, seed: int, end: int) -> tuple[int, int]:
    """Without strips at its ends that have lines on one side only and stand nearer to what is beyond.

    They are the last line of the paragraph above, or the heading of the text below.
    """
    cut = gutters(list(itertools.chain(*strips[start:end])))[0]
    while start < seed and start > 0 and not all(sides(strips[start], cut)):
        if strip_gap(strips[start - 1], strips[start]) >= strip_gap(strips[start], strips[start + 1]):
            break
        start += 1
    while end > seed + 1 and end < len(strips) and not all(sides(strips[end - 1], cut)):
        if strip_gap(strips[end - 2], strips[end - 1]) <= strip_gap(strips[end - 1], strips[end]):
            break
        end -= 1
    return start, end


def read_columns(lines: list[Line]) -> Iterator[Region]:
    """Lines that a gutter goes through: columns of text, a table, or one above the other."""
    strips = cut_strips(lines)
    for i in range(1, len(strips)):
        above, below = list(itertools.chain(*strips[:i])), list(itertools.chain(*strips[i:]))
        if strip_gap(above, below) > 0.8 * median_height(lines) and is_table_edge(above, below):
            yield from read_columns(above)
            yield from read_columns(below)
            return
    cut = column_cut(lines)
    if cut is not None:
        left, right = sides(lines, cut)
        yield from read_regions(left)
        yield from read_regions(right)
        return
    rows = in_rows(lines)
    wide = [i for i, row in enumerate(rows) if row.cells > 1] or [0]
    table = slice(wide[0], wide[-1] + 1)  # what stands alone above and below it is a title or a note
    parts = [Region(rows[: wide[0]], False), Region(rows[table], True), Region(rows[wide[-1] + 1 :], False)]
    yield from (part for part in parts if part.rows)


def column_cut(lines: list[Line]) -> float | None:
    """The widest gutter between columns of text, as x; None when the sides are cells of the same rows."""
    return next((x for x in gutters(lines) if all(sides(lines, x)) and are_columns(*sides(lines, x))), None)


def is_table_edge(above: list[Line], below: list[Line]) -> bool:
    """Whether columns of text end here and a table begins, or the other way round."""
    cuts = [column_cut(part) is None for part in (above, below)]
    table = above if cuts[0] else below
    return cuts[0] != cuts[1] and len(table) >= 6 and statistics.fmean(len(line.text) for line in table) < 18


def read_plain(lines: list[Line]) -> Iterator[Region]:
    """Lines no gutter goes through. Where a wide line over columns touches them, it is taken out and read between."""
    rows = in_rows(lines)
    widest = max(lines, key=lambda n: n.width)
    crowded = len(rows) < 0.75 * len(lines) and len(lines) > 4
    if crowded and widest.width > 1.5 * statistics.median(n.width for n in lines):
        rest = [line for line in lines if line is not widest]
        above = [line for line in rest if line.middle < widest.middle]
        yield from read_regions(above)
        yield Region([widest], is_table=False)
        yield from read_regions([line for line in rest if line.middle >= widest.middle])
    else:
        yield Region(rows, is_table=False)


# Paragraphs: rows that belong together by distance, margin, size and list marker.


def letter_width(line: Line) -> float:
    """The average width of a letter of middling breadth, whatever letters the line happens to hold."""
    narrow, broad = "fijlrtI1.,;:'|!()[]- ", "mw"
    return line.width / sum(0.3 if c in narrow else 0.85 if c in broad or c.isupper() else 0.55 for c in line.text)


def body_type(lines: list[Line]) -> tuple[float, float]:
    """Height of a line and width of a letter in most of the page's text."""
    heights = [h for line in lines for h in [line.height] * len(line.text)]
    widths = [w for line in lines for w in [letter_width(line)] * len(line.text)]
    return statistics.median(heights), statistics.median(widths)


def size_ratio(line: Line, body: tuple[float, float]) -> float:
    """The line's type against the body's. Height alone is misled by a raised mark, width alone by wide spacing."""
    high, wide = line.height / body[0], letter_width(line) / body[1]
    return min(math.sqrt(high * wide), 1.1 * min(high, wide))


def line_pitches(region: Region) -> list[float]:
    """Distances of following rows in heights of a row, without the wide gaps."""
    pitches = [(b.middle - a.middle) / median_height(region.rows) for a, b in itertools.pairwise(region.rows)]
    return [pitch for pitch in pitches if pitch < 2.2]


def usual_pitch(pitches: list[float]) -> float:
    """The distance inside paragraphs: a low one, for short paragraphs leave many gaps among the distances."""
    return sorted(pitches)[len(pitches) * 3 // 10]


def heading_kind(row: Line, body: tuple[float, float], stands_alone: bool) -> str | None:
    """h1 or h2 for a row in larger type. A little larger is enough where it also stands like a heading."""
    if sum(c.isalpha() for c in row.text) < 3 or row.cells > 1 or BULLET.match(row.text):
        return None
    ratio = size_ratio(row, body)
    if ratio < (1.08 if stands_alone and re.match(r"[A-Z0-9À-Þ].*[^.,;:-]$", row.text) else 1.3):
        return None
    return "h1" if ratio > 1.5 else "h2"


def split_paragraphs(region: Region, body: tuple[float, float], leading: float) -> list[Paragraph]:
    if region.is_table:
        return [Paragraph("row", region.rows)]
    own = line_pitches(region)
    pitch = 1.38 * (usual_pitch(own) if len(own) > 3 else leading) * median_height(region.rows)
    margin = statistics.median(
        row.x0 for row in region.rows[1:] or region.rows
    )  # of entries of two lines, the second's
    right = right_edge(region.rows)
    paragraphs: list[Paragraph] = []
    for row, following in zip(region.rows, [*region.rows[1:], None], strict=True):
        last = paragraphs[-1] if paragraphs else None
        below_space = last is None or row.middle - last.rows[-1].middle > pitch
        stands_alone = below_space and (following is None or has_room(row, following, right))
        kind = heading_kind(row, body, stands_alone) or ("li" if BULLET.match(row.text) else "p")
        if last and goes_on(last, row, kind, pitch, margin, right):
            last.rows.append(row)
        else:
            paragraphs.append(Paragraph(kind, [row]))
    return paragraphs


def goes_on(last: Paragraph, row: Line, kind: str, pitch: float, margin: float, right: float) -> bool:
    """Whether the row continues the paragraph before it."""
    previous, first = last.rows[-1], last.rows[0]
    size = max(row.height, previous.height)
    if kind in ("h1", "h2") or last.kind in ("h1", "h2"):
        same_size = 0.8 < row.height / previous.height < 1.25
        return kind == last.kind and same_size and row.middle - previous.middle < 1.6 * size
    if kind == "li" or NUMBERED.match(row.text) or row.middle - previous.middle > pitch:
        return False
    if last.kind == "li" or NUMBERED.match(first.text):
        return row.x0 > first.x0 + 0.4 * size or not has_room(previous, row, right)
    centred = abs(row.x0 + row.x1 - previous.x0 - previous.x1) < size
    indented = abs(row.x0 - margin) > 0.7 * size and abs(row.x0 - previous.x0) > 0.7 * size
    return centred or not indented


def right_edge(rows: list[Line]) -> float:
    """Where the rows' lines end; of many, one may stick out."""
    ends = sorted(row.x1 for row in rows)
    return ends[-2] if len(ends) > 3 else ends[-1]


def has_room(line: Line, following: Line, right: float) -> bool:
    """Whether the first word of the following line would have fitted on this one: then the break was meant."""
    word = len(following.text.split()[0]) + 2
    return line.x1 + word * following.width / len(following.text) < right


def join_text(rows: list[Line], keep_breaks: bool) -> str:
    """The text of following rows as HTML: words broken at a line's end are joined, breaks that were meant are kept."""
    right = right_edge(rows)
    text = rows[0].text.strip()
    for row, following in itertools.pairwise(rows):
        start = following.text.strip()
        if keep_breaks and (row.cells > 1 or following.cells > 1 or has_room(row, following, right)):
            text += "\n" + start
        elif re.search(r"[a-zà-ÿ]-$", text) and start[0].islower():
            text = text[:-1] + start
        elif re.search(r"\w[-—]$", text) or (ord(text[-1]) > 0x2E80 and ord(start[0]) > 0x2E80):
            text += start  # Anglo-|Saxon, 1904-|1910, and scripts without spaces
        else:
            text += " " + start
    return html.escape(text, quote=False).replace("\n", "<br/>")


def write_blocks(paragraphs: list[Paragraph], width: int) -> Iterator[TextBlock]:
    items: list[Paragraph] = []
    for paragraph in [*paragraphs, Paragraph("end")]:
        near = items and paragraph.rows and abs(paragraph.rows[0].x0 - items[-1].rows[0].x0) < 0.3 * width
        if items and not (paragraph.kind == "li" and near):
            texts = [BULLET.sub("", join_text(item.rows, False), count=1) for item in items]
            box = bounds([row for item in items for row in item.rows])
            yield TextBlock("List-Group", box, "<ul>" + "".join(f"<li>{text}</li>" for text in texts) + "</ul>")
            items = []
        if paragraph.kind == "li":
            items.append(paragraph)
        elif paragraph.kind in ("h1", "h2"):
            text = f"<{paragraph.kind}>{join_text(paragraph.rows, False)}</{paragraph.kind}>"
            yield TextBlock("Section-Header", bounds(paragraph.rows), text)
        elif paragraph.rows and paragraph.kind == "row":
            text = "<br/>".join(html.escape(row.text, quote=False) for row in paragraph.rows)
            yield TextBlock("Text", bounds(paragraph.rows), f"<p>{text}</p>")
        elif paragraph.rows:
            yield TextBlock("Text", bounds(paragraph.rows), f"<p>{join_text(paragraph.rows, True)}</p>")


# --- the page image to lines


@functools.cache
def load_reader(threads: int) -> Any:
    """RapidOCR with the models of its own wheel, named by path: it looks for nothing on the network then."""
    import cv2
    import rapidocr

    models = Path(rapidocr.__file__).parent / "models"
    threads = max(1, min(threads, os.cpu_count() or 1))  # RapidOCR ignores a number above the machine's
    cv2.setNumThreads(threads)
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,  # it turns good lines upside down more often than it rights bad ones
            "Global.max_side_len": 100_000,  # 2000 would shrink large pages; they have their size limit already
            "Det.limit_side_len": 32,  # 736 would enlarge long narrow pages to many times their size
            "Det.max_candidates": 5000,  # of 1000 a newspaper page loses lines
            "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
            "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


class Reading(NamedTuple):
    """The lines of a page that was turned counter-clockwise by `turn` degrees and then, on paper, straightened."""

    lines: list[Line]
    turn: int
    size: tuple[int, int]  # of the turned page
    slope: float  # degrees clockwise that its lines ran off: a scan is seldom straight
    sideways: bool  # most of its letters are in lines that run up or down
    trust: float  # mean score of a letter, 0-1


def read_lines(image: Image.Image, turn: int, threads: int) -> Reading:
    turned = image.rotate(turn, expand=True) if turn else image
    found = load_reader(threads)(turned)
    if not len(found):
        return Reading([], turn, turned.size, 0.0, False, 1.0)
    boxes = found.boxes.tolist()
    letters = [len(text) for text in found.txts]
    shapes = [(math.dist(a, b), math.dist(a, d)) for a, b, _, d in boxes]
    running_up = sum(n for n, (wide, high) in zip(letters, shapes, strict=True) if high > 1.5 * wide)
    slopes = [
        math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
        for (a, b, *_), (wide, high) in zip(boxes, shapes, strict=True)
        if wide > 5 * high
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    lines = [upright(text, box, slope, turned.size) for text, box in zip(found.txts, boxes, strict=True)]
    trust = sum(score * n for score, n in zip(found.scores, letters, strict=True)) / sum(letters)
    return Reading(lines, turn, turned.size, slope, running_up > 0.5 * sum(letters), trust)


def upright(text: str, box: list[list[float]], slope: float, size: tuple[int, int]) -> Line:
    """A line from its corners (from the upper left, clockwise) on a page whose lines slope."""
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = (rotate(x, y, -slope, size, size) for x, y in box)
    return Line(text, (ax + dx) / 2, (ay + by) / 2, (bx + cx) / 2, (cy + dy) / 2)


def read_page(image: Image.Image, threads: int) -> Reading:
    """The page as it stands, or turned by 90, 270 or 180 degrees where that reads better."""
    best = read_lines(image, 0, threads)
    turns = (90, 270) if best.sideways else (180,) if best.trust < 0.8 else ()
    for turn in turns:
        if best.turn == 0 or best.trust < 0.9:
            turned = read_lines(image, turn, threads)
            if turned.trust > best.trust and not turned.sideways:
                best = turned
    return best


def rotate(x: float, y: float, degrees: float, size: tuple[int, int], new_size: tuple[int, int]) -> tuple[float, float]:
    """A point after the page turned clockwise about its centre and, at right angles, changed its size."""
    dx, dy, angle = x - size[0] / 2, y - size[1] / 2, math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    return new_size[0] / 2 + dx * cos - dy * sin, new_size[1] / 2 + dx * sin + dy * cos


def page_box(box: Box, reading: Reading, size: tuple[int, int]) -> str:
    """A box of the straightened reading as data-bbox on the page that came in, 0-1000 on each axis."""
    x0, y0, x1, y1 = box
    angle = reading.slope + reading.turn
    corners = [rotate(x, y, angle, reading.size, size) for x in (x0, x1) for y in (y0, y1)]
    xs, ys = [1000 * x / size[0] for x, _ in corners], [1000 * y / size[1] for _, y in corners]
    low, high = (math.floor(min(xs)), math.floor(min(ys))), (math.ceil(max(xs)), math.ceil(max(ys)))
    return " ".join(str(min(1000, max(0, n))) for n in (*low, *high))


def recognize(image: Image.Image, threads: int = 1) -> str:
    """The reply to a page image: its text in labelled divs, in reading order. `threads`: CPU cores for this process."""
    reading = read_page(image.convert("RGB"), threads)
    blocks = group_lines(reading.lines, *reading.size)
    divs = [
        f'<div data-bbox="{page_box(block.box, reading, image.size)}" data-label="{block.label}">{block.html}</div>'
        for block in blocks
    ]
    return "\n".join(divs) or BLANK_PAGE


def start_recognizer(threads: int) -> None:
    """Runs first in a recognizing process: no connections, no commands; no memory limit, as its models need 2 GB."""
    start_worker(memory=None)
    load_reader.cache_clear()
    RECOGNIZER_THREADS.append(threads)


RECOGNIZER_THREADS: list[int] = []  # of this process, once it is started


def recognize_png(png: bytes) -> str:
    import io

    with pillow().open(io.BytesIO(base64.b64decode(png))) as image:
        return recognize(image, RECOGNIZER_THREADS[-1])


class CpuEngine:
    """RapidOCR in processes of this machine, answering as the server does: lines of text, no tables or maths."""

    limits = "text lines in reading order; no tables, maths, pictures or layout labels"

    def __init__(self, settings: Settings):
        self.settings = settings
        self.width = max(1, min(settings.concurrency or cores() // 2, cores()))
        self.model = Model("rapidocr", None, None)
        self.version = version_of("rapidocr")
        self.root = ""
        self.workers = Workers(self.width, functools.partial(start_recognizer, max(1, cores() // self.width)))

    async def __aenter__(self) -> CpuEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.workers.stop()

    async def connect(self, say: Callable[[str, str], None] | None = None) -> None:
        """Raises NoServer when the engine is not installed."""
        if not (importable("rapidocr") and importable("onnxruntime")):
            raise NoServer("--engine cpu needs RapidOCR: pip install -r requirements-cpu.txt")
        self.workers.start()

    async def check_model(self) -> None:
        """The engine is always the same."""

    async def get(self, url: str, timeout: float = 10.0) -> tuple[int, str]:
        return 404, ""

    async def alive(self) -> bool:
        return True

    async def ask(self, png: list[bytes], sampled: Sampling, sent: Callable[[], None], fresh: bool = False) -> Answer:
        """A page read on this machine; the sampling makes no difference. Raises Refused."""
        started = time.monotonic()
        sent()
        try:
            text = await self.workers.run(self.settings.timeout, recognize_png, png.pop())
        except (TimeoutError, Crashed) as e:
            raise Refused(f"RapidOCR failed on the page: {reason(e)}") from None
        return Answer(text, "stop", None, None, time.monotonic() - started)


# ----------------------------------------------------------------------------------------------------------- The run

Listener = Callable[[str, str], None]  # level ("info" or "warning") and a line of text


class Workers:
    """The processes that draw, read and write. One that hangs or dies costs its task one try, nothing else."""

    def __init__(self, count: int, initializer: Callable[[], None], tasks: int = WORKER_TASKS):
        self.count, self.initializer, self.tasks = count, initializer, tasks
        self.idle: list[Worker] = []
        self.busy: set[Worker] = set()
        self.threads: ThreadPoolExecutor | None = None
        self.proved = False  # whether any worker ever started

    def start(self) -> None:
        """Makes room for the processes; each starts with its first task."""
        from concurrent.futures import ThreadPoolExecutor

        self.places = asyncio.Semaphore(self.count)
        self.threads = ThreadPoolExecutor(self.count, "worker")  # a thread waits for each process

    async def run(self, limit: float | None, function: Callable[..., T], *args: Any) -> T:
        """A function's result from a worker. Raises TimeoutError past `limit` seconds, Crashed when the worker died."""
        async with self.places:
            # One that was killed while it was idle (by the system, for memory) is not asked.
            worker = next((w for w in iter(self.next_idle, None) if w.alive), None) or Worker(self.initializer)
            self.busy.add(worker)
            try:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self.threads, worker.call, limit, function, args)
                self.proved = True
                return result
            except asyncio.CancelledError:
                worker.kill()
                raise
            except NotStarted as e:
                if self.proved or worker.exit_code != 1:
                    raise
                raise BadUsage(
                    f"no worker process starts ({e}); a script that calls ocr.run does so below "
                    'if __name__ == "__main__":, as Python\'s multiprocessing wants it'
                ) from None
            finally:
                self.busy.discard(worker)
                if worker.killed or worker.calls >= self.tasks:
                    worker.kill()
                else:
                    self.idle.append(worker)

    def next_idle(self) -> Worker | None:
        return self.idle.pop() if self.idle else None

    async def run_again(self, limit: float | None, function: Callable[..., T], *args: Any) -> T:
        """`run`, with a second try when the worker died: perhaps of something else than its task."""
        try:
            return await self.run(limit, function, *args)
        except Crashed:
            return await self.run(limit, function, *args)

    def stop(self) -> None:
        for worker in (*self.idle, *self.busy):
            worker.kill()
        self.idle.clear()
        if self.threads:
            self.threads.shutdown()


class Worker:
    """A process that does a task at a time, told through a pipe of its own: its death is nobody else's trouble."""

    START_LIMIT = 120.0  # s for Python to start and import

    def __init__(self, initializer: Callable[[], None]):
        self.initializer, self.calls, self.killed = initializer, 0, False
        self.process: BaseProcess | None = None

    def call(self, limit: float | None, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """A task's result; called in a thread. Raises what the task raises, TimeoutError or Crashed."""
        if self.process is None:
            self.begin()
        self.calls += 1
        try:
            self.pipe.send((function, args))
            in_time = self.pipe.poll(limit)
            done, value = self.pipe.recv() if in_time else (False, TimeoutError(f"no result within {limit} s"))
        except (EOFError, OSError):
            self.kill()
            raise Crashed(f"the worker process died (exit code {self.exit_code})") from None
        if not in_time:
            self.kill()
        if done:
            return cast(T, value)
        raise value

    def begin(self) -> None:
        """Starts the process. Raises NotStarted."""
        # "spawn" on every platform: a fork of a process with threads and an event loop may hang.
        context = multiprocessing.get_context("spawn")
        try:
            self.pipe, theirs = context.Pipe()
            with theirs:
                self.process = context.Process(
                    target=serve, args=(theirs, self.initializer), daemon=True, name="ocr worker"
                )
                with interrupts_blocked():
                    self.process.start()
            if self.killed:  # meanwhile, by a run that ends
                self.process.kill()
            if not self.pipe.poll(self.START_LIMIT):
                raise EOFError
            self.pipe.recv()
        except (EOFError, OSError) as e:
            self.kill()
            raise NotStarted(reason(e) if isinstance(e, OSError) else f"exit code {self.exit_code}") from None

    def kill(self) -> None:
        self.killed = True
        if self.process is not None and self.process.pid is not None:
            self.process.kill()
            self.process.join(5)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return self.process.exitcode if self.process else None


def serve(pipe: Connection, initializer: Callable[[], None]) -> None:
    """What a worker process does: one task after another, until its parent closes the pipe or is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear: what arrived is still written
    threading.Thread(target=end_with_parent, daemon=True).start()
    initializer()
    pipe.send("ready")
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result = True, function(*args)
        except Exception as e:
            result = False, sendable(e)
        try:
            pipe.send(result)
        except OSError:
            return
        except Exception as e:  # too large for the worker's memory
            pipe.send((False, RuntimeError(f"{type(e).__name__}: {e}")))


def end_with_parent() -> None:
    """Ends a worker, whatever it does, when its parent was killed: nobody waits for it or keeps its time limit."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def sendable(error: Exception) -> Exception:
    """An exception that gets through a pipe: itself, or its words."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process started in here does not hear Ctrl-C before it can ignore it (where signals can be blocked)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its own start, with the first process, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Crashed(Exception):
    """A worker process died at its task: PDFium crashed, or its memory ran out."""


class NotStarted(Crashed):
    """A worker process did not get as far as its first task."""


class Slot:
    """A place among the pages that are drawn and not sent yet; given back once."""

    def __init__(self, ready: asyncio.Semaphore):
        self.ready, self.held = ready, False

    async def take(self) -> None:
        if not self.held:
            await self.ready.acquire()
            self.held = True

    def give_back(self) -> None:
        if self.held:
            self.held = False
            self.ready.release()


@dataclass
class Trouble:
    """What the transport did to one page so far."""

    replies: int = 0  # the server's, at the page's last fault
    tries: int = 0
    own: int = 0  # faults while the server answered others
    free: bool = True  # a stale connection costs nothing, once
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts for a progress bar. `expected` grows while files are still being found."""

    expected: int
    done: int
    ok: int
    suspect: int
    failed: int
    cached: int
    tokens: int  # of this run
    in_flight: int
    searching: bool


async def run_async(
    inputs: Iterable[str | Path],
    out: str | Path,
    settings: Settings,
    *,
    on_page: Callable[[PageResult], None] | None = None,
    on_event: Listener | None = None,
    on_totals: Callable[[Totals], None] | None = None,
) -> RunResult:
    """Reads documents into `out`. Raises BadUsage or NoServer before anything is sent; later faults are told."""
    run = Run(Path(out), settings, on_page, on_event, on_totals)
    return await run.go(list(inputs))


def run(
    inputs: Iterable[str | Path],
    out: str | Path,
    settings: Settings,
    *,
    on_page: Callable[[PageResult], None] | None = None,
    on_event: Listener | None = None,
    on_totals: Callable[[Totals], None] | None = None,
) -> RunResult:
    """`run_async` for code without an event loop. Ctrl-C raises KeyboardInterrupt once what arrived is on disk."""
    return asyncio.run(run_async(inputs, out, settings, on_page=on_page, on_event=on_event, on_totals=on_totals))


PageId = tuple[Path, int]  # a document's folder and a page number


class Run:
    """One run over all pages of all documents: find -> draw -> ask -> read and write -> put together."""

    def __init__(
        self,
        out: Path,
        settings: Settings,
        on_page: Callable[[PageResult], None] | None,
        on_event: Listener | None,
        on_totals: Callable[[Totals], None] | None,
    ):
        check_settings(settings)
        self.out, self.settings = out, settings
        self.on_page, self.on_event, self.on_totals = on_page, on_event, on_totals
        self.ranges = parse_pages(settings.pages) if settings.pages else None
        count = settings.workers or cores()
        self.workers = Workers(count, start_worker)
        # Enough drawn pages for every worker to have one waiting while it draws the next.
        self.ready = asyncio.Semaphore(2 * count + 2)
        self.lookahead = 2 * count
        self.gate = Gate(settings.patience, self.say)
        self.result = RunResult()
        self.finishing: set[asyncio.Future[Any]] = set()
        self.replies: dict[str, tuple[str, list[PageId | None]]] = {}  # by hash: the first picture, its pages
        self.doubted: list[PageId] = []
        self.together: set[Path] = set()
        self.by_folder: dict[Path, tuple[Document, DocumentResult]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.searching = True
        self.finished = False
        self.probing = False
        self.checking: asyncio.Task[None] | None = None
        self.trusted = asyncio.Event()  # nothing that the server said is written before
        self.findings: list[Finding] = []
        self.scaled = False  # whether it was said that the server scales images down
        self.started = time.time()

    # -- saying

    def say(self, level: str, text: str) -> None:
        if self.on_event:
            self.on_event(level, text)

    def complain(self, source: Path, error: str, page: int | None = None) -> None:
        self.say("warning", f"{show(source)}{f', page {page}' if page else ''}: {error}")

    def show_totals(self) -> None:
        if self.on_totals:
            c = self.counts
            done = c[OK] + c[SUSPECT] + c[FAILED]
            numbers = (c["expected"], done, c[OK], c[SUSPECT], c[FAILED], c["cached"], c["tokens"], self.pace.in_flight)
            self.on_totals(Totals(*numbers, self.searching))

    # -- the whole

    async def go(self, inputs: list[str | Path]) -> RunResult:
        self.inputs = inputs  # as run.json tells them
        inputs = expand_lists(inputs)
        async with self.at_work():
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                self.write_run()
            except OSError as e:
                raise BadUsage(f"--out {show(self.out)}: cannot be written: {reason(e)}") from None
            self.places = Places(self.out)
            try:
                await self.all_pages(inputs)
                self.finished = True
            except asyncio.CancelledError:
                self.result.stopped = "interrupted"
                raise
            except Exception as e:
                self.stop_for(list(flatten(e)))
            finally:
                try:
                    # What arrived is paid for: it goes to disk even when the run was stopped.
                    await asyncio.gather(*self.finishing, return_exceptions=True)
                finally:
                    self.close()
        return self.result

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """With the server found and the workers there; they are ended after. Raises NoServer."""
        engine = CpuEngine(self.settings) if self.settings.engine == "cpu" else Server(self.settings)
        async with engine as self.engine:
            await self.engine.connect(self.say)
            if warning := check_context(self.engine.model, self.settings):
                self.say("warning", warning)
            self.pace = Pace(self.settings.concurrency or self.engine.width)
            self.gate.wake = self.engine.check_model
            self.wanted = self.wanted_of(self.engine.model.name)
            self.workers.start()
            beside = [asyncio.create_task(self.follow_server()), asyncio.create_task(self.tick())]
            if isinstance(self.engine, Server):
                beside.append(asyncio.create_task(self.engine.watch_port()))
            try:
                yield
            finally:
                for task in beside:
                    task.cancel()
                try:
                    await asyncio.gather(*beside, return_exceptions=True)
                finally:
                    self.workers.stop()

    def stop_for(self, errors: list[BaseException]) -> None:
        """Notes why the run ends early; raises what is neither the server's nor the disk's fault."""
        first = next((e for e in errors if not isinstance(e, (NoServer, OutputError))), errors[0])
        self.result.stopped = reason(first)
        if not isinstance(first, (NoServer, OutputError)):
            raise first from None
        self.result.exit_code = 3 if isinstance(first, NoServer) else 1
        self.say("warning", f"stopped: {first}")

    def close(self) -> None:
        """Sums the run up and writes run.json."""
        result = self.result
        whole = all(doc.error is None and not doc.count(FAILED) and doc.folder for doc in result.documents)
        missing = any(len(doc.pages) < len(document.numbers) for document, doc in self.by_folder.values())
        if not whole or missing:
            result.exit_code = result.exit_code or 1
        result.summary = self.summary()
        try:
            self.write_run()
        except OSError as e:
            result.exit_code = result.exit_code or 1
            self.say("warning", f"{show(self.out / 'run.json')}: cannot be written: {reason(e)}")

    def write_run(self) -> None:
        write_json(self.out / "run.json", self.result.summary or self.summary(), indent=1)

    async def all_pages(self, inputs: list[str | Path]) -> None:
        async with asyncio.TaskGroup() as group, contextlib.aclosing(self.documents(inputs)) as documents:
            async for document, todo in documents:
                for number in todo:
                    slot = Slot(self.ready)
                    await slot.take()
                    self.start_checking(group)
                    group.create_task(self.page(document, number, slot))
            self.searching = False
            self.show_totals()
        await self.doubt_twins()

    def start_checking(self, group: asyncio.TaskGroup) -> None:
        """Begins the check beside the first page that needs a reply: a run that asks nothing sends nothing."""
        if not (self.settings.check and isinstance(self.engine, Server)):
            self.trusted.set()
        elif self.checking is None:
            self.checking = group.create_task(self.check_server(self.engine))

    async def check_server(self, server: Server) -> None:
        """Asks for two pages of known text. Raises NoServer when the replies show that no page's can be right."""
        try:
            canaries = await self.workers.run_again(RENDER_LIMIT, draw_canaries)
        except (Crashed, TimeoutError, ImportError, OSError) as e:
            self.findings = [Finding(DOUBT, f"left out, as the test pages cannot be drawn: {reason(e)}")]
        else:
            self.findings, answers = await examine(server, canaries, PAGE_FAULTS, self.pace.slot)
            if not counts_images(answers):
                self.findings = [f._replace(grade=DOUBT) if f.grade == FAULT else f for f in self.findings]
        for finding in self.findings:
            if finding.grade in (NOTE, DOUBT):
                self.say("info" if finding.grade == NOTE else "warning", f"the server's check: {finding.said}")
        if faults := [finding.said for finding in self.findings if finding.grade == FAULT]:
            raise NoServer(f"{'; '.join(faults)} (--no-check reads all the same)")
        self.trusted.set()

    def compare_size(self, attempt: Attempt, picture: Picture) -> None:
        """Says once that the server scales images down: a reply's prompt has fewer tokens than the image needs."""
        needed = image_tokens(picture.sent)
        if self.settings.check and not self.scaled and (attempt.prompt_tokens or needed) < 0.8 * needed:
            self.scaled = True
            self.say("warning", scales_down(attempt.prompt_tokens or 0, needed))

    async def tick(self) -> None:
        """Shows how it goes every second, also while nothing happens."""
        while True:
            await asyncio.sleep(1.0)
            self.show_totals()

    # -- documents

    async def documents(self, inputs: list[str | Path]) -> AsyncGenerator[tuple[Document, list[int]], None]:
        """The documents that open and their pages to do, in order; a few are looked at ahead while more are found."""
        ahead: asyncio.Queue[asyncio.Task[tuple[Document, list[int]] | None] | None] = asyncio.Queue(self.lookahead)

        async def find() -> None:
            try:
                async with contextlib.aclosing(self.found(inputs)) as files:
                    async for found in files:
                        await ahead.put(asyncio.create_task(self.open(found)))
            except Exception:
                await ahead.put(None)
                raise
            await ahead.put(None)

        finding = asyncio.create_task(find())
        try:
            while task := await ahead.get():
                if document := await task:
                    yield document
            await finding  # raises what it met
        finally:
            finding.cancel()
            begun = [task for _ in range(ahead.qsize()) if (task := ahead.get_nowait())]
            for task in begun:
                task.cancel()
            await asyncio.gather(finding, *begun, return_exceptions=True)

    async def found(self, inputs: list[str | Path]) -> AsyncGenerator[Found, None]:
        """The files of the inputs, looked for in a thread, so that the first is read while others are looked for."""
        items: queue.Queue[Found | tuple[Path, str] | Exception | None] = queue.Queue(64)
        enough, some = threading.Event(), False
        threading.Thread(target=pour, args=(find_inputs(inputs, self.out), items, enough), daemon=True).start()
        try:
            while (item := await asyncio.to_thread(items.get) if items.empty() else items.get()) is not None:
                some = True
                if isinstance(item, Found):
                    yield item
                elif isinstance(item, Exception):
                    raise item
                else:
                    self.result.documents.append(DocumentResult(item[0], error=item[1]))
                    self.complain(*item)
        finally:
            enough.set()
        if not some:
            self.say("warning", "no PDF or image found in the inputs")
            self.result.documents.append(
                DocumentResult(Path(str(inputs[0]) if inputs else "."), error="nothing to read")
            )

    async def open(self, found: Found) -> tuple[Document, list[int]] | None:
        """A file's document with its place, and the pages that no earlier run has done; None when it cannot be read."""
        result = DocumentResult(found.source)
        folder = self.places.claim(found)
        if folder is None:
            self.say("info", f"{show(found.source)}: given twice; read once")
            return None
        self.result.documents.append(result)
        done: dict[int, PageResult] = {}
        together = False
        try:
            document = await self.survey(found, folder)
            claim_folder(document, self.places.identity(found.source))
            if not self.settings.overwrite and (folder / "pages").is_dir():
                done, together = await self.pages_done(document)
        except DocumentError as e:
            result.error = str(e)
            self.complain(found.source, str(e))
            return None
        result.folder, result.notes = folder, document.notes
        for note in document.notes:
            self.say("info", f"{show(found.source)}: {note}")
        self.counts["expected"] += len(document.numbers)
        self.by_folder[folder] = document, result
        for page in done.values():
            self.count(page, result)
            if self.has_twin((folder, page.number), page.reply_hash, page.fingerprint or ""):
                self.doubted.append((folder, page.number))
        todo = [number for number in document.numbers if number not in done]
        if not todo and not together:
            await self.put_together(document)
        elif not todo and not has_searchable(document):
            await self.make_searchable(document)
        return document, todo

    async def survey(self, found: Found, folder: Path) -> Document:
        """Opens a file in a worker. Raises DocumentError."""
        password = self.settings.password
        try:
            looked = await self.workers.run_again(10 * RENDER_LIMIT, survey, found.source, password)
        except (TimeoutError, Crashed) as e:
            raise DocumentError(
                f"cannot be opened: {'it takes too long' if isinstance(e, TimeoutError) else e}"
            ) from None
        except (DocumentError, BadUsage):
            raise
        except Exception as e:  # whatever a file can make PDFium or Pillow raise
            raise DocumentError(f"cannot be opened: {type(e).__name__}: {reason(e)}") from None
        notes = looked.notes
        numbers: Sequence[int] = range(1, looked.pages + 1)
        if self.ranges and looked.kind == "pdf":
            numbers = choose_pages(self.ranges, looked.pages)
        document = Document(
            found.source,
            looked.kind,
            looked.pages,
            looked.sha256,
            looked.stamp,
            password,
            looked.has_forms,
            notes,
            folder,
            numbers,
        )
        if not looked.has_forms:
            return document
        try:
            await self.workers.run(FORMS_LIMIT, start_forms, document)
        except (TimeoutError, Crashed):
            why = "its form fields are not drawn: PDFium does not get through starting them"
            return dataclasses.replace(document, forms=False, notes=(*notes, why))
        except Exception:  # PDFium's own word comes with the page
            pass
        return document

    async def pages_done(self, document: Document) -> tuple[dict[int, PageResult], bool]:
        """What an earlier run left of a document. Raises DocumentError or OutputError."""
        try:
            return await self.workers.run_again(None, pages_done, document, self.wanted, self.settings.retry_suspect)
        except OSError as e:
            raise OutputError(f"{show(document.folder)}: cannot be written: {reason(e)}") from None
        except Crashed as e:
            raise DocumentError(f"what an earlier run left in {show(document.folder)} cannot be read: {e}") from None

    async def put_together(self, document: Document) -> None:
        """Writes the document of its pages; one that cannot be put together does not stop the others."""
        try:
            await self.workers.run_again(None, assemble, document, self.wanted)
        except OutputError:
            raise
        except Exception as e:
            result = self.by_folder[document.folder][1]
            result.error = f"its pages are read, but cannot be put together: {type(e).__name__}: {reason(e)}"
            self.complain(document.source, result.error)
        else:
            await self.make_searchable(document)

    async def make_searchable(self, document: Document) -> None:
        """Writes the searchable copy that was asked for; one that cannot be made does not stop the others."""
        if not self.settings.searchable_pdf:
            return
        limit = READ_LIMIT + 2.0 * len(document.numbers)
        try:
            await self.workers.run_again(limit, write_searchable, document)
        except OutputError:
            raise
        except Exception as e:  # whatever a file can make qpdf, PDFium or Pillow raise
            known = isinstance(e, (DocumentError, TimeoutError, Crashed))
            why = str(e) if known else f"{type(e).__name__}: {reason(e)}"
            result = self.by_folder[document.folder][1]
            result.error = f"its pages are read, but it has no searchable copy: {why}"
            self.complain(document.source, result.error)

    # -- pages

    async def page(self, document: Document, number: int, slot: Slot) -> None:
        """One page from its file to disk."""
        job = await self.answered(document, number, slot)
        if job.picture and self.has_twin((document.folder, number), job.reply_hash, job.picture.fingerprint):
            job = dataclasses.replace(job, twin=True)
        task = asyncio.ensure_future(self.finish(job))
        self.finishing.add(task)
        task.add_done_callback(self.finishing.discard)
        await asyncio.shield(task)

    async def answered(self, document: Document, number: int, slot: Slot) -> PageJob:
        """One page, drawn and asked for until a reply stands. Raises NoServer or OutputError."""
        picture: Picture | None = None
        attempts: list[Attempt] = []
        error: str | None = None
        try:
            key = self.wanted.key(document.sha256, number)
            if not self.settings.overwrite:
                attempts = await asyncio.to_thread(load_attempts, document, number, key)
            while True:
                await slot.take()
                drawn = await self.draw(document, number)
                png, picture = [drawn.png], dataclasses.replace(drawn, png=b"")
                del drawn  # nothing but `png` holds the image now
                if attempts and settled(attempts, self.settings.retries):
                    break
                attempt = await self.ask(document, number, png, len(attempts), slot)
                if short := context_too_small(attempt, self.settings, self.engine.model.max_model_len):
                    raise NoServer(short)  # the page is not done: a server with more room reads it
                await self.trusted.wait()
                self.compare_size(attempt, picture)
                attempts.append(attempt)
                if settled(attempts, self.settings.retries):
                    break
                await asyncio.to_thread(save_attempts, document, number, key, attempts)
        except (PageError, Refused) as e:
            error = str(e)
        finally:
            slot.give_back()
        if error is not None and attempts:
            error = None if picture else error  # an earlier attempt's reply stands
        hashed = reply_hash(attempts[best_attempt(attempts)].text) if attempts and not error else None
        return PageJob(document, number, self.wanted, picture, tuple(attempts), error, hashed)

    async def draw(self, document: Document, number: int) -> Picture:
        """A page's picture from a worker; tried again when the worker hung or died, the last time without forms.

        Raises PageError.
        """
        why = ""
        for attempt in (document, dataclasses.replace(document, forms=False)):
            try:
                picture = await self.workers.run(RENDER_LIMIT, picture_of, attempt, number, self.settings.dpi)
            except TimeoutError:
                why = f"drawing the page took more than {RENDER_LIMIT:.0f} s"
            except Crashed as e:
                why = f"PDFium crashed or ran out of memory drawing the page ({e})"
            except PageError:
                raise
            except Exception as e:  # whatever a file can make PDFium or Pillow raise
                raise PageError(f"the page cannot be drawn: {type(e).__name__}: {reason(e)}") from None
            else:
                if why and document.forms:
                    picture = dataclasses.replace(picture, notes=(*picture.notes, f"drawn without forms: {why}"))
                return picture
        raise PageError(why)

    async def ask(self, document: Document, number: int, png: list[bytes], attempt: int, slot: Slot) -> Attempt:
        """One attempt's reply, however often the transport fails. Raises PageError, Refused or NoServer.

        The image is gone once it is sent, so that pages in flight weigh nothing; a fault draws it again.
        """
        sampled = sampling(attempt)
        trouble = Trouble()
        while True:
            try:
                async with self.pace.slot() as answered, self.gate.passing(trouble.free):
                    self.show_totals()
                    answer = await self.engine.ask(png, sampled, slot.give_back, fresh=not trouble.free)
                    answered(answer)
                break
            except Fault as fault:
                slot.give_back()
                if fault.stale and trouble.free:
                    trouble.free = False
                else:
                    await self.weigh(fault, trouble)
                    pause = backoff(trouble.tries - 1) if self.gate.open.is_set() else 0.0  # else the gate makes one
                    await asyncio.sleep(max(min(fault.retry_after or 0.0, 600.0), pause))
            await slot.take()
            png[:] = [(await self.draw(document, number)).png]
        return Attempt(
            sampled.seed,
            sampled.temperature,
            sampled.top_p,
            answer.text,
            answer.finish_reason,
            answer.prompt_tokens,
            answer.completion_tokens,
            round(answer.seconds, 3),
            repeats(answer.text),
        )

    async def weigh(self, fault: Fault, trouble: Trouble) -> None:
        """Counts the faults that are a page's own: those while the server answers others. Raises PageError."""
        trouble.tries += 1
        # Since its last fault: the first one may be the end of a server that answered others until then.
        others = trouble.tries > 1 and self.gate.replies > trouble.replies
        if others and time.monotonic() - trouble.since > max(self.settings.patience, 1.0):
            raise PageError(f"no reply for {self.settings.patience:.0f} s while the server answered others: {fault}")
        if not others and fault.own and (trouble.own or trouble.tries >= 3):
            others = await self.answers_another()
        trouble.own += others and fault.own
        trouble.replies = self.gate.replies
        if trouble.own >= PAGE_FAULTS:
            raise PageError(f"the server failed on this page {trouble.own} times while it answered others: {fault}")

    async def answers_another(self) -> bool:
        """Whether the server answers a tiny page just now; one page at a time asks."""
        if self.probing:
            return False
        self.probing = True
        try:
            alive = await self.engine.alive()
        finally:
            self.probing = False
        if alive:
            self.gate.replies += 1
            self.gate.answered()
        return alive

    async def finish(self, job: PageJob) -> None:
        """A page's files, and its document's when it was the last."""
        page = await self.write(job)
        document, result = self.by_folder[job.document.folder]
        self.counts["tokens"] += page.tokens
        self.count(page, result)
        if page.error:
            self.complain(page.source, page.error, page.number)
        elif page.status == SUSPECT:
            self.complain(page.source, "suspect: " + "; ".join(page.reasons), page.number)
        if len(result.pages) == len(document.numbers) and document.folder not in self.together:
            self.together.add(document.folder)
            await self.put_together(document)

    async def write(self, job: PageJob) -> PageResult:
        """A page's files; when the reply cannot be read in a worker the page fails, its replies kept beside it."""
        try:
            return await self.workers.run_again(READ_LIMIT, finish_page, job)
        except OutputError:
            raise
        except Exception as e:  # a hung or dead worker, or a reply that the reader trips over
            why = "it takes too long" if isinstance(e, TimeoutError) else f"{type(e).__name__}: {reason(e)}"
            failed = dataclasses.replace(job, error=f"the reply cannot be read: {why}")
            page = await asyncio.to_thread(finish_page, failed)  # writes a few lines, and reads nothing
            key = job.wanted.key(job.document.sha256, job.number)
            await asyncio.to_thread(save_attempts, job.document, job.number, key, job.attempts)
            return page

    def count(self, page: PageResult, result: DocumentResult) -> None:
        """Takes a page on disk into the totals."""
        result.pages[page.number] = page
        self.counts[page.status] += 1
        self.counts["cached"] += page.cached
        self.show_totals()
        if self.on_page:
            self.on_page(page)

    def has_twin(self, page: PageId, hashed: str | None, fingerprint: str) -> bool:
        """Whether another page of the run, with another picture, has this reply; the one that came first is noted."""
        if hashed is None:
            return False
        first_picture, alone = self.replies.setdefault(hashed, (fingerprint, []))
        if fingerprint == first_picture and not (alone and alone[0] is None):
            alone.append(page)
            return False
        self.doubted += [twin for twin in alone if twin is not None]
        alone[:] = [None]
        return True

    async def doubt_twins(self) -> None:
        """Marks the pages whose twin came after them, and puts their documents together once more."""
        again: dict[Path, Document] = {}
        for folder, number in self.doubted:
            document, result = self.by_folder[folder]
            page = result.pages.get(number)
            if page is None or TWIN in page.reasons:
                continue
            result.pages[number] = doubted = await self.workers.run(READ_LIMIT, add_doubt, page, TWIN)
            self.counts[page.status] -= 1
            self.counts[doubted.status] += 1
            self.complain(page.source, f"suspect: {TWIN}", number)
            again[folder] = document
        for document in again.values():
            await self.put_together(document)

    async def follow_server(self) -> None:
        """Tells the pace how many requests the server runs and holds, every second while it has /metrics."""
        while not self.pace.fixed:
            with contextlib.suppress(OSError, TimeoutError):
                status, text = await self.engine.get(self.engine.root + "/metrics")
                counts = read_metrics(text) if status == 200 else {}
                if "num_requests_waiting" not in counts:
                    return
                self.pace.follow(counts.get("num_requests_running", 0.0), counts["num_requests_waiting"])
            await asyncio.sleep(1.0)

    # -- the record

    def wanted_of(self, model: str) -> Wanted:
        s = self.settings
        digest = hashlib.sha256(prompt().encode()).hexdigest()
        output = (s.headers_footers, s.images, s.math)
        return Wanted(model, s.engine, s.dpi, s.max_tokens, s.retries, s.loop_stop, *output, digest)

    def summary(self) -> dict[str, Any]:
        """Settings, versions, server, inputs and totals: what run.json holds. No key, no password."""
        settings = dataclasses.asdict(self.settings) | {"url": bare_url(self.settings.url)}
        given = {name: True for name in ("api_key", "password") if settings.pop(name)}
        model = self.engine.model
        return {
            "ocr": __version__,
            "settings": settings | given,
            "prompt_sha256": self.wanted.prompt_sha256,
            "versions": {name: version_of(name) for name in PACKAGES},
            "server": {"model": model.name, "root": model.root, "max_model_len": model.max_model_len}
            | {"version": self.engine.version, "limits": self.engine.limits}
            | {"check": [f"{finding.grade}: {finding.said}" for finding in self.findings]},
            "inputs": [show(Path(str(item))) for item in self.inputs],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 2),
            "finished": self.finished,
            "stopped": self.result.stopped,
            "pages": {status: self.counts[status] for status in (OK, SUSPECT, FAILED)}
            | {"cached": self.counts["cached"]},
            "tokens": self.counts["tokens"],
            "most_in_flight": self.pace.most,
            "documents": [document_summary(document, self.out) for document in self.result.documents],
        }


def document_summary(document: DocumentResult, out: Path) -> dict[str, Any]:
    """A document's line in run.json."""
    record: dict[str, Any] = {"source": show(document.source)}
    if document.folder:
        record["folder"] = document.folder.relative_to(out).as_posix()
        record |= {status: document.count(status) for status in (OK, SUSPECT, FAILED)}
        pages = sorted(document.pages.values(), key=lambda page: page.number)
        record["doubts"] = {page.number: list(page.reasons) for page in pages if page.status == SUSPECT}
        record["errors"] = {page.number: page.error for page in pages if page.status == FAILED}
    if document.error:
        record["error"] = document.error
    if document.notes:
        record["notes"] = list(document.notes)
    return record


PACKAGES = (
    "aiohttp",
    "chandra-ocr",
    "isal",
    "lxml",
    "nh3",
    "pillow",
    "latex2mathml",
    "pikepdf",
    "pillow-heif",
    "pypdfium2",
    "rapidocr",
    "onnxruntime",
)


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def bare_url(url: str) -> str:
    """A URL without the user and password in it."""
    return re.sub(r"//[^/@]*@", "//", url)


def flatten(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, groups within it included."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from flatten(inner)
    else:
        yield error


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_settings(settings: Settings) -> None:
    """Raises BadUsage for a setting out of its range."""
    ranges: dict[str, tuple[float, float]] = {
        "dpi": (20, 1200),
        "max_tokens": (1, 1_000_000),
        "retries": (0, 100),
        "concurrency": (1, MOST_IN_FLIGHT),
        "workers": (1, 256),
        "patience": (0, 1e9),
        "timeout": (0.01, 1e9),
        "wait": (0, 1e9),
    }
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise BadUsage(f"--{name.replace('_', '-')} {value:g}: give a number from {low:g} to {high:g}")
    if settings.engine not in ("vllm", "cpu"):
        raise BadUsage(f"--engine {settings.engine}: vllm or cpu")
    if settings.math not in ("dollars", "brackets"):
        raise BadUsage(f"--math {settings.math}: dollars or brackets")
    if settings.searchable_pdf and not importable("pikepdf"):
        raise BadUsage("--searchable-pdf needs pikepdf: pip install -r requirements.txt")
    if settings.pages:
        parse_pages(settings.pages)
    if not re.match(r"https?://[^/\s]+", settings.url):
        raise BadUsage(f"--url {bare_url(settings.url)}: write it like http://localhost:8000/v1")


def context_too_small(attempt: Attempt, settings: Settings, context: int | None) -> str | None:
    """What to say when a reply was cut before max_tokens: the server has no room for it, nor for the next.

    `context`: the server's own word for its tokens, if it has one; a reply that ends far below it was cut for
    another reason.
    """
    tokens = attempt.completion_tokens
    # A few tokens less are another way to count, not a smaller context.
    if attempt.finish_reason != "length" or tokens is None or tokens >= settings.max_tokens - 8:
        return None
    if context and attempt.prompt_tokens is not None and attempt.prompt_tokens + tokens < context - 64:
        return None
    return (
        f"the server cut a reply at {tokens} of {settings.max_tokens} tokens: its context is too small. "
        f"{more_context(settings)}, or run with --max-tokens {max(1, tokens)}"
    )


def more_context(settings: Settings) -> str:
    needed = settings.max_tokens + PROMPT_TOKENS
    return f"Start vLLM with --max-model-len {needed} or more (llama.cpp: that much for each slot)"


def check_context(model: Model, settings: Settings) -> str | None:
    """What to say of a context in which not every reply fits. Raises NoServer for one in which none does."""
    length = model.max_model_len
    if not length or length >= settings.max_tokens + PROMPT_TOKENS:
        return None
    said = f"the server's context is {length} tokens"
    if length <= settings.max_tokens:
        raise NoServer(
            f"{said}, less than the {settings.max_tokens} that a reply may have. {more_context(settings)}, or run with "
            f"--max-tokens {max(1, length - PROMPT_TOKENS)}"
        )
    return f"{said}: too small for the largest pages with their longest replies. {more_context(settings)}"


# ----------------------------------------------------------------------------------------------------------- Command

EXIT_OK, EXIT_INCOMPLETE, EXIT_USAGE, EXIT_NO_SERVER, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = (
    "exit codes: 0 every page has a reply; 1 some page or document has none; 2 bad usage; 3 no usable server; "
    "130 interrupted"
)

START_SERVER = """\
Start one (NVIDIA GPU, driver 580 or newer):
  docker run --rm --gpus all --network host --ipc host -v ~/.cache/huggingface:/root/.cache/huggingface \\
    docker.io/vllm/vllm-openai:v0.33.0 --model ragarwal/chandra-ocr-2-nvfp4-mtp --served-model-name chandra ...
  (the whole command is in the README), wait for it with --wait 600, or read without a server: --engine cpu"""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ocr.py",
        description="Reads PDFs and images into markdown and HTML with Chandra OCR 2 on a vLLM server.",
        epilog=EXIT_CODES,
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="files, folders (searched), @list.txt (a path a line), @- (standard input)",
    )
    add("--out", metavar="DIR", default="ocr_out", help="output folder (default: %(default)s)")
    add_settings(parser)
    add("--searchable-pdf", action="store_true", help="write a copy of each document with invisible text to search in")
    add("--check", action="store_true", help="only check the server: its model, its context, two test pages")
    add("--json", action="store_true", help="the run's summary as JSON on standard output")
    loud = parser.add_mutually_exclusive_group()
    loud.add_argument("-q", "--quiet", action="store_true", help="errors and the exit code only")
    loud.add_argument("-v", "--verbose", action="store_true", help="a line for every page")
    add("--version", action="version", version=f"ocr.py {__version__}")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options that make Settings: those of every command that reads pages."""
    add = parser.add_argument
    add("--url", default=os.environ.get("OCR_URL") or Settings.url, help="server (OCR_URL; default: %(default)s)")
    add("--model", help="model name (default: the one the server lists)")
    add("--api-key", metavar="KEY", help="better in the environment: OCR_API_KEY")
    add(
        "--engine",
        choices=("vllm", "cpu"),
        default="vllm",
        help="cpu: RapidOCR on this machine, no server (default: %(default)s)",
    )
    add("--pages", metavar="1-5,8,12-", help="pages of each PDF, from 1, inclusive")
    password = parser.add_mutually_exclusive_group()
    password.add_argument("--password", metavar="PW", help="of the PDFs that need one")
    password.add_argument("--password-file", metavar="FILE", help="the password is the file's first line")
    add("--dpi", type=int, default=DPI, help="of PDF pages; short sides have 1024 px at least (default: %(default)s)")
    add("--max-tokens", type=int, metavar="N", default=MAX_TOKENS, help="of a reply (default: %(default)s)")
    add(
        "--retries",
        type=int,
        metavar="N",
        default=RETRIES,
        help="for a reply that loops or is cut off (default: %(default)s)",
    )
    add("--loop-stop", action="store_true", help="let vLLM's repetition detector end a looping reply early")
    add("--concurrency", type=int, metavar="N", help="pages at the server at once (default: follow the server)")
    add("--workers", type=int, metavar="N", help="render processes (default: one a core)")
    add("--headers-footers", action="store_true", help="keep page headers and footers in the markdown")
    add("--no-images", action="store_true", help="leave images and figures out")
    add("--math", choices=("dollars", "brackets"), default="dollars", help=r"$x$ or \(x\) (default: %(default)s)")
    add("--overwrite", action="store_true", help="ask again for pages that are done")
    add("--retry-suspect", action="store_true", help="ask again for suspect pages")
    add(
        "--patience",
        type=float,
        metavar="SECONDS",
        default=1800.0,
        help="with a server that stops answering (default: %(default)g)",
    )
    add("--timeout", type=float, metavar="SECONDS", default=1800.0, help="for one reply (default: %(default)g)")
    add("--wait", type=float, metavar="SECONDS", default=0.0, help="for a server that is still starting")
    add("--no-check", action="store_true", help="leave the short check out that goes before every run")


def settings_of(args: argparse.Namespace) -> Settings:
    """The command line as Settings. Raises BadUsage."""
    password = args.password
    if args.password_file:
        try:
            password = Path(args.password_file).read_text("utf-8").splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError) as e:
            raise BadUsage(f"--password-file {args.password_file}: cannot be read: {reason(e)}") from None
    names = {f.name for f in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    key = args.api_key or os.environ.get("OCR_API_KEY") or None
    switches = {"images": not args.no_images, "check": not args.no_check}
    return Settings(**given | switches | {"password": password, "api_key": key})


class Progress:
    """The run as a person follows it: a bar on a terminal, a line now and then elsewhere; warnings between."""

    EVERY = 30.0  # s between lines without a terminal

    def __init__(self, quiet: bool, verbose: bool, name: str = "ocr.py"):
        from tqdm import tqdm

        self.name = name
        self.verbose, self.quiet = verbose, quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self.bar = tqdm(
            disable=not self.terminal,
            dynamic_ncols=True,
            total=0,
            smoothing=0.05,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} pages [{elapsed}<{remaining}{postfix}]",
        )
        self.started = self.last = time.monotonic()
        self.totals = Totals(0, 0, 0, 0, 0, 0, 0, 0, True)

    def event(self, level: str, text: str) -> None:
        if level == "warning" or not self.quiet:
            self.bar.write(f"{self.name}: {text}", file=sys.stderr)

    def page(self, page: PageResult) -> None:
        if self.verbose and not page.cached:
            said = f"{page.attempts} attempt{'s' * (page.attempts != 1)}, {page.tokens} tokens, {page.seconds:.1f} s"
            self.event("info", f"{show(page.source)}, page {page.number}: {page.status}, {said}")

    def show(self, totals: Totals) -> None:
        self.totals = totals
        now = time.monotonic()
        if self.terminal:
            self.bar.total = totals.expected
            self.bar.n = totals.done
            if now - self.last > 0.1:
                self.last = now
                self.bar.set_postfix_str(self.rates(now), refresh=False)
                self.bar.refresh()
        elif not self.quiet and now - self.last > self.EVERY:
            self.last = now
            more = "+" if totals.searching else ""
            self.event("info", f"{totals.done} of {totals.expected}{more} pages, {self.rates(now)}")

    def rates(self, now: float) -> str:
        t, seconds = self.totals, max(0.001, now - self.started)
        pages = (t.done - t.cached) / seconds
        parts = [f"{pages:.2f} pages/s", f"{t.tokens / seconds:.0f} tokens/s", f"{t.in_flight} in flight"]
        return ", ".join(parts + [f"{n} {name}" for n, name in ((t.failed, FAILED), (t.suspect, SUSPECT)) if n])

    def close(self) -> None:
        if self.terminal:
            self.bar.n, self.bar.total = self.totals.done, self.totals.expected
            self.bar.refresh()
        self.bar.close()


LISTED = 40  # documents in the closing summary; run.json names all


def summary_lines(result: RunResult, out: Path) -> Iterator[str]:
    """The closing summary: a line for each document (for many, those with something to look at), then the totals."""
    documents = result.documents
    if len(documents) > LISTED:
        documents = [d for d in documents if d.error or d.count(FAILED) or d.count(SUSPECT)][:LISTED]
        yield f"{len(result.documents)} documents; those to look at (all are in {show(out / 'run.json')}):"
    for document in documents:
        if document.error or not document.folder:
            yield f"  {show(document.source)}: {document.error or 'not read'}"
            continue
        counts = ", ".join(f"{n} {status}" for status in (OK, SUSPECT, FAILED) if (n := document.count(status)))
        name = short_name(document.folder.name) + ".md"
        yield f"  {show(document.source)}: {counts or 'no page read'} -> {show(document.folder / name)}"
    pages, seconds = result.summary["pages"], result.summary["seconds"]
    fresh = pages[OK] + pages[SUSPECT] + pages[FAILED] - pages["cached"]
    kept = f" ({pages['cached']} from an earlier run)" if pages["cached"] else ""
    yield (
        f"{pages[OK]} pages ok, {pages[SUSPECT]} suspect, {pages[FAILED]} failed{kept}; {result.summary['tokens']} "
        f"tokens, {seconds:.1f} s, {fresh / max(seconds, 0.001):.2f} pages/s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    args = arguments().parse_args(argv)
    keep_freed_memory()
    heed_termination()
    progress: Progress | None = None
    try:
        settings = settings_of(args)
        check_settings(settings)
        if args.check:
            return asyncio.run(check(settings))
        if not args.inputs:
            raise BadUsage("give files or folders to read; python ocr.py --help lists the options")
        progress = Progress(args.quiet, args.verbose)
        hooks = {"on_page": progress.page, "on_event": progress.event, "on_totals": progress.show}
        with contextlib.closing(progress):
            result = run(args.inputs, args.out, settings, **hooks)  # type: ignore[arg-type]
    except BadUsage as e:
        print(f"ocr.py: {e}", file=sys.stderr)
        return EXIT_USAGE
    except NoServer as e:
        print(f"ocr.py: {e}" + (f"\n{START_SERVER}" if e.starting else ""), file=sys.stderr)
        return EXIT_NO_SERVER
    except KeyboardInterrupt:
        done = f"; {progress.totals.done} pages are done" if progress else ""
        print(f"\nocr.py: interrupted{done}. Run the same command again to go on where it stopped.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as e:
        if args.verbose:
            raise
        print(
            f"ocr.py: a bug, please report it: {type(e).__name__}: {reason(e)} (--verbose says where). What is done is "
            "kept.",
            file=sys.stderr,
        )
        return EXIT_INCOMPLETE
    try:
        if args.json:
            print(json.dumps(result.summary, ensure_ascii=False, indent=1))
        elif not args.quiet:
            print("\n".join(summary_lines(result, Path(args.out))))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if result.exit_code == EXIT_NO_SERVER:
        print("ocr.py: what is done is kept; run the same command again to go on.", file=sys.stderr)
    return result.exit_code


def heed_termination() -> None:
    """Ends the run as Ctrl-C does when it is told to end otherwise: `docker stop`, `kill`, a closed terminal."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())

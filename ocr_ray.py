"""Archives on a Ray cluster: ocr.py's pages on many machines, from and to object storage, as Parquet.

    python ocr_ray.py s3://archive/scans --out s3://archive/ocr --url http://router:8080/v1 --address auto
    python ocr_ray.py s3://archive/ocr --export ocr_out

The file reads in the order a page travels:
    Plan         what every process of the run is told
    Stores       folders, S3, GCS and others behind pyarrow's file systems; documents brought to a node once
    Inputs       folders and manifests -> parts, lists of some documents each
    Output       rows of pages and documents; what earlier runs have done
    Surveying    a part's documents -> units, lists of some pages each     (Ray actors)
    Reading      a unit's pages through ocr.py -> one Parquet file         (Ray actors with render processes)
    The run      Ray Data over parts and units; what is counted and said meanwhile
    Settling     after a run: a row a page, and pages that got the same reply
    Exporting    rows -> the files that ocr.py would have written
    Command      arguments, exit codes

A unit's file is named after what is in it: a unit that Ray does twice is one file. Ray Data moves lists of pages only:
a document goes from the store to the nodes that draw it, rows go from there to the store.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import json
import os
import posixpath
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import ocr

T = TypeVar("T")

# -------------------------------------------------------------------------------------------------------------- Plan

ROWS = 64  # pages of one unit, which is one Parquet file
CACHE = 20 << 30  # bytes of documents a node keeps
PART = 256  # documents of one part at most; the first parts are small, so that the first pages start at once
STREAMS = 16  # files of the store read at once


@dataclass(frozen=True)
class Plan:
    """What every process of a run is told."""

    run: str  # its number and some random letters: later runs sort after earlier ones
    out: str
    settings: ocr.Settings
    rows: int
    cache: int
    doors: dict[str, str]  # where a store's addresses hold more than their documents' names: keys, an endpoint

    @property
    def scratch(self) -> Path:
        """The folder of a node in which pages lie until their unit is written; a killed process's are found there."""
        asked = hashlib.blake2b(self.out.encode(), digest_size=8).hexdigest()
        return node_folder() / "pages" / (f"{asked}-{self.run}" if self.settings.overwrite else asked)


def node_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"chandra-ocr-ray-{user}"


def digest(*parts: object) -> str:
    """32 hex digits that name what `parts` say."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------------------------ Stores


def is_remote(name: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None


def bare_address(address: str) -> tuple[str, str]:
    """A store's address without keys and options, and the store it names: ("s3://bucket/scans", "s3://bucket")."""
    if not is_remote(address):
        return os.path.abspath(address), ""
    parts = urllib.parse.urlsplit(address)
    store = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return store + parts.path.rstrip("/"), store


@functools.cache
def file_system(door: str) -> Any:
    """The file system behind a store's address, as pyarrow has it or, for other schemes, fsspec. Raises BadUsage."""
    from pyarrow import fs

    if not is_remote(door):
        return fs.LocalFileSystem()
    scheme = door.partition("://")[0]
    try:
        if scheme in ("gs", "gcs") and "retry_limit_seconds" not in door:  # a quarter of an hour otherwise
            door += ("&" if "?" in door else "?") + "retry_limit_seconds=60"
        if scheme in ("s3", "gs", "gcs", "hdfs", "file"):
            return fs.FileSystem.from_uri(door)[0]
        import fsspec

        if scheme in ("http", "https", "ftp"):
            raise ValueError("documents on web and FTP servers are not read: bring them to a folder or an object store")
        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme)))
    except ImportError as e:
        raise ocr.BadUsage(f"{scheme}://: needs another package: {ocr.reason(e)}") from None
    except Exception as e:  # whatever a store's package raises
        raise ocr.BadUsage(f"{bare_address(door)[0]}: no store opens: {store_words(e)}") from None


def opened(name: str, doors: dict[str, str]) -> tuple[Any, str]:
    """The file system and the path in it of a bare address."""
    if not is_remote(name):
        return file_system(""), name
    store = bare_address(name)[1]
    path = name.partition("://")[2] if not name.startswith("file://") else name.removeprefix("file://")
    return file_system(doors.get(store, store)), path


def store_words(error: BaseException) -> str:
    """What a store's error says, for a person; without the request's dump, and with what to do about missing keys."""
    said = ocr.clip(ocr.reason(error), 200)
    refused = ("access_denied", "forbidden", "credential", "403", "unauthorized", "invalid_access", "signature")
    if any(word in said.lower() for word in refused):
        return f"the store refuses ({said}): give keys that may read and write there, on every node: {KEYS}"
    # Stores answer unsigned requests in many ways, and a request that was not signed is the likeliest reason.
    if "AWS Error" in said and not any(name in os.environ for name in AWS_KEYS) and not aws_file().exists():
        return f"{said}. No keys are set here: unless this machine has a role, give them, on every node: {KEYS}"
    return said


KEYS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or the machine's role for S3, GOOGLE_APPLICATION_CREDENTIALS for GCS"
)
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI")


def aws_file() -> Path:
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")


def again(call: Callable[[], T], tries: int = 4) -> T:
    """A store's call, tried again for a fault that may pass; not for a thing that is absent or refused."""
    for attempt in itertools.count(1):
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError as e:
            words = str(e).upper()
            if attempt == tries or isinstance(e, PermissionError) or "ACCESS_DENIED" in words or "NO_SUCH" in words:
                raise
            time.sleep(0.5 * 2**attempt)
    raise AssertionError


def put(store: Any, path: str, data: bytes) -> None:
    """Writes a file whole or not at all. Raises OSError."""
    from pyarrow import fs

    if isinstance(store, fs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        ocr.write_atomic(Path(path), data)
        return

    def upload() -> None:
        # Object stores show an object when it is whole.
        with store.open_output_stream(path) as stream:
            stream.write(data)

    again(upload)


def get(store: Any, path: str) -> bytes:
    def download() -> bytes:
        with store.open_input_stream(path) as stream:
            return bytes(stream.read())

    return again(download)


class Entry(NamedTuple):
    """A document of the inputs: its bare address (a local one absolute), and what its place is relative to."""

    document: str
    root: str
    size: int = -1  # bytes, -1 where a manifest names it
    mtime: int = -1  # ns


@contextlib.contextmanager
def at_hand(entry: Entry, plan: Plan) -> Iterator[Path]:
    """The document as a local file; a remote one is fetched once a node and kept while it is used.

    Raises DocumentError for one that cannot be had.
    """
    if not is_remote(entry.document):
        yield Path(entry.document)
        return
    import fcntl  # not on Windows, where Ray has no clusters either

    folder = node_folder() / "documents"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / (digest(entry.document, entry.size, entry.mtime) + posixpath.splitext(entry.document)[1][:12])
    # Shared while it is read, exclusive while it is fetched: the cache drops only what nobody holds.
    while True:
        with open(f"{path}.lock", "w") as lock:  # its time tells when the document was last used
            if not has_lock(lock, path, fcntl.LOCK_SH) or not path.exists():
                if not has_lock(lock, path, fcntl.LOCK_EX):
                    continue
                if not path.exists():
                    try:
                        fetch(entry, plan, path)
                    except FileNotFoundError:
                        raise ocr.DocumentError("there is no such object in the store") from None
                    except (OSError, ocr.BadUsage) as e:
                        raise ocr.DocumentError(f"cannot be fetched: {store_words(e)}") from None
                    drop_oldest(folder, plan.cache)
                # Another process may hold it for a moment between the two locks, and drop it.
                if not has_lock(lock, path, fcntl.LOCK_SH) or not path.exists():
                    continue
            yield path
            return


def has_lock(lock: IO[str], path: Path, kind: int) -> bool:
    """Locks a cached document; False when the lock was thrown away meanwhile: try again with the new one."""
    import fcntl

    fcntl.flock(lock, kind)
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), Path(f"{path}.lock").stat())
    return False


def fetch(entry: Entry, plan: Plan, path: Path) -> None:
    store, inside = opened(entry.document, plan.doors)
    part = path.with_name(f"{path.name}-{secrets.token_hex(4)}.part")

    def download() -> None:
        with store.open_input_stream(inside) as stream, open(part, "wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)

    try:
        again(download)
        if entry.size >= 0 and part.stat().st_size != entry.size:
            raise OSError("the object changed while it was read; run again when it is whole")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def drop_oldest(folder: Path, limit: int) -> None:
    """Deletes the documents that were used longest ago while the cache is over its limit."""
    import fcntl

    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.suffix not in (".lock", ".part"):
                files.append((Path(f"{path}.lock").stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            return
        with contextlib.suppress(OSError), open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            Path(f"{path}.lock").unlink()
            total -= size


# ------------------------------------------------------------------------------------------------------------ Inputs

MANIFESTS = (".txt", ".lst", ".csv", ".jsonl", ".ndjson", ".parquet")
COLUMNS = ("document", "path", "uri", "url", "file", "source")


def find_entries(inputs: Sequence[str], plan: Plan) -> Iterator[Entry | tuple[str, str]]:
    """The documents of folders, manifests and single files; (address, error) for what cannot be listed."""
    for item in inputs:
        name = bare_address(item.removeprefix("@"))[0]
        try:
            if item.startswith("@") or name.lower().endswith(MANIFESTS):
                yield from read_manifest(name, plan)
            elif is_remote(name):
                yield from walk(name, plan)
            else:
                some = False
                for found in ocr.find_inputs([name], Path(plan.out)):
                    some = True
                    if not isinstance(found, ocr.Found):
                        yield str(found[0]), found[1]
                        continue
                    try:
                        size, mtime = ocr.file_stamp(found.source)
                    except OSError as e:
                        yield str(found.source), ocr.why_absent(found.source, e)
                    else:
                        yield Entry(str(found.source), str(found.root), size, mtime)
                if not some:
                    yield name, "no PDF or image found there"
        except FileNotFoundError:
            yield name, "there is no such file or folder"
        except (OSError, ocr.BadUsage) as e:
            yield name, f"cannot be read: {store_words(e)}"


def walk(name: str, plan: Plan) -> Iterator[Entry | tuple[str, str]]:
    """The documents below a folder of a store, or the one object of that name; a folder at a time."""
    from pyarrow import fs

    store, path = opened(name, plan.doors)
    head = name[: len(name) - len(path)]
    info = again(lambda: store.get_file_info(path))
    if info.type == fs.FileType.File:
        yield entry_of(info, head, posixpath.dirname(name))
        return
    waiting, found = [path], False
    skip = opened(plan.out, plan.doors)[1] if plan.out.startswith(head) and is_remote(plan.out) else None
    while waiting:
        selector = fs.FileSelector(waiting.pop())
        try:
            listed = sorted(again(lambda: store.get_file_info(selector)), key=lambda info: info.path)  # noqa: B023
        except OSError as e:
            yield head + selector.base_dir, f"cannot be listed: {store_words(e)}"
            found = True
            continue
        for info in listed:
            if info.type == fs.FileType.File and Path(info.path).suffix.lower() in DOCUMENTS:
                yield entry_of(info, head, name)
                found = True
        folders = [info.path for info in listed if info.type == fs.FileType.Directory and info.path != skip]
        waiting += reversed([folder for folder in folders if not posixpath.basename(folder).startswith(".")])
    if not found:
        yield name, "no PDF or image found there"


DOCUMENTS = ocr.IMAGE_SUFFIXES | {".pdf"}


def entry_of(info: Any, head: str, root: str) -> Entry:
    return Entry(head + info.path.lstrip("/"), root, info.size or 0, info.mtime_ns or 0)


def read_manifest(name: str, plan: Plan) -> Iterator[Entry | tuple[str, str]]:
    """The documents that a list names: a line each, or a column of CSV, JSON lines or Parquet."""
    store, path = opened(name, plan.doors)
    suffix, some = posixpath.splitext(name)[1].lower(), False
    for given in manifest_names(store, path, suffix, name):
        some = True
        # A local manifest's relative paths start at its folder, as one moves both together.
        if not is_remote(given) and not Path(given).is_absolute():
            given = posixpath.join(posixpath.dirname(name), given)
        # A ? or # in it is part of the object's name: keys and options stand in the environment, or in --out.
        document = re.sub(r"^([a-z0-9+.-]+://)[^/@]*@", r"\1", given) if is_remote(given) else os.path.abspath(given)
        yield Entry(document, posixpath.dirname(document))
    if not some:
        yield name, "the manifest names no document"


def manifest_names(store: Any, path: str, suffix: str, name: str) -> Iterator[str]:
    import pyarrow as pa
    from pyarrow import csv, parquet
    from pyarrow import json as arrow_json

    try:
        if suffix == ".parquet":
            with store.open_input_file(path) as file:
                table = parquet.ParquetFile(file)
                column = column_of(table.schema_arrow.names, name)
                for batch in table.iter_batches(columns=[column]):
                    yield from (str(value) for value in batch.column(0).to_pylist() if value)
            return
        with store.open_input_stream(path) as stream:
            if suffix == ".csv":
                reader = csv.open_csv(stream)
                column = column_of(reader.schema.names, name)
                for batch in reader:
                    yield from (str(value) for value in batch.column(column).to_pylist() if value)
            elif suffix in (".jsonl", ".ndjson"):
                table = arrow_json.read_json(stream)
                column = column_of(table.column_names, name)
                yield from (str(value) for value in table.column(column).to_pylist() if value)
            else:
                data = bytes(stream.read()).decode("utf-8-sig", "surrogateescape")
                separator = "\0" if "\0" in data else "\n"
                yield from (line for part in data.split(separator) if (line := part.rstrip("\r")).strip())
    except pa.ArrowInvalid as e:
        if suffix == ".csv" and "Empty" in str(e):
            return
        raise ocr.BadUsage(f"the manifest cannot be read as {suffix[1:]}: {ocr.reason(e)}") from None


def column_of(names: Sequence[str], manifest: str) -> str:
    """The column that names the documents. Raises BadUsage."""
    column = next((name for wanted in COLUMNS for name in names if name.lower() == wanted), None)
    if column is None and len(names) == 1:
        column = names[0]
    if column is None:
        raise ocr.BadUsage(f"no column of {', '.join(names) or 'it'} is called {' or '.join(COLUMNS)}")
    return column


class Listed(NamedTuple):
    """What listing the inputs gave: parts to survey, documents that need no look, and names that lead nowhere."""

    parts: int
    complete: int
    bad: int


def write_parts(plan: Plan, inputs: Sequence[str], complain: Callable[[str, str], None], complete: Any) -> Listed:
    """Lists the inputs into files of the output, a part each, so that no process holds them all."""
    part: list[Entry] = []
    seen: set[bytes] = set()
    counts: collections.Counter[str] = collections.Counter()

    def flush() -> None:
        put_rows(plan, part_file(plan, counts["parts"]), [entry._asdict() for entry in part])
        counts["parts"] += 1
        part.clear()

    for found in find_entries(inputs, plan):
        if isinstance(found, Entry) and not is_text(found.document):
            found = ocr.show(Path(found.document)), "its name is not UTF-8, and rows hold nothing else: rename it"
        if not isinstance(found, Entry):
            counts["bad"] += 1
            complain(*found)
            continue
        name = bytes.fromhex(digest(found.document if is_remote(found.document) else real_path(found.document)))
        if name in seen:
            continue
        seen.add(name)
        if among(complete, stamp_digest(found, plan)):
            counts["complete"] += 1
            continue
        part.append(found)
        if len(part) >= min(PART, 8 << min(counts["parts"] // 4, 5)):
            flush()
    if part:
        flush()
    return Listed(counts["parts"], counts["complete"], counts["bad"])


def real_path(document: str) -> str:
    """A local document's path without links to folders, as ocr.py tells documents apart."""
    return os.path.join(os.path.realpath(Path(document).parent), Path(document).name)


def is_text(name: str) -> bool:
    """Whether a name holds no bytes that stand for themselves (surrogates)."""
    return not any("\ud800" <= c <= "\udfff" for c in name)


def part_file(plan: Plan, number: int) -> str:
    return f"inputs/{plan.run}-{number:06d}.parquet"


def read_part(plan: Plan, number: int) -> list[Entry]:
    table = read_table(plan, part_file(plan, number))
    return [Entry(**row) for row in table.to_pylist()]


# ------------------------------------------------------------------------------------------------------------ Output


@functools.cache
def page_schema() -> Any:
    import pyarrow as pa

    attempt = {"seed": pa.int64(), "temperature": pa.float64(), "top_p": pa.float64(), "finish_reason": pa.string()}
    attempt |= {"prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "seconds": pa.float64()}
    attempt |= {"repeats": pa.bool_()}
    return pa.schema(
        {
            "document": pa.string(),
            "page": pa.int32(),
            "status": pa.string(),
            "reasons": pa.list_(pa.string()),
            "error": pa.string(),
            "markdown": pa.string(),
            "html": pa.string(),
            "blocks": pa.string(),  # JSON: blocks hold blocks
            "images": pa.list_(pa.struct({"name": pa.string(), "data": pa.binary()})),
            "tokens": pa.int64(),
            "seconds": pa.float64(),
            "attempts": pa.list_(pa.struct(attempt)),
            "sha256": pa.string(),
            "key": pa.string(),
            "reply_hash": pa.string(),
            "fingerprint": pa.string(),
            "record": pa.string(),  # JSON: what else ocr.py's page file holds
            "run": pa.string(),
        }
    )


@functools.cache
def document_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        {
            "document": pa.string(),
            "root": pa.string(),
            "kind": pa.string(),
            "page_count": pa.int32(),
            "pages": pa.string(),  # 1-5,8
            "asked": pa.string(),  # the --pages that chose them
            "sha256": pa.string(),
            "size": pa.int64(),
            "mtime": pa.int64(),
            "notes": pa.list_(pa.string()),
            "error": pa.string(),
            "run": pa.string(),
        }
    )


def put_rows(plan: Plan, name: str, rows: list[dict[str, Any]], schema: Any = None) -> None:
    import pyarrow as pa

    put_table(plan, name, pa.Table.from_pylist(rows, schema=schema))


def put_table(plan: Plan, name: str, table: Any) -> None:
    """Writes rows as a Parquet file of the output. Raises OutputError."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    store, root = opened(plan.out, plan.doors)
    try:
        put(store, f"{root}/{name}", sink.getvalue().to_pybytes())
    except OSError as e:
        raise ocr.OutputError(f"{plan.out}/{name}: cannot be written: {store_words(e)}") from None


def read_table(plan: Plan, name: str, columns: Sequence[str] | None = None, filters: Any = None) -> Any:
    """The rows of a file of the output. Raises OutputError."""
    from pyarrow import parquet

    store, root = opened(plan.out, plan.doors)
    names = list(columns) if columns is not None else None
    options = {"filters": filters, "filesystem": store, "use_threads": False, "partitioning": None}
    try:
        table = again(lambda: parquet.read_table(f"{root}/{name}", columns=names, **options))
        if "document" not in table.column_names:
            raise ValueError("it holds no rows of ours")
    except Exception as e:  # whatever a strange file makes pyarrow raise
        raise ocr.OutputError(
            f"{plan.out}/{name}: cannot be read: {store_words(e)}; delete it, and its pages are read again"
        ) from None
    return table


def files_in(plan: Plan, folder: str) -> list[str]:
    """The Parquet files of a folder of the output, those of earlier runs first."""
    from pyarrow import fs

    store, root = opened(plan.out, plan.doors)
    selector = fs.FileSelector(f"{root}/{folder}", allow_not_found=True)
    names = (posixpath.basename(info.path) for info in again(lambda: store.get_file_info(selector)))
    return sorted(f"{folder}/{name}" for name in names if name.endswith(".parquet"))


def read_out(plan: Plan, name: str) -> dict[str, Any]:
    """A JSON object of the output; {} when it is absent or broken."""
    store, root = opened(plan.out, plan.doors)
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(get(store, f"{root}/{name}"))
        return data if isinstance(data, dict) else {}
    return {}


def write_out(plan: Plan, name: str, data: dict[str, Any]) -> None:
    store, root = opened(plan.out, plan.doors)
    try:
        put(store, f"{root}/{name}", (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace"))
    except OSError as e:
        raise ocr.OutputError(f"{plan.out}/{name}: cannot be written: {store_words(e)}") from None


def remove(plan: Plan, name: str) -> None:
    store, root = opened(plan.out, plan.doors)
    with contextlib.suppress(FileNotFoundError):
        again(lambda: store.delete_file(f"{root}/{name}"))


class Scan(NamedTuple):
    """What the output holds, a row a page, as arrays (some 70 bytes a page): names are 128-bit digests."""

    files: list[str]
    file: Any  # int32: index of the row's file
    page: Any  # (n, 2) uint64: digest of document and page
    done: Any  # (n, 2) uint64: digest of document and the key of what was asked
    reply: Any  # (n, 2) uint64: the reply's hash, 0 where it has none to compare
    picture: Any  # uint64: the picture's fingerprint
    status: Any  # uint8: index in STATUSES


STATUSES = (ocr.OK, ocr.SUSPECT, ocr.FAILED)
SCANNED = ("document", "page", "status", "key", "reply_hash", "fingerprint")


def words128(digests: Iterable[str]) -> Any:
    """Hex digests of 128 bits as an (n, 2) array."""
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(digests)), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def scan(plan: Plan) -> Scan:
    """Reads the small columns of the output's pages. Raises OutputError for a file that is no Parquet of these rows."""
    import numpy as np

    names = files_in(plan, "pages")
    zero = "0" * 32

    def look(name: str) -> tuple[Any, ...]:
        columns = read_table(plan, name, SCANNED).to_pydict()
        pages = list(zip(columns["document"], columns["page"], strict=True))
        keys = zip(columns["document"], columns["key"], strict=True)
        prints = (hashlib.blake2b(str(p).encode(), digest_size=8).digest() for p in columns["fingerprint"])
        return (
            words128(digest(*page) for page in pages),
            words128(digest(*key) for key in keys),
            words128(h if h and len(h) == 32 else zero for h in columns["reply_hash"]),
            np.frombuffer(b"".join(prints), dtype=np.uint64),
            np.array([STATUSES.index(s) if s in STATUSES else 2 for s in columns["status"]], dtype=np.uint8),
        )

    with ThreadPoolExecutor(STREAMS) as pool:
        found = list(pool.map(look, names))
    empty = words128(()), words128(()), words128(()), np.zeros(0, np.uint64), np.zeros(0, np.uint8)
    counts = [len(rows[0]) for rows in found]
    columns = [np.concatenate([rows[i] for rows in found] or [empty[i]]) for i in range(5)]
    return Scan(names, np.repeat(np.arange(len(names), dtype=np.int32), counts), *columns)


def newest(rows: Scan) -> Any:
    """Which rows stand: of several for one page the latest run's."""
    import numpy as np

    order = np.lexsort((np.arange(len(rows.file)), rows.page[:, 1], rows.page[:, 0]))
    pages = rows.page[order]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = (pages[1:] != pages[:-1]).any(axis=1)
    stands = np.zeros(len(order), dtype=bool)
    stands[order[last]] = True
    return stands


def sorted_digests(digests: Any) -> Any:
    import numpy as np

    return digests[np.lexsort((digests[:, 1], digests[:, 0]))]


def among(known: Any, name: str) -> bool:
    """Whether a digest is among sorted ones."""
    import numpy as np

    if not len(known):
        return False
    high, low = (np.uint64(int(part, 16)) for part in (name[:16], name[16:]))
    first, last = np.searchsorted(known[:, 0], high, "left"), np.searchsorted(known[:, 0], high, "right")
    return bool((known[first:last, 1] == low).any())


def what_is_done(plan: Plan, rows: Scan, wanted: ocr.Wanted) -> tuple[Any, Any]:
    """Digests of the pages that need no reply (document, key), and of the documents that need no look (with stamp)."""
    if plan.settings.overwrite:
        return words128(()), words128(())
    good = rows.status == 0 if plan.settings.retry_suspect else rows.status <= 1
    done = sorted_digests(rows.done[newest(rows) & good])
    complete = []
    for name in files_in(plan, "documents"):
        for row in read_table(plan, name).to_pylist():
            if not row["error"] and row["asked"] == (plan.settings.pages or "") and all_done(row, done, wanted):
                complete.append(stamp_digest(Entry(row["document"], "", row["size"], row["mtime"]), plan))
    return done, sorted_digests(words128(complete))


def all_done(row: dict[str, Any], done: Any, wanted: ocr.Wanted) -> bool:
    keys = (wanted.key(row["sha256"], number) for number in numbers_of(row["pages"]))
    return all(among(done, digest(row["document"], key)) for key in keys)


def numbers_of(spans: str | None) -> list[int]:
    """The reverse of ocr.spans."""
    return [n for low, high in ocr.parse_pages(spans) for n in range(low, (high or low) + 1)] if spans else []


def stamp_digest(entry: Entry, plan: Plan) -> str:
    """Names a document as it lies in its store: one whose size or time changed is looked at again."""
    return digest(entry.document, entry.size, entry.mtime, plan.settings.pages)


# --------------------------------------------------------------------------------------------------------- Surveying


class Worker:
    """What surveyors and readers share: a run of ocr.py's without documents of its own, and the board."""

    def __init__(self, plan: Plan, board: Any):
        self.plan, self.board = plan, board
        self.stopped = False
        self.said: list[tuple[str, str]] = []
        hide_main()
        ocr.keep_freed_memory()
        self.run = ocr.Run(plan.scratch, plan.settings, None, self.say, None)

    def say(self, level: str, text: str) -> None:
        self.said.append((level, text))

    def heard(self) -> list[tuple[str, str]]:
        said = self.said[:]
        self.said.clear()
        return said

    async def stop(self, why: str, code: int) -> None:
        self.stopped = True
        await self.board.stop.remote(why, code)


def hide_main() -> None:
    """Keeps the render processes from importing Ray's worker program as theirs: it is no module of ours."""
    main = sys.modules["__main__"]
    if "ray" in Path(str(getattr(main, "__file__", ""))).parts:
        del main.__file__


def ray_get(references: list[Any]) -> Any:
    import ray

    return ray.get(references)


class Surveyor(Worker):
    """Opens documents, writes a row for each, and lists the pages that no run has done, some in a unit."""

    def __init__(self, plan: Plan, board: Any, wanted: ocr.Wanted, done: Any, complete: Any):
        super().__init__(dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, workers=1)), board)
        self.wanted = wanted
        self.done, self.complete = ray_get([done, complete])
        self.run.workers.start()
        self.looking = asyncio.Semaphore(4)  # documents that are fetched at once

    async def __call__(self, row: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        number, counts = int(row["id"]), collections.Counter[str]()
        try:
            self.stopped = await self.board.part.remote(number, {}, [])
            if self.stopped:
                return
            entries = await asyncio.to_thread(read_part, self.plan, number)
            looks = [asyncio.create_task(self.look(entry, counts)) for entry in entries]
            found = [found for found in await asyncio.gather(*looks) if found]
            if rows := [row for row, _ in found]:
                name = f"documents/{self.plan.run}-{number:06d}.parquet"
                await asyncio.to_thread(put_rows, self.plan, name, rows, document_schema())
            counts["parts"] = 1
            await self.board.part.remote(number, dict(counts), self.heard())
            for unit in units(found, self.plan.rows):
                yield {"unit": json.dumps(unit)}
        except (ocr.OutputError, ocr.BadUsage, OSError) as e:
            await self.stop(ocr.reason(e), ocr.EXIT_INCOMPLETE)
        except Exception as e:
            await self.stop(f"a bug, please report it: {type(e).__name__}: {ocr.reason(e)}", ocr.EXIT_INCOMPLETE)

    async def look(self, entry: Entry, counts: collections.Counter[str]) -> tuple[dict[str, Any], list[int]] | None:
        """A document's row and its pages to do; None for one that needs no look."""
        async with self.looking:
            row: dict[str, Any] = {"document": entry.document, "root": entry.root, "run": self.plan.run}
            row |= {"notes": [], "asked": self.plan.settings.pages or ""}
            try:
                entry = await asyncio.to_thread(self.stamped, entry)
                if among(self.complete, stamp_digest(entry, self.plan)):
                    counts["complete"] += 1
                    return None
                row |= {"size": entry.size, "mtime": entry.mtime}
                document = await self.survey(entry)
            except Exception as e:  # whatever a store's package raises, besides our own words
                why = (
                    str(e) if isinstance(e, (ocr.DocumentError, ocr.BadUsage)) else f"cannot be read: {store_words(e)}"
                )
                counts["unreadable"] += 1
                self.say("warning", f"{entry.document}: {why}")
                return row | {"error": why}, []
        row |= {"kind": document.kind, "page_count": document.pages, "pages": ocr.spans(document.numbers)}
        row |= {"sha256": document.sha256, "notes": list(document.notes), "forms": document.forms}
        keys = ((n, digest(entry.document, self.wanted.key(document.sha256, n))) for n in document.numbers)
        todo = [number for number, key in keys if not among(self.done, key)]
        counts["documents"] += 1
        counts["expected"] += len(todo)
        counts["cached"] += len(document.numbers) - len(todo)
        for note in document.notes:
            self.say("info", f"{entry.document}: {note}")
        return row, todo

    def stamped(self, entry: Entry) -> Entry:
        """The entry with the size and the time that its store tells. Raises DocumentError."""
        if entry.size >= 0:
            return entry
        try:
            if not is_remote(entry.document):
                size, mtime = ocr.file_stamp(Path(entry.document))
                return entry._replace(size=size, mtime=mtime)
            store, path = opened(entry.document, self.plan.doors)
            info = again(lambda: store.get_file_info(path))
        except (OSError, ValueError, ocr.BadUsage) as e:
            if isinstance(e, FileNotFoundError):
                raise ocr.DocumentError(ocr.why_absent(Path(entry.document), e)) from None
            raise ocr.DocumentError(f"cannot be read: {store_words(e)}") from None
        if info.size is None:
            raise ocr.DocumentError("there is no such object in the store")
        return entry._replace(size=info.size, mtime=info.mtime_ns or 0)

    async def survey(self, entry: Entry) -> ocr.Document:
        """Raises DocumentError."""
        async with held(entry, self.plan) as path:
            found = ocr.Found(path, path.parent, searched=False)
            return await self.run.survey(found, Path())


@contextlib.asynccontextmanager
async def held(entry: Entry, plan: Plan) -> AsyncIterator[Path]:
    """`at_hand` for code with an event loop: fetching, and waiting for another's fetch, go on in a thread."""
    holding = at_hand(entry, plan)
    path = await asyncio.to_thread(holding.__enter__)
    try:
        yield path
    finally:
        await asyncio.to_thread(holding.__exit__, None, None, None)


def units(found: Iterable[tuple[dict[str, Any], list[int]]], rows: int) -> Iterator[list[dict[str, Any]]]:
    """The pages to do, in order, some of a document or of several documents in one unit."""
    unit: list[dict[str, Any]] = []
    room = rows
    for row, todo in found:
        while todo:
            chosen, todo = todo[:room], todo[room:]
            piece = {name: row[name] for name in ("document", "root", "size", "mtime", "sha256", "kind", "page_count")}
            unit.append(piece | {"forms": row["forms"], "numbers": ocr.spans(chosen)})
            room -= len(chosen)
            if not room:
                yield unit
                unit, room = [], rows
    if unit:
        yield unit


# ----------------------------------------------------------------------------------------------------------- Reading


class Reader(Worker):
    """Reads units: draws and asks for their pages as ocr.py does, and writes their rows."""

    def __init__(self, plan: Plan, board: Any):
        super().__init__(plan, board)
        self.name = secrets.token_hex(8)
        self.starting = asyncio.Lock()
        self.working: contextlib.AsyncExitStack | None = None
        self.beating: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.news: collections.Counter[str] = collections.Counter()

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        pieces = json.loads(row["unit"])
        counts: collections.Counter[str] = collections.Counter()
        try:
            await self.start()
            if not self.stopped:
                counts = await self.unit(pieces)
        except ocr.NoServer as e:
            await self.stop(str(e), ocr.EXIT_NO_SERVER)
        except (ocr.OutputError, OSError) as e:
            await self.stop(ocr.reason(e), ocr.EXIT_INCOMPLETE)
        except Exception as e:  # a bug: said, and the others go on
            self.say("warning", f"a bug, please report it: {type(e).__name__}: {ocr.reason(e)}")
        await self.report()  # now: after the last unit Ray ends this process
        return {"unit": unit_name(pieces), **{name: counts[name] for name in (*STATUSES, "tokens")}}

    async def start(self) -> None:
        """Finds the server and starts the render processes, once. Raises NoServer."""
        async with self.starting:
            if self.beating is None:
                await self.report()
                self.beating = asyncio.create_task(self.beat())
            if self.working is None and not self.stopped:
                working = contextlib.AsyncExitStack()
                await working.enter_async_context(self.run.at_work())
                self.run.trusted.set()  # the driver has checked the server
                self.working = working

    async def beat(self) -> None:
        """Reports every second; ends the pages at work when the run was stopped."""
        while True:
            await asyncio.sleep(1.0)
            if self.working:
                self.news["in flight"] = self.run.pace.in_flight
            await self.report()
            if self.stopped:
                for task in self.tasks:
                    task.cancel()

    async def report(self) -> None:
        news = dict(self.news)
        self.news.clear()
        self.stopped = await self.board.hear.remote(self.name, news, self.heard()) or self.stopped

    async def unit(self, pieces: list[dict[str, Any]]) -> collections.Counter[str]:
        """A unit's counts, once its file is written. What is done of it when the run stops is written, too."""
        name = unit_name(pieces)
        file = f"pages/{self.plan.run}-{name}.parquet"
        rows = await asyncio.to_thread(self.written, file)
        if rows is None:
            found = await asyncio.gather(*(self.piece(piece) for piece in pieces))
            pages = [page for pages, _ in found for page in pages]
            errors = [error for _, errors in found for error in errors]
            if errors:
                file = f"pages/{self.plan.run}-{name}-part.parquet"
            rows = await asyncio.to_thread(self.write_rows, file, pages)
            for kind, code in ((ocr.NoServer, ocr.EXIT_NO_SERVER), (ocr.OutputError, ocr.EXIT_INCOMPLETE)):
                if said := [str(error) for error in errors if isinstance(error, kind)]:
                    await self.stop(said[0], code)
        counts = collections.Counter(status for status, _ in rows)
        counts["tokens"] = sum(tokens for _, tokens in rows)
        return counts

    def written(self, file: str) -> list[tuple[str, int]] | None:
        """The rows of a unit that was read before: Ray gave it to a process that died after, or twice."""
        from pyarrow import fs

        store, root = opened(self.plan.out, self.plan.doors)
        if again(lambda: store.get_file_info(f"{root}/{file}")).type != fs.FileType.File:
            return None
        table = read_table(self.plan, file, ("document", "status", "tokens"))
        return list(zip(table["status"].to_pylist(), table["tokens"].to_pylist(), strict=True))

    async def piece(self, piece: dict[str, Any]) -> tuple[list[Page], list[BaseException]]:
        """A document's pages of one unit; those that are on disk, and why others are not."""
        entry = Entry(piece["document"], piece["root"], piece["size"], piece["mtime"])
        numbers = numbers_of(piece["numbers"])
        async with contextlib.AsyncExitStack() as stack:
            error: str | None = None
            path, stamp = Path(entry.document), (entry.size, entry.mtime)
            try:
                path = await stack.enter_async_context(held(entry, self.plan))
                stamp = ocr.file_stamp(path) if is_remote(entry.document) else stamp
            except (ocr.DocumentError, OSError) as e:
                error = ocr.reason(e)
            document = ocr.Document(
                path,
                piece["kind"],
                piece["page_count"],
                piece["sha256"],
                stamp,
                self.plan.settings.password,
                piece["forms"],
            )
            pages = [Page(piece["document"], self.place(document, piece, number), number) for number in numbers]
            tasks = [asyncio.create_task(self.page(page, error)) for page in pages]
            self.tasks.update(tasks)
            try:
                done = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self.tasks.difference_update(tasks)
        good = [page for page, result in zip(pages, done, strict=True) if not isinstance(result, BaseException)]
        return good, [result for result in done if isinstance(result, BaseException)]

    def place(self, document: ocr.Document, piece: dict[str, Any], number: int) -> ocr.Document:
        """The document with a folder for one page, the same whichever unit holds the page."""
        folder = self.plan.scratch / digest(piece["document"], number)
        return dataclasses.replace(document, folder=folder, numbers=(number,))

    async def page(self, page: Page, error: str | None) -> None:
        """One page from its document to this node's disk, unless a process that died has brought it there."""
        document, number = page.place, page.number
        result = await asyncio.to_thread(self.found, page) if document.folder.is_dir() else None
        if result is None:
            if error is None:
                slot = ocr.Slot(self.run.ready)
                await slot.take()
                try:
                    job = await self.run.answered(document, number, slot)
                except (ocr.NoServer, ocr.OutputError):
                    raise
                except Exception as e:  # a bug: the page fails, the others go on
                    error = f"a bug, please report it: {type(e).__name__}: {ocr.reason(e)}"
            if error is not None:
                job = ocr.PageJob(document, number, self.run.wanted, None, (), error)
            result = await asyncio.shield(self.run.write(job))
        self.news[result.status] += 1
        self.news["tokens"] += result.tokens
        if result.error:
            self.say("warning", f"{page.document}, page {number}: {result.error}")
        elif result.status == ocr.SUSPECT:
            self.say("warning", f"{page.document}, page {number}: suspect: {'; '.join(result.reasons)}")

    def found(self, page: Page) -> ocr.PageResult | None:
        done, _ = ocr.pages_done(page.place, self.run.wanted, self.plan.settings.retry_suspect)
        return done.get(page.number)

    def write_rows(self, file: str, pages: Sequence[Page]) -> list[tuple[str, int]]:
        """Writes the unit's rows, then drops its pages' own files. Raises OutputError."""
        rows = []
        for page in pages:
            try:
                rows.append(row_of(page, self.plan.run))
            except (OSError, KeyError):  # another run on this node has taken the page's files into its own rows
                self.say("warning", f"{page.document}, page {page.number}: another run into this --out has it")
        if rows:
            put_rows(self.plan, file, rows, page_schema())
        for page in pages:
            shutil.rmtree(page.place.folder, ignore_errors=True)
        return [(row["status"], row["tokens"]) for row in rows]


class Page(NamedTuple):
    """A page of a unit: its document's address, and the document with the page's folder on this node."""

    document: str
    place: ocr.Document
    number: int


def unit_name(pieces: list[dict[str, Any]]) -> str:
    return digest([[piece["document"], piece["sha256"], piece["numbers"]] for piece in pieces])


def row_of(page: Page, run: str) -> dict[str, Any]:
    """A page's files as a row."""
    folder, number = page.place.folder, page.number
    record = ocr.read_json(ocr.page_file(folder, number, ".json"))
    texts = {}
    for name, suffix in (("markdown", ".md"), ("html", ".html")):
        path = ocr.page_file(folder, number, suffix)
        texts[name] = path.read_bytes().decode("utf-8") if path.exists() else None
    blocks, attempts = record.pop("blocks", []), record.pop("attempts", [])
    images = [block["image"] for block in blocks if block.get("image")]
    return {
        "document": page.document,
        "page": number,
        "status": record.pop("status"),
        "reasons": record.pop("reasons"),
        "error": record.pop("error"),
        **texts,
        "blocks": json.dumps(blocks, ensure_ascii=False),
        "images": [{"name": name, "data": (folder / "images" / name).read_bytes()} for name in images],
        "tokens": sum(attempt["completion_tokens"] or 0 for attempt in attempts),
        "seconds": sum(attempt["seconds"] for attempt in attempts),
        "attempts": attempts,
        "sha256": page.place.sha256,
        "key": record.pop("key"),
        "reply_hash": record.pop("reply_hash", None),
        "fingerprint": (record.get("image") or {}).get("fingerprint"),
        "record": json.dumps(record, ensure_ascii=False),
        "run": run,
    }


def write_page(row: dict[str, Any], folder: Path) -> None:
    """The reverse of `row_of`: a page's files as ocr.py writes them, the JSON last. Raises OSError."""
    number = row["page"]
    for name, suffix in (("markdown", ".md"), ("html", ".html")):
        path = ocr.page_file(folder, number, suffix)
        if row[name] is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            ocr.write_atomic(path, row[name])
    for image in row["images"]:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        ocr.write_atomic(folder / "images" / ocr.safe_part(image["name"]), image["data"])
    rest = json.loads(row["record"])
    record = {"page": number} | {name: row[name] for name in ("status", "reasons", "error", "key")} | rest
    record["attempts"] = row["attempts"]
    if row["status"] != ocr.FAILED:
        record |= {"reply_hash": row["reply_hash"], "blocks": json.loads(row["blocks"])}
    path = ocr.page_file(folder, number, ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    ocr.write_json(path, record)


# ----------------------------------------------------------------------------------------------------------- The run


class Board:
    """Where readers and surveyors tell how it goes, and hear that the run was stopped. One Ray actor."""

    def __init__(self) -> None:
        self.parts: dict[int, dict[str, int]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.in_flight: dict[str, tuple[float, int]] = {}  # by reader, with the time it told so
        self.said: collections.deque[tuple[str, str]] = collections.deque(maxlen=10_000)
        self.why: tuple[str, int] | None = None

    def hear(self, name: str, news: dict[str, int], said: list[tuple[str, str]]) -> bool:
        self.in_flight[name] = time.monotonic(), news.pop("in flight", 0)
        self.counts.update(news)
        self.said.extend(said)
        return self.why is not None

    def part(self, number: int, counts: dict[str, int], said: list[tuple[str, str]]) -> bool:
        """A part's documents and pages; the same part may be told twice, when Ray does it twice."""
        if counts:
            self.said.extend(said if number not in self.parts else ())
            self.parts[number] = counts
        return self.why is not None

    def stop(self, why: str, code: int) -> None:
        if self.why is None:
            self.why = why, code

    def poll(self) -> dict[str, Any]:
        """All that is known, and what was said since the last poll."""
        said = list(self.said)
        self.said.clear()
        parts: collections.Counter[str] = collections.Counter()
        for counts in self.parts.values():
            parts.update(counts)
        living = (count for told, count in self.in_flight.values() if told > time.monotonic() - 5)
        told = {"counts": dict(self.counts), "parts": dict(parts), "in_flight": sum(living)}
        return told | {"said": said, "why": self.why}


def start_ray(address: str | None) -> None:
    """Joins the cluster at `address`, or starts Ray on this machine, heard on loopback only. Raises BadUsage."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read at import: Ray's servers listen on loopback alone
        if len(tempfile.gettempdir()) > 40:  # Ray's sockets lie there, and their paths have 107 bytes at most
            os.environ.setdefault("RAY_TMPDIR", "/tmp")
    try:
        import ray
    except ImportError:
        raise ocr.BadUsage("Ray is not installed: pip install -r requirements-ray.txt") from None
    import logging

    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    with tempfile.TemporaryDirectory() as folder, hushed():
        try:
            if address is None:
                own = {"num_cpus": max(2, ocr.cores()), "object_store_memory": OBJECT_STORE, "include_dashboard": False}
                ray.init("local", **own, **quiet)  # "local": not some cluster that this machine is part of
                return
            # The two files travel to every node; a node's own environment holds the packages and the stores' keys.
            for path in (Path(ocr.__file__), Path(__file__)):
                shutil.copy(path, folder)
            ray.init(address=address, runtime_env={"working_dir": folder}, **quiet)
        except Exception as e:  # whatever a machine makes Ray raise
            where = "Ray does not start here" if address is None else f"--address {address}: no Ray cluster answers"
            raise ocr.BadUsage(f"{where}: {ocr.reason(e)}") from None


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Without what Ray's C++ says of itself on standard error; its faults come as exceptions."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


OBJECT_STORE = 128 << 20  # bytes: only lists of pages pass through it


def shape(readers: int | None, workers: int | None) -> tuple[int, int, float]:
    """Readers, render processes of each, and the cores that Ray sets aside for one."""
    import ray

    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    nodes = [cpus for cpus in nodes if cpus] or [1]
    workers = workers or min(8, *nodes)
    readers = readers or sum(max(1, cpus // workers) for cpus in nodes)
    # Less than they use: when a node is lost, its readers find room on the others, and a surveyor finds some anywhere.
    room = (sum(nodes) - 1) / readers
    return readers, workers, max(1, min(workers // 3, int(room))) if room >= 1 else round(room, 2) or 0.1


def pipeline(
    plan: Plan, parts: int, board: Any, wanted: ocr.Wanted, known: tuple[Any, Any], readers: int | None
) -> Any:
    """The Ray dataset that does the work: parts -> units -> counts of each unit."""
    import logging

    import ray
    from ray.data import ActorPoolStrategy, DataContext

    count, workers, reserved = shape(readers, plan.settings.workers)
    # Units of one reader at a time: as many as fill its pages in flight, and one that waits for its last page.
    units = min(128, max(4, 1 + -(-ocr.MOST_IN_FLIGHT // plan.rows)))
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # a block a row: a unit goes to a reader as soon as it is known
    context.max_errored_blocks = -1  # what is lost with a node is counted as missing, and the rest goes on
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, workers=workers))
    surveyors = max(1, min(parts, len(ray.nodes())))
    told = [ray.put(array) for array in known]
    # Not ray.data.range: it reads in tasks, which would want cores of their own.
    data = ray.data.from_items([{"id": number} for number in range(parts)], override_num_blocks=parts)
    data = data.flat_map(
        Surveyor,
        fn_constructor_args=(plan, board, wanted, *told),
        compute=ActorPoolStrategy(size=surveyors, max_tasks_in_flight_per_actor=2),
        num_cpus=0.5,
    )
    return data.map(
        Reader,
        fn_constructor_args=(plan, board),
        compute=ActorPoolStrategy(
            size=count, max_tasks_in_flight_per_actor=units, max_concurrent_calls_per_actor=units
        ),
        num_cpus=reserved,
    )


class Watch:
    """A run as its driver sees it: the dataset is drained in a thread, what the board tells is shown meanwhile."""

    def __init__(self, data: Any, board: Any, listed: int):
        self.data, self.board, self.listed = data, board, listed
        self.counts: collections.Counter[str] = collections.Counter()
        self.parts: dict[str, int] = {}
        self.why: tuple[str, int] | None = None
        self.fault: BaseException | None = None
        self.unheard = 0  # times in a row that the board did not answer
        # Not thread.is_alive(): in Python 3.11 an interrupted join() makes it False.
        self.over = threading.Event()

    def drain(self) -> None:
        try:
            for row in self.data.iter_rows():
                self.counts.update({name: row[name] for name in (*STATUSES, "tokens")})
        except BaseException as e:
            self.fault = e
        finally:
            self.over.set()

    def follow(self, progress: ocr.Progress) -> None:
        """Until all is done or stopped. Ctrl-C stops it once what arrived is written; a second one at once."""
        threading.Thread(target=self.drain, daemon=True).start()
        interrupted = False
        while not self.over.is_set():
            try:
                self.over.wait(1.0)
                self.look(progress)
            except KeyboardInterrupt:
                if interrupted:
                    break
                interrupted = True
                progress.event("info", "interrupted: what arrived is being written; once more ends it at once")
                self.ask("stop", INTERRUPTED, ocr.EXIT_INTERRUPTED)
        self.look(progress)
        if self.fault and not self.why:
            self.why = f"Ray gave the work up: {ocr.reason(self.fault)}", ocr.EXIT_INCOMPLETE

    def ask(self, method: str, *args: Any) -> Any:
        """What the board says; None when it does not answer: then Ray itself is in trouble."""
        import ray

        try:
            answer = ray.get(getattr(self.board, method).remote(*args), timeout=30)
        except ray.exceptions.RayError as e:
            self.unheard += 1
            if self.unheard >= 10:
                self.fault = self.fault or e
                self.over.set()
            return None
        self.unheard = 0
        return answer

    def look(self, progress: ocr.Progress) -> None:
        told = self.ask("poll")
        if told is None:
            return
        self.parts, self.why = told["parts"], told["why"]
        for level, text in told["said"]:
            progress.event(level, text)
        counts, cached = told["counts"], self.parts.get("cached", 0)
        ok, suspect, failed = (counts.get(status, 0) for status in STATUSES)
        expected, done = self.parts.get("expected", 0) + cached, ok + suspect + failed + cached
        searching, tokens = self.parts.get("parts", 0) < self.listed, counts.get("tokens", 0)
        progress.show(ocr.Totals(expected, done, ok, suspect, failed, cached, tokens, told["in_flight"], searching))


INTERRUPTED = "interrupted"


async def meet(settings: ocr.Settings, say: ocr.Listener) -> tuple[ocr.Run, ocr.Settings]:
    """Finds the server and checks it as ocr.py does before a run. Raises NoServer.

    Gives the run that met it, and the settings for the readers: with the model's name, and patience with a server that
    is away when a reader starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = ocr.Run(Path(folder), settings, None, say, None)
        async with run.at_work():
            if settings.check and isinstance(run.engine, ocr.Server):
                await run.check_server(run.engine)
            name = run.engine.model.name
    model = None if settings.engine == "cpu" else name
    return run, dataclasses.replace(settings, model=model, wait=max(settings.wait, settings.patience))


def read(args: argparse.Namespace, settings: ocr.Settings, progress: ocr.Progress) -> tuple[dict[str, Any], int]:
    """One run: its record and the exit code. Raises BadUsage, NoServer or OutputError."""
    started = time.time()
    plan = plan_of(args, settings)
    before = check_output(plan)
    run, settings = asyncio.run(meet(settings, progress.event))
    plan = dataclasses.replace(plan, settings=settings)
    record: dict[str, Any] = {
        "ocr_ray": ocr.__version__,
        "run": plan.run,
        "inputs": [bare_address(item.removeprefix("@"))[0] for item in args.inputs],
        "settings": public(plan.settings),
        "model": run.engine.model.name,
        "server": {"root": run.engine.model.root, "version": run.engine.version},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
    }
    write_out(plan, "run.json", before | record | {"finished": False})
    rows = scan(plan)
    if not newest(rows).all():  # a run that was killed before it settled
        settle(plan)
        rows = scan(plan)
    known = what_is_done(plan, rows, run.wanted)
    del rows
    inputs = write_parts(plan, args.inputs, lambda name, error: progress.event("warning", f"{name}: {error}"), known[1])
    watch = None
    if inputs.parts:
        with contextlib.redirect_stdout(sys.stderr):  # where Ray says what became of its processes
            watch = work(plan, inputs.parts, run.wanted, known, args, progress)
    for number in range(inputs.parts):
        remove(plan, part_file(plan, number))
    told, counts = (watch.parts, watch.counts) if watch else ({}, collections.Counter[str]())
    stopped, code = (watch and watch.why) or (None, 0)
    if not stopped and told.get("parts", 0) < inputs.parts:
        stopped, code = "some documents were not looked at: Ray lost the process that had them", ocr.EXIT_INCOMPLETE
    missing = told.get("expected", 0) - sum(counts[status] for status in STATUSES)
    unread = inputs.bad + told.get("unreadable", 0)
    record |= {
        "seconds": round(time.time() - started, 2),
        "finished": not stopped and missing <= 0,
        "stopped": stopped,
        "documents": {"read": told.get("documents", 0), "unreadable": unread}
        | {"done before": inputs.complete + told.get("complete", 0)},
        "pages": {status: counts[status] for status in STATUSES}
        | {"cached": told.get("cached", 0)}
        | {"missing": max(0, missing)},
        "tokens": counts["tokens"],
        "in all": settle(plan, twins=True),
    }
    write_out(plan, "run.json", record)
    if not code and (missing > 0 or unread or counts[ocr.FAILED]):
        code = ocr.EXIT_INCOMPLETE
    return record, code


def plan_of(args: argparse.Namespace, settings: ocr.Settings) -> Plan:
    """Raises BadUsage."""
    doors = {}
    for address in (*args.inputs, args.out):
        name, store = bare_address(address)
        if store and address.rstrip("/") != name:
            doors[store] = address
    if not args.rows >= 1:
        raise ocr.BadUsage(f"--rows {args.rows}: give 1 or more")
    plan = Plan("", bare_address(args.out)[0], settings, args.rows, int(args.cache * (1 << 30)), doors)
    try:
        names = [*files_in(plan, "pages"), *files_in(plan, "documents")]
    except (OSError, ValueError) as e:
        raise ocr.BadUsage(f"--out {plan.out}: cannot be read: {store_words(e)}") from None
    earlier = (re.match(r"\w+/([0-9]{6})-", name) for name in names)
    number = 1 + max((int(match[1]) for match in earlier if match), default=0)
    return dataclasses.replace(plan, run=f"{number:06d}-{secrets.token_hex(2)}")


def check_output(plan: Plan) -> dict[str, Any]:
    """The earlier run's record. Raises BadUsage for an output that cannot be written or was made otherwise."""
    before = read_out(plan, "run.json")
    if before and "ocr_ray" not in before:
        raise ocr.BadUsage(f"--out {plan.out}: holds something else (a run.json that is not ocr_ray.py's)")
    had, now = before.get("settings", {}), public(plan.settings)
    changed = [name for name in ("headers_footers", "images", "math") if had and had.get(name) != now[name]]
    if changed:
        options = ", ".join("--" + name.replace("_", "-").replace("images", "no-images") for name in changed)
        raise ocr.BadUsage(f"--out {plan.out}: its rows were written with another {options}; give another --out")
    try:
        write_out(plan, "run.json", before or {"ocr_ray": ocr.__version__, "finished": False})
    except ocr.OutputError as e:
        raise ocr.BadUsage(f"--out {e}") from None
    return before


def public(settings: ocr.Settings) -> dict[str, Any]:
    """Settings as run.json tells them: no key, no password."""
    told = dataclasses.asdict(settings) | {"url": ocr.bare_url(settings.url)}
    return told | {name: True for name in ("api_key", "password") if told.pop(name)}


def work(
    plan: Plan, parts: int, wanted: ocr.Wanted, known: tuple[Any, Any], args: argparse.Namespace, progress: ocr.Progress
) -> Watch:
    """Runs the dataset until it is done or stopped. Raises BadUsage."""
    start_ray(args.address)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        # On the driver's own node: losing any other must not end the run.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
        watch = Watch(pipeline(plan, parts, board, wanted, known, args.readers), board, parts)
        watch.follow(progress)
    finally:
        ray.shutdown()
    with contextlib.suppress(OSError):  # not empty: another run's, or of one that was stopped
        plan.scratch.rmdir()
    return watch


# ---------------------------------------------------------------------------------------------------------- Settling


def settle(plan: Plan, twins: bool = False) -> dict[str, int]:
    """Drops rows that a later run replaced; marks pages of different pictures with one reply. Counts by status.

    A run writes new rows before old ones go, so a run that was killed leaves both: the next one settles them.
    """
    import numpy as np

    rows = scan(plan)
    stands = newest(rows)
    alike = same_reply(rows, stands) if twins else np.zeros(len(stands), bool)

    def rewrite(index: int) -> None:
        mine = rows.file == index
        name = rows.files[index]
        if not stands[mine].any():
            remove(plan, name)
            return
        table = read_table(plan, name).filter(stands[mine])
        marked = mark_alike(table, alike[mine][stands[mine]])
        if marked is not None or len(table) < mine.sum():
            put_table(plan, name, marked if marked is not None else table)

    touched = np.unique(rows.file[~stands | alike])
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(rewrite, touched.tolist()))
    settle_documents(plan)
    status = np.where(alike & (rows.status == 0), 1, rows.status)[stands]
    return {name: int((status == i).sum()) for i, name in enumerate(STATUSES)}


def same_reply(rows: Scan, stands: Any) -> Any:
    """Which rows share their reply with a page that looks otherwise: ocr.py's rule, over all documents."""
    import numpy as np

    alike = np.zeros(len(stands), dtype=bool)
    compared = np.flatnonzero(stands & rows.reply.any(axis=1))
    order = compared[np.lexsort((rows.picture[compared], rows.reply[compared, 1], rows.reply[compared, 0]))]
    if len(order) < 2:
        return alike
    reply, picture = rows.reply[order], rows.picture[order]
    starts = np.flatnonzero(np.concatenate(([True], (reply[1:] != reply[:-1]).any(axis=1))))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        if picture[start] != picture[end - 1]:  # sorted: the first and the last differ when any do
            alike[order[start:end]] = True
    return alike


def mark_alike(table: Any, alike: Any) -> Any:
    """The rows with those of `alike` made suspect; None when they are that already."""
    import pyarrow as pa

    reasons, status = table["reasons"].to_pylist(), table["status"].to_pylist()
    changed = False
    for i in alike.nonzero()[0].tolist():
        if status[i] in (ocr.OK, ocr.SUSPECT) and ocr.TWIN not in reasons[i]:
            status[i], changed = ocr.SUSPECT, True
            reasons[i] = [*reasons[i], ocr.TWIN]
    if not changed:
        return None
    for name, values in (("reasons", reasons), ("status", status)):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    return table


def settle_documents(plan: Plan) -> None:
    """Keeps the latest row of each document; one that could be read before one that could not."""
    latest: dict[str, str] = {}
    readable: set[str] = set()
    files = files_in(plan, "documents")
    columns = ("document", "error")
    tables = {
        name: [(row["document"], row["error"]) for row in read_table(plan, name, columns).to_pylist()] for name in files
    }
    for name in files:
        for document, error in tables[name]:
            if not (error and document in readable):
                latest[document] = name
            if not error:
                readable.add(document)
    for name in files:
        keep = [latest[document] == name for document, _ in tables[name]]
        if not any(keep):
            remove(plan, name)
        elif not all(keep):
            put_table(plan, name, read_table(plan, name).filter(keep))


# --------------------------------------------------------------------------------------------------------- Exporting


def export(args: argparse.Namespace, progress: ocr.Progress) -> tuple[dict[str, Any], int]:
    """Writes documents of a run as ocr.py would have. Raises BadUsage or OutputError."""
    if is_remote(args.export):
        raise ocr.BadUsage(f"--export {bare_address(args.export)[0]}: give a folder of this machine")
    if len(args.inputs) != 1:
        raise ocr.BadUsage("--export: give one run, the --out of an earlier ocr_ray.py")
    name, store = bare_address(args.inputs[0])
    doors = {store: args.inputs[0]} if store and args.inputs[0].rstrip("/") != name else {}
    plan = Plan("", name, ocr.Settings(), ROWS, CACHE, doors)
    run, out = read_out(plan, "run.json"), Path(args.export)
    if "ocr_ray" not in run or "settings" not in run:
        raise ocr.BadUsage(f"{name}: is no output of ocr_ray.py: it has no run.json of its own")
    rows = chosen_documents(plan, args.only)
    if not rows:
        why = f"--only {args.only}: no document of the run is called so" if args.only else "no document is read yet"
        raise ocr.BadUsage(f"{name}: {why}")
    placed = place_documents(rows, out)
    counts = write_pages(plan, placed, args.only is not None, progress)
    shown = {name: run["settings"][name] for name in ("headers_footers", "images", "math")}
    wanted = ocr.Wanted("", "", 0, 0, 0, False, **shown, prompt_sha256="")  # only how pages look matters here
    results = []
    for document, result in placed.values():
        if document.folder != Path() and not result.error:
            ocr.assemble(document, wanted)
        results.append(ocr.document_summary(result, out))
    record = {"ocr": ocr.__version__, "settings": run["settings"], "server": run.get("server", {})}
    record |= {"inputs": run["inputs"], "started": run["started"], "seconds": run.get("seconds", 0)}
    record |= {"finished": run["finished"], "stopped": run.get("stopped")}
    record |= {"pages": counts, "tokens": run.get("tokens", 0), "documents": results}
    ocr.write_json(out / "run.json", record, indent=1)
    whole = all(len(result.pages) == len(document.numbers) for document, result in placed.values())
    bad = counts[ocr.FAILED] or any(result.error for _, result in placed.values())
    return record, ocr.EXIT_INCOMPLETE if bad or not whole else 0


def chosen_documents(plan: Plan, only: str | None) -> list[dict[str, Any]]:
    """The rows of the documents whose address or name fits, the latest of each, in order."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files_in(plan, "documents"):
        for row in read_table(plan, file).to_pylist():
            name = row["document"]
            if only and not any(fnmatch.fnmatchcase(part, only) for part in (name, posixpath.basename(name))):
                continue
            if row["error"] and name in rows and not rows[name]["error"]:
                continue  # gone or out of reach by now: what was read of it stands
            rows[name] = row
    return [rows[name] for name in sorted(rows)]


Placed = dict[str, tuple[ocr.Document, ocr.DocumentResult]]


def place_documents(rows: Sequence[dict[str, Any]], out: Path) -> Placed:
    """Each document with its folder, as ocr.py would place it."""
    places, placed = ocr.Places(out), {}
    for row in rows:
        source = Path(row["document"])
        folder = places.claim(ocr.Found(source, Path(row["root"]), searched=True))
        if folder is None:  # reached by two paths, in different runs
            continue
        document = ocr.Document(
            source,
            row["kind"] or "",
            row["page_count"] or 0,
            row["sha256"] or "",
            (row["size"] or 0, row["mtime"] or 0),
            notes=tuple(row["notes"] or ()),
            folder=folder,
            numbers=numbers_of(row["pages"]),
        )
        result = ocr.DocumentResult(source, None if row["error"] else folder, {}, row["error"], document.notes)
        if not row["error"]:
            ocr.claim_folder(document, places.identity(source))
        placed[row["document"]] = document, result
    return placed


def write_pages(plan: Plan, placed: Placed, some: bool, progress: ocr.Progress) -> dict[str, int]:
    """Writes the page files of the chosen documents, a file of rows at a time; counts by status."""
    import pyarrow.compute as pc

    chosen = pc.field("document").isin(list(placed)) if some else None
    tokens = 0
    numbers = {name: frozenset(document.numbers) for name, (document, _) in placed.items()}
    expected = sum(map(len, numbers.values()))
    for file in files_in(plan, "pages"):
        for row in read_table(plan, file, filters=chosen).to_pylist():
            document, result = placed.get(row["document"], (None, None))
            if document is None or result is None or row["sha256"] != document.sha256:
                continue  # of another document, or of what this one was before
            if row["page"] not in numbers[row["document"]]:
                continue  # of another choice of pages
            try:
                write_page(row, document.folder)
            except OSError as e:
                raise ocr.OutputError(f"{ocr.show(document.folder)}: cannot be written: {ocr.reason(e)}") from None
            record = {"attempts": row["attempts"]} | {name: row[name] for name in ("status", "reasons", "error")}
            result.pages[row["page"]] = ocr.result_of(record, document.source, document.folder, row["page"])
            tokens += row["tokens"]
    counts = collections.Counter(page.status for _, result in placed.values() for page in result.pages.values())
    ok, suspect, failed = (counts[status] for status in STATUSES)
    progress.show(ocr.Totals(expected, counts.total(), ok, suspect, failed, 0, tokens, 0, False))
    return {status: counts[status] for status in STATUSES}


# ----------------------------------------------------------------------------------------------------------- Command


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ocr_ray.py",
        description="Reads archives with Chandra OCR 2 on a Ray cluster, from and to object storage, as Parquet.",
        epilog=ocr.EXIT_CODES,
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="MANIFEST_OR_FOLDER",
        help="folders, documents, manifests (.txt, .csv, .jsonl, .parquet), local, s3://, gs://; with --export, a run",
    )
    add("--out", metavar="DIR_OR_URI", default="ocr_ray_out", help="where the rows go (default: %(default)s)")
    add("--address", help="of the Ray cluster: auto, or ray://head:10001 (default: Ray on this machine alone)")
    add("--readers", type=int, metavar="N", help="actors that draw and ask (default: as many as the cluster's cores)")
    add("--rows", type=int, metavar="N", default=ROWS, help="pages of one Parquet file (default: %(default)s)")
    add("--cache", type=float, metavar="GB", default=CACHE >> 30, help="of a node's documents (default: %(default)s)")
    add("--export", metavar="DIR", help="write a run's documents as ocr.py does")
    add("--only", metavar="PATTERN", help="with --export: documents whose address or name fits, like 'report*.pdf'")
    ocr.add_settings(parser)
    add("--json", action="store_true", help="the run's record as JSON on standard output")
    loud = parser.add_mutually_exclusive_group()
    loud.add_argument("-q", "--quiet", action="store_true", help="errors and the exit code only")
    loud.add_argument("-v", "--verbose", action="store_true", help="where a bug lies")
    return parser


def summary(record: dict[str, Any], out: str) -> str:
    pages, whole, seconds = record["pages"], record.get("in all", record["pages"]), record["seconds"]
    counts = ", ".join(f"{whole[status]} {'pages ' * (status == ocr.OK)}{status}" for status in STATUSES)
    fresh = sum(pages[status] for status in STATUSES)
    lost = f"; {pages['missing']} pages not read, run again for them" if pages.get("missing") else ""
    done = f" ({fresh} read now, {record['tokens']} tokens, {seconds:.1f} s)" if "in all" in record else ""
    return f"{out}: {counts}{done}{lost}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    args = arguments().parse_args(argv)
    ocr.keep_freed_memory()
    ocr.heed_termination()
    progress = None
    try:
        settings = ocr.settings_of(args)
        ocr.check_settings(settings)
        try:
            import numpy  # noqa: F401
            import pyarrow  # noqa: F401
        except ImportError as e:
            raise ocr.BadUsage(f"{e.name} is not installed: pip install -r requirements-ray.txt") from None
        progress = ocr.Progress(args.quiet, args.verbose, "ocr_ray.py")
        with contextlib.closing(progress):
            record, code = export(args, progress) if args.export else read(args, settings, progress)
    except ocr.BadUsage as e:
        print(f"ocr_ray.py: {e}", file=sys.stderr)
        return ocr.EXIT_USAGE
    except ocr.NoServer as e:
        print(f"ocr_ray.py: {e}", file=sys.stderr)
        return ocr.EXIT_NO_SERVER
    except ocr.OutputError as e:
        print(f"ocr_ray.py: {e}", file=sys.stderr)
        return ocr.EXIT_INCOMPLETE
    except KeyboardInterrupt:
        print("ocr_ray.py: interrupted. Run the same command again to go on where it stopped.", file=sys.stderr)
        return ocr.EXIT_INTERRUPTED
    except Exception as e:
        if args.verbose:
            raise
        why = f"{type(e).__name__}: {ocr.reason(e)} (--verbose says where). What is done is kept."
        print(f"ocr_ray.py: a bug, please report it: {why}", file=sys.stderr)
        return ocr.EXIT_INCOMPLETE
    if args.json:
        print(json.dumps(record, ensure_ascii=False, indent=1))
    elif not args.quiet:
        print(summary(record, args.export or bare_address(args.out)[0]))
    if record.get("stopped"):
        again = "what is done is kept; run the same command again to go on"
        print(f"ocr_ray.py: stopped: {record['stopped']}; {again}.", file=sys.stderr)
    return code


if __name__ == "__main__":
    import ocr_ray  # what Ray sends to its processes must be this module's, not __main__'s

    sys.exit(ocr_ray.main())

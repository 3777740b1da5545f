"""Benchmarks for ocr.py: how well and how fast a server reads, and whether another one reads the same.

    python benchmark.py omni    --out runs/omni   --score     omni_parse_bench: text, tables and layout of pages
    python benchmark.py olmocr  --out runs/olmocr --score     olmOCR-bench: facts about pages, checked in the markdown
    python benchmark.py speed   --data FILES --out runs/speed tokens/s and pages/s at 1 to 640 requests in flight
    python benchmark.py own     --data FOLDER --out runs/own  a private test set: pages with the text they should hold
    python benchmark.py compare RUN... --with RUN...          groups of runs side by side, with intervals and diffs
    python benchmark.py report  RUN...                        the model card's table

The file reads in the order a benchmark goes:
    Settings      the pinned datasets and scorers
    Datasets      a folder, or a pinned revision from the Hugging Face Hub -> items, checked; which of them to run
    Run folder    run.json: what is run and how; a changed setting is refused; what came of it
    Asking        ocr.py over the items, with a progress line
    omni          a raw reply -> the html and blocks that omni_parse_bench grades
    olmocr        the client's markdown, laid out as olmOCR-bench wants it
    Scorers       their own environments, running them, reading what they say
    speed         the levels of a run, its table (the measuring is in benchmark_speed.py)
    own           pages and expected texts from a folder or a table; grading
    compare       and report: in benchmark_compare.py; the statistics of all in benchmark_stats.py
    Command       arguments and exit codes

Exit codes are ocr.py's: 0 all pages have a reply (and the score was read); 1 some page has none, or the scorer failed;
2 bad usage or a broken dataset; 3 no usable server; 130 interrupted: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import datetime
import hashlib
import html
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import benchmark_speed as loop
import benchmark_stats as stats
import ocr

# Heavy packages (pyarrow, huggingface_hub, bs4, tqdm) are imported where they are used: `--help` answers at once.
if TYPE_CHECKING:
    from bs4 import Tag

# ---------------------------------------------------------------------------------------------------------- Settings

HERE = Path(__file__).resolve().parent
SCORER_ENVIRONMENTS = HERE / ".scorers"  # made on the spot by --score, one folder a scorer
SHOWN = 20  # problems or failed pages named one by one on the terminal
QUIET = 30.0  # s between lines of progress where there is no terminal


@dataclass(frozen=True)
class Source:
    """A dataset on the Hugging Face Hub, at the commit that scores are quoted for."""

    name: str
    repo: str
    revision: str


OMNI = Source("omni_parse_bench", "datalab-to/omni_parse_bench", "d70182b9f901d1660a27e60bf6be6d6e6ea83013")
OLMOCR = Source("olmOCR-bench", "allenai/olmOCR-bench", "54a96a6fb6a2bd3b297e59869491db4d3625b711")


@dataclass(frozen=True)
class Scorer:
    """A benchmark's own scorer, which lives in an environment of its own."""

    name: str  # of its folder under SCORER_ENVIRONMENTS
    package: str  # on PyPI
    version: str
    module: str  # what `python -m` runs
    requirements: str  # a file beside this one
    oldest_python: tuple[int, int]
    alone: bool = False  # installed without its own requirements, which bring a GPU stack along
    browser: bool = False  # draws equations in Chromium


OMNI_SCORER = Scorer("omni", "omni-parse-bench", "1.0.0", "omni_parse_bench.cli", "requirements-omni.txt", (3, 12))
OLMOCR_SCORER = Scorer(
    "olmocr", "olmocr", "0.4.27", "olmocr.bench.benchmark", "requirements-olmocr.txt", (3, 11), alone=True, browser=True
)
SCORERS = {scorer.name: scorer for scorer in (OMNI_SCORER, OLMOCR_SCORER)}


class ScorerError(Exception):
    """A command failed: a scorer could not be installed or run, or its words could not be read; exit code 1."""


# ---------------------------------------------------------------------------------------------------------- Datasets


@dataclass(frozen=True)
class Item:
    """What a benchmark counts and `--limit` chooses: a page of omni_parse_bench, a PDF of olmOCR-bench."""

    id: str  # page_id, or the PDF's path under pdfs/
    suite: str
    path: Path
    tested_pages: tuple[int, ...] = (1,)  # from 1


@dataclass(frozen=True)
class Dataset:
    """A dataset's folder that was looked through and found whole."""

    name: str
    folder: Path
    revision: str | None  # None: a folder that does not say
    sha256: str  # of the files that list the items
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()


def dataset_folder(source: Source, data: Path | None) -> tuple[Path, str | None]:
    """The dataset's folder and its revision: `--data`, or the pinned revision, downloaded once."""
    if data is None:
        return download(source), source.revision
    if not data.is_dir():
        raise ocr.BadUsage(
            f"{data}: no such folder; give the dataset's folder to --data, or leave --data out to download it"
        )
    resolved = data.resolve()
    snapshot = resolved.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", resolved.name)
    return data, resolved.name if snapshot else None


def download(source: Source) -> Path:
    """The pinned revision in the Hugging Face cache; what is there already is not fetched again."""
    try:
        import huggingface_hub
    except ImportError:
        raise ocr.BadUsage(
            "downloading a dataset needs huggingface_hub: pip install huggingface_hub, or give --data"
        ) from None
    print(f"{source.name}: revision {source.revision[:12]} of {source.repo} from the Hugging Face Hub", file=sys.stderr)
    try:
        return Path(huggingface_hub.snapshot_download(source.repo, repo_type="dataset", revision=source.revision))
    except Exception as e:  # the Hub's client raises errors of a dozen families; each means there is no dataset
        words = str(e).strip().splitlines() or [""]
        raise ocr.BadUsage(
            f"{source.repo} could not be downloaded ({type(e).__name__}: {words[0][:300]}): run again to go on, "
            "or fetch it elsewhere and give its folder to --data"
        ) from None


def refuse_dataset(name: str, folder: Path, problems: Sequence[str]) -> None:
    """Raises BadUsage with every problem, before anything is sent."""
    if problems:
        raise ocr.BadUsage("\n  ".join([f"{folder} is no whole {name}; nothing was sent:", *listed(problems)]))


def listed(lines: Sequence[str]) -> list[str]:
    """The first lines of a list, and how many more it has."""
    return [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_omni(folder: Path, revision: str | None) -> Dataset:
    """omni_parse_bench: manifest.parquet names each page, its file and its gold tests."""
    manifest = folder / "manifest.parquet"
    absent = [f"{name} is missing" for name in ("manifest.parquet", "pages", "gold") if not (folder / name).exists()]
    refuse_dataset(OMNI.name, folder, absent)
    rows, problems = read_manifest(manifest)
    items = []
    for row in rows:
        page, problem = read_row(folder, row)
        problems += [f"{manifest.name}: {problem}"] if problem else []
        items += [page] if page else []
    ids = collections.Counter(item.id.casefold() for item in items)
    problems += [f"{manifest.name}: page_id {name} occurs {n} times" for name, n in ids.items() if n > 1]
    strays = [f"gold/{name}.json has no row in {manifest.name}" for name in stray_gold(folder, items)]
    # A pinned revision is what it is; in a folder made by hand a gold without a row is a page somebody lost.
    refuse_dataset(OMNI.name, folder, problems + ([] if revision else strays))
    return Dataset(OMNI.name, folder, revision, digest(manifest.read_bytes()), tuple(items), tuple(strays))


COLUMNS = ("page_id", "document", "doc_path", "gt_path", "outputs")  # of the manifest; suite may be left out


def read_manifest(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The manifest's rows, and what is wrong with it as a whole."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ocr.BadUsage("reading omni_parse_bench needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as e:
        return [], [f"{path.name} cannot be read: {str(e).splitlines()[0][:200]}"]
    absent = [name for name in COLUMNS if name not in table.column_names]
    if absent:
        return [], [f"{path.name} has no column {', '.join(absent)}"]
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows, [] if rows else [f"{path.name} has no rows"]


def read_row(folder: Path, row: Mapping[str, Any]) -> tuple[Item | None, str | None]:
    """One row as an item, or what is wrong with it."""
    page_id, doc, gold = row["page_id"], row["doc_path"], row["gt_path"]
    if not isinstance(page_id, str) or Path(page_id).name != page_id or page_id in ("", ".", ".."):
        return None, f"page_id {page_id!r} is no file name"
    for column, name in (("doc_path", doc), ("gt_path", gold)):
        if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            return None, f"{page_id}: {column} {name!r} is no path inside the dataset"
        if not (folder / name).is_file():
            return None, f"{page_id}: {column} {name} does not exist"
    if Path(doc).suffix not in (".pdf", ".png"):
        return None, f"{page_id}: doc_path {doc} is neither .pdf nor .png"
    if Path(gold).name != f"{page_id}.json":
        return None, f"{page_id}: gt_path {gold} is not named {page_id}.json"
    return Item(page_id, row.get("suite") or "other", folder / doc), None


def stray_gold(folder: Path, items: Iterable[Item]) -> list[str]:
    """Gold files that no manifest names; a dataset may hold other manifests beside the main one."""
    known = {item.id for item in items}
    for other in folder.rglob("*.parquet"):
        known |= {str(row.get("page_id")) for row in read_manifest(other)[0]}
    return sorted({path.stem for path in (folder / "gold").rglob("*.json")} - known)


def read_olmocr(folder: Path, revision: str | None) -> Dataset:
    """olmOCR-bench: a line of each .jsonl is a test of one page of one file under pdfs/."""
    inner = folder / "bench_data"
    folder = inner if inner.is_dir() else folder
    files, pdfs = sorted(folder.glob("*.jsonl")), folder / "pdfs"
    problems = [] if files else ["there is no .jsonl file"]
    problems += [] if pdfs.is_dir() else ["the folder pdfs is missing"]
    refuse_dataset(OLMOCR.name, folder, problems)
    pages: dict[str, set[int]] = {path.relative_to(pdfs).as_posix(): set() for path in sorted(pdfs.rglob("*.pdf"))}
    suites: dict[str, str] = {}
    problems += [] if pages else ["pdfs holds no .pdf file"]
    for file in files:
        for number, test, problem in read_tests(file):
            if problem is None and test["pdf"] not in pages:
                problem = f"pdfs/{test['pdf']} does not exist"
            if problem is None:
                pages[test["pdf"]].add(test["page"])
                suites.setdefault(test["pdf"], file.stem)
            else:
                problems.append(f"{file.name} line {number}: {problem}")
    refuse_dataset(OLMOCR.name, folder, problems)
    items = tuple(
        Item(pdf, suites.get(pdf, "baseline"), pdfs / pdf, tuple(sorted(found | {1}))) for pdf, found in pages.items()
    )
    names = "\n".join([*pages, *(file.name for file in files)]).encode()
    return Dataset(OLMOCR.name, folder, revision, digest(names, *(file.read_bytes() for file in files)), items)


def read_tests(file: Path) -> Iterable[tuple[int, dict[str, Any], str | None]]:
    """Each line of a .jsonl: its number, its test, and what is wrong with it; blank lines do not count."""
    seen = set()
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            test = json.loads(line)
            if not (isinstance(test["pdf"], str) and isinstance(test["page"], int) and isinstance(test["id"], str)):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            yield number, {}, 'no JSON object with "pdf", "page" and "id"'
            continue
        yield number, test, f"id {test['id']} occurs twice" if test["id"] in seen else None
        seen.add(test["id"])


@dataclass(frozen=True)
class Choice:
    """The items to run, and in words which those are."""

    items: tuple[Item, ...]
    words: str


def choose(
    items: Sequence[Item], *, limit: int = 0, sample: int = 0, seed: int = 0, only: Path | None = None
) -> Choice:
    """The items that the file `only` names; of those the first `limit`, or `sample` spread evenly over the suites."""
    chosen, words = list(items), []
    if only:
        names = read_names(only)
        unknown = sorted(names - {item.id for item in items})
        if unknown:
            raise ocr.BadUsage(f"{only}: not in the dataset: {', '.join(listed(unknown))}")
        chosen, words = [item for item in items if item.id in names], [f"{len(names)} named in {only.name}"]
    if sample and sample < len(chosen):
        picked = set(spread(chosen, sample, seed))
        chosen = [item for item in chosen if item in picked]
        words.append(f"{sample} sampled over the suites with seed {seed}")
    elif limit and limit < len(chosen):
        chosen = chosen[:limit]
        words.append(f"the first {limit}")
    if not chosen:
        raise ocr.BadUsage(f"{only} names nothing")
    return Choice(tuple(chosen), ", ".join(words) if len(chosen) < len(items) else f"all {len(items)}")


def read_names(path: Path) -> set[str]:
    """A name a line; blank lines and lines that start with # do not count."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ocr.BadUsage(f"--only {path}: {getattr(e, 'strerror', None) or e}") from None
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def spread(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """`count` items, one suite after the other, each suite's in a seeded random order."""
    suites: dict[str, list[Item]] = {}
    for item in items:
        suites.setdefault(item.suite, []).append(item)
    rng = random.Random(seed)
    picked: list[Item] = []
    for suite in suites.values():
        rng.shuffle(suite)
    while len(picked) < count:
        for suite in list(suites.values()):
            if suite and len(picked) < count:
                picked.append(suite.pop())
    return picked


# -------------------------------------------------------------------------------------------------------- Run folder


UNPACKED = "data"  # in a run's folder: the pages of a table, each in a file


@dataclass(frozen=True)
class Run:
    """A run's folder and what its run.json holds."""

    folder: Path
    record: dict[str, Any]

    def save(self) -> None:
        ocr.write_atomic(self.folder / "run.json", json.dumps(self.record, indent=2, ensure_ascii=False) + "\n")


def open_run(folder: Path, benchmark: str, settings: Mapping[str, Any]) -> Run:
    """The run in `folder`: a new one, or the one that an earlier call with the same settings began. Raises BadUsage."""
    file = folder / "run.json"
    if not file.exists():
        if folder.exists() and any(path.name != UNPACKED for path in folder.iterdir()):
            raise ocr.BadUsage(f"{folder} holds files, but no run.json of a benchmark: give --out a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(folder, {"benchmark": benchmark, "settings": dict(settings), "created": now(), "sessions": []})
        run.save()
        return run
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        before = {"benchmark": record["benchmark"], **record["settings"]}
    except (ValueError, KeyError, TypeError):
        raise ocr.BadUsage(f"{file} is no run.json of a benchmark: give --out a new folder") from None
    after = {"benchmark": benchmark, **settings}
    differ = [key for key in after if before.get(key) != after[key]]
    if differ:
        changed = [f"{key}: {str(before.get(key))[:80]} then, {str(after[key])[:80]} now" for key in differ]
        head = f"{folder} holds a run with other settings: change them back, or give another --out"
        raise ocr.BadUsage("\n  ".join([head, *changed]))
    return Run(folder, record)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def asking_settings(client: ocr.Settings) -> dict[str, Any]:
    """What decides the requests of any run, beside its sampling."""
    return {
        "engine": client.engine,
        "dpi": client.dpi,
        "max_tokens": client.max_tokens,
        "retries": client.retries,
        "loop_stop": client.loop_stop,
        "prompt_sha256": digest(ocr.prompt().encode()),
    }


def run_settings(dataset: Dataset, choice: Choice, client: ocr.Settings, repeats: int = 1) -> dict[str, Any]:
    """All that decides what is asked and scored but the model (`note_server`); a folder holds a run of one of these."""
    names = "\n".join(item.id for item in choice.items)
    return {
        "dataset": dataset.name,
        "revision": dataset.revision,
        "dataset_sha256": dataset.sha256,
        "selection": choice.words,
        "items": len(choice.items),
        "items_sha256": digest(names.encode()),
        "repeats": repeats,
        **asking_settings(client),
        "sampling": [sampling_words(ocr.sampling(attempt)) for attempt in range(client.retries + 1)],
        "headers_footers": client.headers_footers,
        "math": client.math,
        "images": client.images,
    }


def sampling_words(sampling: ocr.Sampling) -> str:
    return ", ".join(f"{name} {value}" for name, value in sampling._asdict().items())


def client_commit() -> str | None:
    """The commit of the client, with "+changes" when its files differ from it; None outside a repository."""
    git = ["git", "-C", HERE]
    with contextlib.suppress(ScorerError):
        commit = command([*git, "rev-parse", "HEAD"]).strip()
        return commit + ("+changes" if command([*git, "status", "--porcelain", "--", "ocr.py", "benchmark.py"]) else "")
    return None


SPECULATED = re.compile(r'^vllm:spec_decode_num_accepted_tokens_per_pos\w*\{.*position="(\d+)"', re.MULTILINE)


async def ask_server(client: ocr.Settings) -> dict[str, Any]:
    """What answers: version, model, limits, and how many tokens it speculates where /metrics tells. Raises NoServer."""
    if client.engine == "cpu":
        version, limits = ocr.version_of("rapidocr"), ocr.CpuEngine.limits
        return {"engine": "cpu", "model": "rapidocr", "version": version, "limits": limits}
    async with ocr.Server(client) as server:
        await server.connect()
        model = server.model
        facts: dict[str, Any] = {"engine": client.engine, "url": ocr.bare_url(server.url), "version": server.version}
        facts |= {"model": model.name, "checkpoint": model.root, "max_model_len": model.max_model_len}
        with contextlib.suppress(OSError, TimeoutError):
            status, metrics = await server.get(server.root + "/metrics")
            if status == 200:
                facts["speculative_tokens"] = len(set(SPECULATED.findall(metrics)))
        return facts


def note_server(run: Run, facts: Mapping[str, Any]) -> None:
    """Writes down the server. A run with replies of another model is refused; another version is said and kept."""
    known = run.record.get("server") or {}
    for key in ("model", "checkpoint"):
        if known.get(key) and facts.get(key) and known[key] != facts[key]:
            raise ocr.BadUsage(
                f"{run.folder} holds replies of another {key}: {known[key]} then, {facts[key]} now; give another --out"
            )
    differ = [
        f"{key} {known[key]} -> {facts[key]}"
        for key in facts
        if key != "url" and known.get(key, facts[key]) != facts[key]
    ]
    if differ:
        print(f"{run.folder}: the server is not the one that began this run: {', '.join(differ)}", file=sys.stderr)
        run.record.setdefault("earlier_servers", []).append(known)
    run.record["server"] = {**known, **facts}


# ------------------------------------------------------------------------------------------------------------ Asking


STATUSES = (ocr.OK, ocr.SUSPECT, ocr.FAILED, "missing")  # missing: not asked before the run stopped


@dataclass(frozen=True)
class Page:
    """A page of an item and what came of it; `result` is None when the file could not be opened."""

    item: Item
    number: int  # from 1
    repeat: int  # from 1
    status: str  # one of STATUSES
    error: str | None
    result: ocr.PageResult | None

    @property
    def name(self) -> str:
        name = self.item.id if self.number == 1 else f"{self.item.id} page {self.number}"
        return name if self.repeat == 1 else f"{name} repeat {self.repeat}"


def ask(
    run: Run,
    choice: Choice,
    client: ocr.Settings,
    write: Callable[[list[Page]], None],
    *,
    gpu: str | None,
    scoring: bool = False,
) -> int:
    """The chosen items read by the client, what the scorer reads written, run.json brought up to date; the exit code.

    A run in which all pages have a reply needs no server any more to be scored.
    """
    try:
        note_server(run, asyncio.run(ask_server(client)) | gpu_facts(gpu, client))
    except ocr.NoServer:
        counts = run.record.get("pages")
        if not scoring or not counts or counts["failed"] or counts["missing"]:
            raise
        print(f"{run.folder}: no server answers, and none is needed: every page has a reply", file=sys.stderr)
        return 0
    pages, code = read_pages(run, choice, client)
    write(pages)
    write_totals(run, pages)
    say_pages(run, pages)
    return code or int(run.record["pages"]["failed"] > 0)


def read_pages(run: Run, choice: Choice, client: ocr.Settings) -> tuple[list[Page], int]:
    """Every page of the chosen items, read as often as the run's settings say; and the client's exit code."""
    paths = list(dict.fromkeys(item.path for item in choice.items))
    repeats, code = run.record["settings"]["repeats"], 0
    pages: list[Page] = []
    session = Session(run)
    for repeat in range(1, repeats + 1):
        folder = run.folder / "ocr" if repeats == 1 else run.folder / "ocr" / f"repeat{repeat}"
        with session.one_pass() as hooks:
            result = ocr.run(paths, folder, client, **hooks)
        pages += gather(choice.items, result, repeat)
        run.record["ocr"], run.record["versions"] = result.summary["ocr"], result.summary["versions"]
        run.record["stopped"] = result.stopped
        code = max(code, result.exit_code)
        if result.stopped:
            break
    return pages, code


class Session:
    """One call's work on a run, as run.json tells it: written while it goes on, so that a kill loses little of it."""

    EVERY = 10.0  # s

    def __init__(self, run: Run):
        self.run = run
        self.started = self.saved = time.monotonic()
        self.passes: list[ocr.Totals] = []
        self.entry: dict[str, Any] = {"started": now(), "commit": client_commit()}
        run.record["sessions"].append(self.entry)
        self.save()

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[dict[str, Any]]:
        """The client's hooks for one pass over the pages: a progress bar, and the session kept up to date."""
        progress = ocr.Progress(quiet=False, verbose=False)
        self.passes.append(progress.totals)

        def show(totals: ocr.Totals) -> None:
            progress.show(totals)
            self.passes[-1] = totals
            if time.monotonic() - self.saved > self.EVERY:
                self.save()

        try:
            yield {"on_page": progress.page, "on_event": progress.event, "on_totals": show}
        finally:
            progress.close()
            self.save()

    def save(self) -> None:
        self.saved = time.monotonic()
        asked = sum(totals.done - totals.cached for totals in self.passes)
        tokens = sum(totals.tokens for totals in self.passes)
        self.entry |= {"seconds": round(self.saved - self.started, 3), "pages": asked, "tokens": tokens}
        if asked:
            drop_score(self.run)
        self.run.save()


def drop_score(run: Run) -> None:
    """Removes a score with all that the scorer left: it was of other replies."""
    run.record.pop("score", None)
    shutil.rmtree(run.folder / "unit_tests", ignore_errors=True)
    for name in ("failed_tests.jsonl", "score.log"):
        (run.folder / name).unlink(missing_ok=True)


def gather(items: Iterable[Item], result: ocr.RunResult, repeat: int) -> list[Page]:
    """The pages of each item: those its file has and those that are tested."""
    documents = {Path(document.source): document for document in result.documents}
    pages = []
    for item in items:
        document = documents.get(item.path) or ocr.DocumentResult(item.path)
        for number in sorted({*document.pages, *item.tested_pages}):
            page = document.pages.get(number)
            if page is not None:
                pages.append(Page(item, number, repeat, page.status, page.error, page))
            elif result.stopped and not document.error:
                pages.append(Page(item, number, repeat, "missing", result.stopped, None))
            else:
                error = document.error or f"the file has no page {number}"
                pages.append(Page(item, number, repeat, ocr.FAILED, error, None))
    return pages


def write_totals(run: Run, pages: Sequence[Page]) -> None:
    """The counts of run.json. Pages per second leave out the sessions that only found all pages done."""
    record = run.record
    working = [session for session in record["sessions"] if session["pages"]]
    seconds = sum(session["seconds"] for session in working)
    record["pages"] = {status: sum(page.status == status for page in pages) for status in STATUSES}
    record["failed_pages"] = {page.name: page.error for page in pages if page.status == ocr.FAILED}
    record["suspect_pages"] = {
        page.name: page.result.reasons for page in pages if page.result and page.status == ocr.SUSPECT
    }
    record["tokens"] = sum(page.result.tokens for page in pages if page.result)
    record["wall_seconds"] = round(sum(session["seconds"] for session in record["sessions"]), 3)
    record["pages_per_second"] = round(sum(session["pages"] for session in working) / seconds, 3) if seconds else None
    run.save()


def say_pages(run: Run, pages: Sequence[Page]) -> None:
    """Says how the pages went; the client has said why pages failed while it ran."""
    counts, speed = run.record["pages"], run.record["pages_per_second"]
    failed = list(run.record["failed_pages"])
    if failed:
        print(f"failed: {', '.join(listed(failed))}; why is in {run.folder / 'run.json'}", file=sys.stderr)
    told = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    told += f", {speed} pages/s" if speed else ""
    print(f"{run.folder}: {len(pages)} pages at {run.record['settings']['dpi']} dpi: {told}")
    if run.record["stopped"]:
        print(f"not finished ({run.record['stopped']}): run the same command again to go on", file=sys.stderr)


# -------------------------------------------------------------------------------------------------------------- omni

# Chandra's labels as omni_parse_bench's. A block of any other label is left out; Blank-Page marks a page without any.
KINDS = {
    "Text": "text",
    "Table-Of-Contents": "text",
    "Bibliography": "text",
    "Section-Header": "heading",
    "List-Group": "list",
    "Caption": "caption",
    "Footnote": "footnote",
    "Page-Header": "page_furniture",
    "Page-Footer": "page_furniture",
    "Equation-Block": "equation",
    "Code-Block": "code",
    "Table": "table",
    "Form": "form",
    "Image": "figure",
    "Figure": "figure",
    "Picture": "figure",
    "Diagram": "figure",
    "Chemical-Block": "figure",
    "Complex-Block": "figure",
}
PICTURES = ("Image", "Figure", "Picture", "Diagram", "Chemical-Block")  # what they hold is told as an image's alt text
BLOCK_START = re.compile(r'<div\b[^>]*\bdata-label="([^"]*)"[^>]*>', re.IGNORECASE)
BOX = re.compile(r'data-bbox="\s*' + r"[\s,]+".join([r"(-?[\d.]+)"] * 4) + r'\s*"')
ANY_TAG = re.compile(r"<[^>]+>")


def omni_outputs(reply: str) -> dict[str, Any]:
    """What omni_parse_bench grades of a page: the html it reads and the blocks it sees.

    Both are what the benchmark's own Chandra adapter makes of the reply, so that scores compare. Only where the adapter
    gives up all blocks of a page over one (an unknown label, a box that is no numbers), just that block is left out.
    """
    return {"html": omni_html(reply), "blocks": omni_blocks(reply)}


def omni_html(reply: str) -> str:
    """The top-level blocks in reading order, headers and footers included, pictures as their alt text."""
    from bs4 import BeautifulSoup

    blocks = BeautifulSoup(reply, "html.parser").find_all("div", recursive=False)
    return "".join(block_html(block) for block in blocks if block.get("data-label") != "Blank-Page")


def block_html(block: Tag) -> str:
    """One block's contents; a Text block without any tag becomes a paragraph, images that show nothing are dropped."""
    label = block.get("data-label")
    if label in PICTURES:
        return picture_html(block)
    for image in block.find_all("img"):
        if not image.get("src"):
            image.decompose()
    inside = block.decode_contents()
    bare = label == "Text" and not re.search("<.+>", inside.strip())
    return f"<p>{inside.strip()}</p>" if bare else inside


def picture_html(block: Tag) -> str:
    """A picture as an image whose alt text is all that the reply says of it: its own alt text, then its contents."""
    image = block.find("img")
    alt = str(image.get("alt") or "") if image else ""
    said = " ".join(visible_text(" ".join(filter(None, [alt, block.decode_contents()]))).split())
    return f'<img alt="{html.escape(said)}">' if said else "<img>"


def omni_blocks(reply: str) -> list[dict[str, Any]]:
    """Every labelled div with a box, nested ones too; its text runs to the next one. Boxes count from 0 to 1."""
    blocks = []
    starts = list(BLOCK_START.finditer(reply))
    for start, following in itertools.zip_longest(starts, starts[1:]):
        label, box = start[1], BOX.search(start[0])
        if box is None or label not in KINDS:
            continue
        try:
            corners = [min(1.0, max(0.0, float(corner) / 1000)) for corner in box.groups()]
        except ValueError:  # "1..5"
            continue
        text = ANY_TAG.sub(" ", reply[start.end() : following.start() if following else None])
        blocks.append({"label": KINDS[label], "bbox": corners, "text": " ".join(text.split())})
    return blocks


def quoted(name: str) -> str:
    return name + r"""=("([^"]*)"|'([^']*)')"""


MATH = re.compile(r"<math\b([^<>]*)>(.*?)</math>", re.IGNORECASE | re.DOTALL)
TEX = re.compile(
    r"""<annotation\b[^<>]*encoding=["']application/x-tex["'][^<>]*>(.*?)</annotation>""", re.IGNORECASE | re.DOTALL
)
LIST_TAG = re.compile(r"<(/?)(ol|ul|li)\b([^<>]*)>", re.IGNORECASE)
# How a tag reads to a person, in the order the benchmark takes them.
READ_AS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        r"""<input\b[^<>]*\btype=["']?(?:checkbox|radio)["']?[^<>]*>""",
        lambda box: " ☒ " if re.search(r"\bchecked\b", box[0], re.IGNORECASE) else " ☐ ",
    ),
    (r"<(un)?checked\s*/?>", lambda box: " ☐ " if box[1] else " ☒ "),
    (r"<input\b[^<>]*?\b" + quoted("value") + "[^<>]*>", lambda field: f" {field[1][1:-1]} "),
    (r"<img\b[^<>]*\b" + quoted("alt") + "[^<>]*>", lambda image: f" {image[1][1:-1]} "),
    (r"!\[([^\]]*)\]\([^)]*\)", lambda image: f" {image[1]} "),
    (r"(?s)<!--.*?-->", " "),
    (r"<!DOCTYPE[^>]*>", " "),
    (r"(?s)<(script|style|head|title)\b.*?</\1>", " "),
    (r"<sup\b[^<>]*>", " "),
    (
        r"</?(?:table|thead|tbody|tfoot|tr|td|th|p|div|li|ul|ol|dl|dt|dd|h[1-6]|br|hr|section|article|figure|figcaption|"
        r"blockquote|pre|caption|header|footer|nav|aside|form|label|select|option|textarea|img)\b[^<>]*>",
        " ",
    ),
    (r"</?[A-Za-z][A-Za-z0-9-]*(?:\s[^<>]*)?/?>", ""),
)
READ_AS_COMPILED = [(re.compile(pattern, re.IGNORECASE), said) for pattern, said in READ_AS]


def visible_text(markup: str) -> str:
    """HTML as the benchmark reads it: maths between dollars, numbered lists with their numbers, alt texts, no tags."""
    markup = MATH.sub(tex_of, markup)
    if "<ol" in markup.lower():
        markup = numbered(markup)
    for pattern, said in READ_AS_COMPILED:
        markup = pattern.sub(said, markup)
    return html.unescape(markup)


def tex_of(math: re.Match[str]) -> str:
    """A <math> element between dollars; MathML without its TeX is left as its text."""
    body = math[2].strip()
    tex = TEX.search(body)
    if tex:
        body = html.unescape(tex[1].strip())
    elif "<" in body:
        return f" {html.unescape(re.sub(r'<[^<>]+>', '', body))} "
    return f" $${body}$$ " if "block" in math[1] else f"${body}$"


def numbered(markup: str) -> str:
    """Each <li> of an <ol> with the number that a browser draws before it."""
    lists: list[int | None] = []  # the open lists: the next number, None in a bulleted one

    def tag(found: re.Match[str]) -> str:
        close, name, attributes = found[1], found[2].lower(), found[3]
        if name == "li":
            if close or not lists or lists[-1] is None:
                return found[0]
            lists[-1] += 1
            return f"{found[0]}{lists[-1] - 1}. "
        if close:
            del lists[-1:]
        else:
            start = re.search(r"\bstart=[\"']?(\d+)", attributes, re.IGNORECASE)
            lists.append((int(start[1]) if start else 1) if name == "ol" else None)
        return found[0]

    return LIST_TAG.sub(tag, markup)


def write_predictions(run: Run, dataset: Dataset, pages: Sequence[Page]) -> None:
    """The run folder as `opb grade` reads it: a prediction of each page with a reply, a record of each failed one."""
    from tqdm import tqdm

    for name in ("predictions", "records"):
        (run.folder / name).mkdir(exist_ok=True)
    for page in tqdm(pages, "predictions", disable=None, unit="page", leave=False):  # None: only on a terminal
        prediction, record = (run.folder / name / f"{page.item.id}.json" for name in ("predictions", "records"))
        if page.result is None or page.status == ocr.FAILED:
            prediction.unlink(missing_ok=True)
            if page.status == ocr.FAILED:
                write_json(record, {"error": {"type": "PageFailed", "message": page.error}})
        else:
            write_json(prediction, {"pages": [omni_outputs(ocr.raw_reply(page.result.folder, page.number))]})
            record.unlink(missing_ok=True)
    if len(pages) < len(dataset.items):  # then only these are graded
        write_json(run.folder / "settings.json", {"rows": {"only": sorted(page.item.id for page in pages)}})


def write_json(path: Path, value: Any) -> None:
    ocr.write_atomic(path, json.dumps(value, ensure_ascii=False) + "\n")


def score_omni(run: Run, dataset: Dataset, python: Path) -> dict[str, Any]:
    """`opb grade` on the run folder; its summary as this project tells scores."""
    summary_file = run.folder / "unit_tests" / "summary.json"
    summary_file.unlink(missing_ok=True)
    arguments = ["grade", str(run.folder.resolve()), "--dataset", str(dataset.folder.resolve())]
    run_scorer(OMNI_SCORER, python, arguments, run.folder)
    try:
        summary = json.loads(summary_file.read_text(encoding="utf-8"))
        families = (summary["scored"] or {"families": {}})["families"]
        return {
            "headline": summary["headline"],
            "is": "mean of the families' scores x share of pages that have a reply",
            "parts": {name: {"score": family["score"], "tests": family["tests"]} for name, family in families.items()},
            "coverage": summary["coverage"],
        }
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ScorerError(f"{OMNI_SCORER.package} left no summary that can be read in {summary_file}: {e}") from None


def omni(args: argparse.Namespace) -> int:
    """The `omni` command."""
    client = client_settings(args, pages="1")  # a page file is one page; the benchmark's own adapter reads no more
    dataset = read_omni(*dataset_folder(OMNI, args.data))
    choice = choose(dataset.items, limit=args.limit, sample=args.sample, seed=args.seed, only=args.only)
    for note in listed(dataset.notes):
        print(f"{dataset.folder}: {note}", file=sys.stderr)
    run = open_run(args.out, OMNI.name, run_settings(dataset, choice, client))
    python = scorer_python(OMNI_SCORER, args.scorer_python) if args.score else None
    code = ask(
        run, choice, client, lambda pages: write_predictions(run, dataset, pages), gpu=args.gpu, scoring=args.score
    )
    if python and worth_scoring(run):
        keep_score(run, score_omni(run, dataset, python), OMNI_SCORER, python)
    return code


# ------------------------------------------------------------------------------------------------------------ olmocr

CANDIDATE = "chandra"  # the scorer's name for what it scores, and for its folder


def bench_markdown(page: Page) -> str:
    """A page's markdown as the scorer sees it: the client's own; nothing for a failed page.

    The client leaves pictures out here: neither an image's file name nor the model's account of it is text of the page,
    and the tests of page numbers and headers would find them. A page of pictures only is told by their alt texts,
    because the scorer's baseline test asks of every page that is not blank for a letter or a digit.
    """
    if page.result is None or page.status == ocr.FAILED:
        return ""
    text = (page.result.folder / "pages" / f"{page.number:04}.md").read_text(encoding="utf-8")
    if any(c.isalnum() for c in text):
        return text
    return pictures_only(ocr.raw_reply(page.result.folder, page.number))


def pictures_only(reply: str) -> str:
    """The alt texts of a reply's pictures as markdown images without a file, those in headers and footers left out."""
    from bs4 import BeautifulSoup

    images = [
        image
        for block in BeautifulSoup(reply, "html.parser").find_all("div", recursive=False)
        if block.get("data-label") not in ("Page-Header", "Page-Footer", "Blank-Page")
        for image in block.find_all("img")
    ]
    alts = [" ".join(re.sub(r"[\[\]]", " ", str(image.get("alt") or "")).split()) for image in images]
    return "".join(f"![{alt}]()\n" for alt in alts if alt)


def write_bench(run: Run, dataset: Dataset, choice: Choice, pages: Sequence[Page]) -> None:
    """RUN/bench as the scorer reads it: tests, PDFs, and a markdown file for every page of every PDF and repeat."""
    files: dict[str, bytes | Path] = dict(tests_of(dataset, choice))
    files |= {f"pdfs/{item.id}": item.path for item in choice.items}
    for page in pages:
        if page.status != "missing":
            stem = page.item.id.removesuffix(".pdf")
            files[f"{CANDIDATE}/{stem}_pg{page.number}_repeat{page.repeat}.md"] = bench_markdown(page).encode()
    fill_folder(run.folder / "bench", files)


def tests_of(dataset: Dataset, choice: Choice) -> Iterable[tuple[str, bytes]]:
    """The .jsonl files, byte for byte; of a part of the PDFs only their lines, since the scorer fails on any other."""
    chosen = {item.id for item in choice.items}
    for file in sorted(dataset.folder.glob("*.jsonl")):
        content = file.read_bytes()
        if len(choice.items) < len(dataset.items):
            lines = [line for line in content.splitlines(keepends=True) if line.strip()]
            content = b"".join(line for line in lines if json.loads(line)["pdf"] in chosen)
        if content.strip():
            yield file.name, content


def fill_folder(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Makes `folder` hold these files and no others: bytes are written, paths linked or, where that fails, copied."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.rglob("*"), reverse=True):  # a folder comes after what it holds
        if old.is_dir() and not old.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                old.rmdir()
        elif old.relative_to(folder).as_posix() not in files:
            old.unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            link(content, path)
        elif not path.exists() or path.read_bytes() != content:
            ocr.write_atomic(path, content)


def link(source: Path, path: Path) -> None:
    """`path` as a link to `source`, or a copy of it where the system has no links."""
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(source.absolute())
    except (OSError, NotImplementedError):
        shutil.copyfile(source, path)


def score_olmocr(run: Run, python: Path) -> dict[str, Any]:
    """The scorer on RUN/bench; its printed summary as this project tells scores. The tests that failed are kept too."""
    failed = run.folder / "failed_tests.jsonl"
    failed.unlink(missing_ok=True)
    # Run inside the folder: the scorer takes a [ or * in a path given to it for a pattern.
    arguments = ["--dir", ".", "--candidate", CANDIDATE, "--output_failed", str(failed.resolve())]
    said = run_scorer(OLMOCR_SCORER, python, arguments, run.folder, cwd=run.folder / "bench")
    return read_olmocr_summary(said)


HEADLINE = re.compile(
    rf"^{CANDIDATE}\s*: Average Score: (?:FAILED \(errors\)|(?P<mean>[\d.]+)% ± (?P<half>[\d.]+)%)", re.MULTILINE
)
FILE_LINE = re.compile(r"^\s{8}(\S.*?)\s*: [\d.]+% \((\d+)/(\d+) tests\)\s*$", re.MULTILINE)
TYPE_LINE = re.compile(r"^\s{4}(\w+)\s*: ([\d.]+)% average pass rate over (\d+) tests\s*$", re.MULTILINE)


def read_olmocr_summary(said: str) -> dict[str, Any]:
    """The scorer's last table. Raises ScorerError when it says FAILED, which it does with exit code 0."""
    table = said.rpartition("Final Summary with 95% Confidence Intervals:")[2]
    headline = HEADLINE.search(table)
    if headline is None:
        raise ScorerError(f"{OLMOCR_SCORER.package} printed no summary that can be read")
    if headline["mean"] is None:
        errors = re.findall(r"^\s*\[ERROR\] (.*)$", said, re.MULTILINE)
        raise ScorerError("\n  ".join([f"{OLMOCR_SCORER.package} says FAILED:", *listed(errors)]))
    parts = {
        name.removesuffix(".jsonl"): {"score": int(passed) / int(tests), "passed": int(passed), "tests": int(tests)}
        for name, passed, tests in FILE_LINE.findall(table)
    }
    mean = sum(part["score"] for part in parts.values()) / max(1, len(parts))
    if abs(100 * mean - float(headline["mean"])) > 0.06:  # it is printed with one decimal
        raise ScorerError(f"{OLMOCR_SCORER.package} printed {headline['mean']}%, but its parts make {100 * mean:.2f}%")
    types = {name: {"score": float(share) / 100, "tests": int(n)} for name, share, n in TYPE_LINE.findall(table)}
    return {
        "headline": mean,
        "is": "mean of the test files' shares of tests passed, the baseline tests as one file",
        "parts": parts,
        "plus_minus": float(headline["half"]) / 100,  # of the scorer's own bootstrap, which has no seed
        "types": types,
    }


def olmocr(args: argparse.Namespace) -> int:
    """The `olmocr` command."""
    client = client_settings(args, math="brackets", images=False)
    dataset = read_olmocr(*dataset_folder(OLMOCR, args.data))
    choice = choose(dataset.items, limit=args.limit, sample=args.sample, seed=args.seed, only=args.only)
    run = open_run(args.out, OLMOCR.name, run_settings(dataset, choice, client, args.repeats))
    python = scorer_python(OLMOCR_SCORER, args.scorer_python) if args.score else None
    code = ask(
        run, choice, client, lambda pages: write_bench(run, dataset, choice, pages), gpu=args.gpu, scoring=args.score
    )
    if python and worth_scoring(run):
        keep_score(run, score_olmocr(run, python), OLMOCR_SCORER, python)
    return code


# ----------------------------------------------------------------------------------------------------------- Scorers


def worth_scoring(run: Run) -> bool:
    """Whether every page was asked. Raises ScorerError when none has a reply: the scorers refuse that."""
    counts = run.record["pages"]
    if counts["failed"] == sum(counts.values()):
        raise ScorerError("no page has a reply, so there is nothing to score")
    return not run.record["stopped"]


def keep_score(run: Run, score: Mapping[str, Any], scorer: Scorer, python: Path) -> None:
    """Puts a score into run.json and says it."""
    made_by = f"{scorer.package} {installed_version(scorer, python)}"
    run.record["score"] = {**score, "dpi": run.record["settings"]["dpi"], "scorer": made_by, "at": now()}
    run.save()
    print(score_words(run.record))


def score_words(record: Mapping[str, Any]) -> str:
    """A score with its parts, and the dpi that it holds for: 150 is the model card's, 300 the benchmarks' authors'."""
    score, settings = record["score"], record["settings"]
    lines = [f"{record['benchmark']}: {100 * score['headline']:.1f} at {settings['dpi']} dpi ({settings['selection']})"]
    for name, part in score["parts"].items():
        lines.append(f"  {name:24}{100 * part['score']:6.1f}  of {part['tests']} tests")
    if record["pages"]["failed"]:
        lines.append(f"  failed pages, which count 0: {record['pages']['failed']}")
    return "\n".join(lines)


def scorer_python(scorer: Scorer, given: Path | None) -> Path:
    """The Python that has the scorer: the one given, or that of an environment made on the spot. Raises ScorerError.

    It is looked for before anything is sent: hours of replies should not end at a missing package.
    """
    if given is None:
        python = environment_python(SCORER_ENVIRONMENTS / scorer.name)
        if not up_to_date(scorer, python):
            print(f"installing {scorer.package} {scorer.version} into {python.parent.parent}", file=sys.stderr)
            install_scorer(scorer, SCORER_ENVIRONMENTS / scorer.name)
        return python
    version = installed_version(scorer, given)
    if version is None:
        raise ScorerError(f"{given} has no {scorer.package}: {install_words(scorer)}; or leave --scorer-python out")
    if version != scorer.version:
        print(f"{given} has {scorer.package} {version}; scores are quoted for {scorer.version}", file=sys.stderr)
    if scorer.browser and (error := browser_error(given)):
        raise ScorerError(f"{given}: Playwright starts no Chromium: {error.splitlines()[-1]}; {BROWSER_WORDS}")
    return given


def installed_version(scorer: Scorer, python: Path) -> str | None:
    """The version of the scorer that a Python has. Raises ScorerError when it is no Python."""
    probe = f"import importlib.metadata as m; print(m.version({scorer.package!r}))"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    except OSError as e:
        raise ScorerError(f"--scorer-python {python}: {e.strerror}") from None
    return None if found.returncode else found.stdout.strip()


def install_words(scorer: Scorer) -> str:
    """The commands that make a scorer's environment, for error messages."""
    words = f"pip install -r {scorer.requirements}"
    words += f", pip install --no-deps {scorer.package}=={scorer.version}" if scorer.alone else ""
    return words + (", python -m playwright install chromium" if scorer.browser else "")


def environment_python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def requirements_stamp(scorer: Scorer) -> str:
    """What an environment was made from; it is made anew when this changes."""
    try:
        return digest((HERE / scorer.requirements).read_bytes(), scorer.version.encode())
    except OSError:
        raise ScorerError(f"{scorer.requirements} is missing beside benchmark.py: give --scorer-python") from None


def up_to_date(scorer: Scorer, python: Path) -> bool:
    stamp = python.parent.parent / "installed"
    return python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == requirements_stamp(scorer)


def install_scorer(scorer: Scorer, folder: Path) -> Path:
    """A new environment in `folder` with the scorer in it, and a browser where it needs one; its interpreter."""
    stamp = requirements_stamp(scorer)
    shutil.rmtree(folder, ignore_errors=True)
    command([find_python(scorer), "-m", "venv", folder])
    python = environment_python(folder)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command([*pip, "-r", HERE / scorer.requirements])
    if scorer.alone:
        command([*pip, "--no-deps", f"{scorer.package}=={scorer.version}"])
    if scorer.browser:
        install_browser(python)
    (folder / "installed").write_text(stamp, encoding="utf-8")
    return python


def command(words: Sequence[object]) -> str:
    """Runs a command quietly; its standard output. Raises ScorerError with its last words."""
    try:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    except OSError as e:
        raise ScorerError(f"{words[0]}: {e.strerror}") from None
    if done.returncode:
        last = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ScorerError(f"{' '.join(map(str, words))} failed:\n  {last}")
    return done.stdout


def find_python(scorer: Scorer) -> Path:
    """A Python new enough for the scorer: this one, one on PATH, or one that pyenv keeps. Raises ScorerError."""
    if sys.version_info[:2] >= scorer.oldest_python:
        return Path(sys.executable)
    minors = range(scorer.oldest_python[1], scorer.oldest_python[1] + 6)
    found = [shutil.which(f"python3.{minor}") for minor in minors]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    with contextlib.suppress(OSError):  # another user's
        found += [str(path) for minor in minors for path in sorted(pyenv.glob(f"3.{minor}.*/bin/python"))]
    for python in (Path(path) for path in found if path):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                return python
    oldest = ".".join(map(str, scorer.oldest_python))
    raise ScorerError(
        f"{scorer.package} needs Python {oldest} or newer, and none was found: install one, or give --scorer-python"
    )


LAUNCH = "from playwright.sync_api import sync_playwright as go\nwith go() as p: print(p.chromium.launch().version)"
CHROMIUM = Path("/usr/lib/chromium/chromium")  # Debian's
BROWSER_WORDS = (
    "olmOCR-bench draws equations in it: run `python -m playwright install chromium` in the scorer's environment, or "
    "on Debian `apt-get install -y --no-install-recommends chromium` and leave --scorer-python out"
)


def browser_environment(python: Path) -> dict[str, str]:
    """The environment in which Playwright finds the browser that was put beside the scorer, if one was."""
    browsers = python.parent.parent / "browsers"
    return {**os.environ, **({"PLAYWRIGHT_BROWSERS_PATH": str(browsers.absolute())} if browsers.is_dir() else {})}


def browser_error(python: Path) -> str:
    """Why Playwright does not start Chromium; empty when it does."""
    done = subprocess.run([python, "-c", LAUNCH], capture_output=True, text=True, env=browser_environment(python))
    return done.stderr.strip() or "no reason given" if done.returncode else ""


def install_browser(python: Path) -> None:
    """Playwright's Chromium beside the scorer, or a link to Debian's where there is no download. Raises ScorerError."""
    (python.parent.parent / "browsers").mkdir(exist_ok=True)
    words = [str(python), "-m", "playwright", "install", "--only-shell", "chromium"]
    subprocess.run(words, capture_output=True, env=browser_environment(python))
    wanted = re.search(r"Executable doesn't exist at (.+?)[ ║]*$", browser_error(python), re.MULTILINE)
    if wanted and CHROMIUM.exists():  # Playwright says where it looks for its own
        Path(wanted[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(wanted[1]).symlink_to(CHROMIUM)
    if error := browser_error(python):
        raise ScorerError(f"Playwright starts no Chromium: {error.splitlines()[-1]}; {BROWSER_WORDS}")


def run_scorer(scorer: Scorer, python: Path, arguments: Sequence[str], folder: Path, cwd: Path | None = None) -> str:
    """Runs a scorer and shows its progress; its standard output, also kept in score.log. Raises ScorerError."""
    print(f"scoring with {scorer.package}", file=sys.stderr)
    # The scorer may run in another folder; links are kept, because a venv's python is one.
    words = [os.path.abspath(python), "-m", scorer.module, *arguments]
    env = {**browser_environment(python), "PYTHONUTF8": "1"}
    log, errors = folder / "score.log", bytearray()
    with open(log, "w+b") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.PIPE}
        process = subprocess.Popen(words, env=env, cwd=cwd, **streams)
        reader = threading.Thread(target=show_progress, args=(process.stderr, errors), daemon=True)
        reader.start()
        try:
            wait(process, scorer)
        finally:
            process.kill()
            process.wait()
        reader.join(timeout=10)
        out.seek(0)
        said = out.read()
        out.write(b"\n" + errors)
    if process.returncode:
        lines = (errors.strip() or said.strip()).decode("utf-8", "replace").splitlines()
        last = [line for line in lines if line.strip() and not re.match(r"\s|Traceback|.*%\|", line)][-3:]
        failed = f"{scorer.package} failed (exit code {process.returncode}); all it said is in {log}:"
        raise ScorerError("\n  ".join([failed, *last]))
    return said.decode("utf-8", "replace")


def wait(process: subprocess.Popen[bytes], scorer: Scorer) -> None:
    """Waits for the scorer, saying now and then that it still runs."""
    started = time.monotonic()
    while True:
        try:
            process.wait(timeout=QUIET)
            return
        except subprocess.TimeoutExpired:
            print(f"{scorer.package} has been scoring for {time.monotonic() - started:.0f} s", file=sys.stderr)


def show_progress(stream: IO[bytes], kept: bytearray) -> None:
    """Passes a scorer's progress bars on to a terminal; everything it wrote ends up in `kept`."""
    line = bytearray()
    while byte := stream.read(1):
        kept += byte
        if byte not in b"\r\n":
            line += byte
            continue
        if b"%|" in line and sys.stderr.isatty():
            print(line.decode("utf-8", "replace"), end="\n" if b"100%|" in line else "\r", file=sys.stderr, flush=True)
        line.clear()


# ---------------------------------------------------------------------------------------------------------------- speed


def speed_settings(pages: loop.Pages, client: ocr.Settings, args: argparse.Namespace) -> dict[str, Any]:
    """All that decides a level's figures but the server and how many are in flight; a folder holds levels of one."""
    return {
        "pages": len(pages.places),
        "documents": len(pages.documents),
        "pages_sha256": pages.sha256(),
        **asking_settings(client),
        "mode": args.mode,
        "prepared": args.prepared,
        "seconds": args.seconds,
        "warm_up": args.warm_up,
    }


def speed_inputs(data: Sequence[Path], unpacked: Path) -> list[Path]:
    """Where the pages lie: files and folders, of a benchmark's folder only its pages; "omni", "olmocr": downloaded."""
    inputs: list[Path] = []
    for path in data:
        source = {"omni": OMNI, "olmocr": OLMOCR}.get(str(path)) if not path.exists() else None
        folder = download(source) if source else path
        if folder.suffix == ".parquet":
            inputs += [row.path for row in unpack_parquet([folder], unpacked, "image", None)]
            continue
        inside = [folder / name for name in ("pages", "pdfs", "bench_data/pdfs") if (folder / name).is_dir()]
        listed_by = [*folder.glob("manifest.parquet"), *folder.glob("*.jsonl"), *folder.glob("bench_data/*.jsonl")]
        inputs += inside if inside and listed_by else [folder]
    return inputs


async def measure_levels(args: argparse.Namespace, client: ocr.Settings) -> Run:
    """The levels that are not measured yet, each written down when it is."""
    drawing = ocr.Run(args.out, client, None, None, None)
    drawing.workers.start()
    try:
        pages = await loop.find_pages(drawing, speed_inputs(args.data, args.out / UNPACKED), args.limit)
        facts = await ask_server(client)
        run = open_run(args.out, "speed", speed_settings(pages, client, args))
        note_server(run, facts | gpu_facts(args.gpu, client))
        run.record.update(data=[str(path) for path in args.data], unreadable_files=dict(pages.errors))
        run.record.setdefault("levels", {})
        run.record["sessions"].append({"started": now(), "commit": client_commit()})
        run.save()
        engine: Any = ocr.CpuEngine(client) if client.engine == "cpu" else ocr.Server(client)
        async with engine as server, loop.Feed(drawing, pages, args.mode, max(args.levels)) as feed:
            await server.connect()
            await go_through_levels(run, server, feed, args)
        return run
    finally:
        drawing.workers.stop()


async def go_through_levels(run: Run, server: Any, feed: loop.Feed, args: argparse.Namespace) -> None:
    status = Status()
    if args.prepared:
        status.say(f"drawing {len(feed.pages.places)} pages")
        await feed.prepare()
    plan = loop.Plan(args.seconds, args.warm_up, args.retries, args.loop_stop)
    for places in args.levels:
        if str(places) in run.record["levels"]:
            status.keep(f"concurrency {places}: measured already; give another --out to measure it again")
            continue
        status.prefix = f"concurrency {places}: "
        record, asked = await loop.measure(server, feed, places, plan, status.say)
        run.record["levels"][str(places)] = {"at": now(), **record}
        lines = [json.dumps(dataclasses.asdict(one)) for one in asked]
        ocr.write_atomic(run.folder / f"requests-{places:04}.jsonl", "".join(line + "\n" for line in lines))
        run.save()
        status.keep(level_words(record))
    status.keep("")


class Status:
    """What goes on: a line that is written over on a terminal, now and then a new one elsewhere."""

    def __init__(self) -> None:
        self.shown = 0.0
        self.prefix = ""
        self.terminal = sys.stderr.isatty()

    def say(self, said: str) -> None:
        if self.terminal:
            print(f"\r\x1b[K{self.prefix}{said}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown > QUIET:
            self.shown = time.monotonic()
            print(self.prefix + said, file=sys.stderr)

    def keep(self, said: str) -> None:
        print(("\r\x1b[K" if self.terminal else "") + said, end="\n" if said else "", file=sys.stderr, flush=True)


def level_words(record: Mapping[str, Any]) -> str:
    """A level on a line, its warnings below."""
    rates = f"{figure(record['tokens_per_second'])} tokens/s, {figure(record['pages_per_second'])} pages/s"
    latency = record["latency"] or {}
    half = f"p50 {latency['p50']:.2f} s, p99 {latency['p99']:.2f} s" if latency else "no page done"
    return "\n  ".join([f"concurrency {record['concurrency']}: {rates}, {half}", *record["warnings"]])


def figure(value: float | None, digits: int = 3) -> str:
    """A number with so many digits that count, thousands apart; a dash for none."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def gpu_facts(given: str | None, client: ocr.Settings) -> dict[str, Any]:
    """The GPU's name: --gpu, or what nvidia-smi says when the server is on this machine."""
    host = urllib.parse.urlsplit(client.url).hostname
    if given is None and client.engine == "vllm" and host in ("localhost", "127.0.0.1", "::1"):
        with contextlib.suppress(ScorerError):
            names = command(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).strip().splitlines()
            given = ", ".join(f"{n} x {name}" for name, n in collections.Counter(names).items()) or None
    return {"gpu": given} if given else {}


COLUMNS_OF_SPEED: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("in flight", lambda r: str(r["concurrency"])),
    ("tokens/s", lambda r: figure(r["tokens_per_second"], 4)),
    ("server's", lambda r: figure(r["server"] and r["server"]["tokens_per_second"], 4)),
    ("pages/s", lambda r: figure(r["pages_per_second"])),
    ("ms/page", lambda r: figure(r["ms_per_page"])),
    ("p50 s", lambda r: figure(r["latency"] and r["latency"]["p50"])),
    ("p95 s", lambda r: figure(r["latency"] and r["latency"]["p95"])),
    ("p99 s", lambda r: figure(r["latency"] and r["latency"]["p99"])),
    ("errors", lambda r: str(r["errors"])),
    ("retries", lambda r: share(r["retries"]["share_of_tokens"])),
    ("accepted length", lambda r: figure(mtp_of(r).get("mean_accepted_length"))),
    ("accepted by position", lambda r: " ".join(share(n) for n in mtp_of(r).get("acceptance") or []) or "-"),
    ("KV", lambda r: share(((r["server"] or {}).get("kv_use") or {}).get("max"))),
    ("preempted", lambda r: figure((r["server"] or {}).get("preemptions"))),
    ("waiting", lambda r: figure(((r["server"] or {}).get("waiting") or {}).get("mean"))),
    ("client cores", lambda r: figure(r["client"]["cores"])),
    ("client-limited", lambda r: "yes" if loop.client_limit(r) else "no"),
)


def mtp_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return (record["server"] or {}).get("mtp") or {}


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%" if value >= 0.1 or not value else f"{100 * value:.1f}%"


def speed_table(record: Mapping[str, Any]) -> str:
    """The levels of a run as a markdown table, the warnings and the conditions below."""
    levels = sorted(record["levels"].values(), key=lambda level: level["concurrency"])
    rows = [[name for name, _ in COLUMNS_OF_SPEED], ["---:"] * len(COLUMNS_OF_SPEED)]
    rows += [[cell(level) for _, cell in COLUMNS_OF_SPEED] for level in levels]
    lines = ["| " + " | ".join(row) + " |" for row in rows] + [""]
    for level in levels:
        lines += [f"- {level['concurrency']} in flight: {warning}" for warning in level["warnings"]]
        if saved := level.get("loop_stop"):
            lines.append(f"- {level['concurrency']} in flight: {saved_words(saved)}")
    return "\n".join([*lines, f"- {conditions(record)}"])


def saved_words(saved: Mapping[str, Any]) -> str:
    if not saved["stopped_replies"]:
        return "loop stop: no reply was stopped, so no token was saved"
    words = f"loop stop: {saved['stopped_replies']} replies ({saved['stopped_pages']} pages) were stopped"
    if not saved["asked_again"]:
        return f"{words}; what they would have cost is not known"
    both = f"{saved['tokens_with']} tokens instead of {saved['tokens_without']}"
    both += f" on {saved['asked_again']} pages asked both ways"
    return f"{words}: {both}; {share(saved['saved_share'])} of all tokens saved"


def conditions(record: Mapping[str, Any]) -> str:
    """What a run's figures hold for, on a line."""
    server, settings = record.get("server") or {}, record["settings"]
    facts = [
        server.get("checkpoint") or server.get("model"),
        f"{server.get('engine', 'vllm')} {server.get('version') or '(version unknown)'}",
        f"{server['speculative_tokens']} speculative tokens" if server.get("speculative_tokens") else None,
        server.get("gpu") or "GPU not told (--gpu)",
        f"{settings['dpi']} dpi",
        f"{settings['pages']} pages, mode {settings['mode']}" if "mode" in settings else settings.get("selection"),
        "pages drawn before" if settings.get("prepared") else None,
        "loop stop on" if settings.get("loop_stop") else None,
        f"{settings['retries']} retries" if settings.get("retries") and "mode" in settings else None,
        record["created"][:10],
    ]
    return ", ".join(str(fact) for fact in facts if fact)


def speed(args: argparse.Namespace) -> int:
    """The `speed` command."""
    allow_connections(max(args.levels))
    client = client_settings(args)
    run = asyncio.run(measure_levels(args, client))
    table = speed_table(run.record)
    ocr.write_atomic(run.folder / "speed.md", table + "\n")
    print(table)
    for name, error in run.record["unreadable_files"].items():
        print(f"{name}: {error}", file=sys.stderr)
    whole = not run.record["unreadable_files"] and not any(
        level["errors"] or level["unreadable_pages"] or not level["replies"] for level in run.record["levels"].values()
    )
    return 0 if whole else 1


def allow_connections(count: int) -> None:
    """Lifts the limit of open files where so many connections need it; Windows has none."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + 512
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


# --------------------------------------------------------------------------------------------------------------- own

PAGE_TYPES = frozenset(".pdf .png .jpg .jpeg .tif .tiff .webp .bmp .gif .jp2 .heic .heif .avif .ppm .pgm .pbm".split())
TEXT_TYPES = (".md", ".txt")
TEXT_COLUMNS = ("text", "markdown", "ground_truth", "expected", "transcription")  # the first that is there


@dataclass(frozen=True)
class Row:
    """A page of a table of images and texts, its image put into a file."""

    path: Path
    text: str


@dataclass(frozen=True)
class Private:
    """A private test set: its items and what each should hold."""

    dataset: Dataset
    expected: Mapping[str, stats.Expected]  # by item


def read_private(args: argparse.Namespace) -> Private:
    """The test set that --data names: a folder of pages and texts, parquet files, or a dataset of the Hub."""
    path: Path = args.data
    unpacked = args.out / UNPACKED
    columns = (args.image_column, args.text_column)
    if path.suffix == ".parquet" and path.is_file():
        return private_table(path, unpack_parquet([path], unpacked, *columns))
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        return private_table(path, unpack_parquet(tables, unpacked, *columns)) if tables else private_folder(path)
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise ocr.BadUsage(f"--data {path}: give a folder, a .parquet file, or a dataset of the Hub as OWNER/NAME")
    return private_table(path, unpack_rows(hub_rows(str(path), args.split, args.revision), unpacked, *columns))


def private_folder(folder: Path) -> Private:
    """page.pdf (or an image) and page.md or page.txt beside it. Raises BadUsage for what is ambiguous, or nothing."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    pages: dict[Path, list[Path]] = {}
    texts: dict[Path, list[Path]] = {}
    for path in files:
        kinds = pages if path.suffix.lower() in PAGE_TYPES else texts if path.suffix.lower() in TEXT_TYPES else None
        if kinds is not None:
            kinds.setdefault(path.with_suffix(""), []).append(path)
    problems = [
        f"{' and '.join(path.relative_to(folder).as_posix() for path in both)} have one name: which belongs to which?"
        for kinds in (pages, texts)
        for stem, both in kinds.items()
        if len(both) > 1 and stem in pages and stem in texts
    ]
    paired = [stem for stem in pages if stem in texts]
    items, expected = [], {}
    for stem in paired:
        page, text = pages[stem][0], texts[stem][0]
        name = page.relative_to(folder).as_posix()
        items.append(Item(name, suite_of(name), page))
        try:
            words = text.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            problems.append(f"{text.relative_to(folder)}: {getattr(e, 'strerror', None) or 'is not UTF-8 text'}")
            continue
        expected[name] = stats.expected_markdown(words) if text.suffix.lower() == ".md" else stats.expected_text(words)
    problems += [] if paired else ["no page has its text beside it (page.pdf and page.md or page.txt)"]
    refuse_dataset("test set", folder, problems)
    alone = [path.relative_to(folder).as_posix() for stem in pages if stem not in texts for path in pages[stem]]
    return private_set(folder, items, expected, tuple(f"{name} has no text beside it: left out" for name in alone))


def suite_of(name: str) -> str:
    return name.rpartition("/")[0] or "pages"


def private_set(
    source: Path, items: Sequence[Item], expected: Mapping[str, stats.Expected], notes: tuple[str, ...] = ()
) -> Private:
    if not any(one.count for one in expected.values()):
        raise ocr.BadUsage(f"{source}: every expected text is empty, so there is nothing to find; nothing was sent")
    said = [f"{name}\n{one.lines}\n{one.cells}" for name, one in expected.items()]
    pages = [f"{item.id} {file_sha256(item.path)}" for item in items]
    sha256 = digest("\n".join(said + pages).encode())
    return Private(Dataset("own", source, None, sha256, tuple(items), notes), expected)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_table(source: Path, rows: Sequence[Row]) -> Private:
    """The rows of a table as a test set; their texts are read as markdown, which a plain text is too."""
    items = [Item(row.path.stem, "rows", row.path) for row in rows]
    expected = {row.path.stem: stats.expected_markdown(row.text) for row in rows}
    return private_set(source, items, expected)


def unpack_parquet(files: Sequence[Path], folder: Path, image: str | None, text: str | None) -> list[Row]:
    """The images of parquet files, each put into a file of `folder`. Raises BadUsage."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ocr.BadUsage("reading parquet needs pyarrow: pip install -r requirements-bench.txt") from None

    def rows() -> Iterator[Mapping[str, Any]]:
        for file in files:
            try:
                for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=16):
                    yield from batch.to_pylist()
            except (OSError, pyarrow.ArrowException) as e:
                raise ocr.BadUsage(f"{file} cannot be read: {(str(e).splitlines() or [''])[0][:200]}") from None

    return unpack_rows(rows(), folder, image, text)


def hub_rows(name: str, split: str, revision: str | None) -> Iterator[Mapping[str, Any]]:
    """The rows of a dataset on the Hugging Face Hub, images undecoded. Raises BadUsage."""
    try:
        import datasets
    except ImportError:
        raise ocr.BadUsage("a dataset of the Hub needs datasets: pip install datasets; or give a folder") from None
    try:
        table = datasets.load_dataset(name, split=split, revision=revision)
        for column, kind in table.features.items():
            if isinstance(kind, datasets.Image):
                table = table.cast_column(column, datasets.Image(decode=False))
    except Exception as e:  # the Hub's client raises errors of a dozen families; each means there is no dataset
        words = str(e).strip().splitlines() or [""]
        raise ocr.BadUsage(f"--data {name}: {type(e).__name__}: {words[0][:300]}") from None
    yield from table


def unpack_rows(rows: Iterable[Mapping[str, Any]], folder: Path, image: str | None, text: str | None) -> list[Row]:
    """Each row's image as a file named by its number, and its text. Raises BadUsage."""
    found: list[Row] = []
    for number, row in enumerate(rows):
        image = image or next((name for name in ("image", "page", "pdf") if name in row), "image")
        text_column = text or next((name for name in TEXT_COLUMNS if name in row), TEXT_COLUMNS[0])
        if image not in row or text_column not in row:
            raise ocr.BadUsage(
                f"the table has the columns {', '.join(row)}: name those of the page and its text with --image-column "
                "and --text-column"
            )
        data = row[image]["bytes"] if isinstance(row[image], Mapping) else row[image]
        if not isinstance(data, bytes) or not data:
            raise ocr.BadUsage(f"row {number}: column {image} holds no image's bytes")
        path = folder / f"{number:06}{'.pdf' if data[:1024].find(b'%PDF-') >= 0 else '.img'}"
        if not path.exists() or path.stat().st_size != len(data):
            folder.mkdir(parents=True, exist_ok=True)
            ocr.write_atomic(path, data)
        found.append(Row(path, str(row[text_column] or "")))
    if not found:
        raise ocr.BadUsage("the table has no rows; nothing was sent")
    return found


def grade_private(run: Run, private: Private, pages: Sequence[Page], tolerance: float) -> None:
    """Grades every item and writes it to own.jsonl and the score to run.json. A failed page holds nothing."""
    by_item: dict[str, list[Page]] = {}
    for page in pages:
        by_item.setdefault(page.item.id, []).append(page)
    lines = []
    for name, its_pages in by_item.items():
        read = [page for page in its_pages if page.result and page.status not in (ocr.FAILED, "missing")]
        replies = [ocr.raw_reply(page.result.folder, page.number) for page in read if page.result]
        graded = stats.grade(private.expected[name], [stats.seen(reply) for reply in replies], tolerance)
        lines.append(
            {
                "page": name,
                "suite": its_pages[0].item.suite,
                "failed": len(its_pages) - len(read),
                "expected": graded.expected,
                "found": graded.found,
                "rate": graded.rate,
                "extra_words": round(graded.extra_words, 4),
                "missed": list(graded.missed),
                "verdicts": [int(found) for found in graded.verdicts],
            }
        )
    said = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    ocr.write_atomic(run.folder / "own.jsonl", said)
    run.record["score"] = private_score(lines, tolerance) | {"dpi": run.record["settings"]["dpi"], "at": now()}


def private_score(lines: Sequence[Mapping[str, Any]], tolerance: float) -> dict[str, Any]:
    """The share of all expected lines and cells that were found, with its interval over the pages."""
    suites: dict[str, list[int]] = {}
    for line in lines:
        counts = suites.setdefault(line["suite"], [0, 0])
        counts[0] += line["found"]
        counts[1] += line["expected"]
    interval = stats.bootstrap(
        [(line["found"], line["expected"]) for line in lines], lambda sums: stats.ratio(sums[:, 0], sums[:, 1])
    )
    return {
        "headline": interval.value,
        "interval": [interval.low, interval.high],
        "is": "share of the expected lines and cells that were found",
        "tolerance": tolerance,
        "parts": {
            suite: {"score": found / expected, "passed": found, "tests": expected}
            for suite, (found, expected) in suites.items()
            if expected
        },
        "extra_words": round(sum(line["extra_words"] for line in lines) / len(lines), 4),
        "scorer": "benchmark.py own",
    }


WORST = 10  # pages named on the terminal


def private_words(run: Run) -> str:
    """The score, and the pages that miss most."""
    score = run.record["score"]
    low, high = score["interval"]
    sure = "one page, so no interval" if low is None else f"95% {100 * low:.1f} to {100 * high:.1f}"
    lines = [
        f"own: {100 * score['headline']:.1f}% of the expected lines and cells found ({sure}; tolerance "
        f"{score['tolerance']:g} edits a character)"
    ]
    if len(score["parts"]) > 1:
        lines += [f"  {name:24}{100 * part['score']:6.1f}  of {part['tests']}" for name, part in score["parts"].items()]
    pages = [json.loads(line) for line in (run.folder / "own.jsonl").read_text(encoding="utf-8").splitlines()]
    worst = sorted((page for page in pages if page["missed"]), key=lambda page: page["rate"])
    for page in worst[:WORST]:
        found = f"{page['found']} of {page['expected']}" + (", failed" if page["failed"] else "")
        lines.append(f"  {page['page']}: {found}; not found: {page['missed'][0][:60]!r}")
    lines += [f"  and {len(worst) - WORST} more; all are in {run.folder / 'own.jsonl'}"] if len(worst) > WORST else []
    return "\n".join(lines)


def own(args: argparse.Namespace) -> int:
    """The `own` command."""
    client = client_settings(args)
    private = read_private(args)
    choice = choose(private.dataset.items, limit=args.limit, sample=args.sample, seed=args.seed, only=args.only)
    for note in listed(private.dataset.notes):
        print(f"{private.dataset.folder}: {note}", file=sys.stderr)
    run = open_run(args.out, "own", run_settings(private.dataset, choice, client))
    code = ask(run, choice, client, lambda pages: grade_private(run, private, pages, args.tolerance), gpu=args.gpu)
    run.save()
    if not run.record["stopped"]:
        print(private_words(run))
    return code


# ------------------------------------------------------------------------------------------------ compare and report


def compare(args: argparse.Namespace) -> int:
    """The `compare` command."""
    import benchmark_compare

    groups = [args.runs, *args.others]
    options = benchmark_compare.Options(args.anyway, args.diffs, args.resamples, args.seed)
    print(benchmark_compare.compare(groups, args.names, args.out, options))
    print(f"\n{args.out}: compare.md, compare.json, compare.png, pages.html", file=sys.stderr)
    return 0


def report(args: argparse.Namespace) -> int:
    """The `report` command."""
    import benchmark_compare

    table, left_out = benchmark_compare.report(args.runs, args.concurrency)
    if args.out:
        ocr.write_atomic(args.out, table + "\n")
    print(table)
    for line in left_out:
        print(line, file=sys.stderr)
    return 0


# ----------------------------------------------------------------------------------------------------------- Command


def client_settings(args: argparse.Namespace, **fixed: Any) -> ocr.Settings:
    """The client's settings: those given as options, and those that the benchmark fixes. Raises BadUsage."""
    names = {field.name for field in dataclasses.fields(ocr.Settings)} & set(vars(args))
    settings = ocr.Settings(**{name: getattr(args, name) for name in names}, **fixed)
    ocr.check_settings(settings)
    return settings


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def several(text: str) -> list[int]:
    """Whole numbers from 1, between commas; in order, each once."""
    return sorted({count(part) for part in text.split(",")})


def positive(text: str) -> float:
    """A number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def number(text: str) -> float:
    """A number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value


def server_options(retries: int) -> argparse.ArgumentParser:
    """The options of every command that asks a server; they mean what they mean to ocr.py."""
    default = ocr.Settings()
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("the client (as in ocr.py)").add_argument
    url, key = os.environ.get("OCR_URL") or default.url, os.environ.get("OCR_API_KEY") or None
    add("--url", default=url, help="server (OCR_URL; default: %(default)s)")
    add("--model", metavar="NAME", help="model name (default: the one the server lists)")
    add("--api-key", metavar="KEY", default=key, help="better in the environment: OCR_API_KEY")
    add("--engine", choices=("vllm", "cpu"), default=default.engine, help="cpu: RapidOCR on this machine, no server")
    add(
        "--dpi", type=int, metavar="N", default=default.dpi, help="150: the model card's; 300: the benchmarks' authors'"
    )
    add("--max-tokens", type=int, metavar="N", default=default.max_tokens, help="of a reply (default: %(default)s)")
    add("--retries", type=int, metavar="N", default=retries, help="of a looping reply (default: %(default)s)")
    add("--loop-stop", action="store_true", help="let vLLM's repetition detector end a looping reply early")
    add("--workers", type=int, metavar="N", help="render processes (default: one a core)")
    add("--timeout", type=float, metavar="SECONDS", default=default.timeout, help="for one reply")
    add("--wait", type=float, metavar="SECONDS", default=default.wait, help="for a server that is still starting")
    add(
        "--gpu",
        metavar="NAME",
        help="the server's GPU, for the report (default: nvidia-smi's, when it is this machine)",
    )
    return parser


def client_options() -> argparse.ArgumentParser:
    """The options of the commands that run the whole client."""
    default = ocr.Settings()
    parser = server_options(default.retries)
    add = parser.add_argument
    add("--retry-suspect", action="store_true", help="ask again for suspect pages")
    add("--no-check", dest="check", action="store_false", help="leave out the short check before the pages")
    add("--concurrency", type=int, metavar="N", help="pages at the server at once (default: follow the server)")
    add(
        "--patience", type=float, metavar="SECONDS", default=default.patience, help="with a server that stops answering"
    )
    return parser


def choice_options() -> argparse.ArgumentParser:
    """The options that choose a part of a test set."""
    parser = argparse.ArgumentParser(add_help=False)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--limit", type=count, metavar="N", default=0, help="only the first N")
    part.add_argument("--sample", type=count, metavar="N", default=0, help="only N, at random, spread over the suites")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of --sample (default: %(default)s)")
    parser.add_argument("--only", type=Path, metavar="FILE", help="only those that FILE names, one a line")
    return parser


def scored_options() -> argparse.ArgumentParser:
    """The options of the commands that run a public benchmark."""
    parser = argparse.ArgumentParser(add_help=False, parents=[choice_options()])
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", required=True, help="the run's folder; the same command again goes on there")
    add("--data", type=Path, metavar="DIR", help="the dataset's folder (default: download the pinned revision)")
    add("--score", action="store_true", help="run the benchmark's own scorer when the pages are read")
    add("--scorer-python", type=Path, metavar="PATH", help="the Python that has it (default: install it in .scorers)")
    return parser


def speed_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add(
        "--data", type=Path, metavar="PATH", nargs="+", required=True, help="files, folders; omni or olmocr: downloaded"
    )
    add("--out", type=Path, metavar="DIR", required=True, help="the run's folder; levels measured there are kept")
    add(
        "--concurrency",
        dest="levels",
        type=several,
        metavar="N,N",
        default=[1, 16, 64, 256, 640],
        help="requests in flight, a level each (default: 1,16,64,256,640)",
    )
    add("--seconds", type=positive, metavar="S", default=120.0, help="of each level's window (default: %(default)g)")
    add("--warm-up", type=number, metavar="S", help="before the window opens (default: until replies come evenly)")
    add("--mode", choices=("page", "document"), default="page", help="document: its pages one after the other")
    add("--prepared", action="store_true", help="draw all pages before the clock starts")
    add("--limit", type=count, metavar="N", default=0, help="only the first N pages")
    return parser


def own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=[choice_options()])
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", required=True, help="a folder, a .parquet file, or OWNER/NAME of the Hub")
    add("--out", type=Path, metavar="DIR", required=True, help="the run's folder; the same command again goes on there")
    add(
        "--tolerance",
        type=number,
        metavar="SHARE",
        default=stats.TOLERANCE,
        help="edits allowed for each character of a line or cell (default: %(default)g, one for each whole 20)",
    )
    add("--image-column", metavar="NAME", help="of a table: the page's image or PDF (default: image, page or pdf)")
    add("--text-column", metavar="NAME", help=f"of a table: what it should hold (default: {', '.join(TEXT_COLUMNS)})")
    add("--split", metavar="NAME", default="test", help="of a dataset of the Hub (default: %(default)s)")
    add("--revision", metavar="COMMIT", help="of a dataset of the Hub")
    return parser


def compare_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="folders of the first group: what the others are measured by")
    add(
        "--with",
        dest="others",
        type=Path,
        nargs="+",
        action="append",
        metavar="RUN",
        required=True,
        help="folders of another group; give it again for a third",
    )
    add("--out", type=Path, metavar="DIR", default=Path("comparison"), help="(default: %(default)s)")
    add("--names", nargs="+", metavar="NAME", help="of the groups in order (default: from their folders' names)")
    add("--anyway", action="store_true", help="compare runs of different pages or dpi too")
    add("--diffs", type=int, metavar="N", default=100, help="pages shown with their diff (default: %(default)s)")
    add("--resamples", type=count, metavar="N", default=stats.RESAMPLES, help="of the bootstrap (default: %(default)s)")
    add("--seed", type=int, metavar="N", default=0, help="of the bootstrap (default: %(default)s)")
    return parser


def report_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs")
    parser.add_argument("--concurrency", type=count, metavar="N", default=640, help="level of the throughput row")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there too")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Benchmarks for ocr.py: how well and how fast a server reads, and whether another reads the same."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        run: Callable[[argparse.Namespace], int], about: str, *options: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__, parents=options, help=about, description=about)
        added.set_defaults(command=run)
        return added

    of_pages = "omni_parse_bench: text, tables and layout (--limit, --sample and --only count pages)"
    command(omni, of_pages, scored_options(), client_options())
    of_pdfs = "olmOCR-bench: facts about pages (--limit, --sample and --only count PDFs)"
    repeated = command(olmocr, of_pdfs, scored_options(), client_options())
    repeated.add_argument("--repeats", type=count, metavar="N", default=1, help="greedy passes (default: %(default)s)")
    command(
        speed, "how fast a server reads, at several numbers of requests in flight", speed_options(), server_options(0)
    )
    command(own, "a private test set: pages with the text they should hold", own_options(), client_options())
    command(
        compare, "groups of finished runs side by side: scores, speed, and the pages that differ", compare_options()
    )
    command(report, "the model card's table from finished runs", report_options())
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    args = parse(argv)
    try:
        return int(args.command(args))
    except ocr.BadUsage as e:
        code, words = 2, str(e)
    except ocr.NoServer as e:
        code, words = 3, f"{e}\n{ocr.START_SERVER}"
    except ScorerError as e:
        code, words = 1, str(e)
    except OSError as e:
        code, words = 1, f"{e.filename or 'the run'}: {e.strerror or e}; run the same command again to go on"
    except KeyboardInterrupt:
        code, words = 130, "interrupted; run the same command again to go on where it stopped"
    print(f"benchmark.py: {words}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

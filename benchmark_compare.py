"""Finished runs side by side: `benchmark.py compare` and `report`.

Runs       a run's folder -> its scores, the verdict of each test, its pages
Checks     whether runs may be compared: the same pages at the same dpi
Scores     means and ranges, bootstrapped differences, McNemar's test
Texts      the same page in two runs: what differs, and by how much
Comparison the table, its JSON and chart, the pages that differ
Report     the model card's table

The first group is what the others are measured by. Runs of several benchmarks may stand in a group: each benchmark is
compared for itself.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import html
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import benchmark_stats as stats
import ocr

if TYPE_CHECKING:
    from benchmark_stats import Array

# --------------------------------------------------------------------------------------------------------------- Runs

OMNI, OLMOCR, OWN, SPEED, PLAIN = "omni_parse_bench", "olmOCR-bench", "own", "speed", "ocr.py"
MISSING = "missing"  # a page that the run did not get to


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page of a run: where it lies and what became of it."""

    folder: Path
    number: int
    status: str
    fingerprint: str | None  # of the pixels that were sent
    tokens: int


TestId = tuple[str, str, str]  # document, part of the score, test


@dataclass(frozen=True)
class Finished:
    """A run's folder and its run.json."""

    folder: Path
    kind: str
    record: Mapping[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.record.get("settings") or {}

    @property
    def server(self) -> Mapping[str, Any]:
        return self.record.get("server") or {}

    @functools.cached_property
    def pages(self) -> dict[str, PageFile]:
        return dict(read_pages(self))

    @functools.cached_property
    def verdicts(self) -> dict[TestId, bool]:
        """Each test of the benchmark and whether it passed; empty for a run without a score."""
        readers = {OMNI: omni_verdicts, OLMOCR: olmocr_verdicts, OWN: own_verdicts}
        return dict(readers[self.kind](self.folder)) if self.kind in readers and "score" in self.record else {}

    def count(self, status: str) -> int:
        return sum(page.status == status for page in self.pages.values())

    @property
    def pages_per_second(self) -> float | None:
        if self.kind != PLAIN:
            return self.record.get("pages_per_second")
        counts = self.record["pages"]
        fresh = sum(counts.get(status, 0) for status in (ocr.OK, ocr.SUSPECT, ocr.FAILED)) - counts.get("cached", 0)
        return fresh / self.record["seconds"] if fresh and self.record.get("seconds") else None


def load(folder: Path) -> Finished:
    """A run's folder. Raises BadUsage when it is none."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ocr.BadUsage(f"{folder} holds no run.json: give a folder that a run was written to") from None
    except (OSError, ValueError) as e:
        raise ocr.BadUsage(f"{folder / 'run.json'} cannot be read: {ocr.reason(e)}") from None
    if isinstance(record, dict) and record.get("benchmark") in (OMNI, OLMOCR, OWN, SPEED):
        return Finished(folder, record["benchmark"], record)
    if isinstance(record, dict) and "ocr" in record and "documents" in record:
        return Finished(folder, PLAIN, record)
    raise ocr.BadUsage(f"{folder / 'run.json'} is no run's of ocr.py or benchmark.py")


def read_pages(run: Finished) -> Iterator[tuple[str, PageFile]]:
    """Every page that the client's run.json names, by its document's folder and its number."""
    if run.kind == SPEED:
        return
    root = run.folder if run.kind == PLAIN else run.folder / "ocr"
    repeats = sorted(root.glob("repeat*/run.json"))
    for file in repeats or [root / "run.json"]:
        prefix = f"{file.parent.name}/" if repeats else ""
        for document in ocr.read_json(file).get("documents", []):
            for number, page in document_pages(file.parent, document):
                yield f"{prefix}{document.get('folder') or document['source']}#{number}", page


def document_pages(root: Path, document: Mapping[str, Any]) -> Iterator[tuple[int, PageFile]]:
    """A document's pages; one that could not be opened counts as a failed page."""
    folder = root / document.get("folder", "")
    numbers = sorted(
        int(path.stem) for path in (folder / "pages").glob("*.json") if path.stem.isdecimal()
    )  # 0001.attempts.json is no page
    if not document.get("folder") or not numbers:
        yield 1, PageFile(folder, 1, ocr.FAILED if document.get("error") else MISSING, None, 0)
        return
    for number in numbers:
        record = ocr.read_json(ocr.page_file(folder, number, ".json"))
        tokens = sum(attempt.get("completion_tokens") or 0 for attempt in record.get("attempts", []))
        fingerprint = (record.get("image") or {}).get("fingerprint")
        yield number, PageFile(folder, number, record.get("status", MISSING), fingerprint, tokens)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


FAMILY = {"table": "tables", "layout": "layout"}  # omni_parse_bench: a test type's first word -> its family, else text


def omni_verdicts(folder: Path) -> Iterator[tuple[TestId, bool]]:
    for file in sorted((folder / "unit_tests" / "details").glob("*.jsonl")):
        for test in read_lines(file):
            family = FAMILY.get(test["test_type"].partition("_")[0], "text")
            yield (test["document"], family, f"{test['page_id']}/{test['test_id']}"), test["result"] == "pass"


def olmocr_verdicts(folder: Path) -> Iterator[tuple[TestId, bool]]:
    """The scorer names only the tests that failed; each PDF without a baseline test of its own gets one."""
    failed = {test["id"] for test in read_lines(folder / "failed_tests.jsonl")}
    with_baseline = set()
    for file in sorted((folder / "bench").glob("*.jsonl")):
        for test in read_lines(file):
            with_baseline |= {test["pdf"]} if test["type"] == "baseline" else set()
            yield (test["pdf"], file.stem, test["id"]), test["id"] not in failed
    pdfs = folder / "bench" / "pdfs"
    for path in sorted(pdfs.rglob("*.pdf")):
        name = path.relative_to(pdfs).as_posix()
        if name not in with_baseline:
            yield (name, "baseline", f"{name}_baseline"), f"{name}_baseline" not in failed


def own_verdicts(folder: Path) -> Iterator[tuple[TestId, bool]]:
    for page in read_lines(folder / "own.jsonl"):
        for number, found in enumerate(page["verdicts"]):
            yield (page["page"], page["suite"], f"{page['page']}/{number}"), bool(found)


@dataclass(frozen=True)
class Group:
    """Runs of one model or server, under one name."""

    name: str
    runs: tuple[Finished, ...]

    def of(self, kind: str) -> Group:
        return Group(self.name, tuple(run for run in self.runs if run.kind == kind))


def load_groups(folders: Sequence[Sequence[Path]], names: Sequence[str] | None) -> list[Group]:
    """The groups with their names. Raises BadUsage."""
    if names and len(names) != len(folders):
        raise ocr.BadUsage(f"--names: {len(names)} names for {len(folders)} groups")
    given = list(names or map(common_name, folders))
    if len(set(given)) < len(given):
        given = [f"{name} ({chr(ord('A') + n)})" for n, name in enumerate(given)]
    return [
        Group(name, tuple(load(folder) for folder in dict.fromkeys(group)))
        for name, group in zip(given, folders, strict=True)
    ]


def common_name(folders: Sequence[Path]) -> str:
    """What the folders' names begin with, or end with: bf16-1, bf16-2 -> bf16."""
    names = [folder.resolve().name for folder in folders]
    start = re.sub(r"[-_. ]+\d*$", "", shared_start(names))
    end = shared_start([name[::-1] for name in names])[::-1].strip("-_. ") if len(names) > 1 else ""
    return max(start, "" if end.isdecimal() else end, key=len) or names[0]


def shared_start(names: Sequence[str]) -> str:
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike)


# ------------------------------------------------------------------------------------------------------------- Checks

SAME = ("dataset", "dataset_sha256", "items_sha256", "repeats", "pages_sha256", "dpi")  # what decides the pages


def why_not(one: Finished, other: Finished) -> Iterator[str]:
    """Why two runs of a kind are not of the same pages."""
    for key in SAME:
        before, after = one.settings.get(key), other.settings.get(key)
        if before != after:
            yield f"{key}: {str(before)[:16]} in {one.folder}, {str(after)[:16]} in {other.folder}"
    only = sorted(one.pages.keys() ^ other.pages.keys())
    if only:
        where = one.folder if only[0] in one.pages else other.folder
        yield f"{len(only)} pages are in one of {one.folder} and {other.folder} only: {only[0]} in {where}"
    redrawn = [
        name
        for name in one.pages.keys() & other.pages.keys()
        if (a := one.pages[name].fingerprint) and (b := other.pages[name].fingerprint) and a != b
    ]
    if redrawn:
        yield f"{len(redrawn)} pages were sent with other pixels, such as {min(redrawn)}: another file, or another dpi"


NOTED = ("max_tokens", "retries", "loop_stop", "prompt_sha256", "mode", "prepared", "seconds", "engine")


def check_pages(groups: Sequence[Group], kind: str, anyway: bool) -> list[str]:
    """What the runs differ in besides their model. Raises BadUsage when that is the pages, without --anyway."""
    runs = [run for group in groups for run in group.runs]
    problems = list(dict.fromkeys(why for run in runs[1:] for why in why_not(runs[0], run)))
    if problems and not anyway:
        words = f"these {kind} runs are not of the same pages at the same dpi; --anyway compares what they share:"
        raise ocr.BadUsage("\n  ".join([words, *problems[:20]]))
    notes = [f"not the same pages (--anyway): {problem}" for problem in problems[:20]]
    for key in NOTED:
        values = {str(run.settings.get(key)) for run in runs}
        if len(values) > 1:
            notes.append(f"{key} differs: {', '.join(sorted(values))}")
    for run in runs:
        if run.record.get("stopped"):
            notes.append(f"{run.folder} is not finished: {run.record['stopped']}")
    return notes


# ------------------------------------------------------------------------------------------------------------- Scores


@dataclass(frozen=True)
class Options:
    anyway: bool = False
    diffs: int = 100
    resamples: int = stats.RESAMPLES
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """A line of the table: a measure, each group's figure, and each other group's against the first.

    In JSON as they are; `words` turns a group's figure into a cell's text, `against` a comparison.
    """

    measure: str
    values: Sequence[Any]
    comparisons: Sequence[Any]
    words: Callable[[Any], str]
    against: Callable[[Any], str]


def spread(values: Iterable[float | None]) -> stats.Spread | None:
    known = [value for value in values if value is not None]
    return stats.spread_of(known) if known else None


def percent(value: stats.Spread | float | None) -> str:
    """A share as per cent: 85.3, or the mean and the range of several runs, 85.3 (84.9-85.7)."""
    return in_words(value, lambda share: f"{100 * share:.1f}", always=True)


def in_words(value: stats.Spread | float | None, word: Callable[[float], str], always: bool = False) -> str:
    """A figure in words; of several runs their mean and range, which is left out where they agree unless `always`."""
    if value is None:
        return "-"
    if isinstance(value, stats.Spread):
        ends = word(value.low), word(value.high)
        return word(value.mean) + (
            f" ({ends[0]}-{ends[1]})" if value.runs > 1 and (always or ends[0] != ends[1]) else ""
        )
    return word(value)


def number(value: stats.Spread | float | None) -> str:
    """A figure with three digits that count, thousands apart."""

    def word(figure: float) -> str:
        if figure == int(figure) or abs(figure) >= 100:
            return f"{figure:,.0f}"
        return f"{figure:.{1 if abs(figure) >= 10 else 2 if abs(figure) >= 0.995 else 3}f}"

    return in_words(value, word)


def points(interval: stats.Interval | None) -> str:
    """A difference of shares in percentage points, with its interval."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{100 * interval.value:+.1f} (one document: no interval)"
    return f"{100 * interval.value:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x {ratio:.2f}"


def ratio_of(value: stats.Spread | None, base: stats.Spread | None) -> float | None:
    return value.mean / base.mean if value and base and base.mean else None


def score_rows(groups: Sequence[Group], options: Options) -> Iterator[Row]:
    """The headline and each part of a benchmark's score, with the difference's interval over documents."""
    scored = [[run.record["score"] for run in group.runs if "score" in run.record] for group in groups]
    if not any(scored):
        return
    headlines = [spread(score["headline"] for score in scores) for scores in scored]
    parts = list(dict.fromkeys(name for scores in scored for score in scores for name in score["parts"]))
    first, *others = [Tally(group) for group in groups]
    yield Row("score", headlines, [first.against(other, None, options) for other in others], percent, points)
    for part in parts if len(parts) > 1 else ():
        values = [spread(score["parts"].get(part, {}).get("score") for score in scores) for scores in scored]
        yield Row(part, values, [first.against(other, part, options) for other in others], percent, points)
    passed = [sum(tally.verdicts().values()) if tally.tests else None for tally in (first, *others)]
    yield Row("tests passed", passed, [mcnemar(first, other) for other in others], number, changed_words)


class Tally:
    """A group's tests by document, and how often each passes."""

    def __init__(self, group: Group):
        self.group = group
        self.runs = [run for run in group.runs if run.verdicts]
        self.tests = sorted({test for run in self.runs for test in run.verdicts})

    def verdicts(self, tests: Iterable[TestId] | None = None) -> dict[TestId, bool]:
        """Whether more than half of the runs pass a test. One that a run has no verdict of (its page failed) fails."""
        wanted = self.tests if tests is None else tests
        return {test: 2 * sum(run.verdicts.get(test, False) for run in self.runs) > len(self.runs) for test in wanted}

    def against(self, other: Tally, part: str | None, options: Options) -> stats.Interval | None:
        """The other group's score less this one's, over the same documents, drawn together."""
        if not self.runs or not other.runs:
            return None
        both = (self, other)
        parts = [part] if part else sorted({test[1] for tally in both for test in tally.tests})
        documents = sorted({test[0] for tally in both for test in tally.tests})
        coverage = part is None and self.group.runs[0].kind == OMNI
        columns = [column for tally in both for run in tally.runs for column in run_columns(run, parts, coverage)]
        table = [[column.get(document, 0) for column in columns] for document in documents]
        width = 2 * len(parts) + 2 * coverage

        def difference(sums: Array) -> Array:
            scores = [
                run_score(sums[:, at : at + width], len(parts), coverage) for at in range(0, sums.shape[1], width)
            ]
            split = len(self.runs)
            return stats.mean_of(scores[split:]) - stats.mean_of(scores[:split])

        return stats.bootstrap(table, difference, options.resamples, options.seed)


def run_columns(run: Finished, parts: Sequence[str], coverage: bool) -> list[Mapping[str, float]]:
    """What a run's score is made of, each by document: of each part the tests passed and all; pages read and all."""
    columns: list[collections.Counter[str]] = []
    for part in parts:
        passed, all_ = collections.Counter[str](), collections.Counter[str]()
        for (document, its_part, _), verdict in run.verdicts.items():
            if its_part == part:
                passed[document] += verdict
                all_[document] += 1
        columns += [passed, all_]
    if coverage:
        read, all_ = collections.Counter[str](), collections.Counter[str]()
        for line in read_lines(run.folder / "unit_tests" / "scores.jsonl"):
            document = (line.get("row") or {}).get("document") or line["id"]
            all_[document] += 1
            read[document] += line.get("status") == "scored"
        columns += [read, all_]
    return list(columns)


def run_score(sums: Array, parts: int, coverage: bool) -> Array:
    """The benchmarks' own headline: the mean of the parts' shares of tests passed; omni's times its coverage."""
    import numpy

    shares = numpy.stack([stats.ratio(sums[:, 2 * n], sums[:, 2 * n + 1]) for n in range(parts)])
    known = ~numpy.isnan(shares)
    score = stats.ratio(numpy.where(known, shares, 0).sum(axis=0), known.sum(axis=0))
    return stats.ratio(score * sums[:, -2], sums[:, -1]) if coverage else score


@dataclass(frozen=True)
class Changed:
    """Tests whose verdict changed between two groups, and McNemar's p for so uneven a split."""

    lost: int
    won: int
    p: float


def mcnemar(first: Tally, other: Tally) -> Changed | None:
    if not first.runs or not other.runs:
        return None
    tests = sorted({*first.tests, *other.tests})
    before, after = first.verdicts(tests), other.verdicts(tests)
    lost = sum(before[test] and not after[test] for test in tests)
    won = sum(after[test] and not before[test] for test in tests)
    return Changed(lost, won, stats.mcnemar(lost, won))


def changed_words(changed: Changed | None) -> str:
    if changed is None:
        return "-"
    p = "p < 0.001" if changed.p < 0.001 else f"p = {changed.p:.3f}"
    return f"{changed.lost} lost, {changed.won} won ({p})"


def run_rows(groups: Sequence[Group]) -> Iterator[Row]:
    """What became of the pages, and how fast: counts and rates of whole runs."""

    def row(name: str, figure: Callable[[Finished], float | None], against: bool) -> Row:
        values = [spread(map(figure, group.runs)) for group in groups]
        ratios = [ratio_of(value, values[0]) if against else None for value in values[1:]]
        return Row(name, values, ratios, number, times if against else lambda _: "")

    yield row("pages", lambda run: len(run.pages), False)
    yield row("failed pages", lambda run: run.count(ocr.FAILED), False)
    yield row("suspect pages", lambda run: run.count(ocr.SUSPECT), False)
    if any(run.count(MISSING) for group in groups for run in group.runs):
        yield row("pages not asked", lambda run: run.count(MISSING), False)
    yield row("tokens a page", tokens_a_page, True)
    yield row("pages/s", lambda run: run.pages_per_second, True)


def tokens_a_page(run: Finished) -> float | None:
    asked = [page.tokens for page in run.pages.values() if page.tokens]
    return statistics.fmean(asked) if asked else None


SPEEDS = (
    ("tokens/s", lambda level: level["tokens_per_second"]),
    ("pages/s", lambda level: level["pages_per_second"]),
    ("p50 s", lambda level: (level["latency"] or {}).get("p50")),
    ("p99 s", lambda level: (level["latency"] or {}).get("p99")),
    ("accepted length", lambda level: ((level["server"] or {}).get("mtp") or {}).get("mean_accepted_length")),
    ("errors", lambda level: level["errors"]),
)


def speed_rows(groups: Sequence[Group]) -> Iterator[Row]:
    """Each level that more than one group measured: means, ranges and ratios."""
    levels = sorted({int(level) for group in groups for run in group.runs for level in run.record.get("levels", {})})
    for level, (name, figure) in itertools.product(levels, SPEEDS):
        values = [
            spread(figure(run.record["levels"][str(level)]) for run in group.runs if str(level) in run.record["levels"])
            for group in groups
        ]
        if any(values):
            ratios = [ratio_of(value, values[0]) for value in values[1:]]
            yield Row(f"{name}, {level} in flight", values, ratios, number, times)


# -------------------------------------------------------------------------------------------------------------- Texts


@dataclass(frozen=True, slots=True)
class Pair:
    """A page in two runs. A page without a reply differs from the other's as an empty one does."""

    page: str
    status: tuple[str, str]
    difference: stats.Difference

    @property
    def read(self) -> bool:
        """Whether both runs have a reply."""
        return all(status in READ for status in self.status)

    @property
    def error_rate(self) -> float:
        """Characters that differ for each of the first run's; a page that one run has no reply of differs wholly."""
        return self.difference.error_rate if self.read else 1.0


READ = (ocr.OK, ocr.SUSPECT)


def compare_texts(one: Finished, other: Finished) -> Iterator[Pair]:
    """Every page of either run in both."""
    for name in sorted(one.pages.keys() | other.pages.keys()):
        pages = [run.pages.get(name) for run in (one, other)]
        first, second = (page.status if page else MISSING for page in pages)
        replies = [reply_of(page) for page in pages]
        seen = [stats.seen(replies[0])] * 2 if replies[0] == replies[1] else [stats.seen(reply) for reply in replies]
        yield Pair(name, (first, second), stats.compare(*seen))


def reply_of(page: PageFile | None) -> str:
    """A page's reply; empty when it has none."""
    return ocr.raw_reply(page.folder, page.number) if page and page.status in READ else ""


def share_of(part: float, whole: float) -> float | None:
    return part / whole if whole else None


AGREEMENTS: tuple[tuple[str, Callable[[Sequence[Pair]], float | None]], ...] = (
    ("pages with the same text", lambda pairs: share_of(sum(is_same(pair) for pair in pairs), len(pairs))),
    ("character error rate", lambda pairs: share_of(*edits_of(pairs))),
    ("table cells that agree", lambda pairs: over(pairs, lambda d: d.cells_same, lambda d: d.cells)),
    ("blocks in the same place", lambda pairs: over(pairs, lambda d: d.blocks_same, lambda d: max(d.blocks))),
    ("labels of these that agree", lambda pairs: over(pairs, lambda d: d.labels_same, lambda d: d.blocks_same)),
    ("overlap of their boxes", lambda pairs: over(pairs, lambda d: d.overlap, lambda d: d.blocks_same)),
)


def is_same(pair: Pair) -> bool:
    return pair.read and pair.difference.edits == 0


def edits_of(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Characters that differ, and the first run's characters."""
    return sum(pair.difference.edits for pair in pairs), sum(pair.difference.length for pair in pairs)


def over(
    pairs: Sequence[Pair], part: Callable[[stats.Difference], float], whole: Callable[[stats.Difference], float]
) -> float | None:
    differences = [pair.difference for pair in pairs]
    return share_of(sum(map(part, differences)), sum(map(whole, differences)))


@dataclass
class Agreement:
    """How two groups read the same pages, run against run, and how the runs of each group differ among themselves."""

    between: list[list[Pair]] = field(default_factory=list)
    within: list[list[list[Pair]]] = field(default_factory=list)  # of the first group, and of the other


def agree(first: Group, other: Group, within_first: list[list[Pair]]) -> Agreement:
    """The first run of one against the first of the other, the second against the second, and so on."""
    pairs = [
        list(compare_texts(first.runs[n % len(first.runs)], other.runs[n % len(other.runs)]))
        for n in range(max(len(first.runs), len(other.runs)))
    ]
    return Agreement(pairs, [within_first, within(other)])


def within(group: Group) -> list[list[Pair]]:
    """Each run of a group against the next: how far the same server reads a page the same twice."""
    return [list(compare_texts(one, other)) for one, other in itertools.pairwise(group.runs)]


def text_rows(groups: Sequence[Group], agreements: Sequence[Agreement]) -> Iterator[Row]:
    """Agreement of texts: in a group's column that of its own runs, the noise to see a difference against."""
    inside = [agreements[0].within[0], *(agreement.within[1] for agreement in agreements)]
    for name, figure in AGREEMENTS:
        values = [spread(map(figure, pairs)) for pairs in inside]
        between = [spread(map(figure, agreement.between)) for agreement in agreements]
        if any(between):
            words = functools.partial(in_words, word=lambda share: f"{100 * share:.2f}%")
            yield Row(name, values, between, words, words)
    lost = [
        spread(float(sum(not pair.read for pair in pairs)) for pairs in agreement.between) for agreement in agreements
    ]
    if any(one and one.high for one in lost):
        yield Row("pages that only one has read, or none", [None] * len(groups), lost, number, number)


# --------------------------------------------------------------------------------------------------------- Comparison


@dataclass
class Section:
    """What is said of the runs of one benchmark."""

    kind: str
    conditions: str
    notes: list[str]
    rows: list[Row]
    agreements: list[Agreement] = field(default_factory=list)


def compare(folders: Sequence[Sequence[Path]], names: Sequence[str] | None, out: Path, options: Options) -> str:
    """Compares groups of runs; writes table, JSON, chart and diffs into `out`. The table. Raises BadUsage."""
    groups = load_groups(folders, names)
    kinds = common_kinds(groups, options.anyway)
    sections = [compare_kind([group.of(kind) for group in groups], kind, options) for kind in kinds]
    out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(table_lines(groups, sections, options))
    ocr.write_atomic(out / "compare.md", table + "\n")
    said = [section_json(groups, section) for section in sections]
    ocr.write_atomic(out / "compare.json", json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    ocr.write_atomic(out / "pages.html", "".join(pages_html(groups, sections, options)))
    draw_chart(groups, sections, out / "compare.png")
    return table


def common_kinds(groups: Sequence[Group], anyway: bool) -> list[str]:
    """The benchmarks that all groups have runs of. Raises BadUsage."""
    kinds = [list(dict.fromkeys(run.kind for run in group.runs)) for group in groups]
    shared = [kind for kind in kinds[0] if all(kind in others for others in kinds)]
    if not shared or (any(set(others) != set(shared) for others in kinds) and not anyway):
        said = "; ".join(f"{group.name}: {', '.join(has)}" for group, has in zip(groups, kinds, strict=True))
        raise ocr.BadUsage(f"each group must hold runs of the same benchmarks ({said})")
    return shared


def compare_kind(groups: Sequence[Group], kind: str, options: Options) -> Section:
    """All that is said of one benchmark's runs."""
    notes = check_pages(groups, kind, options.anyway)
    conditions = conditions_of(groups[0].runs[0])
    if kind == SPEED:
        return Section(kind, conditions, notes, list(speed_rows(groups)))
    rows = [*score_rows(groups, options), *run_rows(groups)]
    noise = within(groups[0])
    agreements = [agree(groups[0], other, noise) for other in groups[1:]]
    rows += text_rows(groups, agreements)
    return Section(kind, conditions, notes, rows, agreements)


def conditions_of(run: Finished) -> str:
    settings = run.settings
    facts = [f"{settings['dpi']} dpi" if settings.get("dpi") else None]
    facts += [settings.get("selection"), f"mode {settings['mode']}" if settings.get("mode") else None]
    return ", ".join(filter(None, facts))


def table_lines(groups: Sequence[Group], sections: Sequence[Section], options: Options) -> Iterator[str]:
    """The comparison as markdown."""
    names = [cell(group.name) for group in groups]
    for section in sections:
        yield f"## {section.kind} ({cell(section.conditions)})"
        yield ""
        runs = [len(group.of(section.kind).runs) for group in groups]
        heads = [f"{name} ({count} run{'s' * (count != 1)})" for name, count in zip(names, runs, strict=True)]
        yield table_line(["", *heads, *(f"{name} against {names[0]}" for name in names[1:])])
        yield table_line(["---"] + ["---:"] * (2 * len(groups) - 1))
        for row in section.rows:
            cells = [row.words(value) for value in row.values] + [row.against(value) for value in row.comparisons]
            yield table_line([row.measure, *cells])
        yield ""
        yield from (f"- {cell(note)}" for note in section.notes)
        if section.agreements:
            yield (
                f"- Scores in %, mean (range) of the runs; differences in points [95% interval: documents drawn "
                f"{options.resamples} times, seed {options.seed}]; tests by McNemar's exact test, a test counting as "
                "passed when more than half of a group's runs pass it. Texts: a group's own column compares its runs "
                "with each other. Pages without a reply count 0 in the scores and as wholly different in the texts."
            )
        yield ""


def cell(text: str) -> str:
    """Text that may come from a file's name, as a markdown table's cell."""
    return re.sub(r"([\\|`*_\[\]~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def section_json(groups: Sequence[Group], section: Section) -> dict[str, Any]:
    """A section with all its figures, and every page that differs."""
    return {
        "benchmark": section.kind,
        "conditions": section.conditions,
        "groups": {group.name: [str(run.folder) for run in group.of(section.kind).runs] for group in groups},
        "notes": section.notes,
        "rows": [
            {
                "measure": row.measure,
                "groups": [*map(plain, row.values)],
                "against_first": [*map(plain, row.comparisons)],
            }
            for row in section.rows
        ],
        "pages": {
            group.name: [pair_json(pair) for pair in differing(agreement)]
            for group, agreement in zip(groups[1:], section.agreements, strict=False)
        },
    }


def plain(value: Any) -> Any:
    """A figure as JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def differing(agreement: Agreement) -> list[Pair]:
    """The pages of the groups' first runs whose text or layout differs, the most different first."""
    pairs = [pair for pair in agreement.between[0] if not is_same(pair) or changes(pair)]
    return sorted(pairs, key=lambda pair: (pair.read, -pair.error_rate, pair.page))


def changes(pair: Pair) -> list[str]:
    """What differs on a page, in words."""
    difference = pair.difference
    if not pair.read:
        return [f"no reply: {' and '.join(pair.status)}"]
    said = [f"{100 * difference.error_rate:.1f}% of characters"] if difference.edits else []
    said += [f"{difference.words} words"] if difference.words else []
    if gone := difference.numbers_gone + difference.numbers_new:
        said.append(f"{len(gone)} numbers")
    if difference.cells_same < difference.cells:
        said.append(f"{difference.cells - difference.cells_same} of {difference.cells} table cells")
    if difference.layout_changed:
        moved = max(difference.blocks) - difference.blocks_same
        relabelled = difference.blocks_same - difference.labels_same
        said += [f"{moved} of {max(difference.blocks)} blocks moved"] if moved else []
        said += [f"{relabelled} labels"] if relabelled else []
    return said


def pair_json(pair: Pair) -> dict[str, Any]:
    record: dict[str, Any] = {"page": pair.page, "status": pair.status, "error_rate": round(pair.error_rate, 6)}
    return record | {"changes": changes(pair)} | dataclasses.asdict(pair.difference)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #1c1c1c; }
h2 { margin-top: 2.5em; } details { border-top: 1px solid #ddd; padding: .4em 0; } summary { cursor: pointer; }
summary b { font-weight: 600; } .what { color: #555; } p.text { white-space: pre-wrap; margin: .5em 0 1em; }
del { background: #fde2e1; color: #8c1d18; } ins { background: #dcf3e3; color: #10552a; text-decoration: none; }
.gap { color: #999; } table { border-collapse: collapse; } td, th { padding: .1em .8em .1em 0; text-align: left; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } .what { color: #aaa; }
del { background: #5a2320; color: #ffd9d6; } ins { background: #1d4a2c; color: #d3f5df; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def pages_html(groups: Sequence[Group], sections: Sequence[Section], options: Options) -> Iterator[str]:
    """The pages that differ, the most different first, each with its diff. All text is escaped; no script runs."""
    yield '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Pages that differ</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head><body>'
    yield "<h1>Pages that differ</h1>"
    for section in sections:
        pairs_of = zip(groups[1:], section.agreements, strict=False)
        for group, agreement in pairs_of:
            pairs = differing(agreement)
            first, other = groups[0].of(section.kind).runs[0], group.of(section.kind).runs[0]
            head = f"{section.kind}: {first.folder} and {other.folder}"
            yield f"<h2>{html.escape(head)}</h2><p>{len(pairs)} of {len(agreement.between[0])} pages differ"
            yield f"; the {options.diffs} most different are shown" if len(pairs) > options.diffs else ""
            legend = [html.escape(name) for name in (groups[0].name, group.name)]
            yield f". <del>Only in {legend[0]}</del>, <ins>only in {legend[1]}</ins>.</p>"
            for pair in pairs[: options.diffs]:
                yield from page_html(pair, first, other)
    yield "</body></html>\n"


def page_html(pair: Pair, first: Finished, other: Finished) -> Iterator[str]:
    what = html.escape(", ".join(changes(pair)))
    yield f'<details><summary><b>{html.escape(pair.page)}</b> <span class="what">{what}</span></summary>'
    if pair.read:
        one, two = (stats.seen(reply_of(run.pages.get(pair.page))) for run in (first, other))
        yield f'<p class="text">{diff_html(chr(10).join(one.lines), chr(10).join(two.lines))}</p>'
        yield from numbers_html(pair.difference)
        yield from layout_html(one, two) if pair.difference.layout_changed else ()
    yield "</details>\n"


CONTEXT = 160  # characters kept on each side of a change


def diff_html(one: str, other: str) -> str:
    """Two texts as one, with what only one of them has marked; what both have is cut short between changes."""
    parts = []
    for kind, before, after in stats.word_changes(one, other):
        if kind == "=":
            parts.append(html.escape(before) if len(before) <= 3 * CONTEXT else shortened(before))
        else:
            parts.append(f"<del>{html.escape(before)}</del>" if before.strip() else "")
            parts.append(f"<ins>{html.escape(after)}</ins>" if after.strip() else "\n" if "\n" in after else " ")
    return "".join(parts)


def shortened(text: str) -> str:
    left_out = len(text) - 2 * CONTEXT
    gap = f'<span class="gap"> [{left_out} characters alike] </span>'
    return html.escape(text[:CONTEXT]) + gap + html.escape(text[-CONTEXT:])


def numbers_html(difference: stats.Difference) -> Iterator[str]:
    for tag, numbers in (("del", difference.numbers_gone), ("ins", difference.numbers_new)):
        if numbers:
            more = f" and {len(numbers) - 30} more" if len(numbers) > 30 else ""
            listed = " ".join(f"<{tag}>{html.escape(number)}</{tag}>" for number in numbers[:30])
            yield f"<p>Numbers only here: {listed}{more}</p>"


def layout_html(one: stats.Seen, two: stats.Seen) -> Iterator[str]:
    """The blocks that stand in one reading only, or bear another label."""
    matched = stats.match_boxes(one.blocks, two.blocks)
    relabelled = [(a, b) for a, b, _ in matched if a.label != b.label]
    gone, new = list(one.blocks), list(two.blocks)
    for a, b, _ in matched:
        gone.remove(a)
        new.remove(b)
    yield "<table><tr><th>Blocks</th><th></th></tr>"
    for a, b in relabelled:
        yield f"<tr><td><del>{block_words(a)}</del></td><td><ins>{block_words(b)}</ins></td></tr>"
    for block in gone:
        yield f"<tr><td><del>{block_words(block)}</del></td><td></td></tr>"
    for block in new:
        yield f"<tr><td></td><td><ins>{block_words(block)}</ins></td></tr>"
    yield "</table>"


def block_words(block: stats.Box) -> str:
    box = " ".join(f"{corner:g}" for corner in block.corners) if block.corners else "no box"
    return html.escape(f"{block.label} {box}")


# ---- the chart

COLOURS = ("#4c6a92", "#d1793b", "#5a8f63", "#9a5b8f", "#8a7a4d")


def draw_chart(groups: Sequence[Group], sections: Sequence[Section], file: Path) -> None:
    """The comparison as a picture: a row of panels for each benchmark. Raises BadUsage without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ocr.BadUsage("the chart needs matplotlib: pip install -r requirements-bench.txt") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for section in sections for panel in section_panels(groups, section)]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, sum(panel.height for panel in panels) + 0.4), squeeze=False, layout="constrained",
        height_ratios=[panel.height for panel in panels],
    )  # fmt: skip
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        panel.draw(axis)
        axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
    handles = [
        matplotlib.lines.Line2D([], [], color=colour, marker="o", linestyle="", label=literal(group.name))
        for group, colour in zip(groups, itertools.cycle(COLOURS), strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(groups)), frameon=False)
    part = file.with_name(file.name + ".part")
    figure.savefig(part, dpi=150, format="png")
    pyplot.close(figure)
    part.replace(file)


def literal(text: str) -> str:
    """Text that matplotlib does not take for maths."""
    return text.replace("$", r"\$")


@dataclass(frozen=True)
class Panel:
    title: str
    height: float  # inches
    draw: Callable[[Any], None]


def section_panels(groups: Sequence[Group], section: Section) -> Iterator[Panel]:
    """The panels of a benchmark: scores, or speed over requests in flight; and how much the pages' texts differ."""
    if section.kind == SPEED:
        yield Panel("Output tokens/s by requests in flight", 3.4, functools.partial(draw_speed, groups))
        return
    scores = [row for row in section.rows if row.words is percent]
    if scores:
        title = f"{section.kind}: score in %, mean and range of runs"
        yield Panel(title, 1.0 + 0.36 * len(scores), functools.partial(draw_scores, groups, scores))
    if section.agreements:
        title = f"{section.kind}: pages by the share of characters that differ from {literal(groups[0].name)}'s"
        yield Panel(title, 2.6, functools.partial(draw_texts, groups, section.agreements))


def draw_scores(groups: Sequence[Group], rows: Sequence[Row], axis: Any) -> None:
    step = 0.7 / len(groups)
    for n, (_, colour) in enumerate(zip(groups, itertools.cycle(COLOURS), strict=False)):
        for at, row in enumerate(rows):
            value = row.values[n]
            if value is not None:
                y = at + (n - (len(groups) - 1) / 2) * step
                axis.plot([100 * value.low, 100 * value.high], [y, y], color=colour, linewidth=2, alpha=0.6)
                axis.plot(100 * value.mean, y, "o", color=colour, markersize=6)
    axis.set_yticks(range(len(rows)), [literal(row.measure) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    known = [value for row in rows for value in row.values if value is not None]
    low = min((100 * value.low for value in known), default=0.0)
    axis.set_xlim(max(-2.0, min(low - 5, 88.0)), 101.5)
    axis.grid(axis="x", alpha=0.3)


def draw_speed(groups: Sequence[Group], axis: Any) -> None:
    levels: set[int] = set()
    for group, colour in zip(groups, itertools.cycle(COLOURS), strict=False):
        runs = [run.record["levels"] for run in group.of(SPEED).runs]
        found = {
            int(level): value
            for level in {level for run in runs for level in run}
            if (value := spread(run[level]["tokens_per_second"] for run in runs if level in run))
        }
        xs = sorted(found)
        levels.update(xs)
        axis.plot(xs, [found[x].mean for x in xs], "o-", color=colour)
        axis.fill_between(xs, [found[x].low for x in xs], [found[x].high for x in xs], color=colour, alpha=0.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(levels), [str(level) for level in sorted(levels)], minor=False)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests in flight")
    axis.grid(alpha=0.3)


BINS = (
    (0.0, "same text"),
    (0.001, "up to 0.1%"),
    (0.01, "up to 1%"),
    (0.05, "up to 5%"),
    (0.2, "up to 20%"),
    (1e9, "more"),
)


def draw_texts(groups: Sequence[Group], agreements: Sequence[Agreement], axis: Any) -> None:
    width = 0.8 / len(agreements)
    for n, agreement in enumerate(agreements):
        pairs = [pair for pairs in agreement.between for pair in pairs]
        counts = [0] * (len(BINS) + 1)
        for pair in pairs:
            place = next(at for at, (most, _) in enumerate(BINS) if pair.error_rate <= most)
            counts[place if pair.read else len(BINS)] += 1
        xs = [at + (n - (len(agreements) - 1) / 2) * width for at in range(len(counts))]
        heights = [100 * count / max(1, len(pairs)) for count in counts]
        bars = axis.bar(xs, heights, width * 0.92, color=COLOURS[(n + 1) % len(COLOURS)])
        axis.bar_label(bars, [str(count) if count else "" for count in counts], fontsize=8, color="#555")
    axis.set_xticks(range(len(BINS) + 1), [*(name for _, name in BINS), "no reply"])
    axis.set_ylabel("% of pages")
    axis.margins(y=0.15)


# ------------------------------------------------------------------------------------------------------------- Report


def report(folders: Sequence[Path], concurrency: int) -> tuple[str, list[str]]:
    """The model card's table from finished runs, and a line for each folder that is left out. Raises BadUsage."""
    runs, left_out = [], []
    for folder in folders:
        if not folder.is_dir():
            left_out.append(f"{folder}: left out: no such folder")
            continue
        try:
            run = load(folder)
        except ocr.BadUsage as e:
            left_out.append(f"left out: {e}")
            continue
        if why := not_reported(run, concurrency):
            left_out.append(f"{folder}: left out: {why}")
        else:
            runs.append(run)
    if not runs:
        raise ocr.BadUsage("\n  ".join(["no finished run to report", *left_out]))
    return "\n".join(report_lines(runs, concurrency)), left_out


def not_reported(run: Finished, concurrency: int) -> str | None:
    if run.kind == PLAIN:
        return "a run of ocr.py has no score"
    if run.record.get("stopped"):
        return f"not finished: {run.record['stopped']}"
    if run.kind == SPEED:
        return None if str(concurrency) in run.record.get("levels", {}) else f"no level of {concurrency} in flight"
    return None if "score" in run.record else "not scored (--score)"


def column_of(run: Finished) -> str:
    """What a column of the card is: a checkpoint."""
    return str(run.server.get("checkpoint") or run.server.get("model") or "model unknown")


def row_of(run: Finished, concurrency: int) -> str:
    dpi = f"{run.settings.get('dpi')} dpi"
    if run.kind == SPEED:
        settings = run.settings
        more = [f"{settings['retries']} retries"] if settings.get("retries") else []
        more += ["loop stop"] if settings.get("loop_stop") else []
        head = f"Throughput, {concurrency} in flight, mode {settings['mode']}, {settings['pages']} pages"
        return ", ".join([head, dpi, *more])
    name = "Private test set" if run.kind == OWN else run.kind
    return f"{name}, {run.settings.get('selection')}, {dpi}"


def report_lines(runs: Sequence[Finished], concurrency: int) -> Iterator[str]:
    """A column for each checkpoint, in the order given, the first being what the others are measured by."""
    columns = list(dict.fromkeys(map(column_of, runs)))
    order = {kind: n for n, kind in enumerate((SPEED, OMNI, OLMOCR, OWN))}
    rows = dict.fromkeys(row_of(run, concurrency) for run in sorted(runs, key=lambda run: order[run.kind]))
    yield table_line(["", *map(cell, columns)])
    yield table_line(["---"] + ["---:"] * len(columns))
    for row in rows:
        here = [[run for run in runs if (row_of(run, concurrency), column_of(run)) == (row, name)] for name in columns]
        kind = next(run.kind for found in here for run in found)
        for measure, words in reported(kind, concurrency):
            values = [spread(map(measure, found)) for found in here]
            cells = [with_ratio(words, value, values[0] if n and kind == SPEED else None, len(found))
                     for n, (value, found) in enumerate(zip(values, here, strict=True))]  # fmt: skip
            yield table_line([f"{cell(row)}, {words.unit}", *cells])
    yield ""
    for name in columns:
        yield f"- {cell(name)}: {cell(column_conditions([run for run in runs if column_of(run) == name]))}"
    yield "- Mean (range) of the runs; pages without a reply count 0."


@dataclass(frozen=True)
class Words:
    unit: str
    format: Callable[[stats.Spread | float | None], str]


def reported(kind: str, concurrency: int) -> list[tuple[Callable[[Finished], float | None], Words]]:
    """The measures of a benchmark's rows."""
    if kind == SPEED:
        level = str(concurrency)
        return [
            (lambda run: run.record["levels"][level]["tokens_per_second"], Words("tokens/s", number)),
            (lambda run: run.record["levels"][level]["pages_per_second"], Words("pages/s", number)),
        ]
    return [(lambda run: run.record["score"]["headline"], Words("%", percent))]


def with_ratio(words: Words, value: stats.Spread | None, base: stats.Spread | None, runs: int) -> str:
    if value is None:
        return "-"
    ratio = ratio_of(value, base)
    return words.format(value) + (f", {times(ratio)}" if ratio else "") + (f"; {runs} runs" if runs > 1 else "; 1 run")


def column_conditions(runs: Sequence[Finished]) -> str:
    """GPU, server and dates of a column, and the pages that failed in its runs."""

    def every(values: Iterable[Any]) -> str:
        return " and ".join(dict.fromkeys(str(value) for value in values if value))

    dates = sorted(str(run.record.get("created", ""))[:10] for run in runs)
    drafts = every(run.server.get("speculative_tokens") for run in runs)
    failed = sum((run.record.get("pages") or {}).get("failed", 0) for run in runs)
    errors = sum(level["errors"] for run in runs for level in run.record.get("levels", {}).values())
    facts = [
        every(run.server.get("gpu") for run in runs) or "GPU not told (--gpu)",
        f"{every(run.server.get('engine') for run in runs) or 'vllm'} "
        f"{every(run.server.get('version') for run in runs) or '(version unknown)'}",
        f"{drafts} speculative tokens" if drafts else None,
        dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        f"{failed} failed pages" if failed else None,
        f"{errors} failed requests" if errors else None,
    ]
    return ", ".join(filter(None, facts))

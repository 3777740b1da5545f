"""What benchmark.py measures of pages and runs: pure functions, from a reply to a number and its interval.

Seen           a raw reply -> its text, table cells and blocks, ready to compare
edit_distance  and find_within: Levenshtein's distance, of two texts and of a text to the best place in another
Difference     two readings of one page: characters, words, numbers, cells, blocks and boxes
Expected       a text that a page should hold -> lines and cells, each found or not within a tolerance
bootstrap      intervals over documents; mcnemar, percentile, mean and range
"""

from __future__ import annotations

import collections
import difflib
import html
import math
import re
import statistics
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import ocr

if TYPE_CHECKING:
    import numpy
    from lxml import etree

    Array = numpy.ndarray[Any, Any]

# ------------------------------------------------------------------------------------------------ What a page holds

# Signs that are written in several ways and read as one.
ALIKE = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′`´ʼ", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‐‑‒–—―−⁃", "-"),
        "…": "...",
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", ""),
    }
)


def normalise(text: str) -> str:
    """Text as two readings are compared: NFC, one kind of quotes and dashes, single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).translate(ALIKE).split())


class Box(NamedTuple):
    """A block's label and bounding box (0-1000 on each axis; None when the reply gives none)."""

    label: str
    corners: tuple[float, float, float, float] | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reply says of its page: a line of normalised text for each block, the tables' cells, the blocks."""

    lines: tuple[str, ...]
    cells: tuple[str, ...]
    blocks: tuple[Box, ...]

    @property
    def text(self) -> str:
        return " ".join(self.lines)


def seen(reply: str) -> Seen:
    """A raw reply as it is compared. What a model says of a picture (its alt text) is no text of the page."""
    blocks = ocr.read_reply(reply)
    lines = [normalise(element_text(block.element)) for block in blocks]
    cells = [
        normalise(element_text(cell))
        for block in blocks
        for cell in block.element.iter("td", "th")  # every row of every table, in reading order
    ]
    return Seen(tuple(filter(None, lines)), tuple(cells), tuple(boxes(blocks)))


def boxes(blocks: Iterable[ocr.Block]) -> Iterator[Box]:
    """Every block and those inside it."""
    for block in blocks:
        yield Box(block.label, block.bbox)
        yield from boxes(block.inside)


IN_LINE = frozenset("a abbr b bdi bdo big cite code del dfn em font i ins kbd label mark math q s samp small span "
                    "strike strong sub sup time tt u var chem".split())  # fmt: skip


def element_text(element: etree._Element) -> str:
    """An element's text, with a space wherever a browser would begin a new line or cell."""
    parts: list[str] = []
    stack: list[etree._Element | str] = [element]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item.tag, str):
            gap = "" if item.tag in IN_LINE else " "
            field = ocr.input_text(item) if item.tag == "input" else ""
            tail = (item.tail or "") if item is not element else ""
            stack += [gap + tail, *reversed(item), gap + field + (item.text or "")]
        else:  # a comment
            stack.append(item.tail or "")
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------- Edit distance


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and replacements that make one of the other.

    Myers' bit-parallel way (J. ACM 46, 1999, as Hyyrö words it): Python's integers are as long as the text, so a page
    against a wholly different one of 4,000 characters takes some 10 ms, and pages that differ in a word next to none.
    """
    start, ends = 0, [len(one), len(other)]
    while start < min(ends) and one[start] == other[start]:
        start += 1
    while start < min(ends) and one[ends[0] - 1] == other[ends[1] - 1]:
        ends = [end - 1 for end in ends]
    short, long = sorted((one[start : ends[0]], other[start : ends[1]]), key=len)
    if not short:
        return len(long)
    distance = len(long)
    for step in columns(long, short, anywhere=False):
        distance += step
    return distance


def columns(pattern: Sequence[Hashable], text: Iterable[Hashable], anywhere: bool) -> Iterator[int]:
    """How the distance of the whole pattern changes (-1, 0 or 1) with each item of the text.

    `anywhere`: the pattern may begin at any place of the text at no cost.
    """
    where: dict[Hashable, int] = {}
    for index, item in enumerate(pattern):
        where[item] = where.get(item, 0) | 1 << index
    mask, last = (1 << len(pattern)) - 1, 1 << (len(pattern) - 1)
    up, down = mask, 0  # where a column of the table of distances rises and falls from one row to the next
    first = 0 if anywhere else 1
    for item in text:
        equal = where.get(item, 0)
        across = (((equal & up) + up) ^ up) | equal | down
        rises = down | (mask & ~(across | up))
        falls = up & across
        yield 1 if rises & last else -1 if falls & last else 0
        rises, falls = (rises << 1) | first, falls << 1
        vertical = equal | down
        up = (falls | ~(vertical | rises)) & mask
        down = rises & vertical & mask


class Place(NamedTuple):
    """Where a text was found, and with how many edits."""

    start: int
    end: int
    edits: int


def find_within(line: str, text: str, most: int) -> Place | None:
    """The first best place of a line in a text, with at most so many edits; words are not cut for an exact one."""
    exact = re.search(rf"(?<!\w){re.escape(line)}(?!\w)", text)
    if exact:
        return Place(exact.start(), exact.end(), 0)
    if not most or not line:
        return None
    best, end = best_end(line, text)
    if best > most:
        return None
    length = best_end(line[::-1], text[max(0, end - len(line) - most) : end][::-1], at_start=True)[1]
    return Place(end - length, end, best)


def best_end(line: str, text: str, at_start: bool = False) -> tuple[int, int]:
    """The least distance of a line to a part of the text, and where that part ends."""
    distance = len(line)
    best, end = distance, 0
    for index, step in enumerate(columns(line, text, anywhere=not at_start), 1):
        distance += step
        if distance < best:
            best, end = distance, index
    return best, end


# ---------------------------------------------------------------------------------------------- Two readings of a page

NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
SAME_BLOCK = 0.5  # intersection over union from which two boxes are one block's


@dataclass(frozen=True, slots=True)
class Difference:
    """What a second reading of a page changed in the first."""

    edits: int  # characters, of the normalised text
    length: int  # characters of the first reading
    words: int  # words inserted, deleted or replaced
    numbers_gone: tuple[str, ...]
    numbers_new: tuple[str, ...]
    cells_same: int
    cells: int  # of the reading that has more
    blocks: tuple[int, int]  # of each reading, those with a box
    blocks_same: int  # in the same place
    labels_same: int  # of those
    overlap: float  # sum of their intersections over unions

    @property
    def error_rate(self) -> float:
        """Characters to edit for each character of the first reading; 1 for text where there was none."""
        return self.edits / self.length if self.length else float(self.edits > 0)

    @property
    def layout_changed(self) -> bool:
        return not (self.blocks[0] == self.blocks[1] == self.blocks_same == self.labels_same)


def compare(first: Seen, second: Seen) -> Difference:
    """Two readings of one page."""
    one, other = first.text, second.text
    gone, new = numbers_between(one, other)
    matched = match_boxes(first.blocks, second.blocks)
    return Difference(
        edits=edit_distance(one, other),
        length=len(one),
        words=edit_distance(one.split(), other.split()),
        numbers_gone=gone,
        numbers_new=new,
        cells_same=same_cells(first.cells, second.cells),
        cells=max(len(first.cells), len(second.cells)),
        blocks=(boxed(first.blocks), boxed(second.blocks)),
        blocks_same=len(matched),
        labels_same=sum(a.label == b.label for a, b, _ in matched),
        overlap=sum(overlap for _, _, overlap in matched),
    )


def boxed(blocks: Iterable[Box]) -> int:
    return sum(block.corners is not None for block in blocks)


def numbers_between(one: str, other: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The numbers that only the first text holds, and those that only the second does."""
    before, after = (collections.Counter(NUMBER.findall(text)) for text in (one, other))
    return tuple((before - after).elements()), tuple((after - before).elements())


def same_cells(one: Sequence[str], other: Sequence[str]) -> int:
    """Cells of two readings' tables that agree, in order: a row too many costs its own cells only."""
    if one == other:
        return len(one)
    return sum(block.size for block in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks())


def intersection_over_union(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two boxes (x0, y0, x1, y1) are the same: 1 for equal ones, 0 for ones apart."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    whole = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - shared
    return shared / whole if whole > 0 else float(tuple(one) == tuple(other))


def match_boxes(one: Sequence[Box], other: Sequence[Box]) -> list[tuple[Box, Box, float]]:
    """The blocks that stand in the same place in both readings, the closest first, each in one pair."""
    pairs = sorted(
        (
            (intersection_over_union(a.corners, b.corners), a.label == b.label, -i, -j)
            for i, a in enumerate(one)
            for j, b in enumerate(other)
            if a.corners and b.corners
        ),
        reverse=True,
    )
    used: tuple[set[int], set[int]] = set(), set()
    matched = []
    for overlap, _, i, j in pairs:
        if overlap >= SAME_BLOCK and -i not in used[0] and -j not in used[1]:
            used[0].add(-i)
            used[1].add(-j)
            matched.append((one[-i], other[-j], overlap))
    return matched


def word_changes(one: str, other: str) -> Iterator[tuple[str, str, str]]:
    """A text against another as a person reads it: ("=", words, ""), or ("~", words before, words after)."""
    before, after = re.findall(r"\S+\s*", one), re.findall(r"\S+\s*", other)
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        yield ("=" if kind == "equal" else "~"), "".join(before[i:j]), "".join(after[k:m])


# --------------------------------------------------------------------------------------------------- Expected text

TOLERANCE = 0.05  # edits allowed for a character of the expected line or cell: one for each whole 20


@dataclass(frozen=True, slots=True)
class Expected:
    """What a page should hold: lines of text, and cells of tables."""

    lines: tuple[str, ...]
    cells: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.lines) + len(self.cells)


@dataclass(frozen=True, slots=True)
class Graded:
    """How much of what was expected a page holds."""

    verdicts: tuple[bool, ...]  # of the lines, then of the cells: whether each was found
    missed: tuple[str, ...]
    extra_words: float  # share of the words read that were not expected

    @property
    def expected(self) -> int:
        return len(self.verdicts)

    @property
    def found(self) -> int:
        return sum(self.verdicts)

    @property
    def rate(self) -> float | None:
        """None where nothing is expected."""
        return self.found / self.expected if self.expected else None


def allowed(line: str, tolerance: float = TOLERANCE) -> int:
    """The edits with which an expected line or cell still counts as found: none below 20 characters, then one in 20.

    So a price, a date or a name must be exact, and a paragraph may have a slip in each line.
    """
    return int(len(line) * tolerance + 1e-9)


def grade(expected: Expected, pages: Sequence[Seen], tolerance: float = TOLERANCE) -> Graded:
    """Which expected lines and cells the pages hold. What was found once is not found again for another line."""
    lines = found_lines(expected.lines, " ".join(page.text for page in pages), tolerance)
    cells = found_cells(expected.cells, [cell for page in pages for cell in page.cells], tolerance)
    verdicts = (*lines, *cells)
    wanted = (*expected.lines, *expected.cells)
    words = collections.Counter(word for page in pages for line in page.lines for word in line.split())
    known = collections.Counter(word for line in wanted for word in line.split())
    extra = (words - known).total() / words.total() if words else 0.0
    missed = tuple(line for line, found in zip(wanted, verdicts, strict=True) if not found)
    return Graded(verdicts, missed, extra)


def found_lines(lines: Sequence[str], text: str, tolerance: float) -> list[bool]:
    """Whether the text holds each line; the longest are looked for first, so that no short one takes its words."""
    found = [False] * len(lines)
    for index in sorted(range(len(lines)), key=lambda index: -len(lines[index])):
        line = lines[index]
        if place := find_within(line, text, allowed(line, tolerance)):
            found[index] = True
            text = f"{text[: place.start]}\0{text[place.end :]}"
    return found


def found_cells(cells: Sequence[str], read: Sequence[str], tolerance: float) -> list[bool]:
    """Whether the page's tables have each cell; each cell read counts for one. Equal ones are paired first."""
    left = collections.Counter(read)
    found = [False] * len(cells)
    for index, cell in enumerate(cells):
        if left[cell] > 0:
            found[index] = True
            left[cell] -= 1
    for index, cell in enumerate(cells):
        most = allowed(cell, tolerance)
        if found[index] or not most:
            continue
        near = [other for other, count in left.items() if count > 0 and abs(len(other) - len(cell)) <= most]
        edits, other = min(((edit_distance(cell, other), other) for other in near), default=(most + 1, ""))
        if edits <= most:
            found[index] = True
            left[other] -= 1
    return found


MARKUP: tuple[tuple[str, str], ...] = (  # in markdown, what is not text
    (r"(?s)<!--.*?-->", " "),
    (r"!\[[^\]\n]*\]\([^)\n]*\)", " "),
    (r"\[([^\]\n]+)\]\([^)\n]*\)", r"\1"),
    (r"(?m)^\s*(?:```|~~~).*$", ""),
    (r"(?m)^\s*(?:[-*_]\s*){3,}$", ""),
    (r"(?m)^\s*(?:>\s*)+", ""),
    (r"(?m)^\s*#{1,6}\s+", ""),
    (r"(?m)^\s*[-*+]\s+(?:\[[ xX]\]\s+)?", ""),
    (r"(\*\*\*|\*\*|__|~~)(?=\S)(.+?)(?<=\S)\1", r"\2"),
    (r"(?<![\w*\\])([*_])(?=\S)([^*_\n]+?)(?<=[^\s\\])\1(?![\w*])", r"\2"),
    (r"`([^`\n]+)`", r"\1"),
    (r"</?[A-Za-z][^<>]*>", " "),
    (r"\\([!-/:-@\[-`{-~])", r"\1"),
)
MARKUP_COMPILED = [(re.compile(pattern), plain) for pattern, plain in MARKUP]
FORMULA = re.compile(  # $$…$$, $…$ (no space inside, no digit after: a price is none), \(…\), \[…\]
    r"(?s)\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=[^\s\\])\$(?!\d)|\\\((.+?)\\\)|\\\[(?=[^\]]*[\\^_={])(.+?)\\\]"
)
TABLE = re.compile(r"(?is)<table\b.*?</table\s*>")
PIPE_RULE = re.compile(r"\s*\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?\|?\s*|\s*\|\s*:?-+:?\s*\|?\s*")


def expected_markdown(text: str) -> Expected:
    """A page's markdown as what to look for: a line for each line, a cell for each that is not empty."""
    cells: list[str] = []

    def take_table(table: re.Match[str]) -> str:
        cells.extend(seen(table[0]).cells)
        return "\n"

    text = take_pipe_tables(TABLE.sub(take_table, text), cells)
    return Expected(tuple(plain_lines(text)), tuple(filter(None, cells)))


def take_pipe_tables(text: str, cells: list[str]) -> str:
    """The text without its tables of pipes, whose cells are put with the others."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and "|" in line and PIPE_RULE.fullmatch(line) and kept and "|" in kept[-1]:
            inside = True
            cells.extend(pipe_cells(kept.pop()))
        elif inside and "|" in line:
            cells.extend(pipe_cells(line))
        else:
            inside = False
            kept.append(line)
    return "\n".join(kept)


def pipe_cells(line: str) -> list[str]:
    row = re.sub(r"^\s*\||(?<!\\)\|\s*$", "", line)
    return [" ".join(plain_lines(cell)) for cell in re.split(r"(?<!\\)\|", row)]


def plain_lines(markdown: str) -> list[str]:
    """The lines of a markdown text without its marks; what is in a formula is no mark."""
    formulas: list[str] = []

    def hold(formula: re.Match[str]) -> str:
        formulas.append(next(filter(None, formula.groups())))
        return f"\ue000{len(formulas) - 1}\ue001"

    markdown = FORMULA.sub(hold, markdown)
    for pattern, plain in MARKUP_COMPILED:
        markdown = pattern.sub(plain, markdown)
    markdown = re.sub("\ue000(\\d+)\ue001", lambda held: formulas[int(held[1])], html.unescape(markdown))
    return [line for line in map(normalise, markdown.splitlines()) if line]


def expected_text(text: str) -> Expected:
    """A plain text as what to look for: each line as it stands."""
    return Expected(tuple(filter(None, map(normalise, text.splitlines()))), ())


# --------------------------------------------------------------------------------------------------------- Statistics

RESAMPLES = 10_000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A figure with the interval that a bootstrap over documents gives it; None where there is only one document."""

    value: float
    low: float | None
    high: float | None


class Spread(NamedTuple):
    """Several runs' figures as one: their mean, the least and the largest."""

    mean: float
    low: float
    high: float
    runs: int


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lie, between the two nearest in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def mcnemar(lost: int, won: int) -> float:
    """McNemar's exact test, two-sided: how likely so uneven a split of the changed tests is when neither is better.

    `lost`: tests that only the first passes; `won`: those that only the second does.
    """
    changed = lost + won
    tail = sum(math.comb(changed, k) for k in range(min(lost, won) + 1))
    return float(min(1.0, 2 * tail / 2**changed))


Counts = Sequence[Sequence[float]]  # a row for each document, a column for each thing counted
Statistic = Callable[["Array"], "Array"]  # rows of summed columns -> a figure each


def ratio(part: Array, whole: Array) -> Array:
    """part / whole; not a number where there is nothing."""
    import numpy

    with numpy.errstate(divide="ignore", invalid="ignore"):
        return numpy.asarray(numpy.where(whole > 0, part / whole, numpy.nan))


def mean_of(arrays: Sequence[Array]) -> Array:
    import numpy

    return numpy.asarray(numpy.mean(arrays, axis=0))


def bootstrap(counts: Counts, statistic: Statistic, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """A figure made of sums over documents, and its interval: documents drawn with replacement, percentiles of that.

    Both sides of a comparison are columns of one table, so that a draw takes the same documents for both (paired).
    """
    import numpy

    table = numpy.asarray(counts, dtype=float)
    value = float(statistic(table.sum(axis=0, keepdims=True))[0])
    if len(table) < 2:
        return Interval(value, None, None)
    rng = numpy.random.default_rng(seed)
    figures = []
    share = numpy.full(len(table), 1 / len(table))
    for start in range(0, resamples, 500):  # so that 10,000 documents need 40 MB, not 800
        draws = rng.multinomial(len(table), share, size=min(500, resamples - start))
        figures.append(statistic(draws @ table))
    every = numpy.concatenate(figures)
    every = every[~numpy.isnan(every)]
    if not len(every):
        return Interval(value, None, None)
    low, high = numpy.quantile(every, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))

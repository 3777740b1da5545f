"""benchmark.py compare and report: statistics against scipy and hand-worked cases, runs with planted differences.

Most runs here are written by the test, page by page, so that what differs between them is known exactly.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import benchmark
import benchmark_compare as comparison
import benchmark_stats as stats
import ocr

numpy = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")


def run(*words: object) -> int:
    return benchmark.main([str(word) for word in words])


# ---- Statistics


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 5, 1.0), (0, 5, 2 / 32), (1, 9, 2 * 11 / 1024), (2, 8, 2 * 56 / 1024)],
)
def test_mcnemar_by_hand(lost: int, won: int, p: float) -> None:
    assert stats.mcnemar(lost, won) == pytest.approx(p) == stats.mcnemar(won, lost)


def test_mcnemar_is_scipys_binomial_test() -> None:
    scipy = pytest.importorskip("scipy.stats")
    for lost, won in [(3, 12), (40, 60), (700, 800), (0, 30)]:
        assert stats.mcnemar(lost, won) == pytest.approx(scipy.binomtest(lost, lost + won).pvalue, rel=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert stats.percentile(values, share) == pytest.approx(float(numpy.quantile(values, share)), abs=1e-6)


def test_percentiles_by_hand() -> None:
    assert [stats.percentile([4, 1, 3, 2], share) for share in (0, 0.5, 0.9, 1)] == [1, 2.5, 3.7, 4]
    assert stats.percentile([7], 0.99) == 7


def difference_of_means(sums: Any) -> Any:
    return (sums[:, 1] - sums[:, 0]) / sums[:, 2]


def test_the_paired_bootstrap_is_scipys() -> None:
    scipy = pytest.importorskip("scipy.stats")
    rng = numpy.random.default_rng(1)
    before = rng.normal(0.8, 0.1, 60)
    after = before + rng.normal(0.02, 0.05, 60)
    rows = numpy.stack([before, after, numpy.ones(60)], axis=1)
    found = stats.bootstrap(rows, difference_of_means, resamples=20_000)
    known = scipy.bootstrap(
        (before, after),
        lambda a, b, axis: numpy.mean(b - a, axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=numpy.random.default_rng(2),
    ).confidence_interval
    assert found.value == pytest.approx(float(numpy.mean(after - before)))
    assert (found.low, found.high) == (pytest.approx(known.low, abs=5e-4), pytest.approx(known.high, abs=5e-4))
    assert found == stats.bootstrap(rows, difference_of_means, resamples=20_000)  # the seed is fixed
    assert found != stats.bootstrap(rows, difference_of_means, resamples=20_000, seed=1)


def test_an_interval_without_variance_or_with_one_document() -> None:
    same = [[0.5, 0.6, 1.0]] * 10
    assert stats.bootstrap(same, difference_of_means) == pytest.approx((0.1, 0.1, 0.1))
    assert stats.bootstrap(same[:1], difference_of_means) == (pytest.approx(0.1), None, None)


def test_runs_as_mean_and_range() -> None:
    assert stats.spread_of([0.8, 0.9, 0.85]) == (pytest.approx(0.85), 0.8, 0.9, 3)
    assert comparison.percent(stats.spread_of([0.8, 0.9, 0.85])) == "85.0 (80.0-90.0)"
    assert comparison.percent(stats.spread_of([0.8])) == "80.0"
    assert comparison.percent(None) == "-"


# ---- Two readings of a page


def slow_distance(one: str, other: str) -> int:
    """Levenshtein's distance, cell by cell."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


@given(st.text("abé ", max_size=30), st.text("abé ", max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_edit_distance_is_levenshteins(one: str, other: str) -> None:
    assert stats.edit_distance(one, other) == slow_distance(one, other) == stats.edit_distance(other, one)


def test_the_edit_distance_of_long_texts() -> None:
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefgh ") for _ in range(40_000))
    changed = text[:100] + "X" + text[101:20_000] + "YY" + text[20_000:39_000] + text[39_003:]
    assert stats.edit_distance(text, changed) == 6
    assert stats.edit_distance(["a", "b", "c"], ["a", "x", "c", "d"]) == 2  # words too


def block(text: str, label: str = "Text", box: str = "10 20 900 100") -> str:
    return f'<div data-bbox="{box}" data-label="{label}">{text}</div>'


def differ(one: str, other: str) -> stats.Difference:
    return stats.compare(stats.seen(one), stats.seen(other))


def test_what_makes_no_difference_to_a_reader_is_none() -> None:
    found = differ(
        block("<p>“It’s”  1–2<br>café &amp; <b>more</b></p>"), block('<p>"It\'s" 1-2 cafe\u0301 &amp; more</p>')
    )
    assert (found.edits, found.words, found.numbers_gone, found.layout_changed) == (0, 0, (), False)
    assert differ(block("<p>a</p><p>b</p>"), block("<p>a b</p>")).edits == 0
    assert differ(block('<img alt="A red door"/>', "Image"), block('<img alt="A door"/>', "Image")).edits == 0


def test_words_and_numbers() -> None:
    found = differ(block("<p>the 12 lamps cost 4.20 each</p>"), block("<p>the 13 lamp cost 4.20 each</p>"))
    assert (found.edits, found.length, found.words) == (2, 27, 2)
    assert (found.numbers_gone, found.numbers_new) == (("12",), ("13",))
    assert found.error_rate == pytest.approx(2 / 27)


def test_table_cells_are_compared_in_order_and_a_row_too_many_costs_its_own() -> None:
    def table(*rows: str) -> str:
        cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.split('|'))}</tr>" for row in rows)
        return block(f"<table>{cells}</table>", "Table")

    assert stats.seen(table("a|b", "c|d")).cells == ("a", "b", "c", "d")
    one_more = differ(table("a|b", "c|d", "e|f"), table("a|b", "x|y", "c|d", "e|f"))
    assert (one_more.cells_same, one_more.cells) == (6, 8)
    other = differ(table("a|b", "c|d"), table("a|b", "c|z"))
    assert (other.cells_same, other.cells, other.edits) == (3, 4, 1)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((0, 0, 10, 10), (0, 0, 10, 10), 1.0),
        ((0, 0, 10, 10), (5, 0, 15, 10), 50 / 150),
        ((0, 0, 10, 10), (10, 0, 20, 10), 0.0),
        ((0, 0, 10, 10), (0, 0, 5, 10), 0.5),
        ((5, 5, 5, 5), (5, 5, 5, 5), 1.0),  # no area
        ((5, 5, 5, 5), (6, 6, 6, 6), 0.0),
    ],
)
def test_the_overlap_of_boxes(one: tuple[int, ...], other: tuple[int, ...], share: float) -> None:
    assert stats.intersection_over_union(one, other) == pytest.approx(share)


def test_blocks_are_matched_by_place_and_compared_by_label() -> None:
    first = (
        block("a", box="0 0 100 100") + block("b", "Section-Header", "0 100 100 200") + block("c", box="0 500 9 600")
    )
    second = block("a", box="0 0 100 90") + block("b", "Text", "0 100 100 200") + block("c", box="500 500 600 600")
    found = differ(first, second)
    assert (found.blocks, found.blocks_same, found.labels_same) == ((3, 3), 2, 1)
    assert found.overlap == pytest.approx(1.9) and found.layout_changed


# ---- Runs with planted differences

RIGHT = {
    f"doc{n}#{page}": block(f"<h1>Document {n}</h1>", "Section-Header", "10 10 900 60")
    + block(f"<p>Page {page} has {n * 7 + page} lamps and a quiet harbour.</p>", box="10 100 900 300")
    for n in range(1, 7)
    for page in (1, 2)
}


def write_run(folder: Path, replies: Mapping[str, str | None], *, dpi: int = 150, **record: Any) -> Path:
    """A run of ocr.py as it lies on disk: a page of each reply, a failed one where it is None."""
    documents = {}
    for name, reply in replies.items():
        document, _, page = name.partition("#")
        documents[document] = {"source": f"in/{document}.pdf", "folder": document}
        pages = folder / document / "pages"
        pages.mkdir(parents=True, exist_ok=True)
        status = ocr.FAILED if reply is None else ocr.OK
        image = {"fingerprint": f"{name} {dpi}"}
        attempts = [{"completion_tokens": len(reply or "") // 4}]
        found = {"page": int(page), "status": status, "image": image, "attempts": attempts, "error": None}
        (pages / f"{int(page):04}.json").write_text(json.dumps(found))
        if reply is not None:
            (pages / f"{int(page):04}.html").write_text(reply, encoding="utf-8")
    counts = {"ok": sum(reply is not None for reply in replies.values()), "suspect": 0, "cached": 0}
    counts["failed"] = len(replies) - counts["ok"]
    whole = {"ocr": "0.1.0", "settings": {"dpi": dpi}, "documents": list(documents.values()), "pages": counts}
    (folder / "run.json").write_text(json.dumps(whole | {"seconds": 10.0, "stopped": None} | record))
    return folder


Tests = Mapping[str, Sequence[bool]]  # by document: the verdicts of its tests


def write_own(folder: Path, tests: Tests, replies: Mapping[str, str | None] = RIGHT, **settings: Any) -> Path:
    """A run of benchmark.py own with these verdicts."""
    write_run(folder / "ocr", replies)
    lines = [
        {"page": name, "suite": "pages", "verdicts": [int(found) for found in verdicts]}
        for name, verdicts in tests.items()
    ]
    (folder / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    every = [verdict for verdicts in tests.values() for verdict in verdicts]
    share = sum(every) / len(every)
    score = {"headline": share, "parts": {"pages": {"score": share, "tests": len(every)}}}
    record = {
        "benchmark": "own",
        "settings": {"dpi": 150, "dataset_sha256": "a", "items_sha256": "b", "selection": "all 6"} | settings,
        "created": "2026-12-01T00:00:00+00:00",
        "server": {"checkpoint": "m/bf16", "version": "0.33.0", "engine": "vllm"},
        "pages": {"failed": 0},
        "pages_per_second": 2.0,
        "score": score,
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def compare(capsys: pytest.CaptureFixture[str], out: Path, *words: object) -> tuple[str, list[dict[str, Any]]]:
    """The comparison's table and JSON."""
    assert run("compare", *words, "--out", out, "--resamples", 500) == 0
    return capsys.readouterr().out, json.loads((out / "compare.json").read_text())


def rows_of(section: Mapping[str, Any]) -> dict[str, Any]:
    return {row["measure"]: row for row in section["rows"]}


def test_planted_differences_are_found_page_by_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed: dict[str, str | None] = dict(RIGHT)
    changed["doc1#1"] = RIGHT["doc1#1"].replace("harbour", "harbor")
    changed["doc2#1"] = RIGHT["doc2#1"].replace("has 15 lamps and a quiet", "had 51 lamps, a")
    changed["doc3#1"] = RIGHT["doc3#1"].replace("Section-Header", "Caption")
    changed["doc4#2"] = None
    first, second = write_run(tmp_path / "a-1", RIGHT), write_run(tmp_path / "b-1", changed)
    table, (section,) = compare(capsys, tmp_path / "out", first, "--with", second)
    pages = section["pages"]["b"]
    assert [page["page"] for page in pages] == ["doc4#2", "doc2#1", "doc1#1", "doc3#1"]
    assert pages[0]["changes"] == ["no reply: ok and failed"]
    assert pages[1]["numbers_gone"] == ["15"] and pages[1]["numbers_new"] == ["51"]
    assert pages[2]["changes"] == [f"{100 / len(stats.seen(RIGHT['doc1#1']).text):.1f}% of characters", "1 words"]
    assert pages[3]["changes"] == ["1 labels"]
    rows = rows_of(section)
    assert rows["pages with the same text"]["against_first"][0]["mean"] == 9 / 12  # the label is no text
    assert [group["mean"] for group in rows["failed pages"]["groups"]] == [0, 1]
    assert rows["pages that only one has read, or none"]["against_first"][0]["mean"] == 1
    assert "| failed pages | 0 | 1 |  |" in table
    assert (tmp_path / "out/compare.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    html = (tmp_path / "out/pages.html").read_text()
    assert "<del>harbour.</del><ins>harbor.</ins>" in html and html.count("<details>") == 4
    assert "Numbers only here: <del>15</del>" in html


def test_a_difference_is_seen_against_the_noise_of_each_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = RIGHT | {"doc1#1": RIGHT["doc1#1"].replace("quiet", "calm")}
    runs = [write_run(tmp_path / f"a-{n}", replies) for n, replies in enumerate((RIGHT, noisy, RIGHT))]
    other = [write_run(tmp_path / f"b-{n}", RIGHT) for n in range(3)]
    _, (section,) = compare(capsys, tmp_path / "out", *runs, "--with", *other)
    same = rows_of(section)["pages with the same text"]
    assert [group["mean"] for group in same["groups"]] == [pytest.approx(11 / 12), 1.0]
    assert same["against_first"][0] == {
        "mean": pytest.approx(35 / 36),
        "low": pytest.approx(11 / 12),
        "high": 1.0,
        "runs": 3,
    }


def test_scores_with_their_intervals_and_mcnemar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {f"doc{n}": [True] * 8 + [False] * 2 for n in range(1, 7)}
    worse = {name: [True] * 6 + [False] * 4 if name < "doc4" else list(tests) for name, tests in before.items()}
    worse["doc6"] = [True] * 9 + [False]
    a = [write_own(tmp_path / f"bf16-{n}", before) for n in (1, 2, 3)]
    b = [write_own(tmp_path / f"fp4-{n}", worse) for n in (1, 2, 3)]
    table, (section,) = compare(capsys, tmp_path / "out", *a, "--with", *b)
    score, tests = rows_of(section)["score"], rows_of(section)["tests passed"]
    assert [group["mean"] for group in score["groups"]] == [pytest.approx(0.8), pytest.approx(43 / 60)]
    interval = score["against_first"][0]
    assert interval["value"] == pytest.approx(-5 / 60) and interval["low"] < interval["value"] < interval["high"]
    assert tests["groups"] == [48, 43]
    assert tests["against_first"][0] == {"lost": 6, "won": 1, "p": pytest.approx(2 * 8 / 128)}
    assert "| bf16 (3 runs) | fp4 (3 runs) | fp4 against bf16 |" in table
    assert "80.0 (80.0-80.0)" in table and "6 lost, 1 won (p = 0.125)" in table

    _, (alike,) = compare(capsys, tmp_path / "same", *a, "--with", *a, "--names", "one", "two")
    none = rows_of(alike)
    assert none["score"]["against_first"][0] == {"value": 0.0, "low": 0.0, "high": 0.0}  # zero variance
    assert none["tests passed"]["against_first"][0] == {"lost": 0, "won": 0, "p": 1.0}


def test_a_test_passes_in_a_group_when_more_than_half_of_its_runs_pass_it(tmp_path: Path) -> None:
    verdicts = ([True, True, False], [True, False, False], [False, True, False])
    runs = [write_own(tmp_path / f"r{n}", {"doc1": verdict}) for n, verdict in enumerate(verdicts)]
    tally = comparison.Tally(comparison.Group("r", tuple(map(comparison.load, runs))))
    assert list(tally.verdicts().values()) == [True, True, False]
    two = comparison.Tally(comparison.Group("r", tuple(map(comparison.load, runs[1:]))))
    assert list(two.verdicts().values()) == [False, False, False]


def write_omni(folder: Path, pages: Mapping[str, Sequence[tuple[str, bool]] | None]) -> Path:
    """A scored run of omni: each page's tests as (type, passed); None for a page that failed."""
    write_run(folder / "ocr", {f"{page}#1": None if tests is None else block(page) for page, tests in pages.items()})
    (folder / "unit_tests" / "details").mkdir(parents=True)
    lines, counts = [], dict[str, list[bool]]()
    for page, tests in pages.items():
        lines.append({"id": page, "status": "failed" if tests is None else "scored", "row": {"document": page}})
        details = [
            {
                "page_id": page,
                "document": page,
                "test_id": f"t{n}",
                "test_type": kind,
                "result": "pass" if ok else "fail",
            }
            for n, (kind, ok) in enumerate(tests or ())
        ]
        for kind, ok in tests or ():
            counts.setdefault({"table_cell": "tables", "layout_kind": "layout"}.get(kind, "text"), []).append(ok)
        if tests is not None:
            (folder / f"unit_tests/details/{page}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in details))
    (folder / "unit_tests/scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shares = {family: sum(passed) / len(passed) for family, passed in counts.items()}
    coverage = sum(tests is not None for tests in pages.values()) / len(pages)
    parts = {family: {"score": share, "tests": len(counts[family])} for family, share in shares.items()}
    score = {"headline": sum(shares.values()) / len(shares) * coverage, "parts": parts}
    record = {"benchmark": "omni_parse_bench", "settings": {"dpi": 150}, "score": score, "created": "2026-12-01T00"}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_omnis_own_headline_is_made_anew_and_a_failed_pages_tests_are_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {
        "p1": [("present", True), ("layout_kind", True)],
        "p2": [("table_cell", True)] * 4,
        "p3": [("order", False)],
    }
    failed = whole | {"p1": [("present", True), ("layout_kind", False)], "p2": None}
    a, b = write_omni(tmp_path / "a", whole), write_omni(tmp_path / "b", failed)
    _, (section,) = compare(capsys, tmp_path / "out", a, "--with", b)
    rows = rows_of(section)
    before, after = (1 / 2 + 1 + 1) / 3, (1 / 2 + 0) / 2 * (2 / 3)
    assert [group["mean"] for group in rows["score"]["groups"]] == [pytest.approx(before), pytest.approx(after)]
    assert rows["score"]["against_first"][0]["value"] == pytest.approx(after - before)
    assert rows["tests passed"]["against_first"][0]["lost"] == 5  # one label, and the four tests of the failed page


def test_olmocrs_verdicts_are_the_tests_less_those_that_failed(tmp_path: Path) -> None:
    bench = tmp_path / "bench"
    (bench / "pdfs/tables").mkdir(parents=True)
    for name in ("a", "b"):
        (bench / f"pdfs/tables/{name}.pdf").write_bytes(b"%PDF-")
    tests = [("a1", "tables/a.pdf", "table"), ("a2", "tables/a.pdf", "baseline"), ("b1", "tables/b.pdf", "present")]
    lines = [json.dumps({"id": name, "pdf": pdf, "type": kind}) for name, pdf, kind in tests]
    (bench / "tables.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "failed_tests.jsonl").write_text('{"id": "tables/b.pdf_baseline"}\n{"id": "a1"}\n')
    assert dict(comparison.olmocr_verdicts(tmp_path)) == {
        ("tables/a.pdf", "tables", "a1"): False,
        ("tables/a.pdf", "tables", "a2"): True,
        ("tables/b.pdf", "tables", "b1"): True,
        ("tables/b.pdf", "baseline", "tables/b.pdf_baseline"): False,
    }


# ---- Runs that may not be compared


def test_other_pages_or_dpi_are_refused_without_anyway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", RIGHT)
    finer = write_run(tmp_path / "finer", RIGHT, dpi=300)
    fewer = write_run(tmp_path / "fewer", {name: reply for name, reply in RIGHT.items() if name != "doc2#2"})
    for other, why in (
        (finer, "dpi: 150 in"),
        (finer, "12 pages were sent with other pixels"),
        (fewer, "1 pages are in one"),
    ):
        assert run("compare", a, "--with", other, "--out", tmp_path / "out") == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    table, _ = compare(capsys, tmp_path / "out", a, "--with", fewer, "--anyway")
    assert "not the same pages (--anyway): 1 pages are in one of" in table
    assert "| pages | 12 | 11 |  |" in table


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", RIGHT)
    (tmp_path / "empty").mkdir()
    assert run("compare", a, "--with", tmp_path / "empty") == 2
    assert "holds no run.json" in capsys.readouterr().err
    (tmp_path / "empty/run.json").write_text('{"benchmark": "other"}')
    assert run("compare", a, "--with", tmp_path / "empty") == 2
    assert "is no run's of ocr.py or benchmark.py" in capsys.readouterr().err
    own = write_own(tmp_path / "own", {"doc1": [True]})
    assert run("compare", a, "--with", own) == 2
    assert "must hold runs of the same benchmarks" in capsys.readouterr().err
    assert run("compare", a, "--with", a, "--names", "x") == 2
    assert "1 names for 2 groups" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["bf16-1", "bf16-2"], "bf16"),
        (["nvfp4"], "nvfp4"),
        (["omni-bf16", "speed-bf16"], "bf16"),
        (["a", "b"], "a"),
        (["run_1", "run_12"], "run"),
    ],
)
def test_a_group_is_named_by_what_its_folders_share(names: list[str], common: str) -> None:
    assert comparison.common_name([Path(name) for name in names]) == common


HOSTILE = "<script>alert(1)</script>|`x`\n[l](javascript:x) <img src=x onerror=y> $a_b$"


def test_hostile_texts_and_names_are_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt; &lt;img src=x onerror=y&gt; 7"
    first = {"d<b>|$x$#1": block(f"<p>{escaped}</p>")}
    second = {"d<b>|$x$#1": block(f"<p>{escaped.replace('7', '8')}</p>", "T<i>")}
    a, b = write_run(tmp_path / "a<u>", first), write_run(tmp_path / "b$|$", second)
    table, _ = compare(capsys, tmp_path / "out", a, "--with", b, "--names", HOSTILE, "$b$")
    html = (tmp_path / "out/pages.html").read_text()
    for text in (html, table):
        assert "<script" not in text and "<img" not in text and "<b>|" not in text and "<i>" not in text
    assert "default-src 'none'" in html and "&lt;script&gt;" in html
    assert all(line.count(" | ") == 3 for line in table.splitlines() if line.startswith("| pages"))


# ---- Speed, and the report


def write_speed(folder: Path, checkpoint: str, rates: Mapping[int, float], gpu: str = "1 x H200") -> Path:
    levels = {
        str(places): {
            "concurrency": places,
            "tokens_per_second": rate,
            "pages_per_second": rate / 1000,
            "latency": {"p50": 1.0, "p99": 2.0},
            "errors": 0,
            "server": None,
        }
        for places, rate in rates.items()
    }
    folder.mkdir(parents=True)
    settings = {"dpi": 150, "pages_sha256": "x", "pages": 9, "mode": "page", "retries": 0}
    server = {"checkpoint": checkpoint, "version": "0.33.0", "engine": "vllm", "gpu": gpu, "speculative_tokens": 3}
    record = {"benchmark": "speed", "settings": settings, "server": server, "levels": levels}
    (folder / "run.json").write_text(json.dumps(record | {"created": "2026-12-01T10:00:00+00:00"}))
    return folder


def test_speeds_are_compared_level_by_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = [write_speed(tmp_path / f"a-{n}", "m/a", {64: 1000 + n, 640: 2000}) for n in (0, 10)]
    b = write_speed(tmp_path / "b-1", "m/b", {64: 1507.5, 256: 5})
    table, (section,) = compare(capsys, tmp_path / "out", *a, "--with", b)
    rows = rows_of(section)
    assert rows["tokens/s, 64 in flight"]["against_first"] == [1.5]
    assert rows["tokens/s, 640 in flight"]["against_first"] == [None]
    assert "| tokens/s, 64 in flight | 1,005 (1,000-1,010) | 1,508 | x 1.50 |" in table


def test_the_cards_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_speed(tmp_path / f"bf16-speed-{n}", "m/bf16", {640: 12_000 + n}) for n in (0, 742)]
    folders.append(write_speed(tmp_path / "fp4-speed", "m/fp4", {640: 19_446}))
    folders.append(write_own(tmp_path / "bf16-own", {"doc1": [True, True, False, True]}))
    folders.append(write_speed(tmp_path / "short", "m/fp4", {16: 100}))
    folders.append(write_run(tmp_path / "plain", RIGHT))
    (tmp_path / "notes").mkdir()
    assert run("report", *folders, tmp_path / "notes", "--out", tmp_path / "card.md") == 0
    said = capsys.readouterr()
    assert said.out == (tmp_path / "card.md").read_text()
    lines = said.out.splitlines()
    assert lines[0] == "|  | m/bf16 | m/fp4 |"
    throughput = "| Throughput, 640 in flight, mode page, 9 pages, 150 dpi, tokens/s |"
    assert f"{throughput} 12,371 (12,000-12,742); 2 runs | 19,446, x 1.57; 1 run |" in lines
    assert "| Private test set, all 6, 150 dpi, % | 75.0; 1 run | - |" in lines
    assert "- m/fp4: 1 x H200, vllm 0.33.0, 3 speculative tokens, 2026-12-01" in lines
    assert "short: left out: no level of 640 in flight" in said.err
    assert "plain: left out: a run of ocr.py has no score" in said.err and "notes holds no run.json" in said.err
    shutil.rmtree(tmp_path / "fp4-speed")
    assert run("report", tmp_path / "fp4-speed", tmp_path / "notes") == 2
    assert "no finished run to report" in capsys.readouterr().err

"""benchmark.py own: what a page should hold, the rule by which it does, and the command on folders and tables."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from standin import Answer, Request, Standin, Status, answer_by_page
from support import one_page

import benchmark
import benchmark_stats as stats
import ocr

DATA = Path(__file__).resolve().parent / "data"
REPLIES = DATA / "mini" / "replies"
PAGES = DATA / "mini" / "omni" / "pages"
by_page = answer_by_page(REPLIES)


def run(*words: object) -> int:
    return benchmark.main([str(word) for word in words])


def page(*lines: str, cells: tuple[str, ...] = ()) -> stats.Seen:
    return stats.Seen(tuple(map(stats.normalise, lines)), cells, ())


def missed(expected: stats.Expected, seen: stats.Seen, tolerance: float = stats.TOLERANCE) -> tuple[str, ...]:
    return stats.grade(expected, [seen], tolerance).missed


# ---- The rule


@pytest.mark.parametrize(
    ("length", "edits"), [(0, 0), (1, 0), (19, 0), (20, 1), (39, 1), (40, 2), (100, 5), (1000, 50)]
)
def test_the_edits_allowed_grow_with_the_length(length: int, edits: int) -> None:
    assert stats.allowed("x" * length) == edits


LINE = "The lamps of the harbour were lit at dusk."  # 42 characters: two edits


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (LINE, True),
        (f"Before it. {LINE} After it.", True),
        ("The lamps of the harbour were lit\nat dusk.", True),  # wrapped otherwise
        ("The lamps of the harbor were lit at dusk.", True),  # one edit
        ("The lamps of the harbor were lit at dusk", True),  # two
        ("The lamp of the harbor were lit at dusk", False),  # three
        ("The lamps of the town were lit at dusk.", False),
        ("", False),
    ],
)
def test_a_line_is_found_within_its_edits(read: str, found: bool) -> None:
    assert (missed(stats.expected_text(LINE), page(*read.splitlines())) == ()) == found
    assert missed(stats.expected_text(LINE), page(LINE.replace("dusk", "noon")), tolerance=0.2) == ()


def test_short_lines_and_prices_must_be_exact() -> None:
    assert missed(stats.expected_text("Total 4.20\n12 May"), page("Total 4.20", "12 May")) == ()
    assert missed(stats.expected_text("Total 4.20"), page("Total 4.30")) == ("Total 4.20",)
    assert missed(stats.expected_text("Page 1"), page("Page 12")) == ("Page 1",)  # no part of a number or word


def test_what_is_found_once_is_not_found_again() -> None:
    assert missed(stats.expected_text("Received.\nReceived.\nReceived."), page("Received.", "Received.")) == (
        "Received.",
    )
    # The longer line is looked for first, so that the shorter one does not take its words.
    assert missed(stats.expected_text("Total\nTotal of the year"), page("Total of the year", "Total")) == ()


def test_signs_that_read_alike_are_alike() -> None:
    assert missed(stats.expected_text("“It’s” 1–2…  café"), page('"It\'s" 1-2... cafe\u0301')) == ()


def test_cells_are_found_in_tables_only_and_each_once() -> None:
    expected = stats.expected_markdown("| a | b |\n| --- | --- |\n| 4.20 | 4.20 |\n")
    assert expected == stats.Expected((), ("a", "b", "4.20", "4.20"))
    assert missed(expected, page(cells=("a", "b", "4.20", "4.20"))) == ()
    assert missed(expected, page(cells=("a", "b", "4.20"))) == ("4.20",)
    assert missed(expected, page("a b 4.20 4.20")) == ("a", "b", "4.20", "4.20")
    long = "A cell of thirty characters!!!"
    assert missed(stats.Expected((), (long,)), page(cells=(long.replace("thirty", "thirtv"),))) == ()


def test_markdown_is_read_as_its_text() -> None:
    text = """# A **bold** heading
- [x] an item with [a link](http://x.y) and `code`
1. *one* of two_words_kept and 3 * 4
> quoted \\_so\\_ &amp; on, costs $5 to $6

$x^2$ and \\(y\\) ![alt](a.png)
***
<table><tr><td>1 &lt; 2</td><td><b>z</b></td></tr></table>
| h |
|---|
| c \\| d |
"""
    expected = stats.expected_markdown(text)
    assert expected.lines == (
        "A bold heading",
        "an item with a link and code",
        "1. one of two_words_kept and 3 * 4",
        "quoted _so_ & on, costs $5 to $6",
        "x^2 and y",
    )
    assert expected.cells == ("1 < 2", "z", "h", "c | d")


@pytest.mark.parametrize("name", sorted(path.stem for path in REPLIES.glob("*.html")))
def test_the_clients_own_markdown_is_found_whole_in_its_page(name: str) -> None:
    reply = (REPLIES / f"{name}.html").read_text(encoding="utf-8")
    markdown = ocr.to_markdown(ocr.read_reply(reply), headers_footers=True, images=False)
    assert missed(stats.expected_markdown(markdown), stats.seen(reply), tolerance=0.0) == ()


@given(st.text("ab c", min_size=1, max_size=12), st.text("ab cd", max_size=24))
@settings(max_examples=150, deadline=None)
def test_the_best_place_of_a_line_is_the_best_of_all_places(line: str, text: str) -> None:
    best = min(stats.edit_distance(line, text[i:j]) for i in range(len(text) + 1) for j in range(i, len(text) + 1))
    assert stats.best_end(line, text)[0] == best
    place = stats.find_within(line, text, len(line))
    if line.strip() and place and place.edits:
        assert stats.edit_distance(line, text[place.start : place.end]) == place.edits == best


def test_words_that_nobody_expected_are_told() -> None:
    graded = stats.grade(stats.expected_text("one two"), [page("one two three four")])
    assert (graded.rate, graded.extra_words) == (1.0, 0.5)
    assert stats.grade(stats.expected_text(""), [page("x")]).rate is None


# ---- The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four pages with their texts, one page without, one text without."""
    made = tmp_path / "set"
    (made / "bills").mkdir(parents=True)
    for name, place in (
        ("goods_p1.png", "bills"),
        ("landings_p3.pdf", "bills"),
        ("waves_p2.pdf", "."),
        ("bees_p1.pdf", "."),
    ):
        shutil.copy(PAGES / name, made / place)
        reply = (REPLIES / f"{Path(name).stem}.html").read_text(encoding="utf-8")
        markdown = ocr.to_markdown(ocr.read_reply(reply), headers_footers=True)
        (made / place / name).with_suffix(".md").write_text(markdown, encoding="utf-8")
    (made / "bees_p1.md").unlink()
    (made / "bees_p1.txt").write_text("﻿A line that the page does not hold anywhere\n", encoding="utf-8")
    shutil.copy(PAGES / "rain_p5.pdf", made)
    (made / "README.md").write_text("about this set")
    return made


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


def test_a_folder_of_pages_and_texts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    with Standin(by_page) as server:
        words = ["own", "--data", folder, "--out", out, "--url", server.url]
        assert run(*words) == 0
        said = capsys.readouterr()
        assert "rain_p5.pdf has no text beside it: left out" in said.err
        assert "bees_p1.pdf: 0 of 1; not found: 'A line that" in said.out
        score = read(out)["score"]
        lines = {line["page"]: line for line in map(json.loads, (out / "own.jsonl").read_text().splitlines())}
        assert {name: line["rate"] for name, line in lines.items()} == {
            "bees_p1.pdf": 0.0,
            "bills/goods_p1.png": 1.0,
            "bills/landings_p3.pdf": 1.0,
            "waves_p2.pdf": 1.0,
        }
        total = sum(line["expected"] for line in lines.values())
        assert score["headline"] == pytest.approx((total - 1) / total)
        assert score["interval"][0] < score["headline"] < score["interval"][1] == 1.0
        assert score["parts"]["bills"]["score"] == 1.0 and score["parts"]["pages"]["score"] < 1.0
        assert (score["tolerance"], score["dpi"]) == (stats.TOLERANCE, 150)

        # A page that fails holds nothing; it is counted.
        def but_goods(request: Request) -> Any:
            answer = by_page(request)
            return Status(400, "cannot") if "Canvas" in str(answer.content) else answer

        server.answer = but_goods
        assert run(*words[:4], tmp_path / "failed", *words[5:]) == 1
        record = read(tmp_path / "failed")
        assert record["pages"]["failed"] == 1
        assert record["score"]["headline"] == pytest.approx(
            (total - 1 - lines["bills/goods_p1.png"]["expected"]) / total
        )
        assert record["score"]["parts"]["bills"]["tests"] == score["parts"]["bills"]["tests"]


def sent_page(path: Path, number: int) -> str:
    """A page's name at the stand-in: the hash of its pixels."""
    document = ocr.Document(path, "pdf", 2, "", ocr.file_stamp(path))
    png = base64.b64decode(ocr.picture_of(document, number, 150).png)
    return hashlib.sha256(Image.open(io.BytesIO(png)).convert("RGB").tobytes()).hexdigest()


def test_a_page_of_several_pages_is_graded_as_one(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/letter.pdf").write_bytes(one_page("Leaf", pages=2))
    (tmp_path / "set/letter.txt").write_text("Page one\nPage two\n")
    said = {sent_page(tmp_path / "set/letter.pdf", n): f"Page {word}" for n, word in ((1, "one"), (2, "two"))}

    def answer(request: Request) -> Answer | None:
        words = said.get(request.page)
        return Answer(f'<div data-label="Text"><p>{words}</p></div>') if words else None

    with Standin(answer) as server:
        assert run("own", "--data", tmp_path / "set", "--out", tmp_path / "run", "--url", server.url) == 0
    assert read(tmp_path / "run")["score"]["headline"] == 1.0
    assert read(tmp_path / "run")["score"]["interval"] == [None, None]  # one document


def test_tables_of_images_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = (PAGES / "goods_p1.png").read_bytes()
    pdf = (PAGES / "waves_p2.pdf").read_bytes()
    goods, waves = "Received in good order.\nCanvas, 12 yards", "no such line at all"
    table = pyarrow.table(
        {"scan": [{"bytes": image, "path": "a.png"}, {"bytes": pdf, "path": None}], "gold": [goods, waves]}
    )
    parquet.write_table(table, tmp_path / "set.parquet")
    with Standin(by_page) as server:
        words = ["own", "--data", tmp_path / "set.parquet", "--out", tmp_path / "run", "--url", server.url]
        assert run(*words) == 2
        assert "the table has the columns scan, gold" in capsys.readouterr().err
        assert run(*words, "--image-column", "scan", "--text-column", "gold") == 0
        assert read(tmp_path / "run")["score"]["headline"] == pytest.approx(2 / 3)
        plain = pyarrow.table({"image": [image], "text": [goods]})
        (tmp_path / "hub").mkdir()
        parquet.write_table(plain, tmp_path / "hub" / "test-00000.parquet")
        assert run("own", "--data", tmp_path / "hub", "--out", tmp_path / "run2", "--url", server.url) == 0
        assert read(tmp_path / "run2")["score"]["headline"] == 1.0


def test_bad_sets_are_refused_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "set"
    made.mkdir()

    def refused() -> str:
        assert run("own", "--data", made, "--out", tmp_path / "run", "--url", "http://127.0.0.1:9/v1") == 2
        return capsys.readouterr().err

    assert "no page has its text beside it" in refused()
    shutil.copy(PAGES / "waves_p2.pdf", made / "a.pdf")
    shutil.copy(PAGES / "goods_p1.png", made / "a.png")
    (made / "a.md").write_text("x")
    assert "a.pdf and a.png have one name" in refused()
    (made / "a.png").unlink()
    (made / "a.txt").write_text("y")
    assert "a.md and a.txt have one name" in refused()
    (made / "a.txt").unlink()
    (made / "a.md").write_bytes(b"\xff\xfe\x00x")
    assert "a.md: is not UTF-8 text" in refused()
    (made / "a.md").write_text("\n\n")
    assert "every expected text is empty" in refused()
    assert run("own", "--data", tmp_path / "absent", "--out", tmp_path / "run") == 2
    assert "give a folder" in capsys.readouterr().err

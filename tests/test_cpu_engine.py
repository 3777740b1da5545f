"""The embedded engine: the order and grouping of made-up lines, and the sample PDF read by the real models."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path

import pytest
from PIL import Image

import ocr

PAGE = (1275, 1650)  # letter at 150 dpi
needs_models = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr") is None,
    reason="rapidocr is not installed: pip install -r requirements-cpu.txt",
)
SAMPLE = Path(__file__).parent / "data" / "sample.pdf"


def line(text: str, x: float, y: float, height: float = 28, letter: float = 11.5) -> ocr.Line:
    """A line whose width follows from its letters, as in a font."""
    narrow = "fijlrtI1.,;:'|!()[]- "
    units = sum(0.3 if c in narrow else 0.85 if c in "mw" or c.isupper() else 0.55 for c in text)
    return ocr.Line(text, x, y, x + 2 * letter * units, y + height)


def prose(x: float, y: float, words: str, pitch: float = 32) -> list[ocr.Line]:
    """Following lines, divided by '/' in `words`."""
    return [line(text.strip(), x, y + pitch * i) for i, text in enumerate(words.split("/"))]


LEFT_COLUMN = (
    "the pier was begun in the year of / the flood and took four summers to / finish because stones came by barge"
)
RIGHT_COLUMN = (
    "today volunteers keep the old pier / and repaint its lamp in each spring / with paint given by the harbour town"
)


def grouped(lines: list[ocr.Line], shuffle: bool = True) -> list[tuple[str, str]]:
    if shuffle:  # the order of detection says nothing
        random.Random(1).shuffle(lines)
    return [(block.label, block.html) for block in ocr.group_lines(lines, *PAGE)]


def plain(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html).replace("  ", " ").strip()


def test_no_lines_no_blocks() -> None:
    assert ocr.group_lines([], *PAGE) == []
    assert grouped([line("  ", 100, 100), line("_", 100, 200), ocr.Line("flat", 10, 10, 10, 30)]) == []


def test_lines_become_a_paragraph_and_the_box_holds_them_all() -> None:
    lines = prose(120, 300, LEFT_COLUMN)
    (block,) = ocr.group_lines(lines, *PAGE)
    assert (block.label, block.html) == ("Text", f"<p>{LEFT_COLUMN.replace(' / ', ' ')}</p>")
    assert block.box == (120, 300, max(n.x1 for n in lines), lines[-1].y1)


def test_two_columns_are_read_one_after_the_other_below_their_title() -> None:
    title = line("A short history of the north pier and its lamp", 120, 150, 48, 20)
    lines = [title, *prose(120, 300, LEFT_COLUMN), *prose(700, 300, RIGHT_COLUMN)]
    (label, heading), (_, left), (_, right) = grouped(lines)
    assert (label, heading) == ("Section-Header", f"<h1>{title.text}</h1>")
    assert plain(left) == LEFT_COLUMN.replace(" / ", " ")
    assert plain(right) == RIGHT_COLUMN.replace(" / ", " ")


def test_columns_between_full_width_paragraphs() -> None:
    wide = "this line of the report runs across the page from the left margin to the right one / and ends here"
    lines = [
        *prose(120, 150, wide),
        *prose(120, 300, LEFT_COLUMN),
        *prose(700, 300, RIGHT_COLUMN),
        *prose(120, 480, wide.replace("report", "close")),
    ]
    texts = [plain(html) for _, html in grouped(lines)]
    assert len(texts) == 4
    assert "report" in texts[0] and "begun" in texts[1] and "volunteers" in texts[2] and "close" in texts[3]


def test_columns_that_touch_and_lean() -> None:
    """As in an old newspaper: hardly any white between columns, and the page bends."""
    lines = []
    for i in range(20):
        lines += [line("the ship is in the harbour again", 100 + i, 300 + 31 * i, 30)]
        lines += [line("and her guns are seen by all of us", lines[0].x1 + i - 4, 304 + 31 * i, 30)]
    left, right = grouped(lines)
    assert plain(left[1]).count("ship") == 20 and "guns" not in left[1]
    assert plain(right[1]).count("guns") == 20


def test_heading_between_paragraphs() -> None:
    lines = [
        *prose(120, 150, LEFT_COLUMN),
        line("The lamp", 120, 290, 36, 16),
        *prose(120, 350, RIGHT_COLUMN),
    ]
    assert [label for label, _ in grouped(lines)] == ["Text", "Section-Header", "Text"]
    assert grouped(lines)[1][1] == "<h2>The lamp</h2>"


def test_space_parts_paragraphs_and_so_does_an_indented_line() -> None:
    spaced = [*prose(120, 150, LEFT_COLUMN), *prose(120, 300, RIGHT_COLUMN)]
    assert len(grouped(spaced)) == 2
    first, *rest = prose(120, 150 + 3 * 32, RIGHT_COLUMN)
    indented = [*prose(120, 150, LEFT_COLUMN), ocr.Line(first.text, 160, first.y0, first.x1 + 40, first.y1), *rest]
    assert len(grouped(indented)) == 2


def test_hanging_entries_stay_whole() -> None:
    entries = []
    for i, name in enumerate(("Adams", "Baker", "Clark")):
        entries += [line(f"{name} J (1999) A study of tides and of their", 120, 200 + 64 * i)]
        entries += [line("causes in the small harbours of the north", 150, 232 + 64 * i)]
    texts = [plain(html) for _, html in grouped(entries)]
    assert [text.split()[0] for text in texts] == ["Adams", "Baker", "Clark"]


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ("a long line that ends in the mid-", "dle of a word, and then the end", "in the middle of a word"),
        ("a long line about the old Anglo-", "Saxon kings who ruled the north", "old Anglo-Saxon kings"),
        ("a long line about the years 1904-", "1910 and about the years after", "years 1904-1910 and"),
        ("a long line with a dash — then -", "a lone hyphen that is a minus", "then - a lone"),
    ],
)
def test_words_broken_at_a_line_end(first: str, second: str, joined: str) -> None:
    ((_, html),) = grouped([line(first, 120, 200), line(second, 120, 232)])
    assert joined in html


def test_table_is_read_row_by_row() -> None:
    rows = [("Port", "Spring", "Autumn"), ("Ardle", "120", "98"), ("Kessin", "87", "64"), ("Lowmill", "7", "12")]
    lines = [line(cell, 120 + 250 * c, 300 + 40 * r) for r, row in enumerate(rows) for c, cell in enumerate(row)]
    title, note = line("Landings in tonnes, by port", 120, 250), line("Source: port returns.", 120, 480)
    texts = [html for _, html in grouped([title, *lines, note])]
    assert texts[1] == "<p>" + "<br/>".join(" ".join(row) for row in rows) + "</p>"
    assert [plain(texts[0]), plain(texts[2])] == [title.text, note.text]


def test_columns_above_a_table_with_the_same_gutter() -> None:
    cells = [line(f"{name} {c}", 120 + 580 * c, 560 + 40 * r) for r, name in enumerate("ABCD") for c in (0, 1)]
    blocks = grouped([*prose(120, 300, LEFT_COLUMN), *prose(700, 300, RIGHT_COLUMN), *cells])
    assert [plain(html)[:5] for _, html in blocks] == ["the p", "today", "A 0 A"]


def test_bullets_become_a_list_and_numbers_stay_apart() -> None:
    bullets = [
        line(f"• {name}", 120, 200 + 32 * i) for i, name in enumerate(("hawthorn", "dog rose", "bramble & fern"))
    ]
    assert grouped(bullets) == [
        ("List-Group", "<ul><li>hawthorn</li><li>dog rose</li><li>bramble &amp; fern</li></ul>")
    ]
    numbered = [line(f"{i}. raise the sockets on quay {i} by 40 cm", 120, 200 + 32 * i) for i in (1, 2, 3)]
    assert [plain(html)[:2] for _, html in grouped(numbered)] == ["1.", "2.", "3."]


def test_bullet_item_over_two_lines() -> None:
    items = [
        line("• hawthorn that was left uncut for", 120, 200),
        line("three years", 140, 232),
        line("• rose", 120, 264),
    ]
    ((_, html),) = grouped(items)
    assert html == "<ul><li>hawthorn that was left uncut for three years</li><li>rose</li></ul>"


def test_page_header_and_footer_stay_out_of_the_columns() -> None:
    lines = [
        line("Harbour Review", 120, 60),
        line("volume 7", 1000, 60),
        *prose(120, 300, LEFT_COLUMN),
        *prose(700, 300, RIGHT_COLUMN),
        line("page 12", 120, 1580),
    ]
    texts = [plain(html) for _, html in grouped(lines)]
    assert texts[0] == "Harbour Review volume 7" and texts[-1] == "page 12" and len(texts) == 4


def test_text_is_escaped() -> None:
    ((_, html),) = grouped([line("a < b && c > d is <script>", 120, 200)])
    assert html == "<p>a &lt; b &amp;&amp; c &gt; d is &lt;script&gt;</p>"


def test_no_word_is_lost_or_doubled_wherever_lines_stand() -> None:
    chance = random.Random(7)
    for _ in range(300):
        lines = [
            line(
                f"word{i}" + " more" * chance.randrange(9),
                chance.randrange(900),
                chance.randrange(1500),
                chance.randrange(5, 90),
            )
            for i in range(chance.randrange(1, 40))
        ]
        blocks = ocr.group_lines(lines, *PAGE)
        found = re.findall(r"word\d+", " ".join(plain(block.html) for block in blocks))
        assert sorted(found) == sorted(n.text.split()[0] for n in lines)


def sample_page(number: int) -> Image.Image:
    pdfium = pytest.importorskip("pypdfium2")
    return pdfium.PdfDocument(SAMPLE)[number].render(scale=150 / 72).to_pil().convert("RGB")


def boxes(reply: str) -> list[list[int]]:
    return [[int(n) for n in box.split()] for box in re.findall(r'<div data-bbox="([^"]*)"', reply)]


@needs_models
def test_the_sample_is_read_in_order() -> None:
    reply = ocr.recognize(sample_page(0), threads=2)
    order = [
        "<h1>A Year of Tides at Ellmouth</h1>",
        "1. Introduction",
        "has kept a tide gauge since 1931. This report looks at",
        "came on 14 November, when a north-westerly gale",  # the left column
        "to keep the fish market dry.",
        "The gauge was cleaned in June and its float",  # the right column
        "Quarter Mean (m) Highest (m) Storm days",
        "Autumn 2.46 4.95 9",
        "Page 1 of 2",
    ]
    places = [reply.find(words) for words in order]
    assert -1 not in places and places == sorted(places)
    assert all(len(b) == 4 and 0 <= b[0] < b[2] <= 1000 and 0 <= b[1] < b[3] <= 1000 for b in boxes(reply))


@needs_models
@pytest.mark.parametrize(
    "words",
    [
        "stays at $5, and a season ticket at $48.50",
        "tide_gauge_2024.csv",
        "h(t) = 2.4 + 1.1 sin(0.506 t)",
        "<ul><li>Service the second pump before October.</li><li>Raise the electric",
        "Page 2 of 2",
    ],
)
def test_the_samples_words(second_reply: str, words: str) -> None:
    assert words in second_reply


@pytest.fixture(scope="module")
def second_reply() -> str:
    return ocr.recognize(sample_page(1), threads=2)


@needs_models
def test_a_sideways_page_is_read_and_its_boxes_are_the_pages_own(second_reply: str) -> None:
    reply = ocr.recognize(sample_page(1).rotate(90, expand=True), threads=2)
    assert "<li>Service the second pump before October.</li>" in reply
    x0, y0, x1, y1 = boxes(second_reply)[1]  # its top left is the turned page's bottom left
    assert boxes(reply)[1] == pytest.approx([y0, 1000 - x1, y1, 1000 - x0], abs=8)


@needs_models
def test_a_page_with_nothing_on_it() -> None:
    reply = ocr.recognize(Image.new("RGB", PAGE, "white"))
    assert reply == '<div data-bbox="0 0 1000 1000" data-label="Blank-Page"></div>'

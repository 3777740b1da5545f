"""Writes a tiny dataset in Omni Parse Bench's format, every page and test authored here:

python make_mini_omni.py mini_omni replies

mini_omni/manifest.parquet, mini_omni/pages/<page_id>.pdf or .png, mini_omni/gold/<page_id>.json
replies/<page_id>.html      what a perfect model answers for each page, and replies/index.json
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import minipages
import pyarrow as pa
import pyarrow.parquet as pq
from minipages import MARGIN, WIDTH, Block, Sheet
from PIL import Image

LATIN = ["eng", "Latn"]
READS = {"present": "html", "order": "html", "repeat": "html", "table_cell": "html", "layout_kind": "blocks"}


def text(s: str, max_diffs: int = 0) -> dict[str, Any]:
    return {"text": s, "max_diffs": max_diffs}


def test(
    test_type: str, args: dict[str, Any], settings: dict[str, Any] | None = None, tags: tuple[str, ...] = ()
) -> dict:
    return {
        "test_type": test_type,
        "output_type": READS[test_type],
        "derivation": "authored",
        "tags": [*tags, *LATIN],
        "args": args,
        "settings": settings or {},
    }


def present(s: str, max_diffs: int = 0, **kw) -> dict:
    return test("present", {"content": text(s, max_diffs)}, **kw)


def number(s: str, **kw) -> dict:
    return test("present", {"content": {"number": s}}, **kw)


def latex(s: str) -> dict:
    return test("present", {"content": {"latex": s}}, tags=("math",))


def order(a: str, b: str, **kw) -> dict:
    return test("order", {"before": text(a, 1), "after": text(b, 1)}, **kw)


def repeat(s: str, n: int) -> dict:
    return test("repeat", {"content": text(s)}, {"expected_count": n})


def cell(s: str, *, headings: list[str] = (), section: str = "", row_groups: list[str] = (), **relations: str) -> dict:
    args: dict[str, Any] = {"cell": text(s)} | {k: text(v) for k, v in relations.items()}
    if headings:
        args["headings"] = [text(h) for h in headings]
    if row_groups:
        args["row_groups"] = [text(g) for g in row_groups]
    if section:
        args["section"] = text(section)
    return test("table_cell", args, tags=("table",))


def kind(b: Block, s: str, label: str) -> dict:
    return test("layout_kind", {"content": text(s) | {"place": [b.place()]}}, {"kind": label})


def prose() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    head = s.text("Page-Header", "Harbour Review, volume 7", size=9, at=30)
    title = s.text("Section-Header", "A short history of the north pier", tag="h1", size=18)
    first = s.text(
        "Text",
        "The north pier was begun in 1871 and took four summers to finish. Its stones came by barge from "
        "the quarry at Ardle, two at a time, because the crane could lift no more.",
    )
    s.text(
        "Text",
        "By the winter of 1902 some 1,240 boats were using it every year, and the harbour board had spent "
        "$18,600.50 on repairs. Traffic fell by 4.8% after the railway opened.",
    )
    last = s.text("Text", "Today the pier is kept by volunteers, who repaint the lamp each spring.")
    note = s.text("Footnote", "1 Board minutes, held at the county archive.", size=9)
    foot = s.text("Page-Footer", "page 12", size=9, at=750)
    return s, [
        present("Its stones came by barge from the quarry at Ardle, two at a time", 1),
        number("1,240"),
        number("18,600.50"),
        number("4.8%"),
        order("A short history of the north pier", "the crane could lift no more", tags=("heading",)),
        order("Traffic fell by", "Today the pier is kept by volunteers"),
        repeat("Harbour Review, volume 7", 1),
        kind(title, "A short history of the north pier", "heading"),
        kind(first, "The north pier was begun", "text"),
        kind(last, "Today the pier is kept", "text"),
        kind(note, "1 Board minutes", "footnote"),
        kind(head, "Harbour Review, volume 7", "page_furniture"),
        kind(foot, "page 12", "page_furniture"),
    ]


def two_column() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    title = s.text("Section-Header", "Bees, hedges and the shape of fields", tag="h1", size=18)
    top, width = s.y, (WIDTH - 2 * MARGIN - 20) / 2
    s.column(MARGIN, width, top)
    s.text("Section-Header", "Why hedges matter", tag="h2", size=13)
    s.text(
        "Text",
        "Hedges give wild bees a place to nest and something to eat before the crops flower. A farm that keeps its "
        "hedges keeps its bees, and a farm that keeps its bees needs to rent fewer hives in May.",
    )
    s.text(
        "Text", "We walked forty farms in two counties and counted the bees along every hedge between dawn and noon."
    )
    s.column(MARGIN + width + 20, width, top)
    s.text("Section-Header", "What we counted", tag="h2", size=13)
    right = s.text(
        "Text",
        "The oldest hedges held three times as many nests as the youngest. Width mattered less than age, and "
        "the number of flowering species mattered most of all.",
    )
    s.list(["hawthorn and blackthorn", "dog rose", "bramble, where it was left uncut"])
    listed = s.blocks[-1]
    return s, [
        present("needs to rent fewer hives in May", tags=("multi_column",)),
        order("between dawn and noon", "The oldest hedges held three times as many nests", tags=("multi_column",)),
        order("Why hedges matter", "What we counted", tags=("heading", "multi_column")),
        order("hawthorn and blackthorn", "bramble, where it was left uncut", tags=("list",)),
        kind(title, "Bees, hedges and the shape of fields", "heading"),
        kind(right, "The oldest hedges", "text"),
        kind(listed, "hawthorn and blackthorn", "list"),
    ]


def table() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    title = s.text("Section-Header", "Catch by port", tag="h2", size=15)
    caption = s.text("Caption", "Table 1. Landings in tonnes, by port and quarter.", size=10)
    rows = [
        ["Region", "Port", "Spring", "", "Autumn", ""],
        ["", "", "Cod", "Crab", "Cod", "Crab"],
        ["Year 2021", "", "", "", "", ""],
        ["North", "Ardle", "120", "33.5", "98", "41.0"],
        ["", "Kessin", "87", "12.0", "64", "9.5"],
        ["Year 2022", "", "", "", "", ""],
        ["North", "Ardle", "131", "30.5", "102", "44.5"],
        ["", "Kessin", "79", "14.5", "61", "11.0"],
    ]
    spans = [
        (0, 0, 2, 1),
        (0, 1, 2, 1),
        (0, 2, 1, 2),
        (0, 4, 1, 2),
        (2, 0, 1, 6),
        (3, 0, 2, 1),
        (5, 0, 1, 6),
        (6, 0, 2, 1),
    ]
    grid = s.table(rows, spans, headings=2)
    s.text("Footnote", "Crab is landed live weight; source: port returns.", size=9)
    return s, [
        cell("44.5", headings=["Autumn", "Crab"], section="Year 2022", row_groups=["North"]),
        cell("64", headings=["Autumn", "Cod"], section="Year 2021", row_groups=["North", "Kessin"]),
        cell("12.0", left="87", up="33.5", top_heading="Crab"),
        cell("79", left="Kessin", right="14.5", section="Year 2022"),
        cell("Spring", down="Crab"),
        present("Landings in tonnes, by port and quarter", tags=("caption",)),
        order("Catch by port", "Crab is landed live weight"),
        repeat("Kessin", 2),
        kind(title, "Catch by port", "heading"),
        kind(caption, "Table 1", "caption"),
        kind(grid, "Ardle", "table"),
    ]


def math() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    s.text("Section-Header", "Waves on a shallow shelf", tag="h2", size=15)
    s.rich(
        "Text",
        "Write <i>h</i>(<i>x</i>) for the depth and <i>g</i> for gravity. A long wave travels at speed "
        "<i>c</i> = &radic;(<i>gh</i>), so that <i>c</i><super>2</super> = <i>gh</i> everywhere on the shelf.",
        "<p>Write <math>h(x)</math> for the depth and <math>g</math> for gravity. A long wave travels at speed "
        "<math>c = \\sqrt{gh}</math>, so that <math>c^{2} = gh</math> everywhere on the shelf.</p>",
    )
    shown = s.rich(
        "Equation-Block",
        "&part;<super>2</super><greek>h</greek>/&part;<i>t</i><super>2</super> = "
        "<i>g</i> &part;/&part;<i>x</i> ( <i>h</i> &part;<greek>h</greek>/&part;<i>x</i> )",
        '<math display="block">\\frac{\\partial^{2} \\eta}{\\partial t^{2}} = g \\frac{\\partial}{\\partial x} '
        "\\left( h \\frac{\\partial \\eta}{\\partial x} \\right)</math>",
        size=13,
    )
    s.rich(
        "Text",
        "If <greek>a</greek> &lt; 1 the wave breaks before it reaches the beach.",
        "<p>If <math>\\alpha &lt; 1</math> the wave breaks before it reaches the beach.</p>",
    )
    return s, [
        latex(r"c=\sqrt{gh}"),
        latex(r"c^2=gh"),
        latex(r"\alpha<1"),
        latex(
            r"\frac{\partial^2\eta}{\partial t^2}=g\frac{\partial}{\partial x}\left(h\frac{\partial\eta}{\partial x}\right)"
        ),
        present("everywhere on the shelf", tags=("math",)),
        order("A long wave travels at speed", "the wave breaks before it reaches the beach"),
        kind(shown, "the wave equation", "equation"),
    ]


def figure() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    title = s.text("Section-Header", "Rain in the valley", tag="h2", size=15)
    chart = s.bars(
        "Figure",
        {"March": 60, "April": 45, "May": 20},
        '<img alt="Bar chart of rainfall by month: March 60, April 45, May 20 millimetres"/>',
    )
    caption = s.text("Caption", "Figure 3. Rainfall in millimetres, spring 2019.", size=10)
    s.text("Text", "Most of the spring rain fell in March, and May was the driest since records began.")
    return s, [
        present("Figure 3. Rainfall in millimetres", 1, tags=("caption",)),
        present("April", tags=("figure",)),
        order("Rain in the valley", "spring 2019"),
        repeat("March", 1),
        kind(title, "Rain in the valley", "heading"),
        kind(chart, "April", "figure"),
        kind(caption, "Figure 3", "caption"),
    ]


def repeated() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    s.text("Section-Header", "Goods received", tag="h2", size=15)
    for item in ("Rope, 40 m, two coils", "Lamp oil, 5 l, six tins", "Canvas, 12 yards"):
        s.text("Text", item)
        s.text("Text", "Received in good order.")
    return s, [
        repeat("Received in good order.", 3),
        repeat("Canvas, 12 yards", 1),
        present("Lamp oil, 5 l, six tins"),
        order("Rope, 40 m", "Canvas, 12 yards"),
        number("40"),
    ]


def form() -> tuple[Sheet, list[dict]]:
    s = Sheet()
    s.text("Section-Header", "Mooring permit", tag="h2", size=15)
    fields = s.rich(
        "Form",
        "Name: J. Sedge<br/>Vessel: Kittiwake<br/>[X] resident &nbsp; [ &nbsp; ] visitor",
        '<p>Name: J. Sedge<br/>Vessel: Kittiwake<br/><input type="checkbox" checked/> resident '
        '<input type="checkbox"/> visitor</p>',
    )
    s.text("Text", "Show the permit to the warden on request.")
    code = s.code(["permit --vessel Kittiwake \\", "  --days 14 > permit.txt"])
    return s, [
        present("\u2612 resident", tags=("form",)),
        present("\u2610 visitor", tags=("form",)),
        present("Vessel: Kittiwake", tags=("form",)),
        present("--days 14 > permit.txt", tags=("code",)),
        order("Name: J. Sedge", "Show the permit to the warden", tags=("form",)),
        kind(fields, "Name: J. Sedge", "form"),
        kind(code, "permit --vessel", "code"),
    ]


PAGES = {  # page id -> how it is drawn, its file's suffix, its suite and its document
    "harbour_p12": (prose, ".pdf", "reports", "harbour"),
    "bees_p1": (two_column, ".pdf", "papers", "bees"),
    "landings_p3": (table, ".pdf", "papers", "landings"),
    "waves_p2": (math, ".pdf", "papers", "waves"),
    "rain_p5": (figure, ".pdf", "reports", "rain"),
    "goods_p1": (repeated, ".png", "scans", "goods"),
    "permit_p1": (form, ".png", "", "permit"),
}


def main(root: Path, replies: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("pages", "gold"):
        (root / folder).mkdir(parents=True)
    rows, answers, images = [], {}, {}
    for page_id, (draw, suffix, suite, document) in PAGES.items():
        sheet, tests = draw()
        page = root / "pages" / f"{page_id}{suffix}"
        (minipages.save_pdf if suffix == ".pdf" else minipages.save_png)(page, sheet)
        tests = [{"id": f"{page_id}_{i:02}"} | t for i, t in enumerate(tests)]
        (root / "gold" / f"{page_id}.json").write_text(
            json.dumps({"tests": tests}, indent=1, ensure_ascii=False) + "\n"
        )
        rows.append(
            {
                "page_id": page_id,
                "document": document,
                "suite": suite or None,
                "doc_path": f"pages/{page.name}",
                "gt_path": f"gold/{page_id}.json",
                "outputs": sorted({t["output_type"] for t in tests}),
            }
        )
        answers[page_id] = sheet.reply()
        images[page_id] = minipages.render(page) if suffix == ".pdf" else Image.open(page)
    pq.write_table(pa.Table.from_pylist(rows), root / "manifest.parquet")
    minipages.save_replies(replies, answers, images)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

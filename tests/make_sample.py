"""Writes tests/data/sample.pdf, the two-page report that the README's first command reads.

    python tests/make_sample.py           write the file again
    python tests/make_sample.py --check   exit 1 when the shipped file is not what this script makes

The PDF is written by hand, object by object: no dates, no compression and no embedded fonts, so its bytes are the same
everywhere. The text is made up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SAMPLE = Path(__file__).parent / "data" / "sample.pdf"
WIDTH, HEIGHT = 612, 792  # US letter, points
LEFT, RIGHT = 72, 540  # the text's margins
FONTS = {"F1": "Times-Roman", "F2": "Helvetica-Bold", "F3": "Times-Italic", "F4": "Courier"}

INTRODUCTION = """
The small harbour of Ellmouth has kept a tide gauge since 1931. This report looks
at the twelve months that ended in March, compares them with the year before, and
says what the harbour office should do before the winter storms arrive.
"""

READINGS = """
Readings were taken every ten minutes by a float in the old lock. Gaps of less
than an hour were filled by a straight line; longer gaps were left empty. In all,
98.6% of the readings are good, which is the best year of the last five.
"""

STORM = """
The highest water of the year
came on 14 November, when a
north-westerly gale met a spring
tide. The lower quay was under
water for forty minutes, and two
of the three pumps were needed
to keep the fish market dry.
"""

REPAIRS = """
The gauge was cleaned in June
and its float replaced in August.
A new cable now runs along the
east wall, out of reach of boats.
None of the work interrupted the
readings for more than one day,
so the year can be compared.
"""

COSTS = """
A day ticket for the slipway stays at $5, and a season ticket at $48.50. The raw
readings are in the file tide_gauge_2024.csv, one line for each ten minutes; the
column mean_level holds the height in metres above the chart's zero.
"""

ADVICE = [
    "Service the second pump before October.",
    "Raise the electric sockets on the lower quay by 40 cm.",
    "Print the warning table for every boat in the harbour.",
]

TABLE = [
    ("Quarter", "Mean (m)", "Highest (m)", "Storm days"),
    ("Spring", "2.31", "4.02", "3"),
    ("Summer", "2.28", "3.87", "1"),
    ("Autumn", "2.46", "4.95", "9"),
    ("Winter", "2.52", "4.71", "12"),
]

BARS = [("Spring", 3), ("Summer", 1), ("Autumn", 9), ("Winter", 12)]


def text(x: float, y: float, words: str, size: float = 13, font: str = "F1") -> str:
    """One line of text, its baseline at y points from the page's bottom."""
    escaped = words.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    return f"BT /{font} {size} Tf {x} {y} Td ({escaped}) Tj ET"


def paragraph(x: float, y: float, lines: str, leading: float = 16) -> list[str]:
    return [text(x, y - leading * i, line) for i, line in enumerate(lines.strip().splitlines())]


def rule(x0: float, y0: float, x1: float, y1: float, width: float = 0.7) -> str:
    return f"{width} w {x0} {y0} m {x1} {y1} l S"


def furniture(number: int) -> list[str]:
    """The running head and foot."""
    return [
        text(LEFT, 744, "Ellmouth Harbour Office", 9, "F3"),
        text(463, 744, "Tide report, no. 7", 9, "F3"),
        rule(LEFT, 738, RIGHT, 738),
        text(283, 40, f"Page {number} of 2", 9),
    ]


def table(top: float) -> list[str]:
    columns, height = (LEFT + 8, 190, 310, 440), 20
    drawn = []
    for i, row in enumerate(TABLE):
        y = top - height * i
        drawn.append(rule(LEFT, y, RIGHT, y))
        drawn += [text(x, y - 14, cell, 10.5, "F2" if i == 0 else "F1") for x, cell in zip(columns, row, strict=True)]
    bottom = top - height * len(TABLE)
    return [*drawn, rule(LEFT, bottom, RIGHT, bottom), *(rule(x, top, x, bottom) for x in (LEFT, 180, 300, 430, RIGHT))]


def figure(bottom: float) -> list[str]:
    """A bar chart: storm days in each quarter."""
    drawn = [rule(120, bottom, 492, bottom, 1), rule(120, bottom, 120, bottom + 135, 1)]
    for i, (name, days) in enumerate(BARS):
        x = 150 + 88 * i
        drawn.append(f"0.35 0.55 0.75 rg {x} {bottom} 48 {days * 10} re f 0 g")
        drawn += [text(x + 18, bottom + days * 10 + 4, str(days), 10), text(x + 6, bottom - 14, name, 10)]
    return drawn


def first_page() -> list[str]:
    return [
        *furniture(1),
        text(LEFT, 690, "A Year of Tides at Ellmouth", 24, "F2"),
        text(LEFT, 664, "Report of the harbour office, with advice for the winter", 12, "F3"),
        text(LEFT, 624, "1. Introduction", 17, "F2"),
        *paragraph(LEFT, 602, INTRODUCTION),
        text(LEFT, 530, "2. The readings", 17, "F2"),
        *paragraph(LEFT, 508, READINGS),
        text(LEFT, 436, "The night of the storm", 17, "F2"),
        *paragraph(LEFT, 412, STORM),
        text(322, 436, "Work on the gauge", 17, "F2"),
        *paragraph(322, 412, REPAIRS),
        text(LEFT, 272, "Table 1. Water levels and storm days, by quarter.", 10.5, "F3"),
        *table(258),
        text(LEFT, 124, "Levels are above the chart's zero. A storm day has gusts of 20 m/s or more.", 10.5),
    ]


def second_page() -> list[str]:
    return [
        *furniture(2),
        text(LEFT, 690, "3. How the level is worked out", 17, "F2"),
        text(LEFT, 668, "The calm-weather level, in metres, t hours after midnight, follows"),
        text(200, 638, "h(t) = 2.4 + 1.1 sin(0.506 t) + 0.02 t\xb2", 13, "F3"),
        text(LEFT, 608, "with an error of \xb1 0.05 m on nine days out of ten."),
        text(LEFT, 568, "4. Tickets and data", 17, "F2"),
        *paragraph(LEFT, 546, COSTS),
        *figure(350),
        text(LEFT, 312, "Figure 1. Storm days in each quarter of the year.", 10.5, "F3"),
        text(LEFT, 272, "5. Advice", 17, "F2"),
        *(text(LEFT + 12, 250 - 18 * i, f"\x95 {line}") for i, line in enumerate(ADVICE)),
        text(LEFT, 178, "The next report appears in April. Questions go to the harbour office."),
    ]


def make_pdf() -> bytes:
    """Catalog, page tree, fonts, then each page with its content, and the table of where they lie."""
    pages = [first_page(), second_page()]
    first = 3 + len(FONTS)  # the number of the first page's object
    kids = " ".join(f"{first + 2 * i} 0 R" for i in range(len(pages)))
    fonts = " ".join(f"/{name} {3 + i} 0 R" for i, name in enumerate(FONTS))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        *(f"<< /Type /Font /Subtype /Type1 /BaseFont /{font} /Encoding /WinAnsiEncoding >>" for font in FONTS.values()),
    ]
    for i, page in enumerate(pages):
        content = "\n".join(page)
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {WIDTH} {HEIGHT}] /Contents {first + 2 * i + 1} 0 R"
            f" /Resources << /Font << {fonts} >> >> >>",
            f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        ]
    pdf, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(pdf))
        pdf += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table_of_places = "".join(f"{place:010d} 00000 n \n" for place in places)
    trailer = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table_of_places}"
        f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(pdf)}\n%%EOF\n"
    )
    return pdf + trailer.encode("ascii")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the sample PDF the README's first command reads.")
    parser.add_argument("--check", action="store_true", help="only compare the shipped file with what would be made")
    pdf = make_pdf()
    if parser.parse_args().check:
        if SAMPLE.exists() and SAMPLE.read_bytes() == pdf:
            return 0
        print(f"{SAMPLE} is not what this script makes: run it without --check", file=sys.stderr)
        return 1
    SAMPLE.parent.mkdir(parents=True, exist_ok=True)
    SAMPLE.write_bytes(pdf)
    print(f"wrote {SAMPLE} ({len(pdf)} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

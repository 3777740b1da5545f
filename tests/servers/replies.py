"""What the tiny checkpoint says, and the pages that make it say so: `python replies.py > replies.json`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ocr


def div(label: str, html: str, box: str = "80 60 920 940") -> str:
    return f'<div data-bbox="{box}" data-label="{label}">{html}</div>'


def canary(lines: tuple[str, ...], box: str) -> str:
    return div("Section-Header", f"<h1>{lines[0]}</h1>", box) + div("Text", f"<p>{' '.join(lines[1:])}</p>", box)


first, second = ocr.CANARY_LINES
# Image tokens: what vLLM makes of the page as it is sent, in cells of 32 x 32 px.
LETTER = 2084  # 612 x 792 points
SMALL = 1380  # 300 x 400 points: drawn 1024 px wide
SQUARE = 1028  # 200 x 200 points

REPLIES = [
    {"tokens": 392, "text": canary(first, "50 130 700 900")},
    {"tokens": 588, "text": canary(second, "70 530 930 800")},
    {"tokens": 5292, "text": canary(second, "71 531 929 799")},
    {
        "tokens": LETTER,
        "text": div("Section-Header", "<h1>Harvest of the year</h1>", "80 60 920 140")
        + "\n"
        + div("Text", "<p>Eleven carts &amp; nine wagons of barley went to the mill at noon.</p>", "80 160 920 400"),
    },
    # It leaves its loop when it is warm.
    {
        "tokens": SMALL,
        "text": div("Text", "<p>A ledger whose last column runs on and on ")[:-6] + "12 34 56 ",
        "loop": 1,
    },
    {"tokens": SQUARE, "text": div("Text", f"<p>{' '.join(f'number {n} of many' for n in range(1, 60))}</p>")},
]

if __name__ == "__main__":
    print(json.dumps({"prompt": ocr.prompt(), "replies": REPLIES}))

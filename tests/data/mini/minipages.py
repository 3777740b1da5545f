"""Pages drawn for the tiny datasets: each block is drawn on a PDF page and recorded as the model would answer it.

- `Sheet`: one PDF page; its methods draw a block and record its label, box and HTML;
- `save_pdf` and `save_png`: sheets as a PDF, or a sheet as an image page;
- `scan`: a PDF as a grey, noisy scan of itself; and
- `index`: thumbnails of pages, so a stand-in server can tell which page an image shows (`which`).
"""

from __future__ import annotations

import html
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pypdfium2 as pdfium
from PIL import Image
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import Paragraph, Preformatted, Table, TableStyle

WIDTH, HEIGHT, MARGIN = 612, 792, 60
GAP = 10
THUMB = (24, 32)


class Block(NamedTuple):
    label: str  # one of Chandra's labels
    box: tuple[int, int, int, int]  # x0, y0, x1, y1, from 0 to 1000
    html: str

    def reply(self) -> str:
        """The block as the model answers it."""
        return f'<div data-bbox="{" ".join(map(str, self.box))}" data-label="{self.label}">{self.html}</div>'

    def place(self) -> list[float]:
        """The block's box as fractions of the page, as a layout test's place writes it."""
        return [v / 1000 for v in self.box]


class Sheet:
    """One page. Every method draws a block at the top of what is left of the current column (or at `at`, a
    distance from the page's top), records it, and returns it."""

    def __init__(self) -> None:
        self.draws: list[Callable[[Canvas], None]] = []
        self.blocks: list[Block] = []
        self.column(MARGIN, WIDTH - 2 * MARGIN, MARGIN)

    def column(self, x: float, width: float, top: float) -> None:
        """Starts a column: blocks are drawn under one another from `top` on."""
        self.x, self.width, self.y = x, width, top

    def reply(self) -> str:
        """The whole page as the model answers it: its top-level divs, in reading order."""
        return "\n".join(b.reply() for b in self.blocks)

    def flow(self, label: str, flowable, answer: str, *, at: float | None = None) -> Block:
        """A reportlab flowable, and the HTML the model answers for it."""
        top = self.y if at is None else at
        w, h = flowable.wrap(self.width, HEIGHT)
        x = self.x
        self.draws.append(lambda c: flowable.drawOn(c, x, HEIGHT - top - h))
        if at is None:
            self.y = top + h + GAP
        return self._add(label, (x, top, x + min(w, self.width), top + h), answer)

    def text(self, label: str, content: str, *, tag: str = "p", size: float = 11, at: float | None = None) -> Block:
        """Plain text in one tag."""
        bold = "-Bold" if tag.startswith("h") else ""
        style = ParagraphStyle("x", fontName="Helvetica" + bold, fontSize=size, leading=size * 1.3)
        return self.flow(
            label, Paragraph(html.escape(content), style), f"<{tag}>{html.escape(content, quote=False)}</{tag}>", at=at
        )

    def rich(self, label: str, drawn: str, answer: str, *, size: float = 11) -> Block:
        """Text drawn from reportlab's markup (`<super>`, `<greek>`, ...), answered as `answer`."""
        style = ParagraphStyle("x", fontName="Helvetica", fontSize=size, leading=size * 1.4)
        return self.flow(label, Paragraph(drawn, style), answer)

    def list(self, items: Sequence[str]) -> Block:
        """A bulleted list."""
        style = ParagraphStyle("x", fontName="Helvetica", fontSize=11, leading=15)
        drawn = "<br/>".join("&bull; " + html.escape(i) for i in items)
        answer = "<ul>" + "".join(f"<li>{html.escape(i, quote=False)}</li>" for i in items) + "</ul>"
        return self.flow("List-Group", Paragraph(drawn, style), answer)

    def code(self, lines: Sequence[str]) -> Block:
        """A code listing."""
        style = ParagraphStyle("x", fontName="Courier", fontSize=10, leading=13)
        source = "\n".join(lines)
        return self.flow(
            "Code-Block", Preformatted(source, style), f"<pre><code>{html.escape(source, quote=False)}</code></pre>"
        )

    def table(
        self, rows: Sequence[Sequence[str]], spans: Sequence[tuple[int, int, int, int]] = (), headings: int = 1
    ) -> Block:
        """A ruled table. `spans` are merged cells, (row, column, rows, columns); the cells a merge covers are
        written "" in `rows`. The first `headings` rows are headings."""
        style = [
            ("GRID", (0, 0), (-1, -1), 0.5, "black"),
            ("FONT", (0, 0), (-1, headings - 1), "Helvetica-Bold"),
            ("VALIGN", (0, 0), (-1, -1), "MIDDLE"),
        ]
        style += [("SPAN", (c, r), (c + nc - 1, r + nr - 1)) for r, c, nr, nc in spans]
        t = Table([list(r) for r in rows], style=TableStyle(style), hAlign="LEFT")
        return self.flow("Table", t, _table_html(rows, spans, headings))

    def bars(self, label: str, values: dict[str, int], answer: str) -> Block:
        """A bar chart, `values` by bar name."""
        top, x, high, step = self.y, self.x, 120, 70
        peak = max(values.values())

        def draw(c: Canvas) -> None:
            base = HEIGHT - top - high - 10
            c.line(x, base, x + step * len(values), base)
            c.setFont("Helvetica", 9)
            for i, (name, v) in enumerate(values.items()):
                c.rect(x + step * i + 15, base, 40, high * v / peak, fill=0)
                c.drawString(x + step * i + 15, base - 12, name)

        self.draws.append(draw)
        self.y = top + high + 30 + GAP
        return self._add(label, (x, top, x + step * len(values), top + high + 25), answer)

    def shape(
        self, draw: Callable[[Canvas, float, float], None], size: tuple[float, float], label: str, answer: str
    ) -> Block:
        """Anything drawn by `draw(canvas, x, y)`, its lower left corner at (x, y)."""
        top, x = self.y, self.x
        self.draws.append(lambda c: draw(c, x, HEIGHT - top - size[1]))
        self.y = top + size[1] + GAP
        return self._add(label, (x, top, x + size[0], top + size[1]), answer)

    def paint(self, c: Canvas) -> None:
        for d in self.draws:
            d(c)
        c.showPage()

    def _add(self, label: str, box: tuple[float, float, float, float], answer: str) -> Block:
        x0, y0, x1, y1 = box
        per_mille = (x0 / WIDTH, y0 / HEIGHT, x1 / WIDTH, y1 / HEIGHT)
        self.blocks.append(Block(label, tuple(round(v * 1000) for v in per_mille), answer))
        return self.blocks[-1]


def _table_html(rows: Sequence[Sequence[str]], spans: Sequence[tuple[int, int, int, int]], headings: int) -> str:
    size = {(r, c): (nr, nc) for r, c, nr, nc in spans}
    covered = {(r + i, c + j) for r, c, nr, nc in spans for i in range(nr) for j in range(nc)} - set(size)
    out = []
    for r, row in enumerate(rows):
        tag = "th" if r < headings else "td"
        cells = ""
        for c, text in enumerate(row):
            if (r, c) in covered:
                continue
            nr, nc = size.get((r, c), (1, 1))
            attrs = (f' rowspan="{nr}"' if nr > 1 else "") + (f' colspan="{nc}"' if nc > 1 else "")
            cells += f"<{tag}{attrs}>{html.escape(text, quote=False)}</{tag}>"
        out.append(f"<tr>{cells}</tr>")
    head, body = "".join(out[:headings]), "".join(out[headings:])
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def save_pdf(path: Path, *sheets: Sheet) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    c = Canvas(str(path), pagesize=(WIDTH, HEIGHT), invariant=1)
    for s in sheets:
        s.paint(c)
    c.save()


def render(pdf: Path, page: int = 0, dpi: int = 100) -> Image.Image:
    doc = pdfium.PdfDocument(pdf)
    image = doc[page].render(scale=dpi / 72).to_pil().convert("RGB")
    doc.close()
    return image


def save_png(path: Path, sheet: Sheet, dpi: int = 110) -> None:
    tmp = path.with_suffix(".pdf")
    save_pdf(tmp, sheet)
    render(tmp, dpi=dpi).convert("L").save(path, optimize=True)
    tmp.unlink()


def scan(pdf: Path, dpi: int = 100, seed: int = 0) -> None:
    """Replaces the PDF by a one-page scan of its first page: grey, speckled, and with no text layer."""
    image = render(pdf, dpi=dpi).convert("L").point(lambda v: 40 + v * 3 // 4)
    rng, px = random.Random(seed), image.load()
    for _ in range(image.width * image.height // 400):
        px[rng.randrange(image.width), rng.randrange(image.height)] = rng.randrange(256)
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=45)
    c = Canvas(str(pdf), pagesize=(WIDTH, HEIGHT), invariant=1)
    c.drawImage(ImageReader(jpeg), 0, 0, WIDTH, HEIGHT)
    c.showPage()
    c.save()


def save_replies(folder: Path, replies: dict[str, str], images: dict[str, Image.Image]) -> None:
    """Writes each page's reply as <name>.html, and adds the pages' thumbnails to index.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, reply in replies.items():
        (folder / f"{name}.html").write_text(reply + "\n")
    path = folder / "index.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {name: thumbnail(image) for name, image in images.items()}
    path.write_text(json.dumps(dict(sorted(known.items())), separators=(",", ":")) + "\n")


def thumbnail(image: Image.Image) -> list[int]:
    return list(image.convert("L").resize(THUMB, Image.Resampling.BOX).tobytes())


def which(image: Image.Image, index: dict[str, list[int]]) -> str:
    """The name of the page that `image` shows, at any resolution: the nearest thumbnail of index.json."""
    t = thumbnail(image)
    return min(index, key=lambda name: sum((a - b) ** 2 for a, b in zip(t, index[name], strict=True)))

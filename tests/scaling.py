"""What a large archive takes, and what breaks first: the tables of the README's "Scaling".

    python tests/scaling.py

A model, not a measurement: every figure it rests on is named below with where it is from. Change one and run it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU at work: output tokens a second, and pages in flight that it takes to make them."""

    name: str
    tokens: float
    in_flight: int

    @property
    def pages(self) -> float:
        """Pages a second."""
        return self.tokens / TOKENS

    @property
    def seconds(self) -> float:
        """How long a page's reply takes at that pace (Little's law)."""
        return self.in_flight / self.pages


TOKENS = 1000  # of a page's reply, as the model card's and our own measurements have it
GPUS = (
    Gpu("B200, NVFP4 + MTP", 19_446, 320),  # the model card: 640 in flight on two
    Gpu("B200, BF16", 12_371, 320),  # the model card, the same
    Gpu("H200, BF16, no MTP", 10_200, 256),  # this model's dimensions with random weights, vLLM 0.26.0
)
CPU = 0.075  # s of a core a page: ocr.py and ocr_ray.py alike (568 mixed PDF pages of 2.1 megapixels, 2 cores)
LOOP = 0.0045  # s of it in the one process that holds the connections (the same run)
SENT = 0.9e6  # bytes of a request: a page's PNG in base64
ROUTER = 0.0025  # s of a core a page in vllm-router 0.1.17 (nginx: 0.0008)
ROUTER_LIMIT = 2048  # requests at once, as docker/compose.yaml starts it
CLIENT_LIMIT = 1024  # pages at once of one ocr.py or of one reader of ocr_ray.py
ROW = 5e3  # bytes a page in Parquet, without figures
ROWS = 64  # pages a file
PAGES_A_DOCUMENT = 20
NETWORK = 10e9 / 8 * 0.8  # bytes a second of a 10 Gbit/s link, with room for the rest
STORE_READS = 5500.0  # requests a second that S3 takes under one prefix
DRIVER = 70.0  # bytes a page of what is done, held by ocr_ray.py's driver


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def number(value: float) -> str:
    """Two figures that mean something."""
    if value >= 100:
        return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def archive() -> Iterator[str]:
    """GPU-hours and the rest for 1 and 10 million pages, and what makes 10 million in a day or a week."""
    head = ("", "1 M pages", "10 M pages", "10 M in a week", "10 M in a day")
    rows = []
    for gpu in GPUS:
        hours = [number(pages / gpu.pages / 3600) + " GPU-hours" for pages in (1e6, 1e7)]
        gpus = [f"{math.ceil(1e7 / gpu.pages / seconds)} GPUs" for seconds in (7 * 86400, 86400)]
        rows.append((gpu.name, *hours, *gpus))
    rates = [1e7 / seconds for seconds in (7 * 86400, 86400)]
    hours = [number(pages * CPU / 3600) + " core-hours" for pages in (1e6, 1e7)]
    rows.append(("client", *hours, *(f"{math.ceil(rate * CPU)} cores" for rate in rates)))
    rows.append(("pages/s", "", "", *(number(rate) for rate in rates)))
    sent = [number(pages * SENT / 1e12) + " TB" for pages in (1e6, 1e7)]
    rows.append(("sent to the servers", *sent, *(number(rate * SENT * 8 / 1e9) + " Gbit/s" for rate in rates)))
    rows.append(("rows written", *(number(pages * ROW / 1e9) + " GB" for pages in (1e6, 1e7)), "", ""))
    files = [number(pages / ROWS) + " files" for pages in (1e6, 1e7)]
    rows.append(("", *files, *(number(rate / ROWS) + "/s" for rate in rates)))
    yield from table(head, rows)


def limits() -> Iterator[str]:
    """What ends where: the pages a second that each part bears, and how many GPUs those are."""
    gpu = GPUS[0]
    bears = [
        (f"one ocr.py: {CLIENT_LIMIT:,} pages in flight", CLIENT_LIMIT / gpu.seconds, "a second one, or ocr_ray.py"),
        (f"one vllm-router: {ROUTER_LIMIT:,} requests at once", ROUTER_LIMIT / gpu.seconds, "raise it, or nginx"),
        ("a client of 16 cores", 16 / CPU, "more client machines: ocr_ray.py"),
        ("one ocr.py: the process with the connections", 1 / LOOP, "a second one, or ocr_ray.py"),
        ("vllm-router, one core", 1 / ROUTER, "it uses several"),
        ("a 10 Gbit/s link, at the router", NETWORK / SENT, "a second router, or 25 Gbit/s"),
        ("S3 under one prefix", STORE_READS * PAGES_A_DOCUMENT / 3, "several prefixes"),
    ]
    rows = [
        (what, number(rate), number(rate / gpu.pages), then) for what, rate, then in sorted(bears, key=lambda b: b[1])
    ]
    yield from table(("limit", "pages/s", f"{gpu.name}: GPUs", "then"), rows)


def main() -> None:
    print("\n".join(archive()), end="\n\n")
    print("\n".join(limits()))


if __name__ == "__main__":
    main()

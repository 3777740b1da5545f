"""What the client costs: CPU and memory a page, pages a second, requests in flight, and where the CPU goes.

    python tests/bench_client.py PDF... [--pages 600] [--seconds 0.5] [--runs 3] [--ocr "--concurrency 640"]
    python tests/bench_client.py PDF... --chandra .chandra/bin/chandra   # Chandra's own command on the same pages
    python tests/bench_client.py PDF... --profile                        # milliseconds a page by stage, in one process

The server is tests/standin.py in a process of its own; it answers after --seconds x (0.5 to 1.5). PDFs are copied
until they have --pages pages. Figures are medians of --runs; compare ratios within one run, since machines are noisy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pypdfium2  # noqa: E402
from standin import made_up_page  # noqa: E402

import ocr  # noqa: E402


@contextmanager
def stand_in(seconds: float) -> Iterator[str]:
    """The stand-in server in a process of its own; gives its address without /v1."""
    command = [sys.executable, str(ROOT / "tests/standin.py"), "--seconds", str(seconds), "--jitter", "0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http")).rstrip("/").removesuffix("/v1")
    finally:
        process.terminate()
        process.wait()


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        said: dict[str, Any] = json.load(response)
    return said


def tree_megabytes(pid: int) -> float:
    """Resident memory of a process and all below it; pages they share count in each."""
    total, todo = 0, [pid]
    while todo:
        process = todo.pop()
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
            for task in Path(f"/proc/{process}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total / 1e6


def measure(command: list[str], server: str, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Runs a client once and gives its costs, as the system and the server count them."""
    get(server + "/reset")
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
        )
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak[0] = max(peak[0], tree_megabytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        sys.exit(f"{shlex.join(command)} exited {code}:\n{(folder / 'log').read_text()[-2000:]}")
    stats = get(server + "/stats")
    pages = max(1, int(stats["requests"]))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "pages": pages,
        "pages/s": pages / wall,
        "CPU ms/page": 1000 * cpu / pages,
        "peak MB": peak[0],
        "most in flight": stats["most_in_flight"],
    }


def copies(pdfs: list[Path], pages: int, folder: Path) -> None:
    """Copies the PDFs into `folder` until they have `pages` pages."""
    counts = [len(pypdfium2.PdfDocument(pdf)) for pdf in pdfs]
    total = 0
    for number, (pdf, count) in enumerate(itertools.cycle(zip(pdfs, counts, strict=True))):
        if total >= pages:
            break
        shutil.copy(pdf, folder / f"{number:04d}-{pdf.name}")
        total += count


def compare(args: argparse.Namespace) -> None:
    """Prints a table of the clients' medians, and the ratios when Chandra's command is among them."""
    rows: dict[str, list[dict[str, float]]] = {}
    with stand_in(args.seconds) as server:
        for _ in range(args.runs):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "in").mkdir()
                copies(args.pdfs, args.pages, folder / "in")
                ours = [sys.executable, str(ROOT / "ocr.py"), "in", "--out", "out", "--url", server + "/v1", "-q"]
                rows.setdefault("ocr.py", []).append(measure([*ours, *shlex.split(args.ocr)], server, folder, {}))
                if args.chandra:
                    theirs = [str(Path(args.chandra).absolute()), "in", "chandra", "--method", "vllm"]
                    address = {"VLLM_API_BASE": server + "/v1"}
                    rows.setdefault("chandra", []).append(measure(theirs, server, folder, address))
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in rows.items()
    }
    print("| client | " + " | ".join(medians["ocr.py"]) + " |")
    print("|---" * (1 + len(medians["ocr.py"])) + "|")
    for name, figures in medians.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in figures.values()) + " |")
    if "chandra" in medians:
        ours_, theirs_ = medians["ocr.py"], medians["chandra"]
        print(
            f"\nCPU a page {theirs_['CPU ms/page'] / ours_['CPU ms/page']:.2f} times less, "
            f"pages/s {ours_['pages/s'] / theirs_['pages/s']:.2f} times, "
            f"memory {theirs_['peak MB'] / ours_['peak MB']:.2f} times less than Chandra's"
        )


def profile(pdfs: list[Path]) -> None:
    """Prints milliseconds of CPU a page by stage: each stage's own function over all pages, in this process."""
    ocr.keep_freed_memory()  # as a worker does
    stages: dict[str, float] = {}
    pages = 0

    def timed(stage: str, function: Callable[[], Any]) -> Any:
        started = time.process_time()
        value = function()
        stages[stage] = stages.get(stage, 0.0) + 1000 * (time.process_time() - started)
        return value

    with tempfile.TemporaryDirectory() as name:
        wanted = ocr.Wanted("chandra", "vllm", ocr.DPI, ocr.MAX_TOKENS, 6, False, False, True, "dollars", "")
        for pdf in pdfs:
            looked = timed("look at the file", lambda: ocr.survey(pdf, None))  # noqa: B023
            numbers = tuple(range(1, looked.pages + 1))
            document = ocr.Document(
                pdf, "pdf", looked.pages, looked.sha256, looked.stamp, folder=Path(name) / pdf.stem, numbers=numbers
            )
            for number in numbers:
                pages += 1
                profile_page(document, number, wanted, timed)
            timed("put together", lambda: ocr.assemble(document, wanted))  # noqa: B023
    print(f"| stage | CPU ms/page ({pages} pages) |\n|---|---|")
    for stage, spent in stages.items():
        print(f"| {stage} | {spent / pages:.2f} |")
    print(f"| all | {sum(stages.values()) / pages:.2f} |")


def profile_page(
    document: ocr.Document, number: int, wanted: ocr.Wanted, timed: Callable[[str, Callable[[], Any]], Any]
) -> None:
    page = timed("render", lambda: ocr.load_page(document, number, wanted.dpi)).image
    small = timed("reduce, ink", lambda: page.reduce(4))
    timed("reduce, ink", lambda: ocr.ink_share(small))
    scaled = timed("scale", lambda: ocr.scale_page(page, small))
    size = scaled.size
    png = timed("encode", lambda: ocr.encode_png(scaled))
    reply = made_up_page(f"{number:012d}", tokens=1000)
    blocks = timed("read", lambda: ocr.read_reply(reply))
    timed("read", lambda: ocr.to_markdown(blocks))
    picture = ocr.Picture(b"", page.size, size, float(wanted.dpi), 0.1, str(len(png)))
    attempt = ocr.Attempt(0, 0.0, 0.1, reply, "stop", 2100, 1000, 1.0, False)
    job = ocr.PageJob(document, number, wanted, picture, (attempt,))
    timed("read and write", lambda: ocr.finish_page(dataclasses.replace(job)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pdfs", nargs="+", type=Path, metavar="PDF")
    parser.add_argument("--pages", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=0.5, help="a reply takes, on average")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ocr", default="", metavar="OPTIONS", help="more options for ocr.py")
    parser.add_argument("--chandra", metavar="COMMAND", help="the chandra command of chandra-ocr 0.2.0")
    parser.add_argument("--profile", action="store_true", help="CPU by stage instead")
    args = parser.parse_args()
    if args.profile:
        profile(args.pdfs)
    else:
        compare(args)


if __name__ == "__main__":
    main()

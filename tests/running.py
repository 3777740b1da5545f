"""Runs for tests: the real command in a process of its own, and the whole pipeline in this process, quick.

- command, Started: `python ocr.py ...` as a user calls it, and one that can be interrupted or killed
- tree, page_record: what a run left on disk
- needs: skips a test whose real server is not installed
- quick, read: ocr.run with workers in a thread, pages drawn as small pictures and pauses of milliseconds
- picture_id: what the stand-in calls such a page
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from PIL import Image
from serve import INSTALLED, interpreter
from standin import Answer, Standin
from support import one_page

import ocr

T = TypeVar("T")
SCRIPT = Path(ocr.__file__)
# The command with pauses of milliseconds.
HURRIED = "import sys, ocr; ocr.BACKOFF = 0.02; sys.exit(ocr.main())"


def a_pdf(path: Path, pages: int = 3, text: str = "Page") -> Path:
    path.write_bytes(one_page(text, box="0 0 200 200", pages=pages))
    return path


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def needs(kind: str) -> None:
    """Skips a test whose server (tests/servers/install.sh) is missing. In CI it fails where the server could be."""
    if interpreter(kind):
        return
    why = INSTALLED / kind / "missing"
    reason = why.read_text("utf-8").strip() if why.exists() else f"run tests/servers/install.sh {kind}"
    expected = os.environ.get("CI") == "true" and os.environ.get("OCR_SERVERS") and not why.exists()
    (pytest.fail if expected else pytest.skip)(f"{kind} is not installed: {reason}")


# ---- the real command


def arguments(args: tuple[Any, ...], server: Standin | None, hurried: bool = False) -> list[str]:
    start = [sys.executable, "-c", HURRIED] if hurried else [sys.executable, str(SCRIPT)]
    # Without the test pages that go before a run: tests count requests.
    return [*start, *map(str, args), *(["--url", server.url, "--no-check"] if server else [])]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCR_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | more


def command(
    *args: Any, server: Standin | None = None, cwd: Path | None = None, hurried: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """`python ocr.py` with these arguments, to its end."""
    return subprocess.run(
        arguments(args, server, hurried),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=environment(**env),
        timeout=120,
        check=False,
    )


class Started:
    """A command that runs in a process group of its own."""

    def __init__(self, *args: Any, server: Standin | None = None, hurried: bool = True):
        self.process = subprocess.Popen(
            arguments(args, server, hurried),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment(),
            start_new_session=True,
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self.process.communicate()

    def children(self) -> list[int]:
        """The processes that it started, theirs included, while they run (Linux)."""
        return [pid for pid in processes_of_group(self.process.pid) if pid != self.process.pid]

    def interrupt(self) -> None:
        """Ctrl-C: the terminal tells every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def processes_of_group(group: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            yield int(entry.name)


# ---- what is on disk


def page_record(out: Path, name: str, number: int = 1) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / name / "pages" / f"{number:04d}.json").read_text("utf-8"))
    return record


def tree(out: Path) -> dict[str, bytes]:
    """Every file that a run wrote but run.json; JSON without the seconds that replies took."""
    files = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name != "run.json":
            data = path.read_bytes()
            if path.suffix == ".json":
                data = re.sub(rb'"seconds": [0-9.e-]+', b'"seconds": 0', data)
            files[path.relative_to(out).as_posix()] = data
    return files


# ---- the pipeline, quick


class InThread(ocr.Workers):
    """Workers without processes: tasks one after the other in a thread."""

    def start(self) -> None:
        self.threads = ThreadPoolExecutor(1)

    async def run(self, limit: float | None, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, functools.partial(function, *args))


@functools.cache
def small_png(name: str, number: int) -> bytes:
    """A picture of 56 x 56 pixels, another for each document and page."""
    image = Image.new("RGB", (56, 56), "white")
    digest = hashlib.sha256(f"{name} {number}".encode()).digest()
    for i, byte in enumerate(digest):
        image.paste((byte, 0, 0), (i % 8 * 7, i // 8 * 7, i % 8 * 7 + 6, i // 8 * 7 + 6))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def small_picture(document: ocr.Document, number: int, dpi: int) -> ocr.Picture:
    png = small_png(document.source.name, number)
    return ocr.Picture(
        base64.b64encode(png), (56, 56), (56, 56), float(dpi), 0.1, picture_id(document.source.name, number)
    )


@functools.cache
def picture_id(name: str, number: int) -> str:
    """The stand-in's Request.page of such a page."""
    return hashlib.sha256(Image.open(io.BytesIO(small_png(name, number))).convert("RGB").tobytes()).hexdigest()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "BACKOFF", 0.005)
    monkeypatch.setattr(ocr, "Workers", InThread)
    monkeypatch.setattr(ocr, "picture_of", small_picture)


class Read:
    """A run that ended, and what it said."""

    def __init__(self, result: ocr.RunResult, said: list[str], out: Path):
        self.result, self.said, self.out = result, said, out

    @property
    def pages(self) -> list[ocr.PageResult]:
        return [page for document in self.result.documents for _, page in sorted(document.pages.items())]

    @property
    def statuses(self) -> list[str]:
        return [page.status for page in self.pages]

    def heard(self, words: str) -> bool:
        return any(words in line for line in self.said)


def read(inputs: Any, out: Path, server: Standin, **settings: Any) -> Read:
    """ocr.run, its events collected."""
    said: list[str] = []
    inputs = [inputs] if isinstance(inputs, Path) else inputs
    settings = {"url": server.url, "workers": 2, "check": False} | settings
    result = ocr.run(inputs, out, ocr.Settings(**settings), on_event=lambda _, text: said.append(text))
    return Read(result, said, out)


# ---- replies


def block(text: str, label: str = "Text") -> str:
    return f'<div data-bbox="10 10 990 990" data-label="{label}"><p>{text}</p></div>'


def looping(n: int = 0) -> Answer:
    """A reply that ends in a loop; more words before it for a larger n."""
    return Answer(block(" ".join(f"word{i}" for i in range(n)) + ": " + "and again, " * 60)[:-10])

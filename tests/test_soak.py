"""A soak: thousands of pages, a server that fails at random: each page accounted for, none asked too often."""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import a_pdf, block, looping, picture_id, quick, read
from standin import Answer, CloseAfter, Request, Stale, Stall, Standin, Status, Trickle, random_faults

import ocr

pytestmark = pytest.mark.usefixtures("quick")
__all__ = ["quick"]


def says(request: Request) -> Any:
    """What a page is answered when nothing fails: by its picture and seed alone, so it is the same in every run.

    Of ten pages one loops at first, one loops for ever, one is refused; the others are answered at once.
    """
    kind, seed = int(request.page[:4], 16) % 10, request.fields["seed"]
    if request.fields["max_tokens"] == 1:  # a probe
        return Answer("x")
    if kind == 1 or (kind == 0 and seed < 2):
        return looping(seed)
    if kind == 2:
        return Status(400, "this page never")
    return Answer(block(f"The text of page {request.page}."))


def expected(page: str) -> str:
    return {1: "suspect", 2: "failed"}.get(int(page[:4], 16) % 10, "ok")


def is_whole(said: Any) -> bool:
    """Whether the client gets a reply out of it."""
    if isinstance(said, Answer):
        return said.finish_reason not in ("abort", None)
    return isinstance(said, CloseAfter | Stale | Trickle) or (isinstance(said, Stall) and not said.close)


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarts"])
@pytest.mark.parametrize(
    ("documents", "pages", "runs"), [(4, 40, 2), pytest.param(20, 100, 4, marks=pytest.mark.slow)], ids=["160", "2000"]
)
def test_every_page_is_accounted_for(tmp_path: Path, documents: int, pages: int, runs: int, restarts: bool) -> None:
    """Random faults in a third of the requests, perhaps restarts, and runs that do a part of the pages each."""
    files = [a_pdf(tmp_path / f"{n}.pdf", pages, f"Document {n}, page") for n in range(documents)]
    replies: collections.Counter[tuple[str, int]] = collections.Counter()
    faulty = random_faults(0.3, seed=5, answer=says)

    def answer(request: Request) -> Any:
        said = faulty(request)
        if is_whole(said) and request.fields["max_tokens"] > 1:
            replies[request.page, request.fields["seed"]] += 1
        return said

    with Standin(answer, seconds=0.003) as server, restarting(server, restarts):
        for n in range(1, runs):
            read(files, tmp_path / "out", server, concurrency=16, pages=f"1-{pages * n // runs}")
        last = read(files, tmp_path / "out", server, concurrency=16)

    assert len(last.pages) == documents * pages
    assert sum(last.result.summary["pages"][status] for status in ("ok", "suspect", "failed")) == documents * pages
    given_up = 0
    for page in last.pages:
        name = picture_id(page.source.name, page.number)
        if page.status == "failed" and expected(name) != "failed":
            given_up += 1  # it had faults while the others were answered
            assert "while it answered others" in str(page.error), page
        elif page.reasons == ("an empty reply for a page with ink",):
            assert ocr.raw_reply(page.folder, page.number) == ""
        else:
            assert page.status == expected(name), page
        if page.status == "ok":  # the right text in the right file
            assert f"The text of page {name}." in (page.folder / "pages" / f"{page.number:04d}.md").read_text("utf-8")
    assert given_up <= len(last.pages) // 50
    assert max(seed for _, seed in replies) <= ocr.RETRIES
    if not restarts:  # else a reply may be lost on its way
        assert set(replies.values()) == {1}
    assert not list((tmp_path / "out").rglob("*.part")) and not list((tmp_path / "out").rglob("*.attempts.json"))


@contextlib.contextmanager
def restarting(server: Standin, wanted: bool) -> Iterator[None]:
    """Restarts the server now and then, with and without handing out what it has."""
    rng, stopped = random.Random(9), threading.Event()

    def restart_now_and_then() -> None:
        while not stopped.wait(rng.uniform(0.3, 2.0)):
            server.stop(abort_replies=rng.random() < 0.5)
            time.sleep(rng.uniform(0, 0.3))
            server.start()

    disturber = threading.Thread(target=restart_now_and_then)
    if wanted:
        disturber.start()
    try:
        yield
    finally:
        stopped.set()
        if wanted:
            disturber.join()

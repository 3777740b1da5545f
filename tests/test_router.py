"""Two hosts behind one address, vllm-router or nginx, as docker/ starts them: pages on both, no page lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fronts import start_nginx, start_router
from running import a_pdf, block, command, picture_id, quick, until
from standin import Answer, Request, Standin, Status
from test_check import right

import ocr

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
__all__ = ["quick"]


def hosts(seconds: float = 0.3) -> tuple[Standin, Standin]:
    def says(request: Request) -> Answer:
        return Answer(block(f"this is {request.page}"))

    return Standin(says, seconds=seconds, jitter=0.3), Standin(says, seconds=seconds, jitter=0.3, seed=1)


@pytest.fixture(params=[pytest.param("router", marks=pytest.mark.server), "nginx"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Standin, Standin]]:
    """An address, and the two hosts behind it."""
    one, other = hosts()
    with one, other:
        servers = [one.base, other.base]
        # A host that is back is found in seconds here, where docker/ has half a minute.
        soon = ["--cb-timeout-duration-secs", "2", "--health-check-interval-secs", "1"]
        starts = start_router(servers, *soon) if request.param == "router" else start_nginx(servers, tmp_path, "2s")
        with starts as url:
            yield url, one, other


def test_a_host_dies_and_comes_back(front: tuple[str, Standin, Standin], tmp_path: Path) -> None:
    url, one, other = front
    pages, document, said = 240, "shelf.pdf", []
    results: list[ocr.RunResult] = []

    def work() -> None:
        settings = ocr.Settings(url=url, check=False, concurrency=8)
        source = a_pdf(tmp_path / document, pages)
        results.append(ocr.run([source], tmp_path / "out", settings, on_event=lambda _, text: said.append(text)))

    run = threading.Thread(target=work)
    run.start()
    try:
        until(lambda: len(one.requests) + len(other.requests) >= 60)
        before = len(one.requests), len(other.requests)
        other.stop()
        until(lambda: len(one.requests) >= before[0] + 30)
        alone = len(other.requests)
        other.start()
        until(lambda: len(other.requests) >= alone + 10)
    finally:
        run.join(60)
    (result,) = results
    assert min(before) > 15, "pages went to both hosts alike"
    assert result.exit_code == 0 and not result.stopped, said
    read = result.documents[0].pages
    assert sorted(read) == list(range(1, pages + 1)) and {page.status for page in read.values()} == {"ok"}
    for number in read:
        text = (tmp_path / "out" / "shelf" / "pages" / f"{number:04d}.md").read_text("utf-8")
        assert text == f"this is {picture_id(document, number)}\n"
    # One whole reply a page: what the dead host had begun was asked for again, and nothing else was.
    assert one.counts["200 stop"] + other.counts["200 stop"] == pages


def test_the_check_through_it(front: tuple[str, Standin, Standin]) -> None:
    """Lists, version and replies come from either host, and the counters of MTP from another one each time."""
    url, *both = front
    for host in both:
        host.answer = right
    done = command("--check", "--url", url)
    assert done.returncode == 0, done.stdout
    assert "version 0.33.0" in done.stdout and done.stdout.count("100% of its words") == 2


def test_a_page_that_is_refused_is_refused_once(front: tuple[str, Standin, Standin], tmp_path: Path) -> None:
    """A front that asks the other host as well would have a page that ends an engine end every engine."""
    url, *both = front
    for host in both:
        host.answer = Status(400, "no such page")
    result = ocr.run([a_pdf(tmp_path / "a.pdf", 1)], tmp_path / "out", ocr.Settings(url=url, check=False))
    assert result.exit_code == 1 and "no such page" in str(result.documents[0].pages[1].error)
    assert sum(len(host.requests) for host in both) == 1


def test_both_hosts_are_filled(front: tuple[str, Standin, Standin], tmp_path: Path) -> None:
    """The router passes on the counts of one host at a time, which are no measure of all that was sent."""
    url, *both = front
    for host in both:
        host.seconds = 1.0
    result = ocr.run([a_pdf(tmp_path / "a.pdf", 500)], tmp_path / "out", ocr.Settings(url=url, check=False))
    assert result.exit_code == 0
    assert min(host.most_in_flight for host in both) > 40  # 16 each is where a run begins

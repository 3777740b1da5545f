"""benchmark.py speed: the figures of made-up levels, then the command against stand-ins of a known rate.

A stand-in with S slots that takes T seconds a token makes S / T tokens a second once more than S requests are in
flight, to the millisecond: a slot is handed over with the time at which it was due.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from standin import Answer, Request, Standin, Status
from support import one_page

import benchmark
import benchmark_speed as loop
import ocr

GPU = ["--gpu", "1 x Test", "--workers", 1]


def run(*words: object) -> int:
    return benchmark.main([str(word) for word in words])


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


def level(out: Path, places: int) -> dict[str, Any]:
    return read(out)["levels"][str(places)]


# ---- Figures of made-up levels


def asked(start: float, end: float, tokens: int | None = 100, **more: Any) -> loop.Asked:
    fields = {"page": 0, "attempt": 0, "begun": start, "uploaded": start, "finish": "stop", "last": True} | more
    return loop.Asked(start=start, end=end, tokens=tokens, **fields)


def figures(
    requests: list[loop.Asked],
    window: tuple[float, float] = (10, 20),
    places: int = 1,
    waits: tuple[tuple[float, float], ...] = (),
    **watch: Any,
) -> dict[str, Any]:
    """The record of a level that went so."""

    async def made() -> dict[str, Any]:
        load = loop.Load(None, None, places, 0)  # type: ignore[arg-type]
        load.asked, load.waits = requests, list(waits)
        facts = {"cpu": 1.0, "main": 0.5, "gauges": [], "counters": (None, None)} | watch
        return loop.figures(load, loop.Watch(loop.Window(*window), **facts), 0)

    return asyncio.run(made())


def test_a_reply_that_straddles_the_window_counts_in_proportion() -> None:
    record = figures([asked(8, 12), asked(12, 16), asked(16, 24), asked(30, 40)])
    assert record["tokens_per_second"] == 20.0  # 50 + 100 + 50 of 100 tokens each, in 10 s
    assert record["pages_per_second"] == 0.2
    assert record["ms_per_page"] == 5000.0
    assert record["replies"] == 2  # those that ended in it
    assert sum(record["slices"]) == pytest.approx(200.0)
    assert record["slices"][3:6] == [25.0, 25.0, 25.0]


def test_latency_is_the_pages_with_its_retries() -> None:
    first = asked(10, 12, attempt=0, last=False, finish="length")
    again = asked(12, 13, tokens=50, attempt=1, begun=10.0)
    record = figures([first, again])
    assert record["latency"]["p50"] == 3.0
    assert (record["pages_per_second"], record["tokens_per_second"]) == (0.1, 15.0)
    assert record["retries"] == {"replies": 1, "share_of_tokens": round(50 / 150, 4)}
    assert record["finish"] == {"length": 1, "stop": 1}


def test_replies_without_usage_give_no_tokens_per_second() -> None:
    record = figures([asked(10, 15), asked(15, 20, tokens=None)])
    assert record["tokens_per_second"] is None and record["pages_per_second"] == 0.2
    assert "1 replies came without usage" in " ".join(record["warnings"])


def test_errors_are_counted_by_their_words_and_make_no_page() -> None:
    failed = asked(11, 12, tokens=None, finish=None, error="HTTP 500: broken")
    record = figures([asked(10, 11), failed, failed])
    assert (record["errors"], record["error_kinds"], record["replies"]) == (2, {"HTTP 500: broken": 2}, 1)
    assert (record["tokens_per_second"], record["pages_per_second"]) == (10.0, 0.1)


def test_an_empty_window_says_so() -> None:
    record = figures([])
    assert record["tokens_per_second"] is None and record["ms_per_page"] is None and record["latency"] is None
    assert "no reply came within the window: give more --seconds" in record["warnings"]


METRICS = """
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:generation_tokens_total{{engine="1",model_name="m"}} {tokens}
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {pages}
vllm:num_requests_running{{engine="0"}} 3.0
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:num_preemptions_total{{engine="0"}} {tokens}
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} 0.75
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",position="0"}} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} 0.0
"""


def counters(at: float, tokens: float, accepted: float = 0, drafts: float = 0, waiting: float = 0) -> loop.Counters:
    text = METRICS.format(tokens=tokens, pages=tokens / 100, accepted=accepted, drafts=drafts, waiting=waiting)
    found = loop.parse_counters(text, at)
    assert found
    return found


def test_counters_are_summed_over_engines_and_their_kv_use_averaged() -> None:
    found = counters(0, tokens=100, accepted=40, drafts=50)
    assert found.values["generation_tokens_total"] == 200
    assert found.per_position == {0: 45, 1: 0}
    assert found.kv == 0.5
    assert loop.parse_counters('{"json": "of another server"}', 0) is None


def test_the_servers_account_of_the_window() -> None:
    ends = (counters(10, 100, accepted=0, drafts=0), counters(20, 600, accepted=80, drafts=100))
    gauges = [counters(11, 0, waiting=2), counters(12, 0, waiting=4)]
    server = figures([asked(10, 20, tokens=1000)], counters=ends, gauges=gauges, whole=ends)["server"]
    assert (server["tokens_per_second"], server["pages_per_second"]) == (100.0, 0.5)
    assert server["disagreement"] == 0.0
    assert server["mtp"] == {"drafts": 100, "acceptance": [0.8, 0.0], "mean_accepted_length": 1.8}
    assert server["waiting"] == {"mean": 3.0, "max": 4.0}
    assert server["kv_use"] == {"mean": 0.5, "max": 0.5}
    assert server["preemptions"] == 500


@pytest.mark.parametrize(("said", "warns"), [(1000, False), (985, False), (1025, True), (800, True)])
def test_a_server_that_counts_otherwise_is_told_from_2_percent_on(said: int, warns: bool) -> None:
    ends = (counters(10, 0), counters(20, 500))
    record = figures([asked(10, 20, tokens=said)], counters=ends, whole=ends)
    assert any("against its replies' usage" in warning for warning in record["warnings"]) == warns


@pytest.mark.parametrize(
    ("accepted", "drafts", "warns"), [(80, 100, False), (4, 100, True), (0, 100, True), (0, 0, True)]
)
def test_mtp_that_brings_nothing_is_told(accepted: int, drafts: int, warns: bool) -> None:
    ends = (counters(10, 0), counters(20, 500, accepted=accepted, drafts=drafts))
    record = figures([asked(10, 20, tokens=1000)], counters=ends, whole=ends)
    assert any("MTP brings nothing" in warning for warning in record["warnings"]) == warns


def test_the_client_is_the_limit_when_places_stand_free_and_the_server_has_nothing_to_do() -> None:
    record = figures([asked(10, 20)], places=2, waits=((9.0, 11.0),))  # 1 s of 20 place-seconds
    assert record["client"]["starved"] == 0.05
    assert record["warnings"][0].startswith(
        "client-limited: places stood free 5% of the time because no page was drawn"
    )
    busy = figures([asked(10, 20)], main=9.5)
    assert busy["warnings"][0].startswith("client-limited: its main thread was busy 95% of the time")
    assert figures([asked(10, 20)], places=2, waits=((9.0, 10.4),))["warnings"] == []
    # A queue that is never empty: the server had work all the time.
    ends, full = (counters(10, 0), counters(20, 50)), [counters(11, 0, waiting=1)] * 10
    record = figures([asked(10, 20)], places=2, waits=((9.0, 11.0),), counters=ends, whole=ends, gauges=full)
    assert not any("client-limited" in warning for warning in record["warnings"])


def test_an_even_rate_ends_the_warm_up() -> None:
    even = [asked(n, n + 1) for n in range(40)]
    slower = [asked(n, n + 1 + (n - 20) ** 2 / 20 * (n > 20)) for n in range(40)]
    assert loop.is_steady(even, places=8) and not loop.is_steady(slower, places=8)
    assert not loop.is_steady(even[:16], places=8)  # two spans are needed


# ---- The command


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents of two pages."""
    folder = tmp_path_factory.mktemp("papers")
    for name in ("one", "two"):
        (folder / f"{name}.pdf").write_bytes(one_page(f"Paper {name}", pages=2))
    return folder


def test_a_known_rate_is_found_within_3_percent_and_its_counters_told(
    papers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots, seconds_per_token = 4, 0.0005
    pace: dict[str, Any] = {"slots": slots, "seconds_per_token": seconds_per_token, "tokens": 200, "look": False}
    words = ["speed", "--data", papers, "--out", tmp_path, "--seconds", 2, "--prepared", *GPU]
    with Standin(None, **pace, mtp_acceptance=(0.9, 0.7, 0.5), engines=2) as server:
        assert run(*words, "--concurrency", 12, "--url", server.url) == 0
        said = capsys.readouterr().out
        requests = len(server.requests)
        assert run(*words, "--concurrency", 12, "--url", server.url) == 0  # measured already
        assert len(server.requests) == requests
    full = level(tmp_path, 12)
    known = slots / seconds_per_token
    assert full["tokens_per_second"] == pytest.approx(known, rel=0.03)
    assert full["server"]["tokens_per_second"] == pytest.approx(known, rel=0.06)  # counted when replies end
    assert full["server"]["disagreement"] == 0.0
    assert full["pages_per_second"] == pytest.approx(known / full["tokens_per_page"], rel=0.01)
    assert full["ms_per_page"] == pytest.approx(1000 / full["pages_per_second"], rel=0.01)
    assert full["latency"]["p50"] == pytest.approx(12 * full["tokens_per_page"] / known, rel=0.1)
    assert full["server"]["mtp"]["acceptance"] == pytest.approx([0.9, 0.7, 0.5], abs=0.01)
    assert full["server"]["mtp"]["mean_accepted_length"] == pytest.approx(3.1, abs=0.02)
    assert full["server"]["waiting"]["mean"] == pytest.approx(8, abs=1)
    assert not any("client-limited" in warning for warning in full["warnings"])
    assert full["errors"] == 0
    assert "| in flight | tokens/s |" in said and "| 90% 70% 50% |" in said
    assert "1 x Test, 150 dpi, 4 pages, mode page, pages drawn before" in said
    record = read(tmp_path)
    assert record["server"]["version"] == "0.33.0" and record["settings"]["retries"] == 0
    lines = [json.loads(line) for line in (tmp_path / "requests-0012.jsonl").read_text().splitlines()]
    assert {line["page"] for line in lines} == {0, 1, 2, 3}


def test_a_client_that_draws_too_slowly_is_told_and_a_full_server_is_not_blamed_on_it(
    papers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = ocr.Run.draw

    async def slow(self: ocr.Run, document: ocr.Document, number: int) -> ocr.Picture:
        picture = await draw(self, document, number)
        await asyncio.sleep(0.2)
        return picture

    monkeypatch.setattr(ocr.Run, "draw", slow)
    words = ["speed", "--data", papers, "--seconds", 1, "--warm-up", 0.5, *GPU]
    with Standin(None, seconds=0.05, look=False) as server:
        assert run(*words, "--out", tmp_path / "fast", "--concurrency", 16, "--url", server.url) == 0
    assert level(tmp_path / "fast", 16)["client"]["starved"] > 0.5
    assert "client-limited: places stood free" in capsys.readouterr().out
    with Standin(None, seconds=0.3, slots=1, look=False) as server:
        assert run(*words, "--out", tmp_path / "full", "--concurrency", 3, "--url", server.url) == 0
    assert "client-limited:" not in capsys.readouterr().out


def test_document_mode_sends_a_documents_pages_one_after_the_other(papers: Path, tmp_path: Path) -> None:
    with Standin(None, seconds=0.1, look=False) as server:
        words = ["speed", "--data", papers, "--out", tmp_path, "--url", server.url, "--mode", "document", "--prepared"]
        assert run(*words, "--concurrency", 2, "--seconds", 1, "--warm-up", 0.2, *GPU) == 0
    lines = [json.loads(line) for line in (tmp_path / "requests-0002.jsonl").read_text().splitlines()]
    for pages in ((0, 1), (2, 3)):
        its = sorted((line for line in lines if line["page"] in pages), key=lambda line: line["start"])
        assert [line["page"] for line in its[:4]] == [*pages, *pages]
        assert all(second["start"] >= first["end"] for first, second in itertools.pairwise(its))
    assert level(tmp_path, 2)["ms_per_page"] == pytest.approx(50, rel=0.25)  # two documents, 100 ms a page


LOOPING = f'<div data-bbox="1 2 300 400" data-label="Text"><p>{"again and again " * 3000}</p></div>'


def test_what_loop_stop_saves_and_what_retries_cost(papers: Path, tmp_path: Path) -> None:
    first: list[str] = []

    def one_page_loops(request: Request) -> Answer | None:
        first.append(request.page)
        return Answer(LOOPING) if request.page == first[0] else None

    words = ["speed", "--data", papers, "--concurrency", 2, "--seconds", 1, "--warm-up", 0.3, "--prepared", *GPU]
    with Standin(one_page_loops, seconds=0.05, look=False) as server:
        assert run(*words, "--out", tmp_path / "stop", "--url", server.url, "--loop-stop") == 0
        saved = level(tmp_path / "stop", 2)["loop_stop"]
        assert (saved["stopped_pages"], saved["asked_again"]) == (1, 1)
        assert saved["tokens_without"] == pytest.approx(12_000, rel=0.02)  # the whole loop
        assert saved["tokens_with"] < 400 and saved["saved"] == saved["tokens_without"] - saved["tokens_with"]
        assert 0.7 < saved["saved_share"] < 1
        assert "repetition_detection" not in server.requests[-1].fields
        assert run(*words, "--out", tmp_path / "retry", "--url", server.url, "--retries", 2) == 0
    retries = level(tmp_path / "retry", 2)["retries"]
    assert retries["replies"] > 0 and 0.4 < retries["share_of_tokens"] < 0.8  # two of three replies of that page


def test_levels_of_other_settings_are_refused(papers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["speed", "--data", papers, "--out", tmp_path, "--concurrency", 1, "--warm-up", 0, *GPU]
    with Standin(None, look=False, seconds=0.05) as server:
        assert run(*words, "--seconds", 0.5, "--url", server.url) == 0
        assert run(*words, "--seconds", 0.5, "--url", server.url, "--dpi", 300) == 2
    assert "dpi: 150 then, 300 now" in capsys.readouterr().err


@pytest.mark.parametrize("script", [Status(500, "broken"), Status(400, "cannot")])
def test_a_server_that_answers_nothing_is_given_up(
    papers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "BACKOFF", 0.01)
    with Standin(script, look=False) as server:
        words = ["speed", "--data", papers, "--out", tmp_path, "--url", server.url, "--concurrency", 2, *GPU]
        assert run(*words) == 3
    assert f"no reply to 20 requests in a row: {'' if script.code == 500 else 'the server refuses the page ('}HTTP" in (
        capsys.readouterr().err
    )
    assert read(tmp_path)["levels"] == {}


def test_a_server_without_usage_or_metrics_and_with_errors(papers: Path, tmp_path: Path) -> None:
    def answer(request: Request) -> Answer | Status:
        return Status(503, retry_after=0) if request.number % 5 == 4 else Answer("<p>x</p>", usage=False)

    with Standin(answer, seconds=0.05, metrics=False, look=False) as server:
        words = ["speed", "--data", papers, "--out", tmp_path, "--url", server.url, "--prepared", *GPU]
        assert run(*words, "--concurrency", 4, "--seconds", 1.5, "--warm-up", 0) == 1
    record = level(tmp_path, 4)
    assert record["tokens_per_second"] is None and record["server"] is None
    assert record["pages_per_second"] > 0 and record["errors"] > 0
    assert {"HTTP 503: scripted"} == set(record["error_kinds"])


def test_empty_and_broken_data(tmp_path: Path, papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "run"
    with Standin(None, look=False, seconds=0.05) as server:
        words = ["speed", "--out", out, "--url", server.url, "--concurrency", 1, "--seconds", 0.5, "--warm-up", 0, *GPU]
        assert run(*words, "--data", tmp_path / "empty") == 2
        assert "--data holds no page that can be read; nothing was sent" in capsys.readouterr().err
        assert server.requests == []
        broken = tmp_path / "broken.pdf"
        broken.write_bytes(b"%PDF-1.4 no more")
        assert run(*words, "--data", broken, papers / "one.pdf", "--limit", 1) == 1
        assert f"{broken}: " in capsys.readouterr().err
    assert read(out)["settings"]["pages"] == 1
    assert str(broken) in read(out)["unreadable_files"]


@pytest.mark.parametrize(
    "words", [["--concurrency", "0"], ["--concurrency", "4,x"], ["--seconds", "0"], ["--mode", "x"]]
)
def test_options_out_of_range(words: list[str], papers: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("speed", "--data", papers, "--out", tmp_path, *words)
    assert stopped.value.code == 2


def test_a_figure_is_short_and_right() -> None:
    assert [benchmark.figure(value) for value in (None, 0.0, 0.01234, 1.0, 12.34, 999.6, 12345.0)] == [
        "-",
        "0",
        "0.0123",
        "1.00",
        "12.3",
        "1,000",
        "12,345",
    ]


@pytest.mark.slow
def test_640_in_flight_are_no_burden_to_the_client(papers: Path, tmp_path: Path) -> None:
    with Standin(None, slots=64, seconds_per_token=0.001, tokens=1000, look=False) as server:
        words = ["speed", "--data", papers, "--out", tmp_path, "--url", server.url, "--prepared", *GPU]
        assert run(*words, "--concurrency", 640, "--seconds", 10) == 0
        assert server.most_in_flight == 640
    record = level(tmp_path, 640)
    assert record["tokens_per_second"] == pytest.approx(64_000, rel=0.03)
    assert record["client"]["main_thread"] < 0.5

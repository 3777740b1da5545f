"""Asking: what a request holds, when a page is asked again, and what becomes of it when the server fails."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chandra.prompts import OCR_LAYOUT_PROMPT
from running import a_pdf, block, looping, page_record, picture_id, quick, read, small_picture, until
from standin import (
    Answer,
    CloseAfter,
    HalfJson,
    Refuse,
    Request,
    Reset,
    Stale,
    Stall,
    Standin,
    Status,
    Trickle,
)

import ocr

pytestmark = pytest.mark.usefixtures("quick")
__all__ = ["quick"]

GOOD = Answer(block("A good reply, said once and to its end."))


# ---- The request


def test_a_request_is_chandras_to_the_letter(tmp_path: Path) -> None:
    with Standin() as server:
        read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
        (request,) = server.requests
    assert request.order == ("image_url", "text")
    assert request.prompt == OCR_LAYOUT_PROMPT
    assert request.format == "PNG"
    assert request.fields == {"model": "chandra", "max_tokens": 12384, "temperature": 0.0, "top_p": 0.1, "seed": 0}


def test_options_of_the_request_are_sent_only_when_asked_for(tmp_path: Path) -> None:
    with Standin() as server:
        read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, loop_stop=True, max_tokens=1777)
        (request,) = server.requests
    detector = {"max_pattern_size": 64, "min_pattern_size": 1, "min_count": 64}
    assert request.fields["repetition_detection"] == detector and request.fields["max_tokens"] == 1777


def test_the_body_is_json_without_nulls() -> None:
    head, tail = ocr.request_frame("m", 10, ocr.sampling(3), True)
    body = json.loads(head + b"AAAA" + tail)
    image, text = body["messages"][0]["content"]
    assert len(body["messages"]) == 1 and body["messages"][0]["role"] == "user"
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert text["type"] == "text" and b"null" not in head + tail


class Counted(bytes):
    """An image that tells how many of its kind there are."""

    alive = 0

    def __new__(cls, data: bytes) -> Counted:
        cls.alive += 1
        return super().__new__(cls, data)

    def __del__(self) -> None:
        Counted.alive -= 1


def test_an_image_is_gone_once_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages are in flight, only those that wait to be sent hold their image."""
    seen: list[tuple[int, int]] = []

    def counted(document: ocr.Document, number: int, dpi: int) -> ocr.Picture:
        picture = small_picture(document, number, dpi)
        return dataclasses.replace(picture, png=Counted(picture.png))

    monkeypatch.setattr(ocr, "picture_of", counted)
    with Standin(seconds=0.3) as server:

        def answer(request: Request) -> None:
            seen.append((server.in_flight, Counted.alive))

        server.answer = answer
        read(a_pdf(tmp_path / "a.pdf", 60), tmp_path / "out", server, concurrency=60, workers=1)
    most_in_flight = max(flying for flying, _ in seen)
    assert most_in_flight > 30 and max(held for _, held in seen) < 12
    assert Counted.alive == 0


# ---- The retry schedule


def sampled(request: Request) -> tuple[float, float, int]:
    return request.fields["temperature"], request.fields["top_p"], request.fields["seed"]


def test_a_looping_reply_is_asked_for_again_six_times_warmer_with_fixed_seeds(tmp_path: Path) -> None:
    with Standin(looping()) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
        asked = [sampled(request) for request in server.requests]
    assert asked == [
        (0.0, 0.1, 0),
        (0.2, 0.95, 1),
        (0.4, 0.95, 2),
        (0.6, 0.95, 3),
        (0.8, 0.95, 4),
        (0.8, 0.95, 5),
        (0.8, 0.95, 6),
    ]
    assert run.statuses == ["suspect"] and "repeats itself at its end" in run.pages[0].reasons
    attempts = page_record(run.out, "a")["attempts"]
    assert [(a["temperature"], a["top_p"], a["seed"]) for a in attempts] == asked
    assert {a["finish_reason"] for a in attempts} == {"stop"} and all(a["completion_tokens"] for a in attempts)
    assert not list(run.out.rglob("*.attempts.json"))


def test_two_runs_send_the_same_bytes(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 4)
    sent = []
    for out in ("one", "two"):
        with Standin([looping(), looping(3), GOOD]) as server:
            read(document, tmp_path / out, server)
            sent.append(sorted((request.page, request.turn, request.body_hash) for request in server.requests))
    assert sent[0] == sent[1] and len(sent[0]) == 12


@pytest.mark.parametrize("bad", [looping(), Answer("<p>half", finish_reason="length"), Answer("x", "repetition")])
def test_asking_ends_with_the_first_good_reply(tmp_path: Path, bad: Answer) -> None:
    with Standin([bad, bad, GOOD]) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
        assert len(server.requests) == 3
    assert run.statuses == ["ok"] and page_record(run.out, "a")["kept"] == 2
    assert (run.out / "a" / "pages" / "0001.html").read_text() == GOOD.content


def test_a_form_of_blank_rows_is_believed_when_the_first_retry_says_the_same(tmp_path: Path) -> None:
    form = Answer(f'<div data-bbox="0 0 9 9" data-label="Form"><table>{"<tr><td></td></tr>" * 40}')
    with Standin(form) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
        assert len(server.requests) == 2
    assert "repeats itself at its end" not in run.pages[0].reasons


def test_of_several_attempts_the_best_is_kept(tmp_path: Path) -> None:
    replies = [
        Answer("<p>cut off", finish_reason="length"),
        looping(),
        looping(9),  # whole, and the longest before its loop
        looping(4),
        Answer(block("long " * 3 + "cut"), finish_reason="length"),
    ]
    with Standin(replies) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, retries=4)
        assert len(server.requests) == 5
    assert page_record(run.out, "a")["kept"] == 2 and ocr.raw_reply(run.out / "a", 1) == replies[2].content


def test_with_no_retries_a_page_is_asked_once(tmp_path: Path) -> None:
    with Standin(looping()) as server:
        assert read(a_pdf(tmp_path / "a.pdf", 2), tmp_path / "out", server, retries=0).statuses == ["suspect"] * 2
        assert len(server.requests) == 2


def test_loop_stop_ends_a_loop_early_and_the_page_says_so(tmp_path: Path) -> None:
    with Standin(Answer("Begin. " + "and again, " * 500)) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, loop_stop=True)
        assert server.counts["200 repetition"] == 7
    assert "stopped by the server's loop detector" in run.pages[0].reasons


def test_attempts_are_carried_over_a_run_that_was_cut_off(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 1)
    with Standin([looping(), looping(1), Answer("", seconds=60)]) as server:

        async def cut_off() -> None:
            settings = ocr.Settings(url=server.url, workers=1, check=False)
            running = asyncio.create_task(ocr.run_async([document], tmp_path / "out", settings))
            await asyncio.to_thread(until, lambda: len(server.requests) == 3)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

        asyncio.run(cut_off())
        record = json.loads((tmp_path / "out" / "run.json").read_text())
        assert (record["finished"], record["stopped"]) == (False, "interrupted")
        server.reset()
        server.answer = looping(2)
        read(document, tmp_path / "out", server)
        assert [sampled(request)[2] for request in server.requests] == [2, 3, 4, 5, 6]
        server.reset()
        again = read(document, tmp_path / "out", server)
        assert server.requests == [] and again.pages[0].attempts == 7


# ---- The server's context


def test_a_context_that_cuts_replies_stops_the_run_and_says_so(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 3)
    with Standin(Answer("words " * 9000), max_model_len=12500, tokens=50) as server:
        run = read(document, tmp_path / "out", server)
        assert run.result.exit_code == 3 and "its context is too small" in str(run.result.stopped)
        assert "--max-model-len 19200" in str(run.result.stopped)
        assert run.heard("the server's context is 12500 tokens")
        server.stop()
        server.max_model_len, server.answer = 24576, None
        server.start()
        assert read(document, tmp_path / "out", server).statuses == ["ok"] * 3


def test_a_context_without_room_for_a_reply_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with Standin(max_model_len=8192) as server:
        with pytest.raises(ocr.NoServer, match=r"context is 8192 tokens.*--max-model-len 19200.*--max-tokens 1376"):
            read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
        assert server.requests == []
        assert read(tmp_path / "a.pdf", tmp_path / "out", server, max_tokens=2000).statuses == ["ok"]


# ---- Which model


def models(*names: str) -> list[ocr.Model]:
    return [ocr.Model(name, name, None) for name in names]


def test_the_model_is_the_named_one_or_the_only_one_and_never_a_guess() -> None:
    assert ocr.pick_model(models("x"), None, "u").name == "x"
    assert ocr.pick_model(models("qwen", "my-Chandra"), None, "u").name == "my-Chandra"
    assert ocr.pick_model(models("a", "b"), "b", "u").name == "b"
    for served, wanted, words in [
        (models("a", "b"), None, "serves: a, b; name one with --model"),
        (models("chandra-1", "chandra-2"), None, "name one with --model"),
        (models("a"), "b", "does not serve 'b'; it serves: a"),
        ([], None, "serves no model"),
    ]:
        with pytest.raises(ocr.NoServer, match=words):
            ocr.pick_model(served, wanted, "u")


def test_a_wrong_model_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    with Standin(model="one") as server:
        with pytest.raises(ocr.NoServer, match="does not serve 'two'; it serves: one"):
            read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, model="two", wait=30.0)
        assert server.requests == [] and not (tmp_path / "out").exists()


def test_an_address_without_v1_is_found(tmp_path: Path) -> None:
    with Standin() as server:
        assert read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, url=server.base).statuses == ["ok"]


# ---- The API key

KEY = "sk-a-secret-of-theirs"


def test_the_api_key_is_sent_and_never_written(tmp_path: Path) -> None:
    def answer(request: Request) -> Any:
        return Status(400, f"no page for {KEY}") if request.page == picture_id("a.pdf", 2) else None

    with Standin(answer, api_key=KEY) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 3), tmp_path / "out", server, api_key=KEY)
        with pytest.raises(ocr.NoServer, match="wants an API key") as error:
            read(tmp_path / "a.pdf", tmp_path / "out", server, api_key=KEY + "x")
    assert run.statuses == ["ok", "failed", "ok"] and "no page for (key)" in str(run.pages[1].error)
    told = [*run.said, str(error.value), str(run.result.summary)]
    assert not any(KEY in text for text in told)
    assert not any(KEY.encode() in path.read_bytes() for path in run.out.rglob("*") if path.is_file())


def test_a_user_and_password_in_the_address_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(ocr.NoServer) as error:
        ocr.run([tmp_path], tmp_path / "out", ocr.Settings(url="http://me:hidden@127.0.0.1:9/v1"))
    assert "hidden" not in str(error.value) and "127.0.0.1:9" in str(error.value)


def test_the_api_key_stands_against_what_netrc_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("default login me password mine\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with Standin(api_key=KEY) as server:
        assert read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, api_key=KEY).statuses == ["ok"]


def test_a_proxy_of_the_environment_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert ocr.environment_proxy("http://gpu7:8000/v1") == "http://proxy:3128"
    assert ocr.environment_proxy("http://localhost:8000/v1") is ocr.environment_proxy("http://127.0.0.1/v1") is None
    monkeypatch.setenv("no_proxy", "gpu7")
    assert ocr.environment_proxy("http://gpu7:8000/v1") is None


def test_a_key_refused_in_mid_run_stops_it(tmp_path: Path) -> None:
    with Standin(lambda request: Status(401) if request.number >= 2 else None) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 6), tmp_path / "out", server, concurrency=1)
    assert run.result.exit_code == 3 and "refuses the API key" in str(run.result.stopped)
    assert run.statuses == ["ok", "ok"]


# ---- Faults that pass


@pytest.mark.parametrize(
    "fault",
    [
        Refuse(),
        Reset(0.0),
        Reset(0.5),
        HalfJson(),
        HalfJson(declared=False),
        Stall(0.01, close=True),
        *(Status(code) for code in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
        *(Status(503, kind=kind, echo=5000) for kind in ("detail", "text", "html", "empty")),
        Status(429, retry_after=0),
        Status(429, retry_after="soon"),
        Answer("half a", finish_reason="abort"),
        Answer("half a", finish_reason=None),
        Answer("half a", finish_reason="error"),
    ],
    ids=str,
)
def test_a_fault_costs_a_page_nothing_but_time(tmp_path: Path, fault: Any) -> None:
    with Standin([fault, fault, GOOD]) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 2), tmp_path / "out", server)
        assert len(server.requests) == 6
        assert {sampled(request) for request in server.requests} == {(0.0, 0.1, 0)}
        assert len({request.body_hash for request in server.requests}) == 2
    assert {page.status for page in run.pages} <= {"ok", "suspect"}  # both pages have the same reply
    assert [page.attempts for page in run.pages] == [1, 1]


@pytest.mark.parametrize("fault", [CloseAfter(), Stale(), Trickle(0.2), Stall(0.2)], ids=str)
def test_a_whole_reply_counts_however_it_comes(tmp_path: Path, fault: Any) -> None:
    with Standin(fault) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 3), tmp_path / "out", server, concurrency=1)
        assert len(server.requests) == 3
    assert run.statuses == ["ok"] * 3


def test_a_stale_connection_is_tried_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "BACKOFF", 60.0)
    with Standin(Stale()) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 4), tmp_path / "out", server, concurrency=1, timeout=20.0)
    assert run.statuses == ["ok"] * 4 and run.result.summary["seconds"] < 20


def test_a_stalled_reply_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    with Standin([Stall(30), None]) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, timeout=0.3)
        assert run.statuses == ["ok"] and server.counts["disconnected"] == 1


def test_retry_after_is_heeded(tmp_path: Path) -> None:
    with Standin([Status(429, retry_after=0.6), None]) as server:
        assert read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server).statuses == ["ok"]
        first, second = server.requests
    assert second.time - first.time >= 0.6


def test_retry_after_is_a_number_a_date_or_nothing() -> None:
    assert ocr.retry_after("2.5") == 2.5 and ocr.retry_after("-3") == 0.0
    assert 50 < (ocr.retry_after(email.utils.formatdate(time.time() + 60, usegmt=True)) or 0) <= 61
    for nothing in (None, "", "soon", "Mon, 99 Nov"):
        assert ocr.retry_after(nothing) is None


def test_a_busy_server_never_fails_a_page(tmp_path: Path) -> None:
    """One page is turned away far more often than a page may fail, while the others are answered."""

    def answer(request: Request) -> Any:
        return Status(429) if request.page == picture_id("a.pdf", 1) and request.turn < 15 else None

    with Standin(answer) as server:
        assert read(a_pdf(tmp_path / "a.pdf", 30), tmp_path / "out", server, concurrency=3).statuses == ["ok"] * 30


@pytest.mark.parametrize("content", [None, "", "   \n"])
def test_an_empty_reply_for_a_page_with_ink_is_suspect(tmp_path: Path, content: str | None) -> None:
    with Standin(Answer(content)) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
        assert len(server.requests) == 1
    assert run.pages[0].reasons == ("an empty reply for a page with ink",) and run.result.exit_code == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"null", b'{"choices": []}', b'{"choices": [{"message": null}]}', b'{"error": "x"}', b"\xff<"],
)
def test_what_is_no_chat_completion_is_a_fault(body: bytes) -> None:
    with pytest.raises(ocr.Fault, match="no chat completion"):
        ocr.read_answer(body, 0.0)


# ---- Pages that a server never takes


def bad_page(says: Any, number: int = 2) -> Any:
    return lambda request: says if request.page == picture_id("a.pdf", number) else None


@pytest.mark.parametrize("code", [400, 413, 415, 422])
def test_a_refused_page_fails_at_once_with_the_servers_words(tmp_path: Path, code: int) -> None:
    with Standin(bad_page(Status(code, "Failed to load image", echo=100_000))) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 3), tmp_path / "out", server)
        assert len(server.requests) == 3
    assert run.statuses == ["ok", "failed", "ok"] and run.result.exit_code == 1
    error = str(run.pages[1].error)
    assert f"HTTP {code}: Failed to load image" in error and len(error) < 600 and "AAAANSUhEUg" not in error
    assert run.heard("a.pdf, page 2: ")
    text = (run.out / "a" / "a.md").read_text()
    assert "<!-- page 2: failed -->" in text and text.count("<!-- page") == 2


def test_a_refused_retry_leaves_the_first_reply_standing(tmp_path: Path) -> None:
    with Standin([looping(), Status(400)]) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server)
    assert run.statuses == ["suspect"] and run.pages[0].attempts == 1


@pytest.mark.parametrize("fault", [Status(500), Reset(0.0), Answer("x", finish_reason="error")], ids=str)
def test_a_page_that_the_server_fails_on_while_others_pass_is_given_up(tmp_path: Path, fault: Any) -> None:
    with Standin(bad_page(fault)) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 40), tmp_path / "out", server, concurrency=2)
        asked = sum(request.page == picture_id("a.pdf", 2) for request in server.requests)
    assert run.statuses.count("failed") == 1 and "failed on this page" in str(run.pages[1].error)
    assert ocr.PAGE_FAULTS <= asked <= ocr.PAGE_FAULTS + ocr.Gate.LIMIT


@pytest.mark.parametrize("fault", [Status(500), Status(502, kind="html"), Reset(0.0)], ids=str)
def test_a_page_that_the_server_fails_on_is_given_up_when_it_is_the_last_one(tmp_path: Path, fault: Any) -> None:
    with Standin(bad_page(fault)) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 2), tmp_path / "out", server)
        asked = sum(request.page == picture_id("a.pdf", 2) for request in server.requests)
    assert run.statuses == ["ok", "failed"] and run.result.exit_code == 1 and asked <= 12


def test_many_pages_that_the_server_fails_on_are_given_up_and_the_others_read(tmp_path: Path) -> None:
    bad = {picture_id("a.pdf", number) for number in range(5, 25)}
    with Standin(lambda request: Status(500) if request.page in bad else None) as server:
        run = read(a_pdf(tmp_path / "a.pdf", 30), tmp_path / "out", server)
    assert run.statuses == ["ok"] * 4 + ["failed"] * 20 + ["ok"] * 6


# ---- Servers that go away


def test_a_restart_in_the_middle_of_a_run_is_waited_for(tmp_path: Path) -> None:
    with Standin(seconds=0.02) as server:

        def restart() -> None:
            until(lambda: len(server.requests) >= 10)
            server.stop(abort_replies=True)
            time.sleep(0.4)
            server.start()

        thread = threading.Thread(target=restart)
        thread.start()
        run = read(a_pdf(tmp_path / "a.pdf", 60), tmp_path / "out", server, concurrency=8)
        thread.join()
    assert run.statuses == ["ok"] * 60 and run.result.exit_code == 0
    assert run.heard("the server stopped answering") and run.heard("the server answers again")


def test_replies_of_a_server_that_closed_its_port_are_asked_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM told to stop ends its engine and then waits for its clients, who would wait for it until --timeout."""
    monkeypatch.setattr(ocr, "PORT_LOOK", 0.05)
    monkeypatch.setattr(ocr, "LAST_WORDS", 0.5)
    with Standin(lambda request: Stall(600) if request.turn == 0 else None) as old:
        new = Standin(port=old.port)

        def restart() -> None:
            until(lambda: old.in_flight == 3)
            old.close_port()
            time.sleep(0.3)
            new.start()

        thread = threading.Thread(target=restart)
        thread.start()
        run = read(a_pdf(tmp_path / "a.pdf", 3), tmp_path / "out", old)
        thread.join()
        until(lambda: old.in_flight == 0)
    new.stop()
    assert run.statuses == ["ok"] * 3 and len(new.requests) == 3


def test_a_dead_engine_stops_the_sending_until_it_answers(tmp_path: Path) -> None:
    with Standin(seconds=0.02) as server:

        def die() -> None:
            until(lambda: len(server.requests) >= 10)
            server.engine_dead = True
            time.sleep(0.5)
            server.engine_dead = False

        thread = threading.Thread(target=die)
        thread.start()
        run = read(a_pdf(tmp_path / "a.pdf", 60), tmp_path / "out", server, concurrency=8)
        thread.join()
        asked = len(server.requests)
    assert run.statuses == ["ok"] * 60
    assert asked < 60 + 80  # a page at a time, with growing pauses, not all of them all the time


@pytest.mark.parametrize("how", ["dead engine", "gone", "accepts and closes"])
def test_patience_ends_the_run_with_what_is_done_kept(tmp_path: Path, how: str) -> None:
    document = a_pdf(tmp_path / "a.pdf", 20)
    with Standin(seconds=0.01) as server:

        def fail(request: Request) -> Any:
            if request.number < 6:
                return None
            server.engine_dead = how == "dead engine"
            server.refusing = how == "gone"
            return Stall(0, close=True) if how == "accepts and closes" else Status(500)

        server.answer = fail
        began = time.monotonic()
        run = read(document, tmp_path / "out", server, concurrency=2, patience=0.6)
        assert time.monotonic() - began < 15
        assert run.result.exit_code == 3 and "no reply for 1 s" in str(run.result.stopped)
        done = run.statuses
        assert done == ["ok"] * len(done) and 4 <= len(done) < 20
        server.answer, server.engine_dead, server.refusing = None, False, False
        server.reset()
        run = read(document, tmp_path / "out", server)
        assert run.statuses == ["ok"] * 20 and len(server.requests) == 20 - len(done)


@pytest.mark.parametrize("named", [None, "chandra"])
def test_a_server_that_comes_back_with_another_model_stops_the_run(tmp_path: Path, named: str | None) -> None:
    with Standin(seconds=0.02) as server:

        def restart() -> None:
            until(lambda: len(server.requests) >= 6)
            server.stop()
            server.start(model="another")

        thread = threading.Thread(target=restart)
        thread.start()
        run = read(a_pdf(tmp_path / "a.pdf", 40), tmp_path / "out", server, concurrency=2, model=named)
        thread.join()
    assert run.result.exit_code == 3
    assert "another" in str(run.result.stopped) and "chandra" in str(run.result.stopped)
    assert set(run.statuses) == {"ok"}


def test_a_server_that_is_still_starting_is_waited_for(tmp_path: Path) -> None:
    server = Standin()
    server.start()
    server.stop()
    threading.Timer(0.5, server.start).start()
    try:
        run = read(a_pdf(tmp_path / "a.pdf", 1), tmp_path / "out", server, wait=20.0)
    finally:
        server.stop()
    assert run.statuses == ["ok"] and run.heard("waiting for it")


# ---- The gate


def gate(patience: float = 60.0) -> ocr.Gate:
    return ocr.Gate(patience, lambda level, text: None)


async def fault(gate: ocr.Gate, **fields: Any) -> None:
    with pytest.raises(ocr.Fault):
        async with gate.passing():
            raise ocr.Fault("scripted", **fields)


def test_the_gate_closes_after_faults_in_a_row_only() -> None:
    async def play() -> list[bool]:
        door, seen = gate(), []
        for _ in range(door.LIMIT - 1):
            await fault(door, status=503)
        seen.append(door.open.is_set())
        async with door.passing():
            pass
        for _ in range(door.LIMIT - 1):
            await fault(door, status=503)
        seen.append(door.open.is_set())
        await fault(door, status=503)
        return [*seen, door.open.is_set()]

    assert asyncio.run(play()) == [True, True, False]


def test_one_that_tries_and_is_cancelled_lets_the_next_one_try() -> None:
    async def play() -> int:
        door = gate()
        for _ in range(door.LIMIT):
            await fault(door, status=500)
        tried = 0

        async def page(hang: bool) -> None:
            nonlocal tried
            async with door.passing():
                tried += 1
                await asyncio.sleep(60 if hang else 0)

        first = asyncio.create_task(page(hang=True))
        others = [asyncio.create_task(page(hang=False)) for _ in range(5)]
        await asyncio.to_thread(until, lambda: tried)
        assert tried == 1
        first.cancel()
        await asyncio.wait_for(asyncio.gather(*others), 5)
        return tried

    assert asyncio.run(play()) == 6


def test_a_late_reply_opens_the_gate_for_all_that_wait() -> None:
    """The one that tries may hang for minutes: nobody waits for it once another page was answered."""

    async def play() -> None:
        door = gate()
        arrived = asyncio.Event()

        async def slow() -> None:
            async with door.passing():
                await arrived.wait()

        async def page() -> None:
            async with door.passing():
                pass

        late = asyncio.create_task(slow())
        await asyncio.sleep(0)
        for _ in range(door.LIMIT):
            await fault(door, status=500)
        hanging = asyncio.create_task(slow_forever(door))
        await asyncio.sleep(0.05)
        waiting = [asyncio.create_task(page()) for _ in range(5)]
        await asyncio.sleep(0.01)
        arrived.set()
        await asyncio.wait_for(asyncio.gather(late, *waiting), 5)
        hanging.cancel()

    async def slow_forever(door: ocr.Gate) -> None:
        async with door.passing():
            await asyncio.sleep(60)

    asyncio.run(play())


def test_a_broken_connection_has_the_model_checked_once_before_more_is_sent() -> None:
    async def play() -> int:
        door, checks = gate(), 0

        async def wake() -> None:
            nonlocal checks
            checks += 1
            await asyncio.sleep(0.01)

        door.wake = wake
        await fault(door)

        async def page() -> None:
            async with door.passing():
                await asyncio.sleep(0.01)

        await asyncio.gather(*(page() for _ in range(20)))
        return checks

    assert asyncio.run(play()) == 1

"""The stand-in keeps its own promises: what vLLM says, each fault as a client sees it, its pace and its counters."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from standin import (
    Answer,
    CloseAfter,
    Fault,
    HalfJson,
    Refuse,
    Reset,
    Slots,
    Stale,
    Stall,
    Standin,
    Status,
    Trickle,
    answer_by_page,
    image_tokens,
    loop_end,
    made_up_page,
    random_faults,
    thumbnail,
)

MINI = Path(__file__).parents[2] / "shared" / "data" / "mini"


def picture(size: tuple[int, int] = (96, 128), ink: int = 7) -> Image.Image:
    """A page with a dark band whose place tells it from others."""
    image = Image.new("RGB", size, "white")
    image.paste((ink, 0, 0), (0, ink % size[1], size[0], ink % size[1] + 9))
    return image


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def body(data: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """A completion's body as the client sends it; None leaves a field out."""
    text = base64.b64encode(png(picture()) if data is None else data).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
    content = [image, {"type": "text", "text": "Read this page."}]
    asked = {"model": "chandra", "messages": [{"role": "user", "content": content}], "max_tokens": 12384} | fields
    return {name: value for name, value in asked.items() if value is not None}


def ask(server: Standin, *args: Any, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/chat/completions", json=body(*args, **fields), timeout=20)


def choice(response: httpx.Response) -> tuple[Any, Any, int]:
    """Content, finish reason and tokens of a reply."""
    said = response.json()
    first = said["choices"][0]
    return first["message"]["content"], first["finish_reason"], said["usage"]["completion_tokens"]


def metric(server: Standin, name: str, label: str = "") -> float:
    """The sum of a metric's lines, over engines."""
    text = httpx.get(f"{server.base}/metrics").text
    lines = re.findall(rf"^vllm:{name}{{(.*)}} (.*)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in lines if label in labels)


def until(true: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


# ---- What it says, and what it writes down


def test_a_request_is_recorded_and_answered_with_a_page_of_its_own() -> None:
    with Standin() as server, httpx.Client() as client:
        for ink in (7, 7, 50):
            sent = body(png(picture(ink=ink)), temperature=0, top_p=0.1)
            said = client.post(f"{server.url}/chat/completions", json=sent)
            assert said.json()["choices"][0]["message"]["content"] == made_up_page(server.requests[-1].page)
        first, again, other = server.requests
    assert first.page == hashlib.sha256(picture().tobytes()).hexdigest() == again.page != other.page
    assert (first.turn, again.turn, other.turn) == (0, 1, 0)
    assert (first.size, first.format, first.order) == ((96, 128), "PNG", ("image_url", "text"))
    assert first.prompt == "Read this page."
    assert first.fields == {"model": "chandra", "max_tokens": 12384, "temperature": 0, "top_p": 0.1}
    assert first.body_hash == again.body_hash != other.body_hash
    assert first.connection == other.connection and server.most_in_flight == 1


def test_the_fast_mode_tells_as_much_without_decoding() -> None:
    with Standin(look=False) as server:
        text = base64.b64encode(png(picture()))
        assert ask(server).status_code == 200
        ask(server, temperature=0.2)
        ask(server, b"no image at all")
        first, again, broken = server.requests
    assert first.page == hashlib.sha256(text).hexdigest() == again.page and first.body_hash != again.body_hash
    assert (first.size, first.format, again.turn) == ((96, 128), "PNG", 1)
    assert again.fields["temperature"] == 0.2 and again.prompt == "Read this page." and first.body_size > len(text)
    assert (broken.size, broken.format) == ((0, 0), "")


def test_the_paths_beside_completions() -> None:
    with Standin(model="one", max_model_len=9000, metrics=False, version="0.32.0") as server:
        model = httpx.get(f"{server.url}/models").json()["data"][0]
        assert (model["id"], model["max_model_len"], model["owned_by"]) == ("one", 9000, "vllm")
        assert httpx.get(f"{server.base}/version").json() == {"version": "0.32.0"}
        assert httpx.get(f"{server.base}/health").status_code == 200
        for response, status in (
            (httpx.get(f"{server.url}/chat/completions"), 405),
            (httpx.get(f"{server.base}/v2"), 404),
            (httpx.get(f"{server.base}/metrics"), 404),
        ):
            assert response.status_code == status and response.json().keys() == {"detail"}


@pytest.mark.parametrize(
    ("status", "words", "fields"),
    [
        (404, "The model `two` does not exist.", {"model": "two"}),
        (400, "max_model_len=24576", {"max_tokens": 30000}),
        (400, "max_tokens must be", {"max_tokens": 0}),
        (400, "temperature", {"temperature": "hot"}),
        (400, "top_p", {"top_p": 0}),
        (400, "repetition_detection", {"repetition_detection": 5}),
        (400, "not permitted: wish", {"wish": 1}),
        (400, "messages", {"messages": "hello"}),
        (400, "Failed to load image", {"data": b"no image"}),
        (400, "aspect ratio must be smaller than 200", {"data": png(picture((402, 2)))}),
    ],
)
def test_what_vllm_refuses(status: int, words: str, fields: dict[str, Any]) -> None:
    with Standin(refuses=["wish"]) as server:
        response = ask(server, fields.pop("data", None), **fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, status) and words in error["message"]
        assert error.keys() == {"message", "type", "param", "code"}


def test_two_images_a_wrong_key_and_half_a_body() -> None:
    with Standin(api_key="secret") as server:
        two = body()
        two["messages"][0]["content"] *= 2
        good = {"Authorization": "Bearer secret"}
        url = f"{server.url}/chat/completions"
        assert "At most 1 image(s)" in httpx.post(url, json=two, headers=good).json()["error"]["message"]
        assert httpx.post(url, content=b'{"model": ', headers=good).status_code == 400
        for headers in ({}, {"Authorization": "Bearer guess"}):
            response = httpx.post(url, json=body(), headers=headers)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
        assert httpx.get(f"{server.base}/health").status_code == 200


# ---- What becomes of a reply


def test_length_comes_at_max_tokens_or_earlier_when_the_context_is_small() -> None:
    with Standin(answer=Answer("abcd" * 500)) as server:
        assert choice(ask(server)) == ("abcd" * 500, "stop", 500)
        assert choice(ask(server, max_tokens=100)) == ("abcd" * 100, "length", 100)
        server.max_model_len = 300
        prompt = image_tokens((96, 128)) + 4  # 3 x 4 cells, and 15 characters
        content, finish, tokens = choice(ask(server, max_tokens=299))
        assert (len(content), finish, tokens) == (4 * (300 - prompt), "length", 300 - prompt)
        assert server.requests[-1].prompt_tokens == prompt == 16
        server.answer = Answer("short", finish_reason="length")
        server.max_model_len = 24576
        assert choice(ask(server)) == ("short", "length", 12384)


def test_a_loop_is_ended_only_when_asked_to() -> None:
    asked = {"max_pattern_size": 64, "min_pattern_size": 1, "min_count": 64}
    with Standin(answer=Answer("Begin. " + "and again, " * 500)) as server:
        assert choice(ask(server))[1] == "stop"
        response = ask(server, repetition_detection=asked)
        content, finish, tokens = choice(response)
        assert finish == "repetition" and response.json()["choices"][0]["stop_reason"] == "repetition_detected"
        assert content == "Begin." + " and again," * 64 and tokens == len(content) // 4 + 1
        server.answer = None
        assert choice(ask(server, repetition_detection=asked))[1] == "stop"
    assert loop_end("no loop here " * 60, 1, 64, 64) is None


def test_answers_are_sent_as_scripted() -> None:
    script = [Answer(None), Answer(""), Answer("x", finish_reason=None, reasoning="hm"), Answer("y", usage=False)]
    with Standin(answer=script, known={"": Answer("no image")}) as server:
        assert choice(ask(server)) == (None, "stop", 0)
        assert choice(ask(server))[0] == ""
        third = ask(server).json()["choices"][0]
        assert third["finish_reason"] is None and third["message"]["reasoning"] == "hm"
        assert ["usage" in ask(server).json() for _ in range(2)] == [False, False]
        text_only = [{"role": "user", "content": "Hello"}]
        assert choice(ask(server, messages=text_only))[0] == "no image"
        server.answer = lambda request: Answer(f"{request.fields['seed']}")
        assert choice(ask(server, seed=3))[0] == "3"


def test_pages_are_matched_by_what_they_show(tmp_path: Path) -> None:
    for ink in (7, 40, 90):
        (tmp_path / f"{ink}.html").write_text(f"page {ink}", encoding="utf-8")
    index = {f"{ink}": list(thumbnail(picture(ink=ink))) for ink in (7, 40, 90)}
    with Standin(answer=answer_by_page(tmp_path, index)) as server:
        for ink in (40, 90, 7):
            assert choice(ask(server, png(picture(ink=ink))))[0] == f"page {ink}"
        larger = picture(ink=40).resize((200, 260))
        assert choice(ask(server, png(larger)))[0] == "page 40"


@pytest.mark.skipif(not MINI.is_dir(), reason="the mini pages lie beside the project: ../shared is absent")
def test_the_mini_pages_are_matched() -> None:
    with Standin(answer=answer_by_page(MINI / "replies")) as server:
        for page in sorted((MINI / "omni" / "pages").glob("*.png")):
            assert choice(ask(server, page.read_bytes()))[0] == (MINI / "replies" / f"{page.stem}.html").read_text()


def test_a_blank_page_is_answered_as_one() -> None:
    with Standin() as server:
        assert "Blank-Page" in choice(ask(server, png(Image.new("RGB", (64, 64), "white"))))[0]


# ---- Faults


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Refuse(), httpx.ReadError),
        (Reset(), (httpx.ReadError, httpx.RemoteProtocolError)),
        (HalfJson(), httpx.RemoteProtocolError),
        (HalfJson(declared=False), json.JSONDecodeError),
        (Stall(0.01, close=True), httpx.RemoteProtocolError),
    ],
)
def test_a_broken_reply_and_the_next_one_whole(fault: Fault, error: Any) -> None:
    with Standin(answer=[fault, None]) as server:
        with pytest.raises(error):
            ask(server).json()
        assert choice(ask(server))[1] == "stop"
        assert server.counts[type(fault).__name__] == 1


def test_a_late_and_a_slow_reply_are_whole() -> None:
    with Standin(answer=[Stall(0.3, then=Answer("late")), Trickle(0.3, then=Answer("slow"))]) as server:
        for words in ("late", "slow"):
            start = time.monotonic()
            assert choice(ask(server))[0] == words and 0.29 < time.monotonic() - start < 2


@pytest.mark.parametrize("kind", ["error", "detail", "text", "html", "empty"])
def test_error_bodies(kind: str) -> None:
    with Standin(answer=Status(503, "busy", retry_after=7, kind=kind, echo=100_000)) as server:
        response = ask(server)
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")
        if kind == "empty":
            assert response.content == b""
        else:
            assert "busy data:image/png;base64,iVBOR" in response.text and len(response.text) > 100_000
        if kind in ("error", "detail"):
            assert kind in response.json()


@pytest.mark.parametrize("fault", [Stale(), CloseAfter()])
def test_a_kept_connection_that_is_gone(fault: Fault) -> None:
    with Standin(answer=[fault, None]) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        data = json.dumps(body()).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        raw.sendall(head % len(data) + data)
        got = b""
        while b'"usage"' not in got:
            got += raw.recv(1 << 16)
        assert b"connection: close" not in got.lower()
        with pytest.raises(ConnectionError):  # the FIN of CloseAfter is seen first, or the RST of what is written
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
            time.sleep(0.05)
            raw.sendall(b"host: x\r\n")
            if not raw.recv(1):
                raise ConnectionError
        assert len(server.requests) == 1 and choice(ask(server))[1] == "stop"


def test_idle_connections_end_and_uploads_can_be_cut() -> None:
    with Standin(keep_alive=0.1) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"GET /version HTTP/1.1\r\n\r\n")
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
            raw.settimeout(2)
            assert raw.recv(1) == b""
        server.reset_uploads = 1
        big = bytes(3_000_000)
        with pytest.raises(httpx.TransportError):
            ask(server, big)
        assert server.requests == [] and ask(server, big).status_code == 400


def test_refusing_for_a_while() -> None:
    with Standin(answer=[Refuse(seconds=0.3), None]) as server:
        for _ in range(2):
            with pytest.raises(httpx.TransportError):
                ask(server)
        time.sleep(0.3)
        assert ask(server).status_code == 200 and server.counts["refused"] == 1
        server.refusing = True
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/models")


def test_a_dead_engine_and_a_restart_with_another_model() -> None:
    with Standin(model="one") as server:
        server.engine_dead = True
        assert httpx.get(f"{server.url}/models").status_code == 200
        response = ask(server, model="one")
        assert response.status_code == 500 and "EngineCore" in response.json()["error"]["message"]
        url = server.url
        server.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/models")
        server.engine_dead = False
        server.start(model="two")
        assert server.url == url and httpx.get(f"{url}/models").json()["data"][0]["id"] == "two"
        assert (ask(server, model="one").status_code, ask(server, model="two").status_code) == (404, 200)
        assert [request.turn for request in server.requests] == [0, 1, 2]


def test_replies_in_the_making_when_the_server_stops() -> None:
    async def both(server: Standin, abort: bool) -> Any:
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(client.post(f"{server.url}/chat/completions", json=body()))
            await asyncio.to_thread(until, lambda: server.running == 1)
            await asyncio.to_thread(server.stop, abort)
            return (await asyncio.gather(asking, return_exceptions=True))[0]

    with Standin(answer=Answer("abcdefgh", seconds=60)) as server:
        assert choice(asyncio.run(both(server, abort=True))) == ("abcd", "abort", 1)
        server.start()
        assert isinstance(asyncio.run(both(server, abort=False)), httpx.TransportError)
        assert (server.running, server.waiting, server.in_flight) == (0, 0, 0)


def test_random_faults_are_the_same_again() -> None:
    script = random_faults(0.5, seed=3)
    with Standin(look=False) as server:
        for _ in range(40):
            ask(server)
        said = [script(request) for request in server.requests]
    assert said == [random_faults(0.5, seed=3)(request) for request in server.requests]
    assert 8 < said.count(None) < 32


def test_a_mistake_in_a_script_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Standin(answer=lambda request: request.fields["none"]) as server:
        assert ask(server).status_code == 500
    assert "KeyError" in capsys.readouterr().err


# ---- Pace and counters


async def together(server: Standin, pages: int) -> tuple[float, list[httpx.Response]]:
    """Ask for so many pages at once; the seconds it took, and the replies."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        bodies = [body(n.to_bytes(4, "big") * 50) for n in range(pages)]
        start = time.monotonic()
        replies = await asyncio.gather(*(client.post(f"{server.url}/chat/completions", json=b) for b in bodies))
        return time.monotonic() - start, replies


def test_slots_keep_the_rate_and_the_order() -> None:
    with Standin(Answer("abcd" * 10), look=False, slots=4, seconds=0.05, seconds_per_token=0.005) as server:
        seconds, replies = asyncio.run(together(server, 40))
        assert {r.status_code for r in replies} == {200}
        assert 0.99 < seconds < 2.5  # 40 pages, 4 at a time, 0.1 s each: 1 s and the client's own work
        assert server.most_in_flight > 30
        assert metric(server, "num_requests_waiting") == metric(server, "num_requests_running") == 0


def test_slots_are_handed_over_as_they_were_due() -> None:
    async def queue() -> list[float]:
        slots = Slots(1)
        start = await slots.take()
        waiting = [asyncio.create_task(slots.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one that leaves the queue holds up nobody
        slots.give(start + 1)
        second = await waiting[1]
        slots.give(second + 1)
        third = await waiting[2]
        slots.give(third + 1)
        return [second - start, third - start, slots.free]

    assert asyncio.run(queue()) == pytest.approx([1, 2, 1])


def test_a_client_that_leaves_frees_its_request() -> None:
    with Standin(seconds=60, slots=1, look=False) as server:
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/chat/completions", json=body(), timeout=0.2)
        until(lambda: server.in_flight == 0)
        assert (server.running, server.waiting, server.counts["disconnected"]) == (0, 0, 2)


def test_metrics_count_what_was_made() -> None:
    with Standin(Answer("abcd" * 340), mtp_acceptance=(0.9, 0.8, 0.7), engines=2, look=False) as server:
        for limit in (12384, 12384, 12384, 100):
            ask(server, max_tokens=limit)
        assert metric(server, "generation_tokens_total") == 3 * 340 + 100
        assert metric(server, "prompt_tokens_total") == 4 * 16
        assert metric(server, "request_success_total", 'finished_reason="stop"') == 3
        assert metric(server, "request_success_total", 'finished_reason="length",model_name="chandra"') == 1
        drafts = metric(server, "spec_decode_num_drafts_total")
        assert drafts == round(680 / 3.4) + round(440 / 3.4)
        assert metric(server, "spec_decode_num_draft_tokens_total") == 3 * drafts
        shares = [metric(server, "spec_decode_num_accepted_tokens_per_pos_total", f'position="{n}"') for n in range(3)]
        assert [share / drafts for share in shares] == pytest.approx([0.9, 0.8, 0.7], abs=0.01)
        assert metric(server, "spec_decode_num_accepted_tokens_total") == sum(shares)
        server.stop()
        server.start()
        assert metric(server, "generation_tokens_total") == 0
    with Standin() as server:
        assert "spec_decode" not in httpx.get(f"{server.base}/metrics").text


def test_metrics_show_the_queue() -> None:
    with Standin(seconds=0.5, slots=2, look=False) as server:

        async def watch() -> tuple[float, float]:
            asking = asyncio.create_task(together(server, 5))
            await asyncio.to_thread(until, lambda: server.in_flight == 5)
            seen = await asyncio.to_thread(
                lambda: (metric(server, "num_requests_running"), metric(server, "num_requests_waiting"))
            )
            await asking
            return seen

        assert asyncio.run(watch()) == (2, 3)


def test_the_command_line_serves_counts_and_stops() -> None:
    command = [sys.executable, str(Path(__file__).with_name("standin.py")), "--port", "0", "--mtp", "0.9,0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().strip()
        base = url.removesuffix("/v1")
        assert choice(httpx.post(f"{url}/chat/completions", json=body()))[1] == "stop"
        stats = httpx.get(f"{base}/stats").json()
        assert (stats["requests"], stats["most_in_flight"]) == (1, 1) and stats["bytes"] > 300
        assert httpx.get(f"{base}/reset").json()["requests"] == 1
        assert httpx.get(f"{base}/stats").json()["requests"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()

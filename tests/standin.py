"""A stand-in for a vLLM server: it speaks the part of the API that an OCR client uses, and fails on demand.

In a test, in a thread of its own on a free port:

    with Standin(answer=lambda request: Status(503) if request.turn == 0 else None) as server:
        ...  # talk to server.url, then look at server.requests

By hand, or for a benchmark: `python tests/standin.py --port 8000 --seconds 0.5 --slots 256` (--help shows the rest).

What is here, from top to bottom:
- Request, what a client sent; Answer and the faults, what the server does about it; Script, how a test says so
- made_up_page, answer_by_page, random_faults: ready-made scripts
- Body, look and the checks: reading a request as vLLM does, without keeping what nobody asks for
- compose: an answer as vLLM words it, cut off where it would be
- Slots, Metrics: how many replies are made at a time, and what /metrics says of it
- Link: one connection; Standin: the server; main: the command line

Only loopback, no TLS, no streaming. Four characters count as one token. Python's standard library, and Pillow where
images are looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import functools
import hashlib
import io
import json
import math
import random
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

VERSION = "0.33.0"  # the vLLM whose words these are
TOKEN = 4  # characters a token
GRID = 32  # pixels a side of an image token, the server's own grid
MAX_PIXELS = 6_291_456  # larger images are resized by the server, as the model's start command says
MAX_SIDES = 200  # the largest aspect ratio the image processor takes
BOMB = 178_956_970  # pixels from which Pillow, and so vLLM, refuses to decode
KEEP_ALIVE = 5.0  # seconds an idle connection stays open, uvicorn's default
THUMBNAIL = (24, 32)  # pixels: what pages are matched by


# ---- What a client sent


@dataclass(frozen=True)
class Request:
    """A chat completion as it arrived.

    `page` is the SHA-256 of the image's RGB pixels, or of its base64 text on a server with look=False. `body_hash` is
    equal for two requests exactly when their bytes are. `turn` counts the requests of the same page before this one.
    """

    page: str
    size: tuple[int, int]  # (0, 0) when nothing could be told
    format: str  # Pillow's name: PNG, JPEG, ...; "" when unknown
    prompt: str = field(repr=False)
    order: tuple[str, ...]  # types of the content parts
    fields: dict[str, Any]  # every field of the body but messages
    body_hash: str
    body_size: int
    turn: int
    number: int  # 0-based, over all pages
    time: float  # time.time() when the last byte was here
    connection: int
    prompt_tokens: int
    thumbnail: bytes = field(default=b"", repr=False)  # grey, row by row; empty with look=False


# ---- What the server does about it


@dataclass(frozen=True)
class Answer:
    """A reply. It is cut off at the request's max_tokens and ended by its loop detector, as vLLM would do."""

    content: str | None
    finish_reason: str | None = "stop"
    completion_tokens: int | None = None  # None: counted from the content
    usage: bool = True
    reasoning: str | None = None
    seconds: float | None = None  # None: the server's own pace


@dataclass(frozen=True)
class Status:
    """An error status instead of a reply: at once, without waiting for a slot."""

    code: int
    message: str = "scripted"
    retry_after: str | float | None = None  # seconds, or a date as HTTP writes it
    kind: str = "error"  # error (vLLM's JSON), detail (FastAPI's JSON), text, html, empty
    echo: int = 0  # characters of base64 in the message, as servers do that quote the image


@dataclass(frozen=True)
class Refuse:
    """The connection is reset without a byte, and so is every new one for the seconds that follow."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Stall:
    """Not a byte for so long; then a reply, or nothing and a closed connection when close is set."""

    seconds: float
    then: Answer | None = None
    close: bool = False


@dataclass(frozen=True)
class Reset:
    """The connection is reset when this share of the reply's body is sent."""

    share: float = 0.5
    then: Answer | None = None


@dataclass(frozen=True)
class HalfJson:
    """The reply ends in the middle. declared: its length was promised (HTTP is broken); else only the JSON is."""

    declared: bool = True
    then: Answer | None = None


@dataclass(frozen=True)
class CloseAfter:
    """A whole reply, after which the server closes the connection without having said so."""

    then: Answer | None = None


@dataclass(frozen=True)
class Stale:
    """A whole reply on a connection that is reset at the first byte of the next request, unread and uncounted."""

    then: Answer | None = None


@dataclass(frozen=True)
class Trickle:
    """The reply's bytes in so many pieces over so many seconds."""

    seconds: float
    pieces: int = 20
    then: Answer | None = None


# In each fault, then=None means the made-up page.
Fault: TypeAlias = Status | Refuse | Stall | Reset | HalfJson | CloseAfter | Stale | Trickle
Says: TypeAlias = Answer | Fault | None  # None: the made-up page
# One for all, one for each turn of a page (the last one repeats), or a function, which runs on the server's own thread.
Script: TypeAlias = Says | Sequence[Says] | Callable[[Request], Says]


# ---- Ready-made scripts

NOUNS = ("anchor", "barley", "canal", "chapel", "clerk", "cellar", "ferry", "furnace", "granary", "island", "kiln")
VERBS = ("bought", "carried", "counted", "found", "kept", "mended", "moved", "owed", "painted", "recorded", "sold")
KINDS = ("broad", "clean", "distant", "early", "empty", "grey", "heavy", "narrow", "old", "patient", "quiet", "warm")


def made_up_sentence(rng: random.Random) -> str:
    def thing() -> str:
        return f"{rng.choice(KINDS)} {rng.choice(NOUNS)}"

    return f"The {thing()} {rng.choice(VERBS)} {rng.randint(2, 999)} of the {thing()} by the {thing()}."


def made_up_page(seed: str, tokens: int = 1000) -> str:
    """A page in Chandra's blocks, the same for the same seed, about so many tokens long. Its heading names the seed."""
    rng = random.Random(seed)
    blocks = [("Section-Header", f"<h1>Page {seed[:12]}</h1>")]
    while sum(len(html) + 60 for _, html in blocks) < tokens * TOKEN - 1000:
        blocks.append(("Text", f"<p>{' '.join(made_up_sentence(rng) for _ in range(5))}</p>"))
    rows = "".join(f"<tr><td>{rng.choice(NOUNS)} {n}</td><td>{rng.uniform(1, 99):.2f}</td></tr>" for n in range(1, 5))
    blocks += [
        ("List-Group", "<ul>" + "".join(f"<li>{made_up_sentence(rng)}</li>" for _ in range(3)) + "</ul>"),
        ("Equation-Block", f'<math display="block">a = \\frac{{{rng.randint(1, 99)}}}{{b}}</math>'),
        ("Table", f"<table><thead><tr><th>Thing</th><th>Price</th></tr></thead><tbody>{rows}</tbody></table>"),
        ("Page-Footer", f"<p>{rng.randint(1, 400)}</p>"),
    ]
    step = 900 // len(blocks)
    return "\n".join(
        f'<div data-bbox="80 {50 + n * step} 920 {46 + (n + 1) * step}" data-label="{label}">{html}</div>'
        for n, (label, html) in enumerate(blocks)
    )


def made_up_answer(request: Request, tokens: int = 1000) -> Answer:
    """A made-up page; a blank one when the image was looked at and is one colour all over."""
    if request.thumbnail and min(request.thumbnail) == max(request.thumbnail):
        return Answer('<div data-bbox="0 0 1000 1000" data-label="Blank-Page"></div>')
    return Answer(made_up_page(request.page, tokens))


def thumbnail(image: Any) -> bytes:
    """What a page (a Pillow image) is matched by: its mean greys on a coarse grid, row by row."""
    from PIL.Image import Resampling

    grey: bytes = image.convert("L").resize(THUMBNAIL, Resampling.BOX).tobytes()
    return grey


def answer_by_page(folder: Path, index: Mapping[str, Sequence[int]] | None = None) -> Callable[[Request], Answer]:
    """A script that answers with FOLDER/<name>.html of the page whose thumbnail is nearest. Needs look=True.

    index: name -> thumbnail(page); None reads FOLDER/index.json.
    """
    known = index if index is not None else json.loads((folder / "index.json").read_text(encoding="utf-8"))

    @functools.cache
    def nearest(seen: bytes) -> str:
        return min(known, key=lambda name: sum((a - b) * (a - b) for a, b in zip(seen, known[name], strict=True)))

    def answer(request: Request) -> Answer:
        if not request.thumbnail:
            raise ValueError("pages are matched by what they show: use look=True, and send an image")
        return Answer((folder / f"{nearest(request.thumbnail)}.html").read_text(encoding="utf-8"))

    return answer


def random_faults(rate: float, seed: int = 0, answer: Script = None) -> Callable[[Request], Says]:
    """A script that fails a share of the requests, each kind alike; the same for the same seed, page and turn.

    A fault that ends in a whole reply ends in what `answer` says; its errors and faults come as they are.
    """

    def script(request: Request) -> Says:
        rng = random.Random(f"{seed} {request.page} {request.turn}")
        said = choose(answer, request)
        if rng.random() >= rate or not isinstance(said, Answer | None):
            return said
        half = made_up_page(request.page)[:900]
        faults: tuple[Says, ...] = (
            Reset(rng.random()),
            HalfJson(declared=rng.random() < 0.5),
            Status(429, retry_after=0),
            Status(500),
            Status(502, kind="html"),
            Status(503, kind="text", retry_after=0.05),
            Status(504, kind="empty"),
            Refuse(),
            CloseAfter(then=said),
            Stale(then=said),
            Stall(rng.uniform(0, 0.5), then=said),
            Stall(0.1, close=True),
            Trickle(0.2, then=said),
            Answer(None),
            Answer(""),
            Answer(half, finish_reason="abort"),
            Answer(half, finish_reason=None),
        )
        return rng.choice(faults)

    return script


def choose(script: Script, request: Request) -> Says:
    """What a script says to a request."""
    if callable(script):
        return script(request)
    if isinstance(script, Sequence):
        return script[min(request.turn, len(script) - 1)]
    return script


# ---- Reading a request


class Refused(Exception):
    """A request that vLLM answers with an error, and the error as it words it."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.payload = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Body:
    """A request's body as it streams in: base64 text is hashed on the way, and kept only when it is to be looked at.

    So a thousand uploads of 2 MB cost no more memory than their JSON without the images.
    """

    MARK = b";base64,"

    def __init__(self, keep: bool):
        self.keep = keep
        self.text = bytearray()  # the body without the base64 text, still valid JSON
        self.images: list[tuple[Any, bytearray]] = []  # each: SHA-256 of its base64 text; its start, or all of it
        self.inside = False  # is the next byte base64?
        self.size = 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        while data:
            if self.inside:
                end = data.find(b'"')
                self._image(data if end < 0 else data[:end])
                self.inside = end < 0
                data = b"" if end < 0 else data[end:]
            else:
                start = max(0, len(self.text) - len(self.MARK) + 1)
                self.text += data
                at = self.text.find(self.MARK, start)
                if at < 0:
                    return
                data = bytes(self.text[at + len(self.MARK) :])
                del self.text[at + len(self.MARK) :]
                self.images.append((hashlib.sha256(), bytearray()))
                self.inside = True

    def _image(self, data: bytes) -> None:
        digest, kept = self.images[-1]
        digest.update(data)
        if self.keep:
            kept += data
        elif len(kept) < 64:  # enough for a PNG's header
            kept += data[: 64 - len(kept)]

    def digest(self) -> str:
        """Equal exactly when the bodies' bytes are, at the cost of one pass over them."""
        return hashlib.sha256(bytes(self.text) + b"".join(d.digest() for d, _ in self.images)).hexdigest()


@dataclass(frozen=True)
class Sight:
    """What can be told of a request's image."""

    page: str = ""
    size: tuple[int, int] = (0, 0)
    format: str = ""
    thumbnail: bytes = b""
    problem: Refused | None = None  # why the server cannot take it


def glance(base64_sha256: str, start: bytes) -> Sight:
    """An image by its first bytes alone: a PNG says its size there."""
    raw = base64.b64decode(start[: len(start) // 4 * 4], validate=False)
    if raw[:8] == b"\x89PNG\r\n\x1a\n" and raw[12:16] == b"IHDR":
        width, height = struct.unpack(">II", raw[16:24])
        return Sight(base64_sha256, (width, height), "PNG")
    return Sight(base64_sha256)


def look(base64_sha256: str, text: bytes) -> Sight:
    """An image decoded, as the server would."""
    from PIL import Image

    try:
        raw = base64.b64decode(text.replace(b"\\/", b"/"), validate=True)
        image = Image.open(io.BytesIO(raw))
        if image.width * image.height > BOMB:  # Pillow says so itself, unless someone lifted its limit
            raise Image.DecompressionBombError(f"Image size ({image.size} pixels) exceeds limit of {BOMB} pixels")
        rgb = image.convert("RGB")
    except Image.DecompressionBombError as e:
        return Sight(base64_sha256, problem=Refused(500, str(e), "InternalServerError"))
    except (OSError, ValueError, SyntaxError) as e:  # base64 that is none is a ValueError
        return Sight(base64_sha256, problem=Refused(400, f"Failed to load image: {e}"))
    return Sight(hashlib.sha256(rgb.tobytes()).hexdigest(), rgb.size, image.format or "", thumbnail(rgb))


def image_tokens(size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> int:
    """The prompt tokens of an image: cells of the server's grid, after its own resizing."""
    width, height = size
    shrink = max(1.0, math.sqrt(width * height / max_pixels))
    whole = math.floor if shrink > 1 else round
    return max(1, whole(width / shrink / GRID)) * max(1, whole(height / shrink / GRID))


def content_parts(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of all messages in order, a bare string as a text part."""
    parts: list[dict[str, Any]] = []
    try:
        for message in fields["messages"]:
            content = message["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        if all(isinstance(part["type"], str) for part in parts):
            return parts
    except (KeyError, TypeError):
        pass
    raise Refused(400, "messages: field required, with a role and content each", param="messages")


def image_url(part: Mapping[str, Any]) -> str:
    """The URL of an image part; vLLM takes an object or a string."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def check_image(parts: Sequence[Mapping[str, Any]], images: int, sight: Sight, limit: int = 1) -> None:
    """Raise what vLLM says of the wrong number of images, or a wrong one."""
    wanted = [part for part in parts if part["type"] == "image_url"]
    if len(wanted) > limit:
        raise Refused(400, f"At most {limit} image(s) may be provided in one prompt. (parameter=image)", param="image")
    if len(wanted) != images or any(not image_url(part).startswith("data:image/") for part in wanted):
        raise Refused(400, "The URL must be a data URL with base64 text: nothing is fetched here.")
    if sight.problem:
        raise sight.problem
    if wanted and min(sight.size) > 0 and max(sight.size) / min(sight.size) > MAX_SIDES:
        ratio = max(sight.size) / min(sight.size)
        raise Refused(400, f"absolute aspect ratio must be smaller than {MAX_SIDES}, got {ratio}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# Field: (what it must be, the words when it is not). None means "not given" to vLLM; unknown fields are ignored.
FIELD_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (is_count, "max_tokens must be at least 1"),
    "max_completion_tokens": (is_count, "max_completion_tokens must be at least 1"),
    "temperature": (lambda v: is_number(v) and 0 <= v <= 2, "temperature must be non-negative, and at most 2"),
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "top_p must be in (0, 1]"),
    "seed": (lambda v: isinstance(v, int) and abs(v) < 2**63, "seed must be an integer of 64 bits"),
    "n": (lambda v: v == 1, "n must be 1 here"),
    "stream": (lambda v: v is False, "the stand-in does not stream: leave stream out"),
    "repetition_detection": (
        lambda v: (
            isinstance(v, dict)
            and v.keys() <= {"max_pattern_size", "min_pattern_size", "min_count"}
            and all(isinstance(n, int) and n >= 0 for n in v.values())
        ),
        "repetition_detection must be an object of max_pattern_size, min_pattern_size and min_count",
    ),
}


def check_fields(fields: Mapping[str, Any], refuses: Iterable[str], max_model_len: int, prompt_tokens: int) -> None:
    """Raise what vLLM says of a field it cannot take, of too many tokens wanted, and of a prompt too long."""
    for name in refuses:
        if name in fields:
            raise Refused(400, f"Extra inputs are not permitted: {name}", param=name)
    for name, (right, words) in FIELD_RULES.items():
        if fields.get(name) is not None and not right(fields[name]):
            raise Refused(400, f"{words}, got {fields[name]!r}.", param=name)
    wanted = asked_tokens(fields)
    if wanted and wanted > max_model_len:
        words = f"max_tokens={wanted} cannot be greater than max_model_len={max_model_len}."
        raise Refused(400, f"{words} Please request fewer output tokens.", param="max_tokens")
    if prompt_tokens >= max_model_len:
        words = f"This model's maximum context length is {max_model_len} tokens."
        raise Refused(400, f"{words} However, your request has {prompt_tokens} input tokens. Please reduce its length.")


def asked_tokens(fields: Mapping[str, Any]) -> int | None:
    asked: int | None = fields.get("max_completion_tokens") or fields.get("max_tokens")
    return asked


# ---- Making a reply


@functools.lru_cache(maxsize=256)
def loop_end(text: str, min_pattern: int, max_pattern: int, count: int) -> int | None:
    """Where a loop detector ends the text: after `count` repeats of a unit of so many tokens. None: no loop."""
    if count < 2 or max_pattern < max(1, min_pattern):
        return None
    unit = f"(.{{{TOKEN * max(1, min_pattern)},{TOKEN * max_pattern}}}?)"
    found = re.search(f"{unit}\\1{{{count - 1}}}", text, re.DOTALL)
    return found.end() if found else None


@dataclass(frozen=True)
class Reply:
    """An answer as it will be sent, and what it counts for."""

    payload: dict[str, Any]
    tokens: int
    prompt_tokens: int
    finish_reason: str | None

    def data(self) -> bytes:
        return json.dumps(self.payload).encode()


def cut(answer: Answer, fields: Mapping[str, Any], room: int) -> tuple[str | None, str | None, int]:
    """The content, finish reason and tokens of an answer after the server's loop detector and its limit of tokens."""
    text, finish = answer.content, answer.finish_reason
    tokens = answer.completion_tokens
    if tokens is None:
        tokens = room if finish == "length" else math.ceil(len(text or "") / TOKEN)
    loops = fields.get("repetition_detection")
    if loops and text:
        end = loop_end(text, *(loops.get(name, 0) for name in ("min_pattern_size", "max_pattern_size", "min_count")))
        if end is not None:
            text, finish, tokens = text[:end], "repetition", math.ceil(end / TOKEN)
    if tokens > room:
        text, finish, tokens = text and text[: room * TOKEN], "length", room
    return text, finish, tokens


def compose(request: Request, answer: Answer, model: str, max_model_len: int, stopping: bool = False) -> Reply:
    """An answer in vLLM's words. stopping: the server is told to go, and hands out what it has as "abort"."""
    # A limit that does not fit beside the prompt is lowered without a word, so "length" comes early.
    left = max_model_len - request.prompt_tokens
    text, finish, tokens = cut(answer, request.fields, min(asked_tokens(request.fields) or left, left))
    if stopping:
        text, finish, tokens = text and text[: len(text) // 2], "abort", tokens // 2
    message: dict[str, Any] = {
        "role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "tool_calls": [], "reasoning": answer.reasoning,
    }  # fmt: skip
    choice = {
        "index": 0, "message": message, "logprobs": None, "finish_reason": finish, "token_ids": None,
        "stop_reason": "repetition_detected" if finish == "repetition" else None,
    }  # fmt: skip
    usage = {
        "prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens + tokens,
        "completion_tokens": tokens, "prompt_tokens_details": None,
    }  # fmt: skip
    payload: dict[str, Any] = {
        "id": f"chatcmpl-{request.number:032x}", "object": "chat.completion", "created": int(request.time),
        "model": model, "choices": [choice], "service_tier": None, "system_fingerprint": None,
    }  # fmt: skip
    if answer.usage:
        payload["usage"] = usage
    return Reply(payload, tokens, request.prompt_tokens, finish)


def status_body(fault: Status) -> tuple[bytes, str]:
    """The body and content type of an error status."""
    words = fault.message
    if fault.echo:
        words += " data:image/png;base64,iVBORw0KGgo" + "AAAANSUhEUg/" * (fault.echo // 12)
    if fault.kind == "empty":
        return b"", "text/plain"
    if fault.kind == "text":
        return words.encode(), "text/plain; charset=utf-8"
    if fault.kind == "html":
        page = f"<html><head><title>{fault.code}</title></head><body><h1>{fault.code}</h1><p>{words}</p></body></html>"
        return page.encode(), "text/html"
    if fault.kind == "detail":
        return json.dumps({"detail": words}).encode(), "application/json"
    kinds = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}
    error = Refused(fault.code, words, kinds.get(fault.code, "InternalServerError"))
    return json.dumps(error.payload).encode(), "application/json"


# ---- The server's pace and its counters


class Slots:
    """So many replies at a time, first come first served; 0: any number.

    A slot is handed over with the time at which it was due, not with the time the loop got to it, so a full server
    keeps its exact rate however late its timers are.
    """

    def __init__(self, count: int):
        self.free = count or sys.maxsize
        self.queue: collections.deque[asyncio.Future[float]] = collections.deque()

    async def take(self) -> float:
        """Wait for a slot; the loop's time from which it is held."""
        loop = asyncio.get_running_loop()
        if self.free > 0:
            self.free -= 1
            return loop.time()
        turn: asyncio.Future[float] = loop.create_future()
        self.queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot came in the very moment its taker left
                self.give(turn.result())
            raise

    def give(self, since: float) -> None:
        while self.queue:
            turn = self.queue.popleft()
            if not turn.done():
                return turn.set_result(since)
        self.free += 1


REASONS = ("stop", "length", "abort", "error", "repetition")
HELP = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "prompt_tokens_total": "Number of prefill tokens processed.",
    "generation_tokens_total": "Number of generation tokens processed.",
    "num_preemptions_total": "Cumulative number of preemption from the engine.",
    "prefix_cache_queries_total": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits_total": "Prefix cache hits, in terms of number of cached tokens.",
    "mm_cache_queries_total": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits_total": "Multi-modal cache hits, in terms of number of cached items.",
    "request_success_total": "Count of successfully processed requests.",
    "spec_decode_num_drafts_total": "Number of spec decoding drafts.",
    "spec_decode_num_draft_tokens_total": "Number of draft tokens.",
    "spec_decode_num_accepted_tokens_total": "Number of accepted tokens.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Accepted tokens per draft position.",
}


class Sample(NamedTuple):
    """A line of /metrics but for its model: the metric's name, value and engine, and its own label if it has one."""

    name: str
    value: float
    engine: int
    label: str = ""


class Metrics:
    """The counters of a server's life, one set for each engine, and their text for Prometheus."""

    def __init__(self, engines: int, acceptance: Sequence[float] | None):
        self.engines = engines
        self.acceptance = acceptance  # share of drafts whose token at each position was accepted; None: no MTP
        self.counts: collections.Counter[tuple[int, str]] = collections.Counter()  # engine; metric or finish reason
        self.created = time.time()

    def count(self, reply: Reply, request: Request) -> None:
        engine = request.number % self.engines
        self.counts[engine, "prompt_tokens_total"] += reply.prompt_tokens
        self.counts[engine, "generation_tokens_total"] += reply.tokens
        self.counts[engine, "prefix_cache_queries_total"] += reply.prompt_tokens
        self.counts[engine, "mm_cache_queries_total"] += 1
        self.counts[engine, "mm_cache_hits_total"] += request.turn > 0
        self.counts[engine, reply.finish_reason or "error"] += 1

    def samples(self, running: int, waiting: int, usage: float) -> Iterable[Sample]:
        spread = self.engines - 1
        for engine in range(self.engines):
            yield Sample("num_requests_running", (running + spread - engine) // self.engines, engine)
            yield Sample("num_requests_waiting", (waiting + spread - engine) // self.engines, engine)
            yield Sample("kv_cache_usage_perc", usage, engine)
            for name in list(HELP)[3:10]:
                yield Sample(name, self.counts[engine, name], engine)
            for reason in REASONS:
                value = self.counts[engine, reason]
                yield Sample("request_success_total", value, engine, f'finished_reason="{reason}"')
            if self.acceptance is not None:
                yield from self._drafts(engine, self.acceptance)

    def _drafts(self, engine: int, acceptance: Sequence[float]) -> Iterable[Sample]:
        """Each draft step makes one token of its own, and those of the draft that were right."""
        drafts = round(self.counts[engine, "generation_tokens_total"] / (1 + sum(acceptance)))
        accepted = [round(drafts * share) for share in acceptance]
        yield Sample("spec_decode_num_drafts_total", drafts, engine)
        yield Sample("spec_decode_num_draft_tokens_total", drafts * len(acceptance), engine)
        yield Sample("spec_decode_num_accepted_tokens_total", sum(accepted), engine)
        for at, value in enumerate(accepted):
            yield Sample("spec_decode_num_accepted_tokens_per_pos_total", value, engine, f'position="{at}"')

    def text(self, model: str, running: int, waiting: int, usage: float) -> str:
        families: dict[str, list[str]] = {}
        for name, value, engine, label in self.samples(running, waiting, usage):
            # Prometheus' client writes the labels in alphabetical order.
            labels = ",".join(sorted(filter(None, (f'engine="{engine}"', f'model_name="{model}"', label))))
            counter = name.endswith("_total")
            for family, kind, figure in (
                (name, "counter" if counter else "gauge", float(value)),
                (name.replace("_total", "_created"), "gauge", self.created),
            )[: 1 + counter]:
                head = [f"# HELP vllm:{family} {HELP[name]}", f"# TYPE vllm:{family} {kind}"]
                families.setdefault(family, head).append(f"vllm:{family}{{{labels}}} {figure}")
        return "\n".join(line for lines in families.values() for line in lines) + "\n"


# ---- The server

PHRASES = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 411: "Length Required", 422: "Unprocessable Entity", 429: "Too Many Requests",
    500: "Internal Server Error", 502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip
PATHS = {
    "/v1/chat/completions": "POST", "/v1/models": "GET", "/version": "GET", "/health": "GET", "/metrics": "GET",
    "/stats": "GET", "/reset": "GET",
}  # fmt: skip
JSON = "application/json"
EMPTY_STATS: dict[str, Any] = {"requests": 0, "bytes": 0, "most_in_flight": 0, "first": None, "last": None}


class Link(asyncio.Protocol):
    """A client's connection: its bytes cut into requests, one at a time, and the replies written to it.

    A protocol rather than a stream, so that an upload is hashed as it comes and a client's leaving is seen at once.
    """

    def __init__(self, server: Standin):
        self.server = server
        self.number = -1
        self.head = bytearray()
        self.body: Body | None = None  # None: the head is still coming
        self.left = 0  # bytes of the body still to come
        self.verb, self.path, self.headers = "", "", dict[str, str]()
        self.rest = b""  # what came while a reply was being made
        self.task: asyncio.Task[None] | None = None
        self.stale = False  # the next byte resets the connection
        self.idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.number = self.server.connections
        self.server.connections += 1
        self.server.links.add(self)
        if self.server.refusing or time.monotonic() < self.server.refuse_until:
            self.server.counts["refused"] += 1
            self.reset()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.links.discard(self)
        if self.idle:
            self.idle.cancel()
        if self.task and not self.task.done():
            self.server.counts["disconnected"] += 1
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.stale:
            return self.reset()
        if self.idle:
            self.idle.cancel()
        if self.task:
            self.rest += data
            return
        if self.body is None:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = bytes(self.head[end + 4 :])
            self._read_head(self.head[:end].decode("latin-1").split("\r\n"))
            self.head.clear()
        self._read_body(data)

    def _read_head(self, lines: list[str]) -> None:
        self.verb, target = [*lines[0].split(" "), "", ""][:2]
        self.path = target.split("?")[0]
        named = (line.partition(":") for line in lines[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in named}
        self.left = int(self.headers.get("content-length") or 0)
        self.body = Body(keep=self.server.look)
        if self.headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self, data: bytes) -> None:
        assert self.body is not None
        data, self.rest = data[: self.left], data[self.left :]
        self.body.feed(data)
        self.left -= len(data)
        if self.left and self.server.reset_uploads and self.body.size > 1 << 16:
            self.server.reset_uploads -= 1
            self.server.counts["upload reset"] += 1
            return self.reset()
        if not self.left:
            self.task = asyncio.get_running_loop().create_task(self.server.handle(self, self.body))
            self.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.task = self.body = None
        if self.transport.is_closing():
            return
        if self.headers.get("connection", "").lower() == "close":
            return self.transport.close()
        self.idle = asyncio.get_running_loop().call_later(self.server.keep_alive, self.transport.close)
        if self.rest:
            data, self.rest = self.rest, b""
            self.data_received(data)

    def send(self, status: int, data: bytes, kind: str = JSON, more: str = "", declared: int | None = None) -> None:
        """Write a response. declared: the length it promises when that is not the body's."""
        head = f"HTTP/1.1 {status} {PHRASES.get(status, 'Unknown')}\r\nserver: uvicorn\r\n{more}"
        length = len(data) if declared is None else declared
        self.transport.write(f"{head}content-length: {length}\r\ncontent-type: {kind}\r\n\r\n".encode("latin-1") + data)

    def reset(self) -> None:
        """End the connection with a RST, as a process killed or a broken network does."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Standin:
    """The server: in a thread of its own between start() and stop(), or in a `with` block.

    answer          what it says (Script); known: the same for single pages, by Request.page, asked first
    seconds, seconds_per_token, jitter
                    what a reply takes: (seconds + seconds_per_token x its tokens), times 1 - jitter to 1 + jitter
    slots           replies made at a time, the other requests wait in order; 0: any number
    look            decode images (page by pixels, thumbnails, broken ones refused); False: only hash their text
    refuses         names of fields answered with 400; api_key: asked for under /v1; max_pixels: a cap on prompt tokens
    mtp_acceptance  share of drafts accepted at each position, for the counters; None: no such counters
    engines         data-parallel engines, each with its own counters; metrics=False: no /metrics

    May be changed at any time: answer, known, engine_dead, refusing, reset_uploads, seconds and its like.
    """

    def __init__(
        self,
        answer: Script = None,
        *,
        model: str = "chandra",
        max_model_len: int = 24576,
        slots: int = 0,
        seconds: float = 0.0,
        seconds_per_token: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        tokens: int = 1000,
        look: bool = True,
        known: Mapping[str, Script] | None = None,
        refuses: Iterable[str] = (),
        api_key: str | None = None,
        max_pixels: int = MAX_PIXELS,
        metrics: bool = True,
        mtp_acceptance: Sequence[float] | None = None,
        engines: int = 1,
        version: str = VERSION,
        keep_alive: float = KEEP_ALIVE,
        port: int = 0,
    ):
        self.answer, self.known, self.tokens = answer, dict(known or {}), tokens
        self.model, self.max_model_len, self.version = model, max_model_len, version
        self.slots, self.seconds, self.seconds_per_token = slots, seconds, seconds_per_token
        self.jitter, self.rng = jitter, random.Random(seed)
        self.look, self.refuses, self.api_key, self.max_pixels = look, tuple(refuses), api_key, max_pixels
        self.metrics, self.mtp_acceptance, self.engines = metrics, mtp_acceptance, engines
        self.keep_alive, self.port = keep_alive, port
        self.engine_dead = False  # 500 to every completion, while /v1/models is fine
        self.refusing = False  # every new connection is reset at once
        self.refuse_until = 0.0
        self.reset_uploads = 0  # so many of the next uploads over 64 KB are reset in the middle
        self.failures: list[Exception] = []  # of a test's own script; the with block raises the first
        self.connections = self.in_flight = self.running = self.waiting = 0
        self.links: set[Link] = set()
        self.reset()
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        """Forget the requests so far, and their turns."""
        self.requests: list[Request] = []
        self.counts: collections.Counter[str] = collections.Counter()  # what was done: "200 stop", "503", "Reset", ...
        self.turns: collections.Counter[str] = collections.Counter()
        self.figures = EMPTY_STATS | {"most_in_flight": self.in_flight}

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.base}/v1"

    @property
    def most_in_flight(self) -> int:
        most: int = self.figures["most_in_flight"]
        return most

    def stats(self) -> dict[str, Any]:
        """What /stats says: requests and bytes, most in flight, when the first came and the last was answered."""
        now = {"in_flight": self.in_flight, "running": self.running, "waiting": self.waiting}
        return self.figures | now | {"connections": self.connections, "counts": dict(self.counts)}

    # -- starting and stopping

    def start(self, model: str | None = None) -> Standin:
        """Listen, on the same port as before, perhaps with another model. As a new process: /metrics begins at zero."""
        if self._thread:
            raise RuntimeError("the stand-in runs already: stop() it first")
        self.model = model or self.model
        self.gauges = Metrics(self.engines, self.mtp_acceptance)
        self.abort_replies = False
        allow_open_files()
        listening: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listening)), daemon=True, name="standin")
        self._thread.start()
        try:
            self.port = listening.result(timeout=30)
        except OSError:
            self._thread = None
            raise
        return self

    def stop(self, abort_replies: bool = False) -> None:
        """Close the port and every connection. abort_replies: replies in the making are sent half, as "abort"."""
        if self._thread:
            self.abort_replies = abort_replies
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            self._thread = None

    def close_port(self) -> None:
        """Take no more connections, and leave those there are as they are."""
        self._loop.call_soon_threadsafe(self._listener.close)

    def __enter__(self) -> Standin:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is None and self.failures:
            raise self.failures[0]

    async def _serve(self, listening: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots, self._stopping = Slots(self.slots), asyncio.Event()
        try:
            self._listener = listener = await self._loop.create_server(
                lambda: Link(self), "127.0.0.1", self.port, backlog=4096
            )
        except OSError as e:
            return listening.set_exception(e)
        listening.set_result(listener.sockets[0].getsockname()[1])
        await self._stopping.wait()
        listener.close()
        tasks = [link.task for link in self.links if link.task]
        if tasks and self.abort_replies:
            await asyncio.wait(tasks, timeout=2)
        for link in list(self.links):
            link.transport.close() if self.abort_replies else link.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # for the transports to close

    # -- answering

    async def handle(self, link: Link, body: Body) -> None:
        """Answer one request, whatever it is."""
        try:
            if "transfer-encoding" in link.headers:
                self._plain(link, 411, {"detail": "Length Required"})
                link.transport.close()
            elif link.path in PATHS and link.path.startswith("/v1/") and not self._authorized(link):
                self._plain(link, 401, {"error": "Unauthorized"})
            elif link.path not in PATHS or (link.path == "/metrics" and not self.metrics):
                self._plain(link, 404, {"detail": "Not Found"})
            elif link.verb != PATHS[link.path]:
                self._plain(link, 405, {"detail": "Method Not Allowed"})
            elif link.verb == "POST":
                await self._complete(link, body)
            else:
                self._get(link)
        except Exception as e:  # a bug in a script or here: loud in the test, a 500 to the client
            self.failures.append(e)
            traceback.print_exc()
            self._plain(link, 500, Refused(500, f"the stand-in failed: {e!r}", "InternalServerError").payload)

    def _authorized(self, link: Link) -> bool:
        return self.api_key is None or link.headers.get("authorization") == f"Bearer {self.api_key}"

    def _plain(self, link: Link, status: int, payload: Mapping[str, Any]) -> None:
        self.counts[str(status)] += 1
        link.send(status, json.dumps(payload).encode())

    def _get(self, link: Link) -> None:
        if link.path == "/health":
            return link.send(503 if self.engine_dead else 200, b"")
        if link.path == "/metrics":
            usage = min(1.0, self.running / (self.slots or 256))
            text = self.gauges.text(self.model, self.running, self.waiting, usage)
            return link.send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        if link.path == "/v1/models":
            model = {
                "id": self.model, "object": "model", "created": int(self.gauges.created), "owned_by": "vllm",
                "root": self.model, "parent": None, "max_model_len": self.max_model_len, "permission": [],
            }  # fmt: skip
            payload: dict[str, Any] = {"object": "list", "data": [model]}
        elif link.path == "/version":
            payload = {"version": self.version}
        else:
            payload = self.stats()
            if link.path == "/reset":
                self.reset()
        link.send(200, json.dumps(payload).encode())

    async def _complete(self, link: Link, body: Body) -> None:
        """A chat completion: counted in flight from its last byte until its reply is written or its client is gone."""
        figures = self.figures
        self.in_flight += 1
        figures["requests"] += 1
        figures["bytes"] += body.size
        figures["most_in_flight"] = max(figures["most_in_flight"], self.in_flight)
        figures["first"] = figures["first"] or time.time()
        try:
            request = await self._read(link, body)
            if self.engine_dead:
                raise dead_engine()
            says = choose(self.known.get(request.page, self.answer), request)
            await self._act(link, request, says if says is not None else made_up_answer(request, self.tokens))
        except Refused as e:
            self._plain(link, e.status, e.payload)
        finally:
            self.in_flight -= 1
            self.figures["last"] = time.time()

    async def _read(self, link: Link, body: Body) -> Request:
        """Record a request; raise Refused for what vLLM would not take, in its order."""
        arrived = time.time()
        try:
            fields = json.loads(body.text)
            parts = content_parts(fields)
        except ValueError as e:
            raise Refused(400, f"JSON decode error: {e}") from None
        sight = Sight()
        if body.images:
            digest, text = body.images[0]
            see = functools.partial(look if self.look else glance, digest.hexdigest(), bytes(text))
            sight = await asyncio.to_thread(see) if self.look else see()
        images = len(body.images)
        prompt = sys.intern("".join(str(part.get("text", "")) for part in parts if part["type"] == "text"))
        tokens = math.ceil(len(prompt) / TOKEN) + (image_tokens(sight.size, self.max_pixels) if images else 0)
        request = Request(
            page=sight.page, size=sight.size, format=sight.format, prompt=prompt,
            order=tuple(part["type"] for part in parts),
            fields={name: value for name, value in fields.items() if name != "messages"},
            body_hash=body.digest(), body_size=body.size,
            turn=self.turns[sight.page], number=len(self.requests), time=arrived, connection=link.number,
            prompt_tokens=tokens, thumbnail=sight.thumbnail,
        )  # fmt: skip
        body.images.clear()  # a request that waits holds no image
        self.turns[sight.page] += 1
        self.requests.append(request)
        if fields.get("model") not in (self.model, None):
            raise Refused(404, f"The model `{fields['model']}` does not exist.", "NotFoundError", "model")
        check_fields(fields, self.refuses, self.max_model_len, tokens)
        check_image(parts, images, sight)
        return request

    async def _act(self, link: Link, request: Request, says: Answer | Fault) -> None:
        """Answer as scripted."""
        if not isinstance(says, Answer | Status):
            self.counts[type(says).__name__] += 1
        if isinstance(says, Status):
            self.counts[str(says.code)] += 1
            after = "" if says.retry_after is None else f"retry-after: {says.retry_after}\r\n"
            return link.send(says.code, *status_body(says), more=after)
        if isinstance(says, Refuse):
            self.refuse_until = max(self.refuse_until, time.monotonic() + says.seconds)
            return link.reset()
        if isinstance(says, Stall):
            await asyncio.sleep(says.seconds)
            if says.close:
                return link.transport.close()
        answer = says if isinstance(says, Answer) else says.then or made_up_answer(request, self.tokens)
        data = (await self._make(request, answer)).data()
        if isinstance(says, Answer | Stall):
            link.send(200, data)
        else:
            await send_badly(link, says, data)

    async def _make(self, request: Request, answer: Answer) -> Reply:
        """A reply, after the time it takes at this server's pace."""
        reply = compose(request, answer, self.model, self.max_model_len)
        takes = answer.seconds
        if takes is None:
            takes = self.seconds + self.seconds_per_token * reply.tokens
            takes *= self.rng.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else 1
        if await self._work(takes):
            reply = compose(request, answer, self.model, self.max_model_len, stopping=True)
        if self.engine_dead:
            raise dead_engine()
        self.gauges.count(reply, request)
        self.counts[f"200 {reply.finish_reason}"] += 1
        return reply

    async def _work(self, takes: float) -> bool:
        """Hold a slot for the seconds a reply takes. True: the server was told to stop meanwhile."""
        self.waiting += 1
        try:
            start = await self._slots.take()
        finally:
            self.waiting -= 1
        self.running += 1
        due, stopped = start + takes, True
        try:
            async with asyncio.timeout_at(due):
                await self._stopping.wait()
        except TimeoutError:
            stopped = False
        finally:
            self.running -= 1
            self._slots.give(min(due, self._loop.time()))
        if stopped and not self.abort_replies:
            raise asyncio.CancelledError
        return stopped


def allow_open_files(wanted: int = 8192) -> None:
    """Lift the limit of open files: a connection is one at each end, and both may be in this process."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
    except (ImportError, OSError, ValueError):  # Windows has none
        pass


def dead_engine() -> Refused:
    words = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return Refused(500, words, "InternalServerError")


async def send_badly(link: Link, fault: Reset | HalfJson | CloseAfter | Stale | Trickle, data: bytes) -> None:
    """Send a reply as the fault says."""
    if isinstance(fault, Reset):
        link.send(200, data[: int(len(data) * fault.share)], declared=len(data))
        await asyncio.sleep(0.02)  # a reset takes with it what the client has not read yet
        link.reset()
    elif isinstance(fault, HalfJson):
        link.send(200, data[: len(data) // 2], declared=len(data) if fault.declared else None)
        if fault.declared:
            link.transport.close()
    elif isinstance(fault, Trickle):
        size = math.ceil(len(data) / fault.pieces)
        link.send(200, b"", declared=len(data))
        for at in range(0, len(data), size):
            await asyncio.sleep(fault.seconds / fault.pieces)
            link.transport.write(data[at : at + size])
    else:
        link.send(200, data)
        link.stale = isinstance(fault, Stale)
        if not link.stale:
            link.transport.close()


# ---- The command line


def arguments() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    ap.add_argument("--port", type=int, default=8000, help="0: a free one; the URL is printed")
    ap.add_argument("--model", default="chandra")
    ap.add_argument("--max-model-len", type=int, default=24576)
    ap.add_argument("--api-key")
    ap.add_argument("--seconds", type=float, default=0.0, help="a reply takes, besides its tokens")
    ap.add_argument("--seconds-per-token", type=float, default=0.0)
    ap.add_argument("--jitter", type=float, default=0.0, help="0.5: times 0.5 to 1.5")
    ap.add_argument("--slots", type=int, default=0, help="replies made at a time; 0: any number")
    ap.add_argument("--tokens", type=int, default=1000, help="length of a made-up page")
    ap.add_argument("--mtp", help="acceptance at each draft position, as 0.9,0.8,0.7")
    ap.add_argument("--engines", type=int, default=1)
    ap.add_argument("--faults", type=float, default=0.0, metavar="RATE", help="share of requests that fail in some way")
    ap.add_argument("--seed", type=int, default=0, help="of the faults and the jitter")
    ap.add_argument("--match", type=Path, metavar="DIR", help="answer DIR/PAGE.html by DIR/index.json")
    ap.add_argument("--look", action="store_true", help="decode the images (--match does)")
    return ap


def main(argv: Sequence[str] | None = None) -> int:
    a = arguments().parse_args(argv)
    answer: Script = answer_by_page(a.match) if a.match else None
    server = Standin(
        random_faults(a.faults, a.seed, answer) if a.faults else answer,
        model=a.model, max_model_len=a.max_model_len, api_key=a.api_key, slots=a.slots, seconds=a.seconds,
        seconds_per_token=a.seconds_per_token, jitter=a.jitter, seed=a.seed, tokens=a.tokens, engines=a.engines,
        look=bool(a.match or a.look), port=a.port,
        mtp_acceptance=[float(share) for share in a.mtp.split(",")] if a.mtp else None,
    )  # fmt: skip
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with server:
        print(server.url, flush=True)
        while not stop.wait(3600):  # a wait with a limit, so that signals get through on every system
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The closed loop of `benchmark.py speed`: so many requests in flight, what comes of them, and whose limit it was.

Pages     what is sent: found, and drawn by ocr.py's own workers ahead of the requests (Feed)
Load      the places, each of which sends a page, waits for its reply and sends the next
Counters  what a vLLM server says of itself in /metrics
measure   a level: warm-up, window, the load kept on until the window's last request is answered, drain
figures   a level's record, with its warnings

Tokens are counted as they are made: a reply that straddles an end of the window counts with the share of its time that
lies in it. Over a steady window that is the server's own rate, however long the replies are.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark_stats as stats
import ocr

STARVED = 0.03  # share of the places' time spent waiting for a drawn page from which the client is called the limit
LATE = 0.05  # of a reply's time that the client's event loop adds to it: the same
BUSY = 0.90  # of one core, the client's main thread: from here on it is called the limit
DISAGREE = 0.02  # between the replies' usage and the server's counters
READY = 256  # drawn pages that wait to be sent, at most
PREPARED = 4 << 30  # bytes of drawn pages that --prepared keeps
STEADY = 0.10  # two spans of replies in a row whose rates differ less end the warm-up
SLICES = 10  # parts of a window, whose rates tell whether it was steady
MTP_DROPPED = 1.05  # mean accepted length below which the draft tokens bring nothing: perhaps the weights are gone


# ------------------------------------------------------------------------------------------------------------- Pages


@dataclass(frozen=True)
class Sheet:
    """A page to be asked for: which one, and its PNG in base64."""

    page: int  # its place among the pages
    png: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it went. Times are the event loop's, in seconds."""

    page: int
    attempt: int  # 0: the first; from 1: because the reply before repeated itself or was cut off
    begun: float  # when the page's first attempt was sent
    start: float
    uploaded: float | None  # when its last byte was sent
    end: float
    tokens: int | None  # None: the server does not say
    finish: str | None  # None: an error
    last: bool  # whether the page is done with it
    error: str | None = None

    def share(self, window: Window, since: float | None = None) -> float:
        """The part of its time (or of the page's, from `begun` on) that lies in the window."""
        start = self.start if since is None else since
        inside = min(self.end, window.end) - max(start, window.start)
        return max(0.0, inside) / max(self.end - start, 1e-9)


@dataclass(frozen=True, slots=True)
class Window:
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, moment: float) -> bool:
        return self.start < moment <= self.end


@dataclass(frozen=True)
class Pages:
    """The pages that are sent, in order, and those of each document."""

    documents: tuple[ocr.Document, ...]
    places: tuple[tuple[int, int], ...]  # of each page: its document's place and its number, from 1
    errors: Mapping[str, str]  # files that could not be opened

    def sha256(self) -> str:
        names = [f"{self.documents[document].sha256} {number}" for document, number in self.places]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def by_document(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for page, (document, _) in enumerate(self.places):
            found.setdefault(document, []).append(page)
        return list(found.values())


async def find_pages(client: ocr.Run, inputs: Sequence[Path], limit: int) -> Pages:
    """The pages of the inputs, the first `limit` of them when that is not 0. Raises BadUsage when there is none."""
    documents: list[ocr.Document] = []
    places: list[tuple[int, int]] = []
    errors: dict[str, str] = {}
    for found in ocr.find_inputs(inputs, client.out):
        if limit and len(places) >= limit:
            break
        if not isinstance(found, ocr.Found):
            errors[str(found[0])] = found[1]
            continue
        try:
            document = await client.survey(found, client.out)
        except ocr.DocumentError as e:
            errors[str(found.source)] = str(e)
            continue
        places += [(len(documents), number) for number in document.numbers]
        documents.append(document)
    if not places:
        why = [f"{name}: {error}" for name, error in errors.items()][:20]
        raise ocr.BadUsage("\n  ".join(["--data holds no page that can be read; nothing was sent", *why]))
    return Pages(tuple(documents), tuple(places[:limit] if limit else places), errors)


class Feed:
    """Pages over and over, drawn by the client's workers ahead of the places that send them.

    mode "page": the places share one queue; "document": each place sends a document page after page, then the next one.
    """

    def __init__(self, client: ocr.Run, pages: Pages, mode: str, most: int):
        self.client, self.pages, self.mode = client, pages, mode
        self.kept: dict[int, bytes] = {}  # drawn before the clock starts (--prepared)
        self.unreadable: dict[int, str] = {}
        self.order = itertools.cycle(range(len(pages.places)))
        self.documents = itertools.cycle(pages.by_document())
        self.rest: dict[int, list[int]] = {}  # mode "document": what is left of each place's document
        self.ahead: dict[int, asyncio.Task[Sheet]] = {}  # and its next page
        room = max(2 * client.workers.count + 2, min(most, READY))
        self.ready: asyncio.Queue[Sheet | Exception] = asyncio.Queue(room)
        self.drawers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Feed:
        if self.mode == "page":
            self.drawers = [asyncio.create_task(self.fill()) for _ in range(2 * self.client.workers.count)]
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = [*self.drawers, *self.ahead.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare(self) -> None:
        """Draws all pages, or as many as PREPARED bytes hold; only those are sent then."""
        todo, size = iter(range(len(self.pages.places))), 0

        async def draw() -> None:
            nonlocal size
            for page in todo:
                if size > PREPARED:
                    break
                if sheet := await self.draw(page):
                    self.kept[page] = sheet.png
                    size += len(sheet.png)

        await asyncio.gather(*(draw() for _ in range(2 * self.client.workers.count)))
        self.order = itertools.cycle(sorted(self.kept))
        whole = [[page for page in pages if page in self.kept] for pages in self.pages.by_document()]
        self.documents = itertools.cycle(list(filter(None, whole)))

    async def draw(self, page: int) -> Sheet | None:
        """A page ready to be sent; None when it cannot be drawn. Raises BadUsage when none can."""
        if png := self.kept.get(page):
            return Sheet(page, png)
        if page in self.unreadable:
            return None
        document, number = self.pages.places[page]
        try:
            return Sheet(page, (await self.client.draw(self.pages.documents[document], number)).png)
        except ocr.PageError as e:
            self.unreadable[page] = str(e)
            if len(self.unreadable) == len(self.pages.places):
                raise ocr.BadUsage(f"no page can be drawn: {e}") from None
            return None

    async def fill(self) -> None:
        """Keeps the queue full; one of several that do. An error goes to who takes from it."""
        try:
            for page in self.order:
                if sheet := await self.draw(page):
                    await self.ready.put(sheet)
        except Exception as e:
            await self.ready.put(e)

    async def take(self, place: int) -> Sheet:
        """The next page to send from a place."""
        if self.mode == "document":
            task = self.ahead.pop(place, None) or asyncio.create_task(self.following(place))
            sheet = await asyncio.shield(task)
            self.ahead[place] = asyncio.create_task(self.following(place))  # drawn while this one is at the server
            return sheet
        ready = await self.ready.get()
        if isinstance(ready, Exception):
            raise ready
        return ready

    async def following(self, place: int) -> Sheet:
        """The next page of a place's document, or the first of another document."""
        while True:
            if not self.rest.get(place):
                self.rest[place] = list(next(self.documents))
            if sheet := await self.draw(self.rest[place].pop(0)):
                return sheet


# ------------------------------------------------------------------------------------------------------------- Counters

PER_POSITION = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*\bposition="(\d+)"[^}]*\}\s+(\S+)', re.MULTILINE
)
KV_USE = re.compile(r"^vllm:(?:kv|gpu)_cache_usage_perc(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
FINISHED = "request_success_total"


@dataclass(frozen=True)
class Counters:
    """What /metrics says at a moment: sums over the engines, the use of the KV cache their mean."""

    at: float
    values: Mapping[str, float]
    per_position: Mapping[int, float]
    kv: float | None

    def since(self, before: Counters, name: str) -> float | None:
        return self.values[name] - before.values[name] if name in self.values and name in before.values else None


def parse_counters(text: str, at: float) -> Counters | None:
    """None when this is not vLLM's /metrics."""
    values = ocr.read_metrics(text)
    if "generation_tokens_total" not in values:
        return None
    per_position: collections.Counter[int] = collections.Counter()
    for position, value in PER_POSITION.findall(text):
        per_position[int(position)] += float(value)  # type: ignore[assignment]
    kv = [float(value) for value in KV_USE.findall(text)]
    return Counters(at, values, dict(sorted(per_position.items())), sum(kv) / len(kv) if kv else None)


def mtp_facts(before: Counters, after: Counters) -> dict[str, Any] | None:
    """Speculative decoding between two moments; None when the server has none.

    acceptance: for each draft position, the share of drafts whose token there was accepted. mean_accepted_length: the
    tokens of a step, the model's own included, so 1.0 means that drafts bring nothing.
    """
    drafts = after.since(before, "spec_decode_num_drafts_total")
    accepted = after.since(before, "spec_decode_num_accepted_tokens_total")
    if drafts is None or accepted is None:
        return None
    positions = [value - before.per_position.get(at, 0.0) for at, value in after.per_position.items()]
    return {
        "drafts": drafts,
        "acceptance": [round(value / drafts, 4) for value in positions] if drafts else None,
        "mean_accepted_length": round(1 + accepted / drafts, 4) if drafts else None,
    }


def mtp_warning(mtp: Mapping[str, Any] | None) -> str | None:
    if mtp is None or (mtp["mean_accepted_length"] or 0) >= MTP_DROPPED:
        return None
    said = f"mean accepted length {mtp['mean_accepted_length']:.2f}" if mtp["drafts"] else "no draft was made"
    return (
        f"MTP brings nothing ({said}; 1.0 is none accepted): were the checkpoint's MTP weights dropped when it was "
        "converted, or is its draft model another's?"
    )


# ----------------------------------------------------------------------------------------------------------------- Load


class Load:
    """A closed loop: so many places, each of which sends a page, waits for its reply and sends the next.

    What goes out and comes back is kept as it was; the figures are made of it afterwards.
    """

    PATIENCE = 20  # requests without a reply in a row, and twice the places, before the server is given up
    TICK = 0.05  # s

    def __init__(self, server: Any, feed: Feed, places: int, retries: int):
        self.server, self.feed, self.places, self.retries = server, feed, places, retries
        self.asked: list[Asked] = []
        self.waits: list[tuple[float, float]] = []  # when a place stood empty because no page was drawn
        self.open: dict[int, float] = {}  # by place: when the page that is at the server was begun
        self.closing = False
        self.failed_in_row = 0
        self.lateness: list[tuple[float, float]] = []  # the event loop's: (when, s)
        self.loop = asyncio.get_running_loop()

    async def place(self, number: int) -> None:
        """One place among the requests in flight."""
        while not self.closing:
            free = self.loop.time()
            try:
                sheet = await self.feed.take(number)
            finally:  # a place that still waits at the end has waited too
                self.waits.append((free, self.loop.time()))
            if not self.closing:
                await self.read_page(number, sheet)

    async def read_page(self, place: int, sheet: Sheet) -> None:
        """A page's attempts: one, or as many as the client would make with --retries."""
        begun, attempts, stale = self.loop.time(), list[ocr.Attempt](), False
        done = False
        while not done:
            start, sent, sampled = self.loop.time(), list[float](), ocr.sampling(len(attempts))
            self.open[place] = begun
            answer: ocr.Answer | None = None
            fault: ocr.Fault | ocr.Refused | None = None
            try:
                answer = await self.server.ask([sheet.png], sampled, lambda sent=sent: sent.append(self.loop.time()))
            except (ocr.Fault, ocr.Refused) as e:
                fault = e
            finally:
                del self.open[place]
            if isinstance(fault, ocr.Fault) and fault.stale and not stale:
                stale = True  # a kept connection that the server had closed: nothing was asked
                continue
            number = len(attempts)
            if answer is not None:
                attempts.append(as_attempt(answer, sampled))
            done = answer is None or ocr.settled(attempts, self.retries)
            self.asked.append(
                Asked(
                    page=sheet.page,
                    attempt=number,
                    begun=begun,
                    start=start,
                    uploaded=sent[0] if sent else None,
                    end=self.loop.time(),
                    tokens=answer.completion_tokens if answer else None,
                    finish=answer.finish_reason if answer else None,
                    last=done,
                    error=str(fault) if fault else None,
                )
            )
            await self.judge(fault)

    async def judge(self, fault: ocr.Fault | ocr.Refused | None) -> None:
        """After an error a short pause; after too many without any reply the server is given up: NoServer."""
        self.failed_in_row = self.failed_in_row + 1 if fault else 0
        if fault and self.failed_in_row >= max(self.PATIENCE, 2 * self.places):
            raise ocr.NoServer(f"no reply to {self.failed_in_row} requests in a row: {fault}")
        if isinstance(fault, ocr.Fault):
            await asyncio.sleep(max(min(fault.retry_after or 0.0, 60.0), ocr.backoff(0)))

    async def tick(self) -> None:
        """How late the event loop is: what a reply waits before it is seen."""
        while True:
            due = self.loop.time() + self.TICK
            await asyncio.sleep(self.TICK)
            self.lateness.append((due, self.loop.time() - due))

    @property
    def replies(self) -> int:
        return sum(asked.finish is not None for asked in self.asked)


def as_attempt(answer: ocr.Answer, sampled: ocr.Sampling) -> ocr.Attempt:
    counts = (answer.prompt_tokens, answer.completion_tokens)
    return ocr.Attempt(
        sampled.seed,
        sampled.temperature,
        sampled.top_p,
        answer.text,
        answer.finish_reason,
        *counts,
        answer.seconds,
        ocr.repeats(answer.text),
    )


def is_steady(asked: Sequence[Asked], places: int) -> bool:
    """Whether the last two spans of replies, each of as many as there are places, came at the same rate."""
    done = [one for one in asked if one.finish is not None]
    span = max(places, 8)
    if len(done) < 2 * span + 1:
        return False
    marks = [done[-1 - n * span].end for n in range(3)]
    rates = []
    for n in range(2):
        replies = done[len(done) - (n + 1) * span : len(done) - n * span]
        rates.append(sum(one.tokens or 1 for one in replies) / max(marks[n] - marks[n + 1], 1e-9))
    return abs(rates[0] - rates[1]) <= STEADY * max(rates)


@dataclass(frozen=True)
class Plan:
    """How a level is measured. Seconds throughout."""

    seconds: float  # of the window
    warm_up: float | None  # None: until it is steady
    retries: int
    loop_stop: bool

    @property
    def longest_warm_up(self) -> float:
        return max(60.0, 5 * self.seconds)


@dataclass
class Watch:
    """What is looked at while the window is open."""

    window: Window
    cpu: float  # s, of this process and its workers
    main: float  # s, of the thread that sends
    gauges: list[Counters]
    counters: tuple[Counters | None, Counters | None]  # at the window's two ends
    whole: tuple[Counters | None, Counters | None] = (None, None)  # before the first request and after the last
    unfinished: int = 0  # requests given up at the end
    warmed: bool = True


async def measure(
    server: Any, feed: Feed, places: int, plan: Plan, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Asked]]:
    """A level's figures and its requests.

    After the window the load stays on until the last page begun before its end is answered: with less of it the server
    would be faster, and those pages' share of the window too large. Then nothing more is sent until the server is idle.
    """
    load = Load(server, feed, places, plan.retries)
    before = await counters(server)
    try:
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(load.tick())
            senders = [group.create_task(load.place(number)) for number in range(places)]
            warmed = await warm_up(load, plan, say)
            watch = await watch_window(load, plan, say)
            watch.warmed = warmed
            say("until the last of the window's requests is answered")
            end = watch.window.end
            await until(lambda: all(begun >= end for begun in load.open.values()), plan.longest_warm_up)
            load.closing = True
            say("until the server is idle")
            await until(lambda: not load.open, plan.longest_warm_up)
            watch.unfinished = len(load.open)
            for task in (*senders, beside):
                task.cancel()
    except BaseExceptionGroup as errors:
        raise next(ocr.flatten(errors)) from None
    watch.whole = (before, await settled_counters(server) if before else None)
    record = figures(load, watch, len(feed.unreadable))
    if plan.loop_stop:
        record["loop_stop"] = await tokens_saved(server, feed, load, watch.window, say)
    return record, load.asked


async def until(condition: Callable[[], bool], limit: float) -> bool:
    """Waits for a condition, so many seconds at most; whether it came."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


async def warm_up(load: Load, plan: Plan, say: Callable[[str], None]) -> bool:
    """Until each place had a reply, taken together, and replies come at an even rate; whether that was reached.

    An even rate is waited for half a window at most; pages differ.
    """
    say("warming up")
    if plan.warm_up is not None:
        await asyncio.sleep(plan.warm_up)
        return True
    turned = await until(lambda: load.replies >= load.places, plan.longest_warm_up)
    await until(lambda: is_steady(load.asked, load.places), plan.seconds / 2)
    return turned


async def watch_window(load: Load, plan: Plan, say: Callable[[str], None]) -> Watch:
    """Lets the window's time pass, looking at the server's gauges every second."""
    first = await counters(load.server)
    start, cpu, main = load.loop.time(), cpu_seconds(load.feed.client.workers), time.thread_time()
    end, gauges = start + plan.seconds, []
    while (left := end - load.loop.time()) > 0:
        done = len(load.asked)
        await asyncio.sleep(min(1.0, left))
        tokens = sum(asked.tokens or 0 for asked in load.asked[done:])
        say(f"measuring, {max(0.0, end - load.loop.time()):.0f} s left, {tokens / min(1.0, left):.0f} tokens/s")
        if first and (now_ := await counters(load.server)):
            gauges.append(now_)
    window = Window(start, load.loop.time())
    cpu, main = cpu_seconds(load.feed.client.workers) - cpu, time.thread_time() - main
    return Watch(window, cpu, main, gauges, (first, await counters(load.server) if first else None))


async def counters(server: Any) -> Counters | None:
    """The server's counters; None when it has none."""
    with contextlib.suppress(OSError, TimeoutError):
        asked = time.monotonic()
        status, text = await server.get(server.root + "/metrics")
        if status == 200:
            return parse_counters(text, (asked + time.monotonic()) / 2)
    return None


async def settled_counters(server: Any) -> Counters | None:
    """The counters once they stand still: vLLM brings them up to date a moment after a reply."""
    last = await counters(server)
    for _ in range(20):
        await asyncio.sleep(0.1)
        now_ = await counters(server)
        if last is None or now_ is None:
            return now_
        if now_.values["generation_tokens_total"] == last.values["generation_tokens_total"]:
            break
        last = now_
    return now_


def cpu_seconds(workers: ocr.Workers) -> float:
    """CPU time of this process, its render workers and those that are gone. Windows tells only this process's."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    alive = [worker.process.pid for worker in (*workers.idle, *workers.busy) if worker.process and worker.process.pid]
    return total + sum(map(process_cpu, alive))


def process_cpu(pid: int) -> float:
    """CPU seconds of another process, from /proc or, where there is none, ps."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError, ValueError):
        said = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True).stdout
        seconds = 0.0
        for part in said.strip().replace("-", ":").split(":"):
            seconds = 60 * seconds + float(part)
        return seconds
    return 0.0


# -------------------------------------------------------------------------------------------------------------- Figures


def figures(load: Load, watch: Watch, unreadable: int) -> dict[str, Any]:
    """A level's record, with its warnings."""
    window = watch.window
    ended = [asked for asked in load.asked if window.holds(asked.end)]
    replies = [asked for asked in load.asked if asked.finish is not None and asked.share(window) > 0]
    pages = [asked for asked in load.asked if asked.last and asked.finish and asked.share(window, asked.begun) > 0]
    tokens = None
    if replies and all(asked.tokens is not None for asked in replies):
        tokens = sum((asked.tokens or 0) * asked.share(window) for asked in replies)
    page_count = sum(asked.share(window, asked.begun) for asked in pages)
    record: dict[str, Any] = {
        "concurrency": load.places,
        "seconds": round(window.seconds, 3),
        "tokens_per_second": rounded(tokens, window.seconds),
        "pages_per_second": round(page_count / window.seconds, 4),
        "ms_per_page": round(1000 * window.seconds / page_count, 2) if page_count else None,
        "tokens_per_page": rounded(tokens, page_count),
        "slices": [rounded(part, window.seconds / SLICES) for part in slices(replies, window)] if tokens else None,
        "latency": latencies([a.end - a.begun for a in ended if a.last and a.finish]),
        "upload": latencies([a.uploaded - a.start for a in ended if a.uploaded is not None]),
        "replies": sum(asked.finish is not None for asked in ended),
        "finish": dict(collections.Counter(asked.finish for asked in ended if asked.finish)),
        "without_usage": sum(asked.tokens is None for asked in replies),
        "errors": sum(asked.error is not None for asked in ended),
        "error_kinds": dict(collections.Counter(asked.error for asked in ended if asked.error).most_common(5)),
        "retries": retry_facts(replies, window),
        "pages": len({asked.page for asked in ended}),
        "times_each_page": round(len(ended) / max(1, len({asked.page for asked in ended})), 2),
        "unreadable_pages": unreadable,
        "unfinished": watch.unfinished,
        "server": server_facts(watch, load),
        "client": client_facts(load, watch, len(ended)),
    }
    record["warnings"] = list(level_warnings(record, watch))
    return record


def rounded(value: float | None, by: float = 1.0) -> float | None:
    return None if value is None or not by else round(value / by, 2)


def slices(replies: Sequence[Asked], window: Window) -> Iterator[float]:
    """The tokens of each tenth of the window."""
    width = window.seconds / SLICES
    for n in range(SLICES):
        part = Window(window.start + n * width, window.start + (n + 1) * width)
        yield sum((asked.tokens or 0) * asked.share(part) for asked in replies)


def latencies(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    shares = {f"p{round(100 * share)}": round(stats.percentile(seconds, share), 4) for share in (0.5, 0.95, 0.99)}
    return shares | {"mean": round(sum(seconds) / len(seconds), 4)}


def retry_facts(replies: Sequence[Asked], window: Window) -> dict[str, Any]:
    """How many replies were asked again, and their share of the tokens: of all, what the page's last one is not."""
    again = [asked for asked in replies if asked.attempt > 0]
    total = sum((asked.tokens or 0) * asked.share(window) for asked in replies)
    spent = sum((asked.tokens or 0) * asked.share(window) for asked in again)
    return {"replies": len(again), "share_of_tokens": round(spent / total, 4) if total else None}


def server_facts(watch: Watch, load: Load) -> dict[str, Any] | None:
    """The server's own account of the window; None when it gives none."""
    first, last = watch.counters
    if first is None or last is None:
        return None
    seconds = last.at - first.at
    waiting = [gauge.values.get("num_requests_waiting", 0.0) for gauge in watch.gauges]
    running = [gauge.values.get("num_requests_running", 0.0) for gauge in watch.gauges]
    kv = [gauge.kv for gauge in watch.gauges if gauge.kv is not None]
    hits, queries = (last.since(first, f"prefix_cache_{name}_total") for name in ("hits", "queries"))
    return {
        "tokens_per_second": rounded(last.since(first, "generation_tokens_total"), seconds),
        "pages_per_second": rounded(last.since(first, FINISHED), seconds),
        "prompt_tokens_per_second": rounded(last.since(first, "prompt_tokens_total"), seconds),
        "disagreement": disagreement(watch, load),
        "mtp": mtp_facts(first, last),
        "kv_use": {"mean": rounded(sum(kv), len(kv)), "max": max(kv)} if kv else None,
        "preemptions": last.since(first, "num_preemptions_total"),
        "waiting": {"mean": rounded(sum(waiting), len(waiting)), "max": max(waiting, default=None)},
        "running": {"mean": rounded(sum(running), len(running)), "max": max(running, default=None)},
        "always_waiting": bool(waiting) and sum(n > 0 for n in waiting) >= 0.9 * len(waiting),
        "prefix_cache_hits": round((hits or 0) / queries, 4) if queries else None,
    }


def disagreement(watch: Watch, load: Load) -> float | None:
    """How far the server's count of tokens lies from the replies', from the first request to the last.

    Over the whole of it, because no reply is cut there: at a window's ends each side cuts in its own way.
    """
    before, after = watch.whole
    counted = after.since(before, "generation_tokens_total") if before and after else None
    if counted is None or any(asked.finish and asked.tokens is None for asked in load.asked):
        return None
    said = sum(asked.tokens or 0 for asked in load.asked)
    return round(counted / said - 1, 4) if said else None


def client_facts(load: Load, watch: Watch, requests: int) -> dict[str, Any]:
    """What the client cost, and whether it was the limit."""
    window = watch.window
    starved = sum(max(0.0, min(end, window.end) - max(start, window.start)) for start, end in load.waits)
    late = [seconds for due, seconds in load.lateness if window.holds(due)]
    return {
        "cpu_seconds_per_page": round(watch.cpu / requests, 4) if requests else None,
        "cores": round(watch.cpu / window.seconds, 3),
        "main_thread": round(watch.main / window.seconds, 3),
        "starved": round(starved / (load.places * window.seconds), 4),
        "loop_late_ms": round(1000 * sum(late) / len(late), 2) if late else None,
    }


def client_limit(record: Mapping[str, Any]) -> str | None:
    """Why the client was the limit; None when it was not.

    A server whose queue was never empty had work all the time, so the client was not, whatever it looked like.
    """
    client, server = record["client"], record["server"]
    if server and server["always_waiting"]:
        return None
    if client["starved"] > STARVED:
        return f"places stood free {100 * client['starved']:.0f}% of the time because no page was drawn"
    if client["main_thread"] > BUSY:
        return f"its main thread was busy {100 * client['main_thread']:.0f}% of the time"
    # A request waits for the event loop when it goes out and when its reply comes in.
    latency, late = record["latency"], client["loop_late_ms"] or 0
    if latency and 2 * late / 1000 > LATE * latency["mean"]:
        return f"its event loop came {late:.0f} ms late to replies that take {latency['mean']:.2f} s"
    return None


def level_warnings(record: Mapping[str, Any], watch: Watch) -> Iterator[str]:
    """What a reader of the figures must know, most important first."""
    server = record["server"]
    if why := client_limit(record):
        yield f"client-limited: {why}; the server could do more (--prepared, --workers, a faster client machine)"
    if record["without_usage"]:
        yield f"{record['without_usage']} replies came without usage: no tokens/s of the replies"
    if server and abs(server["disagreement"] or 0) > DISAGREE:
        lost = record["errors"] or record["unfinished"]
        why = "requests without a reply cost it tokens too" if lost else "does something else use it?"
        yield f"the server counted {100 * server['disagreement']:+.1f}% tokens against its replies' usage: {why}"
    if server and (said := mtp_warning(server["mtp"])):
        yield said
    if record["errors"]:
        yield f"{record['errors']} requests failed: {next(iter(record['error_kinds']))[:200]}"
    if record["unreadable_pages"]:
        yield f"{record['unreadable_pages']} pages could not be drawn and were left out"
    if record["unfinished"]:
        yield f"{record['unfinished']} requests had no reply when the level was given up"
    if not record["replies"]:
        yield "no reply came within the window: give more --seconds"
    if not watch.warmed:
        yield "the window was opened before every place had a reply: the server is slow for --seconds"
    parts = record["slices"] or [1.0] * SLICES
    halves = sum(parts[: SLICES // 2]), sum(parts[SLICES // 2 :])
    if min(halves) < (1 - STEADY) * max(halves) and record["replies"] >= max(20, 2 * record["concurrency"]):
        yield f"not steady: the window's halves differ by {100 * (1 - min(halves) / max(halves)):.0f}%"
    if server and (server["prefix_cache_hits"] or 0) > 0.1:
        yield (
            f"{100 * server['prefix_cache_hits']:.0f}% of the prompt tokens were in the server's prefix cache (each "
            f"page was sent {record['times_each_page']:g} times): more pages in --data would cost it more"
        )


STOPPED = "repetition"  # the finish reason of vLLM's loop detector
SAVED_PAGES = 64  # stopped pages that are asked once more to learn what they would have cost


async def tokens_saved(
    server: Any, feed: Feed, load: Load, window: Window, say: Callable[[str], None]
) -> dict[str, Any]:
    """What the loop detector saved: the pages it stopped are asked once more without it, and the tokens compared."""
    stopped = [asked for asked in load.asked if asked.finish == STOPPED and asked.tokens and asked.share(window) > 0]
    cost: dict[int, int] = {}
    with_it = {asked.page: asked.tokens for asked in stopped if asked.attempt == 0 and asked.tokens}
    say(f"{len(with_it)} pages were stopped: asking once more without the detector")
    kept = server.settings
    server.settings = dataclasses.replace(kept, loop_stop=False)

    async def ask_again(page: int) -> None:
        with contextlib.suppress(ocr.Fault, ocr.Refused):
            if sheet := await feed.draw(page):
                answer = await server.ask([sheet.png], ocr.sampling(0), lambda: None)
                if answer.completion_tokens is not None:
                    cost[page] = answer.completion_tokens

    try:
        pages = list(with_it)[:SAVED_PAGES]
        for start in range(0, len(pages), load.places):
            await asyncio.gather(*map(ask_again, pages[start : start + load.places]))
    finally:
        server.settings = kept
    total = sum((asked.tokens or 0) * asked.share(window) for asked in load.asked if asked.tokens)
    each = [cost[page] / with_it[page] for page in cost]
    spent = sum((asked.tokens or 0) * asked.share(window) for asked in stopped)
    without = spent * (sum(each) / len(each)) if each else None
    return {
        "stopped_replies": len(stopped),
        "stopped_pages": len(with_it),
        "asked_again": len(cost),
        "tokens_with": sum(with_it[page] for page in cost),
        "tokens_without": sum(cost.values()),
        "saved": sum(cost[page] - with_it[page] for page in cost),
        # Of all the tokens that the window would have taken without the detector.
        "saved_share": round((without - spent) / (total + without - spent), 4) if without else 0.0 if total else None,
    }

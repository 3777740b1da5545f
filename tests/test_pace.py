"""How many requests are in flight when nobody says: servers of known capacity, in simulated time."""

from __future__ import annotations

import asyncio
import random
import selectors
from typing import Any

import pytest

import ocr


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that an hour passes in a moment, the same every time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(Jumping(self))

    def time(self) -> float:
        return self.now


class Jumping(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    loop: SimulatedTime

    def __init__(self, loop: SimulatedTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self.loop.now += timeout or 0.0
        return super().select(0)


def simulate(
    slots: int, seconds: float, pages: int, rate: float = 20.0, metrics: bool = False, seed: int = 1, hosts: int = 1
) -> Any:
    """A run of `pages`, `rate` drawn a second, on a server that takes `slots` at once for `seconds` x (0.5 to 1.5).

    `hosts`: so many servers behind a router, whose counts are those of any one of them.

    Gives the pace, the seconds it took, and those an ideal client would have taken.
    """
    rng = random.Random(seed)

    async def run() -> tuple[ocr.Pace, float]:
        pace, server, running = ocr.Pace(None), asyncio.Semaphore(slots * hosts), 0
        ready, loop = asyncio.Semaphore(6), asyncio.get_running_loop()

        async def page() -> None:
            nonlocal running
            async with pace.slot() as answered:
                ready.release()
                sent = loop.time()
                async with server:
                    running += 1
                    await asyncio.sleep(seconds * rng.uniform(0.5, 1.5))
                    running -= 1
                answered(ocr.Answer("x", "stop", 2000, 1000, loop.time() - sent))

        async def follow() -> None:
            while metrics:
                pace.follow(running // hosts, (pace.in_flight - running) // hosts)
                await asyncio.sleep(1.0)

        follower = asyncio.create_task(follow())
        tasks = []
        for _ in range(pages):
            await ready.acquire()
            await asyncio.sleep(1 / rate)
            tasks.append(asyncio.create_task(page()))
        await asyncio.gather(*tasks)
        follower.cancel()
        return pace, loop.time()

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        pace, took = runner.run(run())
    return pace, took, max(pages / rate, pages * seconds / slots / hosts)


@pytest.mark.parametrize(("slots", "seconds"), [(1, 5.0), (2, 2.0), (4, 3.0), (8, 6.0)])
def test_a_laptop_server_is_kept_busy_and_not_buried(slots: int, seconds: float) -> None:
    pace, took, ideal = simulate(slots, seconds, 200)
    assert took < 1.15 * ideal
    assert pace.most <= 32
    assert pace.limit <= 4 * slots + 8


@pytest.mark.parametrize(("slots", "seconds", "pages"), [(64, 10.0, 1500), (256, 20.0, 4000)])
def test_a_large_server_is_filled_by_latency_alone(slots: int, seconds: float, pages: int) -> None:
    pace, took, ideal = simulate(slots, seconds, pages)
    assert pace.most >= slots
    assert took < 1.25 * ideal


def test_slow_replies_are_no_queue() -> None:
    pace, took, _ = simulate(1000, 16.0, 600)
    assert pace.most > 250  # as many as rendering feeds in the time there is
    assert took < 80


@pytest.mark.parametrize("slots", [4, 64, 512])
def test_a_server_that_tells_its_queue_is_followed(slots: int) -> None:
    pace, took, ideal = simulate(slots, 10.0, 20 * slots, rate=60.0, metrics=True)
    assert took < 1.1 * ideal + 10
    assert pace.most >= slots
    assert pace.limit <= max(32, 3 * slots)


@pytest.mark.parametrize(("slots", "hosts"), [(64, 2), (128, 2), (64, 4)])
def test_hosts_behind_a_router_are_filled_though_it_tells_the_counts_of_one(slots: int, hosts: int) -> None:
    pace, took, ideal = simulate(slots, 10.0, 16 * slots * hosts, rate=60.0, metrics=True, hosts=hosts)
    assert pace.most >= slots * hosts
    assert took < 1.25 * ideal + 10


def test_a_fixed_number_is_kept() -> None:
    pace = ocr.Pace(7)
    pace.samples = [ocr.Sample(i, 1.0, 1.0) for i in range(100)]
    assert pace.limit == 7
    assert pace.fixed


def test_a_place_is_given_back_by_a_request_that_was_cancelled_while_it_waited() -> None:
    async def run() -> None:
        pace = ocr.Pace(1)
        release = asyncio.Event()

        async def page() -> None:
            async with pace.slot():
                await release.wait()

        first = asyncio.create_task(page())
        await asyncio.sleep(0)
        second, third = asyncio.create_task(page()), asyncio.create_task(page())
        await asyncio.sleep(0)
        second.cancel()
        release.set()
        await asyncio.gather(first, third)
        assert pace.in_flight == 0

    asyncio.run(run())


def test_metrics_are_summed_over_engines() -> None:
    text = (
        "# HELP vllm:num_requests_running Number of requests.\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="chandra"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="chandra"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 1.5e-02\nother_total 7\n'
    )
    totals = ocr.read_metrics(text)
    assert totals["num_requests_running"] == 7
    assert totals["other_total"] == 7


def test_a_server_that_says_too_many_gets_half_once_for_all_it_turned_away() -> None:
    async def run() -> int:
        pace = ocr.Pace(None)
        slots = [pace.slot() for _ in range(8)]
        for slot in slots:
            await slot.__aenter__()
        for slot in slots:
            fault = ocr.Fault("HTTP 429", status=429)
            assert not await slot.__aexit__(type(fault), fault, None)
        return pace.limit

    assert asyncio.run(run()) == 16

"""A coroutine's result or error comes to the thread that waits; closing ends what runs."""

import asyncio
import threading

import pytest

from grpo_lit.errors import EngineError
from grpo_lit.rollouts.background import BackgroundLoop


async def third(number: int) -> float:
    await asyncio.sleep(0)
    return 1 / number


async def nothing() -> None:
    pass


def test_results_and_errors_come_back_and_after_the_end_an_error_says_so():
    loop = BackgroundLoop()
    assert loop.run(third(4)) == 0.25
    with pytest.raises(ZeroDivisionError):
        loop.run(third(0))
    loop.close(nothing())
    with pytest.raises(EngineError, match="closed before it could answer"):
        loop.run(third(4))


def test_who_waits_may_look_at_something_else_and_its_error_ends_what_is_waited_for():
    loop, looks, cancelled = BackgroundLoop(), [], threading.Event()

    async def until(count: int) -> int:
        try:
            while len(looks) < count:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return count

    def look() -> None:
        looks.append((threading.current_thread(), loop.run(third(3))))  # another coroutine meanwhile
        if len(looks) == 4:
            raise KeyError("the look's own")

    assert loop.run(until(2), look) == 2
    assert {thread for thread, _ in looks} == {threading.current_thread()}
    with pytest.raises(KeyError, match="own"):
        loop.run(until(9), look)
    assert cancelled.wait(5)
    loop.close(nothing())


def test_what_runs_at_the_end_is_cancelled_before_the_last_thing_is_done():
    loop, order, started = BackgroundLoop(), [], threading.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            order.append("cancelled")

    async def last() -> None:
        order.append("last")

    def wait() -> None:
        with pytest.raises(EngineError, match="closed"):
            loop.run(endless())
        order.append("answered")

    waiting = threading.Thread(target=wait)
    waiting.start()
    started.wait(5)
    loop.close(last())
    waiting.join(5)
    assert order[:1] == ["cancelled"]
    assert sorted(order[1:]) == ["answered", "last"]

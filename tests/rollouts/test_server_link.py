"""A server that is gone, hangs or never comes costs its own group, within the timeout, and nobody else's."""

import asyncio
import subprocess
import sys
import time

import pytest
import torch
from members import CPU, Joining

from grpo_lit.errors import EngineError
from grpo_lit.rollouts.patience import ServerError
from grpo_lit.rollouts.server_link import Links, ServerLink, link_device, together

#: More than the kernel keeps for a receiver that does not read.
MEMORY = torch.arange(2**25 // 8).view(torch.uint8)


def links(timeout_s: float = 20.0) -> Links:
    return Links(None, CPU, timeout_s)


async def linked(links: Links) -> tuple[ServerLink, Joining]:
    link = links.open("http://127.0.0.1:8000", 1)
    worker = Joining(link.meeting)
    await link.connect()
    return link, worker


async def arrives(link: ServerLink, worker: Joining) -> bool:
    received, _ = await asyncio.gather(asyncio.to_thread(worker.received, MEMORY.numel()), link.send(MEMORY))
    return torch.equal(received, MEMORY)


def test_a_server_that_hangs_is_late_alone_and_is_reached_again_with_a_fresh_group():
    async def all_of_it() -> None:
        (hung, asleep), (other, awake) = await linked(links(1.0)), await linked(links())
        began = time.monotonic()
        late, good = await asyncio.gather(hung.send(MEMORY), arrives(other, awake), return_exceptions=True)
        assert isinstance(late, ServerError)
        assert "its process group" in str(late)
        assert time.monotonic() - began < 10
        assert good is True
        hung.close()
        assert await arrives(other, awake)
        assert await arrives(*await linked(links()))
        asleep.link.close()

    asyncio.run(all_of_it())


def test_a_server_that_goes_in_the_middle_is_noticed_at_once():
    async def all_of_it() -> None:
        link, worker = await linked(links(60.0))
        sending = asyncio.ensure_future(link.send(MEMORY))
        await asyncio.sleep(0.05)
        worker.join()
        worker.link.close()  # as the kernel does for a process that is killed
        began = time.monotonic()
        with pytest.raises(ServerError, match="its process group broke: "):
            await sending
        assert time.monotonic() - began < 20
        link.close()

    asyncio.run(all_of_it())


def test_nobody_is_waited_for_longer_than_the_timeout():
    async def all_of_it() -> None:
        link = links(0.5).open("http://127.0.0.1:8000", 1)
        with pytest.raises(ServerError, match="its process group"):
            await link.connect()
        link.close()

    asyncio.run(all_of_it())


def test_a_process_that_ends_while_a_group_does_has_its_own_status():
    # The time-out comes while Python goes down: without a wait, that aborts the process.
    program = """
import asyncio, torch
from grpo_lit.rollouts.patience import ServerError
from grpo_lit.rollouts.server_link import Links
async def run():
    link = Links(None, torch.device("cpu"), 1.0).open("http://127.0.0.1:8000", 1)
    waiting = asyncio.ensure_future(link.connect())
    await asyncio.sleep(0.9)
    waiting.cancel()
asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ServerError, match=r"`transport_host` expected an address by which .* got 203\.0\.113\.7"):
        Links("203.0.113.7", CPU, 1.0).open("http://127.0.0.1:8000", 1)
    with pytest.raises(ServerError, match=r"`urls` expected an address"):
        links().open("http://no-such-machine.invalid:8000", 1)
    for everywhere in ("0", "0.0", "::0"):
        with pytest.raises(ServerError, match=r"`transport_host` expected one address of this machine, but got all"):
            Links(everywhere, CPU, 1.0).open("http://127.0.0.1:8000", 1)


def test_an_error_ends_what_was_to_happen_at_the_same_time():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fails() -> None:
        raise EngineError("refused")

    with pytest.raises(EngineError, match="refused"):
        asyncio.run(together(waits(), fails()))
    assert ended == [True]


@pytest.mark.parametrize(("workers", "shared"), [(["cuda"], True), (["cuda", "cpu"], False), (["cpu"], False)])
def test_bytes_go_through_memory_of_the_host_where_nccl_cannot_carry_them(monkeypatch, workers, shared):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert link_device(workers, shared) == CPU
    assert link_device(["cuda", "cuda"], False) == torch.device("cuda", 3)

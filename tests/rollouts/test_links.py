"""What a learner broadcasts reaches every worker of a server to the last bit, and nobody who was not asked."""

import socket
from functools import partial

import pytest
import torch
from members import CPU, at_once

from grpo_lit.rollouts.links import Link, Meeting, ProcessGroupStage, host_towards, read_link
from grpo_lit.rollouts.staging import Chunk


def group(workers: int, backend: str = "gloo", devices: tuple[torch.device, ...] = (CPU,) * 3) -> list[Link]:
    """The learner, then the workers."""
    listening = socket.create_server(("127.0.0.1", 0))
    meeting = Meeting("name", "127.0.0.1", listening.getsockname()[1], 1 + workers, backend, 20.0)
    first = partial(Link, meeting, 0, devices[0], listening)
    return at_once(first, *(partial(Link, meeting, rank, devices[rank]) for rank in range(1, 1 + workers)))


def check_arrival(learner: Link, workers: list[Link], stage: ProcessGroupStage) -> list[Chunk]:
    """Broadcast tensors of many kinds, and compare."""
    weights = {str(i): torch.randn(10, 10) for i in range(5)}
    weights |= {
        "large": torch.randn(30, 20).T,  # more than the stage holds, and not contiguous
        "vector": torch.randn(7, dtype=torch.float64),
        "half": torch.tensor([float("nan"), -0.0, 1 / 3], dtype=torch.float16),  # 6 bytes
        "empty": torch.empty(0, 3),
    }
    arrived: list[dict[str, torch.Tensor]] = [{} for _ in workers]

    def take(chunk: Chunk, worker: Link, into: dict[str, torch.Tensor]) -> None:
        into |= {name: tensor.cpu() for name, tensor in read_link(chunk, worker)}

    chunks = []
    for chunk in stage.chunks(weights.items()):
        sent = Chunk.from_dict(**(chunk.to_dict() | {"address": learner.address}))
        at_once(
            partial(learner.broadcast, stage.to_send(chunk)),
            *(partial(take, sent, worker, into) for worker, into in zip(workers, arrived, strict=True)),
        )
        chunks.append(chunk)
    for found in arrived:
        assert list(found) == list(weights)
        for name, tensor in weights.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
        assert bool(torch.signbit(found["half"][1]))
    return chunks


def test_every_worker_gets_every_chunk_to_the_last_bit():
    learner, *workers = group(2)
    chunks = check_arrival(learner, workers, ProcessGroupStage(torch.float32, CPU, stage_bytes=1024))
    # Two tensors of 400 bytes fit into 1024, the second from byte 448 on; the large one has 2400 bytes, and of the rest
    # (56 bytes, 6 from byte 64 on, none from byte 128 on) no more is sent than there is.
    assert [chunk.size for chunk in chunks] == [848, 848, 400, 2400, 128]


def test_a_chunk_of_empty_tensors_is_read_without_a_broadcast():
    learner, worker = group(1)
    (chunk,) = ProcessGroupStage(torch.float32, CPU, stage_bytes=64).chunks([("none", torch.empty(0, 3))])
    ((name, tensor),) = read_link(Chunk(learner.address, chunk.size, chunk.tensors), worker)
    assert (name, tensor.shape) == ("none", (0, 3))


@pytest.mark.parametrize("address", ["group:other", "group:"])
def test_weights_of_another_group_are_refused_at_once(address):
    _, worker = group(1)
    for link in (worker, None):
        with pytest.raises(ValueError, match="a process group that this server is not in"):
            list(read_link(Chunk(address, 8, []), link))


def test_a_member_that_leaves_breaks_the_group_and_has_left_for_good():
    learner, worker = group(1)
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="was ended"):
        worker.broadcast(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"closed|reset|Broken"):
        learner.broadcast(torch.zeros(2**24, dtype=torch.uint8))  # more than a kernel takes before it knows


def test_the_learner_listens_at_one_address_of_this_machine():
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    meeting = Meeting("name", "127.0.0.1", port, 2, "gloo", 20.0)
    held = at_once(partial(Link, meeting, 0, CPU, listening), partial(Link, meeting, 1, CPU))
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    assert len(held) == 2


def test_this_machine_is_found_at_its_own_address():
    assert [host_towards(host, 80) for host in ("127.0.0.1", "localhost")] == ["127.0.0.1"] * 2


@pytest.mark.cuda
def test_bytes_arrive_between_devices_and_this_process_does_not_end_with_a_failed_group():
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL connects no device with itself")
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    learner, worker = group(1, "nccl", devices)
    check_arrival(learner, [worker], ProcessGroupStage(torch.float32, devices[0], stage_bytes=1024))
    worker.close()
    with pytest.raises(RuntimeError):
        learner.broadcast(torch.zeros(2**24, dtype=torch.uint8, device=devices[0]))
    learner.close()

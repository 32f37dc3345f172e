"""A tiny policy, a reference with other weights, and a mesh of one rank."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.policy import Policy


@pytest.fixture(scope="module")
def policy(tiny_model_path: Path) -> Policy:
    return Policy(load_model(str(tiny_model_path)))


@pytest.fixture(scope="module")
def reference(tiny_folder: Callable[..., Path]) -> Policy:
    return Policy(load_model(str(tiny_folder("llama", seed=5)))).requires_grad_(False)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank that has all shards."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()

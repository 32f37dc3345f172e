"""A tiny policy, and a reference with other weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.policy import Policy


@pytest.fixture(scope="module")
def policy(tiny_model_path: Path) -> Policy:
    return Policy(load_model(str(tiny_model_path)))


@pytest.fixture(scope="module")
def reference(tiny_folder: Callable[..., Path]) -> Policy:
    return Policy(load_model(str(tiny_folder("llama", seed=5)))).requires_grad_(False)

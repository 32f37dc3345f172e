"""An engine refuses to sample what it could not record."""

import pytest

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Request, Sampling
from grpo_lit.rollouts.transformers import TransformersEngine
from grpo_lit.rollouts.vllm import VLLMEngine


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("min_p", 0.1)])
def test_a_limit_without_a_bound_is_refused_where_kept_tokens_are_read_from_a_list(name: str, value: float) -> None:
    message = rf"`data\.sampling\.top_k` expected to be >= 1 beside `data\.sampling\.{name}` with VLLMEngine, but got 0"
    with pytest.raises(ConfigError, match=message):
        VLLMEngine().check_sampling(Sampling(**{name: value}))
    with pytest.raises(ConfigError, match=message):  # and before vLLM is asked for anything
        VLLMEngine().generate([Request((1,), 0)], Sampling(**{name: value}))
    TransformersEngine().check_sampling(Sampling(**{name: value}))


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_what_can_be_recorded_is_fine(limits: dict[str, float]) -> None:
    VLLMEngine().check_sampling(Sampling(**limits))
    VLLMEngine().check_sampling(Sampling(temperature=0.0, top_p=0.9))  # greedy ignores limits

"""What vLLM is told is the same in this process and on a server's command line. Needs no vLLM."""

import pytest

from grpo_lit.errors import EngineError
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.vllm_options import VLLMOptions, check_lengths, flags, sampling_arguments


def test_arguments_for_cpu_and_cuda():
    options = VLLMOptions(cpu_kv_cache_gib=0.5, extra={"seed": 4})
    cpu, cuda = (options.arguments("folder", 300, on_cpu) for on_cpu in (True, False))
    assert (cpu["dtype"], cuda["dtype"]) == ("float32", "bfloat16")
    assert (cpu["enforce_eager"], cuda["enforce_eager"]) == (True, False)
    assert cpu["kv_cache_memory_bytes"] == 2**29
    assert cuda["gpu_memory_utilization"] == 0.4
    assert cpu["max_model_len"] == cuda["max_model_len"] == 300
    assert cpu["seed"] == cuda["seed"] == 4  # extra wins
    assert "enable_chunked_prefill" not in cuda


def test_field_bug_e1_logprobs_are_those_after_the_temperature():
    assert VLLMOptions().arguments("folder", 300, on_cpu=True)["logprobs_mode"] == "processed_logprobs"


def test_threads_are_told_on_cpu_alone(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    variables = VLLMOptions(threads=3).variables(True, "folder")
    assert (variables["OMP_NUM_THREADS"], variables["VLLM_LOGGING_LEVEL"]) == ("3", "DEBUG")
    assert "OMP_NUM_THREADS" not in VLLMOptions(threads=3).variables(False, "folder")


def test_arguments_become_flags():
    arguments = {"block_size": 32, "enforce_eager": True, "model": "a folder", "use_tqdm_on_load": False}
    arguments |= {"weight_transfer_config": {"backend": "x"}, "max_logprobs": -1, "host": None}
    assert flags(arguments) == [
        "a folder",
        "--block-size=32",
        "--enforce-eager",
        "--no-use-tqdm-on-load",
        '--weight-transfer-config={"backend": "x"}',
        "--max-logprobs=-1",
    ]


def test_more_logprobs_are_asked_for_than_top_k_keeps():
    plain = sampling_arguments(7, Sampling(0.7, 5), 260, (2, 3))
    assert (plain["logprobs"], plain["seed"], plain["stop_token_ids"], plain["max_tokens"]) == (0, 7, [2, 3], 5)
    assert sampling_arguments(7, Sampling(0.7, 5, top_k=5), 260, ())["logprobs"] == 37


@pytest.mark.parametrize(("lengths", "got"), [([3, 0], 0), ([3, 8], 8)])
def test_a_prompt_without_room_is_named(lengths, got):
    check_lengths([1, 7], 8)
    with pytest.raises(EngineError, match=f"`prompt_ids` expected 1 to 7 tokens .* but got {got}: "):
        check_lengths(lengths, 8)

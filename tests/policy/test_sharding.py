"""Sharded models hold what whole ones do. Here one rank has all shards; two have halves in tests/runs/test_ranks.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import empty_model, load_model
from grpo_lit.policy.packing import Pack
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.sharding import can_read_shards, decoder_layers, read_shards, shard, whole


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "phi", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_read_as_transformers_reads_the_whole(
    tiny_folder: Callable[..., Path], mesh: DeviceMesh, architecture: str, dtype: torch.dtype
) -> None:
    folder = str(tiny_folder(architecture))
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    expected = load_model(folder)
    policy = Policy(empty_model(folder))
    assert all(weight.is_meta for weight in policy.parameters())
    assert can_read_shards(policy, folder)
    shard(policy, mesh)
    read_shards(policy, folder, torch.device("cpu"))
    assert [name for name, _ in policy.model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for (name, ours), theirs in zip(policy.model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(whole(ours), theirs), name
    for (name, ours), theirs in zip(policy.model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = torch.tensor([[5, 80, 120, 33]])
    pack = Pack(ids, torch.arange(4)[None], layout=None, predictor=torch.arange(3))
    said, wanted = (model(pack, ids[0, 1:], 1.0).logprobs for model in (policy, Policy(expected)))
    torch.testing.assert_close(said, wanted)


def test_weights_that_transformers_joins_as_it_reads_are_told(tiny_folder: Callable[..., Path]) -> None:
    folder = str(tiny_folder("mixtral"))
    assert not can_read_shards(Policy(empty_model(folder)), folder)


def test_a_model_that_names_no_layers_is_refused(tiny_model_path: Path) -> None:
    policy = Policy(load_model(str(tiny_model_path)))
    assert len(decoder_layers(policy)) == 2
    policy.model._no_split_modules = None
    with pytest.raises(ConfigError, match=r"trainer\.strategy.*ddp"):
        decoder_layers(policy)

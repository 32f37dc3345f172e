"""The estimate of the true gradient's norm is unbiased, whatever the parts' sizes."""

from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from callbacks import GradientNoiseScale
from callbacks.noise import gradient_signal
from grpo_lit.errors import ConfigError


def test_equal_parts_are_the_papers_two_batch_sizes():
    # 8 samples in 4 parts of 2: |G|^2 = (8 |g_8|^2 - 2 |g_2|^2) / (8 - 2), g_2 = 4 times what a part adds to the whole.
    whole, part = 3.0, 0.5
    assert gradient_signal(whole, 4 * part, 4 / 16) == pytest.approx((8 * whole - 2 * 16 * part) / 6)


def test_the_mean_over_many_steps_is_the_true_gradient():
    torch.manual_seed(0)
    true, sizes = torch.tensor([0.3, -0.4, 0.0], dtype=torch.double), [1, 2, 5]
    samples = true + 2 * torch.randn(200_000, 8, 3, dtype=torch.double)
    parts = [part.sum(1) / 8 for part in samples.split(sizes, dim=1)]
    whole = sum(parts).square().sum(1).mean()
    signal = gradient_signal(
        float(whole), float(sum(p.square().sum(1) for p in parts).mean()), sum(n**2 for n in sizes) / 64
    )
    # 3 sigma^2 / 8 = 1.5 of noise hides a signal of 0.25; the noise scale is 12 / .25 = 48 samples.
    assert signal == pytest.approx(0.25, abs=0.02)
    assert 8 * (float(whole) - signal) / signal == pytest.approx(48, rel=0.1)


def test_one_part_says_nothing():
    assert gradient_signal(1.0, 1.0, 1.0) is None


def test_a_decay_that_forgets_nothing_is_refused():
    with pytest.raises(ConfigError, match="`decay` of GradientNoiseScale"):
        GradientNoiseScale(decay=1.0)


@pytest.mark.parametrize("kind", [DTensor, FullyShardedDataParallel])
def test_weights_in_shards_are_refused(kind):
    shard = Mock(spec=DTensor, requires_grad=True)
    policy = Mock(spec=kind if kind is FullyShardedDataParallel else torch.nn.Module)
    policy.parameters.return_value = [shard if kind is DTensor else torch.ones(2, requires_grad=True)]
    with pytest.raises(ConfigError, match="whole weights"):
        GradientNoiseScale().on_fit_start(Mock(spec=Trainer), Mock(spec=LightningModule, policy=policy))

"""Agreement with other projects' own functions, where they are installed; each deliberate difference has a test."""

import numpy as np
import pytest
import torch

from grpo_lit.objectives import (
    CISPO,
    DPPO,
    K1,
    K2,
    K3,
    SAPO,
    ConstantLength,
    Counts,
    GDPOAdvantage,
    GeometricMean,
    GroupAdvantage,
    OffPolicySequenceMask,
    SequenceClip,
    SequenceMean,
    SequenceTokenClip,
    TokenClip,
    TokenMean,
)
from grpo_lit.objectives.advantages import STD_EPS

LENGTHS = [3, 1, 4, 2]
ADVANTAGES = [1.5, -0.5, -1.0, 0.7]


@pytest.fixture
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="peer not installed: verl", exc_type=ImportError)


@pytest.fixture
def flat():
    """Random log-ratios of four sequences, as flat tokens."""
    generator = torch.Generator().manual_seed(0)
    return (0.5 * torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator)).tolist()


def padded(values, fill=0.0):
    """Lay flat tokens out as rows, the way peers want them."""
    rows = torch.full((len(LENGTHS), max(LENGTHS)), fill, dtype=torch.float64)
    for row, (part, length) in enumerate(zip(torch.as_tensor(values).split(LENGTHS), LENGTHS, strict=True)):
        rows[row, :length] = part
    return rows


def mask():
    return padded(torch.ones(sum(LENGTHS), dtype=torch.float64))


CASES = [
    (TokenClip(0.2, 0.28, dual=3.0), "vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}),
    (SequenceClip(0.1, 0.2), "gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    (SequenceTokenClip(0.1, 0.2), "gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    (SAPO(1.0, 1.05), "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    (GeometricMean(0.4, 0.3), "geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.3}),
    (CISPO(0.2, 0.28), "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    (DPPO("tv", 0.1, 0.15), "dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}),
    (DPPO("kl", 0.02, 0.03), "dppo_kl", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 20.0}),
]


@pytest.mark.parametrize(("part", "name", "options"), CASES, ids=[f"{type(c[0]).__name__}-{c[1]}" for c in CASES])
def test_verl_losses_and_gradients(verl, make_terms, flat, part, name, options):
    config = pytest.importorskip("verl.workers.config")
    config = config.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, **options
    )
    terms = make_terms(flat, ADVANTAGES, LENGTHS, torch.float64)
    weights = terms.spread(1 / (len(LENGTHS) * terms.lengths.double()))
    ours = -(weights * part(terms).value).sum()
    (gradient,) = torch.autograd.grad(ours, terms.logprobs)

    logprobs = padded(terms.logprobs.detach(), -1.0).requires_grad_()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand_as(logprobs)
    theirs, _ = verl.get_policy_loss_fn(name)(
        padded(terms.old_logprobs, -1.0), logprobs, advantages, mask(), "seq-mean-token-mean", config
    )
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(padded(gradient), their_gradient.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("part", "name"), [(K1(), "k1"), (K2(), "k2"), (K3(), "k3")])
def test_verl_kl(verl, make_terms, flat, part, name):
    terms = make_terms(flat, ADVANTAGES, LENGTHS, torch.float64)
    ours = part(terms)
    theirs = verl.kl_penalty(terms.logprobs, terms.reference_logprobs, name)
    torch.testing.assert_close(ours, theirs)
    # Deliberate difference: theirs cuts k3 at 10, where its gradient ends; ours goes on.
    far = make_terms([-5.0], 0.0)
    assert verl.kl_penalty(far.logprobs, far.reference_logprobs, "k3").item() == 10.0
    assert K3()(far).item() > 100


def test_verl_group_advantages(verl, make_batch, alone):
    # Deliberate differences: eps (1e-4 against 1e-6), and a group of one, which is 0 here and the raw reward there.
    rewards, group = [1.0, 0.0, 0.5, 1.0, 0.2], [0, 0, 0, 1, 1]
    batch = make_batch(rewards, group, dtype=torch.float64)
    token_level, ones = torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(5, 1, dtype=torch.float64)
    for part, by_std in ((GroupAdvantage(), True), (GroupAdvantage("none"), False)):
        theirs, _ = verl.compute_grpo_outcome_advantage(
            token_level.clone(), ones, np.array(group), epsilon=STD_EPS, norm_adv_by_std_in_grpo=by_std
        )
        torch.testing.assert_close(part(batch, alone), theirs[:, 0], rtol=1e-6, atol=1e-7)
    theirs, _ = verl.compute_rloo_outcome_advantage(token_level.clone(), ones, np.array(group))
    torch.testing.assert_close(GroupAdvantage("none", True)(batch, alone), theirs[:, 0], rtol=1e-6, atol=1e-7)
    lone, _ = verl.compute_grpo_outcome_advantage(torch.ones(1, 1), torch.ones(1, 1), np.array([0]))
    assert lone.item() == pytest.approx(1.0, abs=1e-5)
    assert GroupAdvantage()(make_batch([1.0]), alone).item() == 0.0


def test_verl_gdpo(verl, make_batch, alone):
    # Deliberate difference: theirs whitens over tokens with variance + 1e-8, ours over sequences with std + 1e-4; with
    # one token per sequence they differ by that eps.
    scores, group = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, 1.0], [1.0, 0.0]]), [0, 0, 1, 1]
    ours = GDPOAdvantage({"b": 0.5})(make_batch([0.0] * 4, group, scores=scores, score_names=("a", "b")), alone)
    theirs, _ = verl.compute_gdpo_outcome_advantage(
        torch.zeros(4, 1),
        torch.ones(4, 1),
        np.array(group),
        epsilon=STD_EPS,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": scores[:, 0].numpy(), "b": scores[:, 1].numpy()},
        batch={"prompts": torch.zeros(4, 1), "attention_mask": torch.ones(4, 2, dtype=torch.long)},
    )
    torch.testing.assert_close(ours, theirs[:, 0], rtol=5e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "mode", "options"),
    [
        (SequenceMean(), "seq-mean-token-mean", {}),
        (TokenMean(), "token-mean", {}),
        (ConstantLength(9), "seq-mean-token-sum-norm", {"loss_scale_factor": 9}),
    ],
)
def test_verl_averages(verl, make_batch, alone, flat, part, mode, options):
    batch = make_batch([0.0] * 4, lengths=LENGTHS, dtype=torch.float64)
    weights = part(batch, Counts.of(batch, alone))[batch.sequence]
    theirs = verl.agg_loss(padded(flat), mask(), mode, **options)
    torch.testing.assert_close((weights * torch.tensor(flat, dtype=torch.float64)).sum(), theirs.double())


def test_trl_off_policy_mask(make_terms, flat):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="peer not installed: trl", exc_type=ImportError)
    terms = make_terms(flat, ADVANTAGES, LENGTHS, torch.float64)
    for delta in (0.0, 0.1, 0.5):
        theirs = trainer.GRPOTrainer.get_off_policy_mask(
            torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None],
            padded(terms.logprobs.detach()),
            padded(terms.sampler_logprobs),
            mask(),
            delta,
        )
        ours = OffPolicySequenceMask(delta)(terms).weight
        assert ours.tolist() == terms.spread(theirs[:, 0]).tolist()

"""Agreement with other projects' own functions, where they are installed; each deliberate difference has a test."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

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
    Objective,
    OffPolicySequenceMask,
    SequenceClip,
    SequenceMean,
    SequenceTokenClip,
    TokenClip,
    TokenMean,
    TruncatedIS,
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


@pytest.fixture
def trl():
    return pytest.importorskip("trl.trainer.grpo_trainer", reason="peer not installed: trl", exc_type=ImportError)


def trl_loss(trainer, logprobs, entropy, inputs, **settings):
    """Return the loss of TRL's trainer on given log-probs: no model, no accelerator, nothing else of it runs."""
    accelerator = SimpleNamespace(num_processes=1, gather=_same, gather_for_metrics=_same, reduce=_same)
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments |= {key: settings.pop(key) for key in list(settings) if key in arguments}
    itself = SimpleNamespace(
        **{
            "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2,
            "beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
            "vllm_importance_sampling_correction": False, "max_completion_length": 9, **settings,
        },
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
        accelerator=accelerator,
        args=SimpleNamespace(**arguments),
        model=SimpleNamespace(training=False),
        get_off_policy_mask=trainer.GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, entropy, None),
    )  # fmt: skip
    ids = torch.zeros(len(LENGTHS), 1, dtype=torch.long)
    tokens = torch.zeros(mask().shape, dtype=torch.long)
    fixed = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": tokens, "completion_mask": mask()}
    fixed["num_items_in_batch"] = mask().sum()
    return trainer.GRPOTrainer._compute_loss(itself, None, {**fixed, **inputs})


def _same(value, **kwargs):
    return value


# Deliberate differences: TRL's CISPO bound is the largest weight itself, ours what it may exceed 1 by; its dual clip
# bounds the ratio of tokens with A > 0 too, where it is never reached if it is above 1 + epsilon_high.
TRL_RECIPES = {
    "grpo": (Objective(), {}),
    "clip higher": (Objective(surrogate=TokenClip(0.2, 0.28)), {"epsilon_high": 0.28}),
    "dual clip": (Objective(surrogate=TokenClip(0.2, 0.2, dual=1.5)), {"delta": 1.5}),
    "dr_grpo": (Objective(reduction=ConstantLength(9)), {"loss_type": "dr_grpo"}),
    "dapo": (Objective(surrogate=TokenClip(0.2, 0.28), reduction=TokenMean()),
             {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (Objective(surrogate=SequenceClip(0.1, 0.2)),
             {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2}),
    "cispo": (Objective(surrogate=CISPO(high=0.5), reduction=TokenMean()), {"loss_type": "cispo", "epsilon_high": 1.5}),
    "sapo": (Objective(surrogate=SAPO(1.0, 1.05)), {"loss_type": "sapo"}),
    "kl": (Objective(divergence=K3(beta=0.1)), {"beta": 0.1}),
    "weighted kl": (Objective(divergence=K3(beta=0.1, weighting="ratio")),
                    {"beta": 0.1, "use_bias_correction_kl": True}),
    "off-policy mask": (Objective(corrections=[OffPolicySequenceMask(0.05)]), {"off_policy_mask_threshold": 0.05}),
    "tis": (Objective(corrections=[TruncatedIS(1.1)]), {"use_vllm": True, "vllm_importance_sampling_correction": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRL_RECIPES)
def test_trl_losses_and_gradients_of_whole_recipes(trl, make_batch, alone, flat, name):
    objective, settings = TRL_RECIPES[name]
    generator = torch.Generator().manual_seed(1)
    old, sampler, reference, now = (
        -1.5 + 0.2 * torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) for _ in range(4)
    )
    now, entropy = (now + torch.tensor(flat) * 0.5).requires_grad_(), torch.ones(sum(LENGTHS), dtype=torch.float64)
    batch = make_batch(
        [0.0] * 4,
        lengths=LENGTHS,
        dtype=torch.float64,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        old_logprobs=old,
        sampler_logprobs=sampler,
        reference_logprobs=reference,
    )
    batch = replace(batch, weights=objective.weights(batch, Counts.of(batch, alone)))
    ours = objective.loss(batch, now, entropy).loss
    (gradient,) = torch.autograd.grad(ours, now)

    logprobs = padded(now.detach(), -1.0).requires_grad_()
    inputs = {
        "advantages": batch.advantages,
        "old_per_token_logps": padded(old, -1.0),
        "ref_per_token_logps": padded(reference, -1.0),
        "sampling_per_token_logps": padded(sampler, -1.0),
        "importance_sampling_ratio": padded((old - sampler).exp().clamp(max=1.1), 1.0),
    }
    theirs = trl_loss(trl, logprobs, padded(entropy), inputs, **settings)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(padded(gradient), their_gradient)


def test_trl_off_policy_mask(trl, make_terms, flat):
    terms = make_terms(flat, ADVANTAGES, LENGTHS, torch.float64)
    for delta in (0.0, 0.1, 0.5):
        theirs = trl.GRPOTrainer.get_off_policy_mask(
            torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None],
            padded(terms.logprobs.detach()),
            padded(terms.sampler_logprobs),
            mask(),
            delta,
        )
        ours = OffPolicySequenceMask(delta)(terms).weight
        assert ours.tolist() == terms.spread(theirs[:, 0]).tolist()

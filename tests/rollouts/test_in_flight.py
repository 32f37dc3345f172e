"""Completions go on across a weight update: every token is of the weights that it names, and none is lost."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bare import RecordingEngine
from torch import Tensor
from transformers import PreTrainedModel
from updates import ScriptedUpdates, logprobs_across

from grpo_lit.data.checks import check_engine
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.handover import Handover, HandoverUpdates, Probe
from grpo_lit.rollouts.in_flight import InFlight
from grpo_lit.rollouts.transformers import TransformersEngine
from grpo_lit.rollouts.vllm_in_flight import versions_of

PROMPTS = [tuple(range(40, 60)), tuple(range(100, 107)), (7, 8, 9)]
REQUESTS = [Request(prompt, seed) for prompt in PROMPTS for seed in range(2)]
SAMPLING = Sampling(1.0, max_tokens=12)


@pytest.fixture(scope="module")
def policies(tiny_model: Callable[..., PreTrainedModel]) -> list[PreTrainedModel]:
    return [tiny_model("llama", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def started(tiny_folder: Callable[..., Path]) -> TransformersEngine:
    engine = TransformersEngine(batch_size=4, device="cpu")
    engine.start(EngineModel(str(tiny_folder("llama")), (), 512))
    return engine


@pytest.fixture
def engine(started: TransformersEngine, policies: list[PreTrainedModel]) -> TransformersEngine:
    """Four of six requests at a time; nothing but the limit ends a completion."""
    started.load_weights(policies[0].state_dict().items(), 5)
    return started


def weights(policy: PreTrainedModel) -> Iterable[tuple[str, Tensor]]:
    return policy.state_dict().items()


@pytest.mark.parametrize("keep", [True, False])
def test_each_token_is_of_the_weights_that_it_names(
    engine: TransformersEngine, policies: list[PreTrainedModel], keep: bool
) -> None:
    # Six requests of 12 tokens, four at a time: the 5th look comes before token 4 of the first four.
    updates = ScriptedUpdates(not keep, {4: (weights(policies[1]), 9)})
    drawn = engine.generate_through(REQUESTS, SAMPLING, updates)
    assert len(updates.asked) == 2 * 12
    crossed = [completion for completion in drawn if completion.versions is not None]
    assert [completion.versions for completion in crossed] == [(5,) * 4 + (9,) * 8] * 4
    assert {completion.weight_version for completion in drawn if completion.versions is None} == {9}
    for request, completion in zip(REQUESTS, drawn, strict=True):
        first = completion.token_versions.index(9)
        old, new = (policies[0], policies[1]) if first else (policies[1], policies[1])
        found = torch.tensor(completion.logprobs)
        if first:
            before, after = logprobs_across(old, new, request.prompt_ids, completion.token_ids, first, keep)
            torch.testing.assert_close(found[:first], before, atol=1e-4, rtol=0)
            torch.testing.assert_close(found[first:], after, atol=1e-4, rtol=0)
            # The keys and values are what makes the difference, and it is not small.
            _, other = logprobs_across(old, new, request.prompt_ids, completion.token_ids, first, not keep)
            assert float((found[first:] - other).abs().max()) > 0.1
    assert engine.weight_version == 9


@pytest.mark.parametrize("keep", [True, False])
def test_updates_to_equal_weights_change_nothing_but_versions(
    engine: TransformersEngine, policies: list[PreTrainedModel], keep: bool
) -> None:
    sampling = Sampling(0.9, 12, top_k=9)
    straight = engine.generate(REQUESTS, sampling)
    script = {look: (weights(policies[0]), 6 + look) for look in (0, 3, 4, 11, 17)}
    across = engine.generate_through(REQUESTS, sampling, ScriptedUpdates(not keep, script))
    assert [completion.token_ids for completion in across] == [completion.token_ids for completion in straight]
    assert [completion.kept for completion in across] == [completion.kept for completion in straight]
    for one, other in zip(across, straight, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert all(before <= after for before, after in pairwise(one.token_versions))
    # Looks 0 to 11 are the first batch's tokens, 12 to 23 the second's.
    assert sorted({completion.token_versions for completion in across}) == [
        (6, 6, 6, 9, *[10] * 7, 17),
        (*[17] * 5, *[23] * 7),
    ]


def test_an_update_comes_while_the_finished_ones_are_gone(
    engine: TransformersEngine, policies: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = engine.generate(REQUESTS[:1], SAMPLING)
    monkeypatch.setattr(engine, "_stops", (path.token_ids[2],))
    straight = engine.generate(REQUESTS[:3], SAMPLING)
    assert len(straight[0].token_ids) < 4 < len(straight[2].token_ids)
    updates = ScriptedUpdates(True, {4: (weights(policies[0]), 6)})
    across = engine.generate_through(REQUESTS[:3], SAMPLING, updates)
    assert [completion.token_ids for completion in across] == [completion.token_ids for completion in straight]
    assert across[0].versions is None
    assert across[2].versions is not None


# Where the new weights wait.


class Stepwise(RecordingEngine):
    """Draws four tokens, and looks for new weights before each."""

    in_flight: tuple[InFlight, ...] = ("wait", "keep")

    def generate_through(self, requests: Sequence[Request], sampling: Sampling, updates: object) -> list[Completion]:
        versions = []
        for _ in range(4):
            updates.take(self.load_weights)
            versions.append(self.weight_version)
        drawn = super().generate(requests, sampling)
        return [
            Completion((7,) * 4, (-1.0,) * 4, one.text, one.finish_reason, versions[-1]).sampled_by(versions)
            for one in drawn
        ]


def test_a_copy_is_taken_once_and_compared_when_the_engine_has_time() -> None:
    engine = Stepwise(gap=0.25)
    handover = Handover(engine)
    handover.load([], 1, Probe((1, 2), (-1.0,)))
    handover.take_gap()
    handover.put([("w", torch.ones(3))], 2, Probe((1, 2), (-1.0,)))
    (drawn,) = engine.generate_through(REQUESTS[:1], SAMPLING, HandoverUpdates(False, handover))
    assert (drawn.versions, drawn.weight_version) == (None, 2)
    assert engine.calls == ["load 1", "score", "load 2", "generate 1 with 2"]
    assert handover.take_gap() == 0.0
    handover.compare()
    handover.compare()  # once
    assert engine.calls[4:] == ["score"]
    assert handover.take_gap() == pytest.approx(0.25)
    assert handover.take_seconds() > 0
    assert handover.take_seconds() == 0.0
    handover.take_up(None)
    assert engine.calls[5:] == []  # it is gone


# What is refused.


def test_an_engine_that_takes_weights_between_calls_only_is_refused_by_name() -> None:
    options = RolloutOptions(asynchronous=Asynchronous(2, in_flight="keep"))
    with pytest.raises(ConfigError, match=r"`data\.rollout\.asynchronous\.in_flight` expected wait with Recording"):
        check_engine(RecordingEngine(), SAMPLING, options)
    check_engine(Stepwise(), SAMPLING, options)
    with pytest.raises(ConfigError, match=r"expected wait or keep with Stepwise, but got resume"):
        check_engine(Stepwise(), SAMPLING, RolloutOptions(asynchronous=Asynchronous(2, in_flight="resume")))


def test_vllms_spans_become_a_version_for_each_token() -> None:
    assert versions_of([("3-8f0c", 0, 2), ("7-8f0c", 2, 5)]) == [3, 3, 7, 7, 7]
    assert versions_of([("12", 0, 1)]) == [12]
    assert versions_of([]) == []

"""TransformersEngine under top-k, top-p and min-p: it draws among what is possible, and says what that was."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from limits import possible
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from grpo_lit.batch import TokenBatch
from grpo_lit.errors import EngineError
from grpo_lit.objectives import Objective
from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.learner import Learner
from grpo_lit.policy.policy import Policy
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt, Request, Sampling
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.transformers import Drawn, TransformersEngine, _draw_tokens, _uniforms

PROMPTS = [tuple(range(40, 60)), tuple(range(100, 107))]
REQUESTS = [Request(prompt, seed) for prompt in PROMPTS for seed in range(6)]
LIMITS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 1},
]


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> PreTrainedModel:
    return load_model(str(tiny_model_path)).eval()


@pytest.fixture(scope="module")
def engine(tiny_model_path: Path) -> TransformersEngine:
    engine = TransformersEngine(batch_size=5, device="cpu")
    engine.start(EngineModel(str(tiny_model_path), (2, 3), 512))
    return engine


def logits_of(model: PreTrainedModel, prompt: tuple[int, ...], completion: Completion) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_what_was_possible_is_recorded_and_log_probs_are_normalised_over_it(
    engine: TransformersEngine, model: PreTrainedModel, limits: dict[str, Any], temperature: float
) -> None:
    sampling = Sampling(temperature, max_tokens=10, **limits)
    for request, completion in zip(REQUESTS, engine.generate(REQUESTS, sampling), strict=True):
        steps = completion.kept.steps()
        for t, logits in enumerate(logits_of(model, request.prompt_ids, completion)):
            assert steps[t] == possible(logits, sampling)
            assert completion.token_ids[t] in steps[t]
            kept = (logits / temperature)[list(steps[t])].log_softmax(-1)
            place = steps[t].index(completion.token_ids[t])
            assert completion.logprobs[t] == pytest.approx(float(kept[place]), abs=1e-4)


@pytest.mark.parametrize("limits", LIMITS[:-1])
def test_on_policy_the_ratio_is_1_with_kept_tokens_and_is_not_without(
    engine: TransformersEngine, model: PreTrainedModel, limits: dict[str, Any]
) -> None:
    drawn = engine.generate(REQUESTS, Sampling(0.9, max_tokens=10, **limits))
    groups = [
        Group(Prompt(str(n), "", token_ids=prompt), 0, tuple(drawn[6 * n : 6 * n + 6]), rewards=[1.0] * 6)
        for n, prompt in enumerate(PROMPTS)
    ]
    batch = TokenBatch.from_groups(groups, temperature=0.9)
    ranks = Ranks(SingleDeviceStrategy(device=torch.device("cpu")))
    learner = Learner(Objective(), 60, True, ranks, torch.device("cpu"))
    policy = Policy(model)

    def ratio(batch: TokenBatch) -> torch.Tensor:
        return (learner.evaluate(policy, batch).logprobs - batch.sampler_logprobs).exp()

    torch.testing.assert_close(ratio(batch), torch.ones(batch.tokens), rtol=0, atol=1e-4)
    without = ratio(replace(batch, kept_ids=None, kept_counts=None))
    assert float(without.max()) <= 1.0001  # it is the mass that was possible
    assert float(without.mean()) < 0.95


def test_without_limits_nothing_is_recorded(engine: TransformersEngine) -> None:
    assert [c.kept for c in engine.generate(REQUESTS, Sampling(1.0, 4))] == [None] * len(REQUESTS)
    greedy, limited = (engine.generate(REQUESTS, Sampling(0.0, 4, top_k=k)) for k in (0, 3))
    assert greedy == limited
    assert greedy[0].kept is None


def test_limits_that_leave_everything_possible_draw_the_same_tokens(engine: TransformersEngine) -> None:
    free = engine.generate(REQUESTS, Sampling(1.0, 6))
    loose = engine.generate(REQUESTS, Sampling(1.0, 6, top_k=10**6))
    assert [replace(c, kept=None) for c in loose] == free
    assert set(loose[0].kept.counts) == {260}  # the vocabulary


# Field bug B4.
def test_neighbours_change_nothing(engine: TransformersEngine) -> None:
    sampling = Sampling(1.0, 8, top_k=7)
    together = engine.generate(REQUESTS, sampling)
    alone = [engine.generate([request], sampling)[0] for request in REQUESTS]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    assert [c.kept for c in alone] == [c.kept for c in together]


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path) -> Callable[..., list[Completion]]:
    """``canned(rows, stops)``: what the engine makes of a model that emits these tokens, stop or no stop."""

    def generate(rows: list[list[int]], stops: tuple[int, ...]) -> list[Completion]:
        # A row is known by its random numbers, whichever rows are left in the batch.
        token_at = {
            float(uniform): token
            for seed, row in enumerate(rows)
            for uniform, token in zip(_uniforms(seed, len(row)), row, strict=True)
        }

        def emit(logits: torch.Tensor, temperature: float, limits: Any, uniforms: torch.Tensor) -> Drawn:
            tokens = torch.tensor([token_at[float(uniform)] for uniform in uniforms])
            return Drawn(tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], None)

        monkeypatch.setattr("grpo_lit.rollouts.transformers._draw_tokens", emit)
        engine = TransformersEngine(device="cpu")
        engine.start(EngineModel(str(tiny_model_path), stops, 512))
        return engine.generate([Request(PROMPTS[0], seed) for seed in range(len(rows))], Sampling(1.0, len(rows[0])))

    return generate


def test_the_first_stop_token_is_trained_on_and_nothing_after_it_though_it_is_the_pad_token(canned: Callable) -> None:
    """Field bug B1, Field bug B8: the stop token at the cap ends an answer too, and an answer may be it alone."""
    rows = [[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2], [5, 6, 7, 8, 2]]
    drawn = canned(rows, stops=(2,))
    assert [c.finish_reason for c in drawn] == ["stop", "length", "stop", "stop"]
    batch = TokenBatch.from_groups(
        [Group(Prompt("q", "", token_ids=(1,)), 0, tuple(drawn), rewards=[1.0, 0.0] * 2)], 1.0
    )
    masks = [[int(t < length) for t in range(5)] for length in batch.lengths.tolist()]
    assert masks == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0], [1] * 5]
    assert batch.token_ids.tolist() == [5, 6, 2, 5, 6, 7, 8, 9, 2, 5, 6, 7, 8, 2]
    assert batch.truncated.tolist() == [False, True, False, False]


def test_any_of_several_stop_tokens_ends_an_answer(canned: Callable) -> None:
    """Field bug B2."""
    drawn = canned([[5, 3, 3, 2], [5, 2, 3, 3], [5, 6, 7, 3], [5, 6, 7, 8]], stops=(2, 3))
    assert [c.token_ids for c in drawn] == [(5, 3), (5, 2), (5, 6, 7, 3), (5, 6, 7, 8)]
    assert [c.finish_reason for c in drawn] == ["stop", "stop", "stop", "length"]


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2"])
def test_padding_at_the_left_changes_no_log_prob(tiny_folder: Callable, architecture: str) -> None:
    """Field bug B4: 8 tokens beside 13, so that 5 are padding; GPT-2 counts positions, the others need the mask."""
    folder = str(tiny_folder(architecture))
    engine, model = TransformersEngine(device="cpu"), load_model(folder).eval()
    engine.start(EngineModel(folder, (2, 3), 512))
    requests = [Request(tuple(range(50, 50 + length)), seed) for seed, length in enumerate((8, 13, 1, 8))]
    for request, completion in zip(requests, engine.generate(requests, Sampling(1.0, 6)), strict=True):
        expected = logits_of(model, request.prompt_ids, completion).log_softmax(-1)
        for t, token in enumerate(completion.token_ids):
            assert completion.logprobs[t] == pytest.approx(float(expected[t, token]), abs=1e-4)


def test_an_engine_that_is_closed_while_it_draws_stops(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = TransformersEngine(device="cpu"), []

    def close_at_the_third(*arguments: Any) -> Drawn:
        steps.append(len(steps))
        if len(steps) == 3:
            engine.close()  # as another thread may
        return _draw_tokens(*arguments)

    engine.start(EngineModel(str(tiny_model_path), (), 512))
    monkeypatch.setattr("grpo_lit.rollouts.transformers._draw_tokens", close_at_the_third)
    with pytest.raises(EngineError, match="closed while it was sampling"):
        engine.generate(REQUESTS, Sampling(1.0, 400))
    assert len(steps) == 3


def test_tokens_come_as_often_as_they_should_among_the_possible_ones() -> None:
    # p = [.4, .3, .2, .1], the two likeliest: 4/7 and 3/7, and never another.
    count = 4000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(count, 1)
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = _draw_tokens(logits, 1.0, LogitsProcessorList([TopKLogitsWarper(2)]), uniforms)
    found = Counter(drawn.tokens.tolist())
    assert set(found) == {0, 1}
    # sqrt(p (1 - p) / n) = .0078; four of them.
    assert found[0] / count == pytest.approx(4 / 7, abs=0.032)
    torch.testing.assert_close(drawn.logprobs.exp(), torch.tensor([4 / 7, 3 / 7])[drawn.tokens])


def test_logprobs_are_those_of_the_logits_over_the_temperature() -> None:
    """Field bug E1: of logits 2 1 0 at T = 0.5, not log p / T (-0.815 ...) nor those at T = 1 (-0.408 ...)."""
    # log_softmax(4 2 0): -log(1 + e^-2 + e^-4) = -0.143. Uniform numbers that point at the tokens of p .867 .117 .016.
    uniforms = torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)
    drawn = _draw_tokens(torch.tensor([[2.0, 1.0, 0.0]] * 3), 0.5, LogitsProcessorList(), uniforms)
    assert drawn.tokens.tolist() == [0, 1, 2]
    torch.testing.assert_close(drawn.logprobs, torch.tensor([-0.143, -2.143, -4.143]), atol=5e-4, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_no_number_points_at_an_impossible_token(uniform: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50, generator=generator)
    uniforms = torch.full((200,), uniform, dtype=torch.float64)
    drawn = _draw_tokens(logits, 1.0, LogitsProcessorList([TopKLogitsWarper(3)]), uniforms)
    assert drawn.possible.gather(1, drawn.tokens[:, None]).all()
    assert drawn.logprobs.isfinite().all()
    assert int(drawn.possible.sum()) == 3 * 200
    free = _draw_tokens(logits, 1.0, LogitsProcessorList(), uniforms)
    assert free.possible is None
    assert int(free.tokens.max()) < 50
    assert math.isfinite(float(free.logprobs.sum()))

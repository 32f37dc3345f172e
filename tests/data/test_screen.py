"""What nothing can be learnt from is counted, named and never asked; what is held out is found before the run."""

import warnings
from collections.abc import Callable, Sequence
from unittest.mock import Mock

import pytest
import torch

from grpo_lit.data import screen as screening
from grpo_lit.data.heldout import HeldOut
from grpo_lit.data.screen import Screen, logged_apart
from grpo_lit.data.source import PromptSource
from grpo_lit.data.stream import PromptStream
from grpo_lit.data.template import PromptTemplate
from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rewards import MathEquivalence, NumericMatch, Reward, RewardCombination, WeightedReward
from grpo_lit.rollout import Completion, Prompt

PLAIN = PromptTemplate(chat=False)
ALONE = Mock(spec=Ranks, rank=0, world_size=1, max=lambda values: values)


class Sums(PromptSource):
    """Questions ``0+1``, ``1+1``, ... with these answers; every second one of another domain."""

    def __init__(self, answers: Sequence[str | None]) -> None:
        self.answers = answers

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Prompt:
        domain = ("even", "odd")[index % 2]
        return Prompt(f"sum/{index}", f"{index}+1", answer=self.answers[index], domain=domain)


@pytest.fixture
def build(make_tokenizer: Callable) -> Callable[..., Screen]:
    tokenizer = make_tokenizer()

    def make(source: PromptSource, reward: Reward | None = None, held_out: PromptSource | None = None, room: int = 9):
        stream = PromptStream(source, PLAIN, tokenizer, room)
        sets = {} if held_out is None else {"held": held_out}
        rewards = RewardCombination({"answer": WeightedReward(reward or NumericMatch())})
        return Screen(stream, HeldOut(sets, PLAIN, tokenizer, room), rewards)

    return make


def asked(screen: Screen, count: int, ranks: Ranks = ALONE) -> list[str]:
    return [prompt.id for prompt, _ in screen.take(count, ranks)]


def test_golds_that_cannot_be_read_are_counted_named_and_never_asked(build: Callable) -> None:
    """Field bug C4."""
    screen = build(Sums(["1", "two", "3", None, "5", "6 or 7"]))
    with pytest.warns(UserWarning, match="never asked") as caught:
        screen.inspect(ALONE)
    (warning,) = (str(w.message) for w in caught)
    assert "data.train: 3 of 6 prompts (50.0%) cannot be judged by the reward 'answer' and are never asked" in warning
    assert "3 with an answer that is not one number" in warning
    for named in ("sum/1: '1+1', answer 'two'", "sum/3: '3+1', answer None", "sum/5: '5+1', answer '6 or 7'"):
        assert named in warning
    taken = [*asked(screen, 3), *asked(screen, 3)]
    assert sorted(taken) == ["sum/0", "sum/0", "sum/2", "sum/2", "sum/4", "sum/4"]
    assert screen.unreadable == 6


def test_golds_that_all_rewards_stumble_over_end_the_run_at_once(build: Callable) -> None:
    screen = build(Sums(["yes", "no", ""]))
    with pytest.raises(ConfigError, match=r"`data.rewards.correct`.*'answer', which can judge none of 3.*answer 'yes'"):
        screen.inspect(ALONE)
    with pytest.raises(ConfigError, match="can judge none of 3 that were drawn in a row"):
        screen.take(2, ALONE)


def test_a_rollout_that_the_prompts_left_cannot_fill_ends_the_run_at_once(build: Callable) -> None:
    answers = ["1", "two", "3", None, "5", "6"]
    with pytest.warns(UserWarning, match="2 of 6"):
        build(Sums(answers)).inspect(ALONE, wanted=4)
    with (
        pytest.warns(UserWarning, match="2 of 6"),
        pytest.raises(ConfigError, match=r"`data.prompts_per_rollout` expected at most the 4 prompts.*but got 5"),
    ):
        build(Sums(answers)).inspect(ALONE, wanted=5)


def test_math_golds_are_read_before_the_run(build: Callable) -> None:
    """Field bug C4: the golds of the report."""
    reward = MathEquivalence(workers=1)
    screen = build(Sums([r"\frac{1}{2}", "yes", r"x^2+1", "", "E"]), reward)
    with pytest.warns(UserWarning, match=r"3 of 5 .*no mathematical expression \(.*sum/1: '1\+1', answer 'yes'"):
        screen.inspect(ALONE)
    assert sorted(asked(screen, 2)) == ["sum/0", "sum/2"]
    reward.close()


def test_what_one_rank_cannot_judge_none_asks(build: Callable) -> None:
    # The other rank finds fault with the first prompt it is asked about, such as a gold that takes it too long to read.
    faults = [1.0]

    def others(values: torch.Tensor) -> torch.Tensor:
        values[0] = max(float(values[0]), faults.pop() if faults else 0.0)
        return values

    order = asked(build(Sums(list("123456"))), 6)
    screen = build(Sums(list("123456")))
    assert asked(screen, 2, Mock(spec=Ranks, max=others)) == order[1:3]
    assert screen.unreadable == 1


def test_long_prompts_are_named_before_the_run_in_one_warning(build: Callable) -> None:
    # Nine questions of three tokens, and ten of four.
    screen = build(Sums(["7"] * 19), room=3)
    with pytest.warns(
        UserWarning, match=r"9 of 19 .*too long.*more tokens than `data.max_prompt_tokens` \(3\)"
    ) as caught:
        screen.inspect(ALONE)
    assert len(caught) == 1
    named = str(caught[0].message)
    assert named.count(": 4") == 3
    assert ", ...)" in named


def test_the_look_before_the_run_is_short_and_what_it_missed_is_looked_at_when_drawn(
    build: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screening, "SECONDS", 0.0)
    monkeypatch.setattr(screening, "CHUNK", 2)
    source = Sums(["7"] * 20)
    first = [int(name.split("/")[1]) for name in asked(build(source), 20)]  # the order in which prompts are asked
    source.answers = ["x" if i in (first[0], first[5]) else "7" for i in range(20)]
    screen = build(source)
    with pytest.warns(UserWarning, match=r"1 of 2 prompts .*Of 20 prompts, 2 were looked at; the others are when"):
        screen.inspect(ALONE)
    assert asked(screen, 18) == [f"sum/{i}" for i in first if i not in (first[0], first[5])]


def test_a_question_that_is_held_out_is_found_before_the_run(build: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = Sums(["7"])  # 0+1
    with pytest.raises(ConfigError, match=r"`data.train` expected no question of `data.val`, but got sum/0"):
        build(Sums(["7"] * 5), held_out=held_out).inspect(ALONE)
    monkeypatch.setattr(screening, "SECONDS", 0.0)
    monkeypatch.setattr(screening, "CHUNK", 1)
    screen = build(Sums(["7"] * 20), held_out=held_out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        screen.inspect(ALONE)  # it comes later
    with pytest.raises(ConfigError, match="but got sum/0"):
        screen.take(20, ALONE)


def test_domains_are_the_sources_or_those_seen(build: Callable) -> None:
    source = Sums(["7"] * 4)
    screen = build(source)
    assert screen.domains == ()
    screen.inspect(ALONE)
    assert screen.domains == ("even", "odd")
    source.domains = ["odd", "even", "rare"]
    assert build(source).domains == ("even", "odd", "rare")


def test_a_held_out_prompt_that_cannot_be_judged_is_named(make_tokenizer: Callable) -> None:
    rewards = RewardCombination({"answer": WeightedReward(NumericMatch())})
    sets = {"small": Sums(["1", "yes"])}
    with pytest.warns(UserWarning, match=r"data.val.small: 1 of 2 prompts cannot be judged.*sum/1.*answer 'yes'"):
        held_out = HeldOut(sets, PLAIN, make_tokenizer(), 9, rewards.problem)
    assert held_out.domains("small") == ["even", "odd"]
    with pytest.warns(UserWarning, match=r"data.val.small: 2 of 2 prompts are longer .*sum/0: 3, sum/1: 3"):
        assert HeldOut(sets, PLAIN, make_tokenizer(), 2, rewards.problem).prompts["small"] == []


def test_solve_rates_are_logged_apart_for_a_few_domains() -> None:
    assert logged_apart("data.train", ("math",)) == ()
    assert logged_apart("data.train", ("code", "math")) == ("code", "math")
    with pytest.warns(UserWarning, match=r"data.train has 65 domains.*`fields.domain`"):
        assert logged_apart("data.train", [str(i) for i in range(65)]) == ()


class Silent(Reward):
    """Looks at no prompt."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [1.0] * len(completions)


class OnlyOdd(Silent):
    """Can judge the prompts of one domain."""

    def problem(self, prompt: Prompt) -> str | None:
        return None if prompt.domain == "odd" else "no oddness"


class OnlyEven(Silent):
    """Can judge those of the other."""

    def problem(self, prompt: Prompt) -> str | None:
        return None if prompt.domain == "even" else "no evenness"


@pytest.mark.parametrize(
    ("parts", "problems"),
    [
        ([Silent()], [None, None]),
        ([OnlyOdd()], ["no oddness", None]),
        ([OnlyOdd(), Silent()], ["no oddness", None]),  # a format is no evidence of an answer
        ([Silent(), OnlyOdd()], [None, None]),
        ([OnlyOdd(), OnlyEven()], [None, None]),  # each domain has a verifier of its own
        ([OnlyOdd(), OnlyOdd()], ["no oddness", None]),
    ],
)
def test_a_prompt_is_asked_where_one_reward_that_looks_at_prompts_can_judge_it(
    parts: list[Reward], problems: list[str | None]
) -> None:
    rewards = RewardCombination({str(i): WeightedReward(part) for i, part in enumerate(parts)})
    assert [rewards.problem(Sums(["7", "7"])[i]) for i in range(2)] == problems

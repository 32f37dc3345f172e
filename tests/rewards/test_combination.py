import asyncio
import math
import os
import time
from fractions import Fraction

import numpy as np
import psutil
import pytest
import torch
from jsonargparse import ArgumentParser

from grpo_lit.batch import TokenBatch
from grpo_lit.errors import ConfigError, RewardError
from grpo_lit.rewards import (
    CodeTests,
    MathEquivalence,
    MultipleChoice,
    NumericMatch,
    RegexFormat,
    Reward,
    RewardCombination,
    ThinkAnswerFormat,
    WeightedReward,
)
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.replay import Replay


class Canned(Reward):
    """Returns what it was given, whatever that is."""

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, prompt, completions):
        return self.scores


def group(n=4):
    prompt = Prompt(id="sum/7", question="3 + 4 =", answer="7", token_ids=(1,))
    return Group(prompt, 0, tuple(Completion((5,), (-0.1,), str(i), "stop", 0) for i in range(n)))


def scored(combination, n=4):
    g = group(n)
    combination.score(g)
    return g


def test_the_total_is_the_weighted_sum_and_correctness_is_apart():
    g = scored(
        RewardCombination(
            {"answer": WeightedReward(Canned([1, 0, 1, 0])), "format": WeightedReward(Canned([1, 1, 0.5, 0]), 0.25)}
        )
    )
    # 1 * answer + 0.25 * format
    assert g.rewards == [1.25, 0.25, 1.125, 0.0]
    assert g.scores == {"answer": [1, 0, 1, 0], "format": [1, 1, 0.5, 0]}
    assert g.correct == [True, False, True, False]


# Field bug C10.
def test_a_reward_that_abstains_is_no_zero():
    g = scored(
        RewardCombination(
            {
                "a": WeightedReward(Canned([1, None, 0, None])),
                "b": WeightedReward(Canned([None, None, None, None])),
                "c": WeightedReward(Canned([None, -1, None, None]), 0.5),
            }
        )
    )
    assert g.rewards == [1.0, -0.5, 0.0, None]
    assert g.correct == [True, None, False, None]
    assert g.scores["b"] == [None] * 4
    # The sample on which all abstain is left out of the step.
    assert TokenBatch.from_groups([g], 1.0, ["a", "b", "c"]).rewards.tolist() == [1.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("correct", "correct_at", "expected"),
    [
        (None, 1.0, [True, False, False]),
        ("answer", 0.5, [True, True, False]),
        ("bonus", 1.0, [False, False, True]),
    ],
)
def test_which_reward_says_correct_and_from_where(correct, correct_at, expected):
    parts = {"answer": WeightedReward(Canned([1, 0.5, 0])), "bonus": WeightedReward(Canned([0, 0, 3]), -1.0)}
    assert scored(RewardCombination(parts, correct, correct_at), 3).correct == expected


def test_a_conditional_reward_counts_only_for_what_is_correct():
    parts = {
        "answer": WeightedReward(Canned([1, 0, None, 1])),
        "format": WeightedReward(Canned([1, 1, 1, None]), 0.25, conditional=True),
        "length": WeightedReward(Canned([1, 1, None, 1]), -0.5),
    }
    g = scored(RewardCombination(parts))
    # 1 + .25 - .5; without the format's .25 where the answer is wrong; nothing counts where nobody could tell; 1 - .5.
    assert g.rewards == [0.75, -0.5, None, 0.5]
    # Logged for all of them.
    assert g.scores["format"] == [1.0, 1.0, 1.0, None]
    assert g.correct == [True, False, None, True]


def test_conditional_on_the_score_from_which_on_a_completion_is_correct():
    parts = {
        "format": WeightedReward(Canned([1, 1, 1]), conditional=True),
        "answer": WeightedReward(Canned([0.4, 0.5, 0.6])),
    }
    assert scored(RewardCombination(parts, "answer", 0.5), 3).rewards == [0.4, 1.5, 1.6]


@pytest.mark.parametrize("name", ["total", "correct", "correct_kept", "overlong_penalty", "correct/math", ""])
def test_a_name_that_means_something_else_on_tensorboard_is_refused(name):
    with pytest.raises(ConfigError, match=r"expected names without .*Rename it"):
        RewardCombination({"answer": WeightedReward(Canned([1])), name: WeightedReward(Canned([1]))})


def test_a_name_that_is_another_rewards_counter_is_refused():
    class Counting(Canned):
        def counters(self):
            return {"killed": 0}

    with pytest.raises(ConfigError, match="counter of another reward, but got 'a_killed'"):
        RewardCombination({"a": WeightedReward(Counting([1])), "a_killed": WeightedReward(Canned([1]))})


def test_what_is_correct_cannot_depend_on_itself():
    parts = {"answer": WeightedReward(Canned([1]), conditional=True), "format": WeightedReward(Canned([1]))}
    with pytest.raises(ConfigError, match="`correct` expected a reward that is not conditional, but got 'answer'"):
        RewardCombination(parts)
    assert scored(RewardCombination(parts, "format"), 1).rewards == [2.0]


def test_the_time_of_each_reward_adds_up():
    class Slow(Canned):
        def __call__(self, prompt, completions):
            time.sleep(0.02)
            return super().__call__(prompt, completions)

    combination = RewardCombination({"slow": WeightedReward(Slow([1])), "fast": WeightedReward(Canned([1]))})
    for _ in range(2):
        scored(combination, 1)
    assert combination.seconds["slow"] >= 0.04
    assert combination.seconds["fast"] > 0
    combination.seconds.clear()
    scored(combination, 1)
    assert combination.seconds["slow"] >= 0.02


def test_a_weight_of_zero_only_logs_and_a_negative_one_punishes():
    parts = {
        "answer": WeightedReward(Canned([1, 0])),
        "logged": WeightedReward(Canned([5, 5]), 0.0),
        "repetition": WeightedReward(Canned([1, 0]), -0.5),
    }
    g = scored(RewardCombination(parts), 2)
    assert g.rewards == [0.5, 0.0]
    assert g.scores["logged"] == [5.0, 5.0]


# Field bug C10.
@pytest.mark.parametrize(
    "scores",
    [
        [True, False, True],
        (1, 0, 1),
        [np.float32(1), np.int64(0), np.bool_(True)],
        np.array([1.0, 0.0, 1.0]),
        np.array([[1], [0], [1]]),
        torch.tensor([1.0, 0.0, 1.0], requires_grad=True),
        torch.tensor([1, 0, 1]),
        [torch.tensor(1.0), torch.tensor([0.0]), torch.tensor(True)],
        [Fraction(1), 0, 1.0],
    ],
)
def test_any_kind_of_number_becomes_a_float(scores):
    g = scored(RewardCombination({"answer": WeightedReward(Canned(scores))}), 3)
    assert g.scores["answer"] == g.rewards == [1.0, 0.0, 1.0]
    assert all(type(value) is float for value in g.scores["answer"] + g.rewards)
    assert g.correct == [True, False, True]
    assert all(type(flag) is bool for flag in g.correct)


# Field bug C10.
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([math.nan, 1, 0, 0], "sample 0 expected a finite number, but got nan"),
        ([0, 1, 0, math.inf], "sample 3 expected a finite number, but got inf"),
        (torch.tensor([0, 0, -math.inf, 0]), "sample 2 expected a finite number, but got -inf"),
        ([0, 10**400, 0, 0], "sample 1 expected a finite number, but got inf"),
        ([0, 0, 0, 1e300], r"sample 3 expected a finite number, but got 1e\+300, which float32 does not hold"),
        ([1, 0, 1], r"one score per completion \(4\), but got 3"),
        ([1, 0, 1, 0, 1], r"one score per completion \(4\), but got 5"),
        ([], "but got 0"),
        ([1, 0, "1.0", 0], "sample 2 expected a number or None, but got str '1.0'"),
        ([1, 0, [1], 0], "sample 2 expected a number or None, but got list"),
        ([1, 0, 1j, 0], "sample 2 expected a number or None, but got complex"),
        ([1, 0, torch.tensor([1.0, 2.0]), 0], "sample 2 expected a number or None, but got Tensor"),
        (torch.zeros(4, 2), "sample 0 expected a number or None, but got Tensor"),
        (1.0, "expected a list of scores, but got float 1.0"),
        (torch.tensor(1.0), "expected a list of scores, but got Tensor"),
        (None, "expected a list of scores, but got NoneType"),
        ("1010", "expected a list of scores, but got str"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "expected a list of scores, but got dict"),
    ],
)
def test_anything_else_is_refused_by_name(scores, message):
    combination = RewardCombination({"odd": WeightedReward(Canned(scores))})
    with pytest.raises(RewardError, match=rf"reward 'odd' \(Canned\) on prompt 'sum/7'.*{message}"):
        scored(combination)


@pytest.mark.parametrize(
    ("scores", "weights", "message"),
    [
        ([[1.0], [1e30]], [1.0, 1e200], r"sample 0, .* but got 1e\+230: 'b' counts 1e\+230 in it.*`weight`"),
        ([[3e38], [3e38]], [1.0, 1.0], r"but got 6e\+38: 'a' counts 3e\+38"),
        ([[1e30], [1e30]], [1e300, -1e300], "but got nan: 'a' counts inf"),
    ],
)
def test_a_total_that_no_batch_can_hold_names_its_largest_part(scores, weights, message):
    parts = {name: WeightedReward(Canned(s), w) for name, s, w in zip("ab", scores, weights, strict=True)}
    with pytest.raises(RewardError, match=message):
        scored(RewardCombination(parts), 1)


def test_the_largest_total_can_be_ranked_for_replay():
    g = scored(RewardCombination({"a": WeightedReward(Canned([3e38, -3e38]))}), 2)
    assert Replay(hardness=0.0).priority(g) == pytest.approx(3e38 * 2**0.5)


# Field bug C10.
def test_a_failing_reward_is_named_and_its_cause_kept():
    class Fails(Reward):
        def __call__(self, prompt, completions):
            return [1 / (3 - i) for i, _ in enumerate(completions)]

    with pytest.raises(RewardError, match=r"'answer' \(Fails\) on prompt 'sum/7' failed: ZeroDivisionError") as error:
        scored(RewardCombination({"answer": WeightedReward(Fails())}), 8)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


# Field bug C10.
def test_an_asynchronous_reward_is_refused_without_a_warning_of_its_own():
    class Async(Reward):
        async def __call__(self, prompt, completions):
            await asyncio.sleep(0)
            return [1.0] * len(completions)

    with pytest.raises(RewardError, match="got a coroutine: make its `__call__` a plain `def`"):
        scored(RewardCombination({"slow": WeightedReward(Async())}))


def test_a_setting_that_a_reward_refuses_stays_a_config_error():
    class Refuses(Reward):
        def __call__(self, prompt, completions):
            raise ConfigError("`task` expected another")

    with pytest.raises(ConfigError, match="`task` expected another"):
        scored(RewardCombination({"a": WeightedReward(Refuses())}))


# Field bug B8.
def test_an_empty_completion_and_an_empty_group_score():
    g = Group(group().prompt, 0, (Completion((), (), "", "length", 0),))
    combination = RewardCombination(
        {"answer": WeightedReward(NumericMatch()), "format": WeightedReward(ThinkAnswerFormat())}
    )
    combination.score(g)
    assert (g.rewards, g.correct) == ([0.0], [False])
    assert scored(combination, 0).rewards == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RewardCombination({}), "`rewards` expected at least one"),
        (lambda: RewardCombination({"answer": WeightedReward(Canned([]))}, "anwser"), "'anwser': set it to answer"),
        (lambda: WeightedReward(Canned([]), math.nan), "`weight` expected a finite number"),
        (lambda: WeightedReward(Canned([]), math.inf), "`weight` expected a finite number"),
    ],
)
def test_settings_that_cannot_work_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- counters and end


def workers() -> set[int]:
    """Return the ids of this process's reward workers."""
    processes = psutil.Process(os.getpid()).children(recursive=True)
    return {process.pid for process in processes if "worker_process.py" in " ".join(process.cmdline())}


def test_no_process_outlives_close_and_a_closed_reward_works_again():
    combination = RewardCombination(
        {"math": WeightedReward(MathEquivalence(workers=1)), "format": WeightedReward(ThinkAnswerFormat(), 0.0)}
    )
    g = Group(Prompt("q/0", "", answer="x+1"), 0, (Completion((), (), r"\boxed{1+x}", "stop", 0),))
    before = workers()
    combination.close()  # before anything was started
    for _ in range(2):
        combination.score(g)
        assert g.rewards == [1.0]
        started = workers() - before
        assert started
        combination.close()
        combination.close()
        assert not started & workers()


def test_a_reward_that_fails_to_close_keeps_no_other_from_it():
    closed = []

    class Closes(Canned):
        def close(self):
            closed.append(self.scores)
            if self.scores == "b":
                raise OSError("cannot close b")

    combination = RewardCombination({name: WeightedReward(Closes(name)) for name in "abc"})
    with pytest.raises(OSError, match="cannot close b"):
        combination.close()
    assert sorted(closed) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("reward", "prompts", "text", "counted"),
    [
        (NumericMatch(), [{"answer": "seven"}, {"answer": "7"}], "7", {"unreadable": 1}),
        (MultipleChoice(), [{"answer": "none"}, {"answer": ""}, {"answer": "B"}], "B", {"unreadable": 2}),
        (CodeTests(), [{"answer": "7"}], "7", {"unreadable": 1, "broken": 0}),
        # An answer of 3000 characters is longer than what is compared: refused, without any process.
        (
            MathEquivalence(),
            [{"answer": "yes"}, {"answer": "7"}],
            r"\boxed{" + "x" * 3000 + "}",
            {"unreadable": 1, "refused": 1, "killed": 0},
        ),
        # Every way to cut the text into runs of a's is tried, 2^4999 of them.
        (RegexFormat("(a+)+b", timeout=0.05), [{"answer": ""}], "a" * 5000, {"timeouts": 1}),
        (ThinkAnswerFormat(), [{"answer": ""}], "", {}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rewards_tell_what_they_have_counted(reward, prompts, text, counted):
    assert not any(reward.counters().values())
    for fields in prompts:
        reward(Prompt("q/0", "", **fields), [Completion((), (), text, "stop", 0)])
    reward.close()
    assert reward.counters() == counted


def test_counters_carry_the_name_of_their_reward():
    class Counts(Canned):
        def counters(self):
            return {"unreadable": 3, "killed": self.scores}

    parts = {"a": Counts(1), "b": Canned(0), "c": Counts(2)}
    combination = RewardCombination({name: WeightedReward(reward) for name, reward in parts.items()})
    assert combination.counters() == {"a_unreadable": 3, "a_killed": 1, "c_unreadable": 3, "c_killed": 2}


# ---------------------------------------------------------------- YAML


def parse(text):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data.rewards", type=RewardCombination)
    config = parser.parse_string(text)
    return parser.instantiate(config).data.rewards


YAML = """
data:
  rewards:
    rewards:
      answer: {reward: NumericMatch}
      format: {reward: ThinkAnswerFormat, weight: 0.2}
    correct: answer
"""


def test_the_yaml_shape_with_short_class_names():
    combination = parse(YAML)
    assert isinstance(combination, RewardCombination)
    assert list(combination.rewards) == ["answer", "format"]
    assert isinstance(combination.rewards["answer"].reward, NumericMatch)
    assert isinstance(combination.rewards["format"].reward, ThinkAnswerFormat)
    assert [part.weight for part in combination.rewards.values()] == [1.0, 0.2]
    assert combination.correct == "answer"


def test_every_reward_has_a_short_name_and_its_settings():
    combination = parse(
        """
data:
  rewards:
    rewards:
      code: {reward: {class_path: CodeTests, init_args: {limits: {seconds: 3, memory_mib: 256}, partial: true}}}
      choice: {reward: {class_path: MultipleChoice, init_args: {extract: boxed}}}
      number: {reward: {class_path: NumericMatch, init_args: {relative_tolerance: 1e-3, units: convert}}}
      format:
        reward: {class_path: RegexFormat, init_args: {pattern: '<think>.*</think>.*', once: [<think>, </think>]}}
        weight: 0.1
        conditional: true
"""
    )
    rewards = {name: part.reward for name, part in combination.rewards.items()}
    assert (rewards["code"].limits.seconds, rewards["code"].limits.memory_mib, rewards["code"].partial) == (
        3,
        256,
        True,
    )
    assert rewards["choice"].extract == "boxed"
    assert rewards["number"].relative_tolerance == Fraction(1, 1000)
    assert rewards["format"].once == ("<think>", "</think>")
    assert [part.conditional for part in combination.rewards.values()] == [False, False, False, True]


def test_a_reward_takes_its_own_arguments_from_yaml():
    combination = parse(
        """
data:
  rewards:
    rewards:
      answer:
        reward: {class_path: NumericMatch, init_args: {extract: answer_tag}}
        weight: 2
      mine: {reward: {class_path: grpo_lit.rewards.ThinkAnswerFormat, init_args: {tag_credit: 0}}}
"""
    )
    assert combination.rewards["answer"].reward.extract == "answer_tag"
    assert combination.rewards["answer"].weight == 2.0
    assert combination.rewards["mine"].reward.tag_credit == 0


@pytest.mark.parametrize(
    "bad",
    [
        YAML.replace("NumericMatch", "NumericMatsch"),
        YAML.replace("weight", "wieght"),
        YAML.replace("0.2", "much"),
        YAML.replace("correct: answer", "correct_if: answer"),
    ],
)
def test_yaml_with_a_mistake_is_refused(bad):
    with pytest.raises(Exception, match=r"(?i)NumericMatsch|wieght|much|correct_if"):
        parse(bad)

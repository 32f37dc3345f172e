"""What completions answer, as a majority vote counts it: one form for all ways to write the same, wrong ones too."""

from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from grpo_lit.errors import ConfigError, RewardError
from grpo_lit.rewards import (
    MathEquivalence,
    MultipleChoice,
    NumericCloseness,
    NumericMatch,
    ReasoningGymScore,
    Reward,
    RewardCombination,
    ThinkAnswerFormat,
    WeightedReward,
)
from grpo_lit.rollout import Completion, Group, Prompt


def said(reward: Reward, text: str, answer: str | None = "7", **metadata: Any) -> Hashable | None:
    return reward.answer(Prompt("q", "q", answer, metadata=metadata), Completion((), (), text, "stop", 0))


@pytest.mark.parametrize("reward", [NumericMatch(), NumericMatch(relative_tolerance=0.1), NumericCloseness()])
def test_a_number_is_one_answer_however_it_is_written(reward: Reward) -> None:
    assert {said(reward, text) for text in ("7", "so 7.0", "x = 007", "3 + 4 = 7 cm")} == {Fraction(7)}
    assert said(reward, "7.1") == Fraction(71, 10)
    assert said(reward, "none") is None
    assert said(reward, "12", answer="no number") is not None


@pytest.mark.parametrize("units", ["convert", "require"])
def test_numbers_with_units_meet_in_that_of_the_answer(units: Any) -> None:
    reward = NumericMatch(units=units)
    assert {said(reward, text, "1.5 km") for text in ("1500 m", "1.5 km", "150000 cm")} == {Fraction(3, 2)}
    wrong = {said(reward, text, "1.5 km") for text in ("1.5 kg", "1500 g")}
    assert len(wrong) == 1
    assert Fraction(3, 2) not in wrong
    # Without a unit it is taken to mean kilometres, or is an answer of its own.
    assert (said(reward, "1.5", "1.5 km") == Fraction(3, 2)) == (units == "convert")


@pytest.mark.parametrize(
    "texts",
    [
        (r"\boxed{1,234}", r"\boxed{1{,}234}", r"\boxed{x = 1234.0}", r"\boxed{$1234$}"),
        (r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{2/4}"),
        (r"\boxed{\text{Evelyn}}", r"\boxed{evelyn}"),
        (r"\boxed{2 \sqrt{3}}", r"\boxed{2\sqrt{3}}", r"\boxed{2\,\sqrt{3}}"),
        (r"\boxed{\dfrac{x}{2}}", r"\boxed{\frac{x}{2}}"),
        (r"\boxed{52_8}", r"\boxed{52_{8}}"),
    ],
)
def test_a_boxed_answer_is_one_however_it_is_written(texts: Sequence[str]) -> None:
    answers = {said(MathEquivalence(), text) for text in texts}
    assert len(answers) == 1
    assert None not in answers


def test_different_boxed_answers_stay_apart() -> None:
    texts = (r"\boxed{7}", r"\boxed{8}", r"\boxed{x}", r"\boxed{x^2}", r"\boxed{52_8}", r"\boxed{52_9}", r"\boxed{-7}")
    assert len({said(MathEquivalence(), text) for text in texts}) == len(texts)
    assert [said(MathEquivalence(), text) for text in ("7", r"\boxed{}", r"\boxed{\frac{1}{2}")] == [None] * 3
    assert said(MathEquivalence(extract="last_number"), "it is 7.0") == Fraction(7)


def test_a_choice_is_its_letter() -> None:
    texts = ("B", "(b)", r"\boxed{B}", "The answer is B) four", "four")
    assert {said(MultipleChoice(), text, "A", options=["three", "four"]) for text in texts} == {"B"}
    assert said(MultipleChoice(), "A or B", "A") is None


def test_a_task_is_answered_by_what_its_scorer_reads() -> None:
    assert said(ReasoningGymScore(), "I think <answer> 7 </answer>") == "7"
    assert said(ReasoningGymScore(), "7") is None
    assert said(ReasoningGymScore("last_line"), "so\n 7 \n") == "7"
    assert said(ReasoningGymScore("text"), " 7 ") == "7"
    assert said(ReasoningGymScore("text"), "  ") is None


def test_any_other_reward_takes_the_text() -> None:
    assert said(ThinkAnswerFormat(), " the text\n") == "the text"
    assert said(ThinkAnswerFormat(), " \n") is None


class Odd(Reward):
    """Answers with what it was made with."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [0.0] * len(completions)

    def answer(self, prompt: Prompt, completion: Completion) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def group_of(*texts: str) -> Group:
    return Group(Prompt("q/3", "q", "7"), 0, tuple(Completion((), (), text, "stop", 0) for text in texts))


def test_the_reward_that_says_correct_reads_the_answers() -> None:
    parts = {"odd": WeightedReward(Odd("x")), "number": WeightedReward(NumericMatch())}
    assert RewardCombination(parts, correct="number").answers(group_of("it is 7", "8", "")) == [7, 8, None]
    assert RewardCombination(parts).answers(group_of("7", "8")) == ["x", "x"]


@pytest.mark.parametrize(("found", "message"), [(["x"], "TypeError.*list"), (ValueError("no"), "ValueError: no")])
def test_a_reward_that_fails_to_tell_answers_is_named(found: Any, message: str) -> None:
    combination = RewardCombination({"odd": WeightedReward(Odd(found))})
    with pytest.raises(RewardError, match=rf"reward 'odd' \(Odd\) on prompt 'q/3' failed to tell answers: {message}"):
        combination.answers(group_of("7"))
    with pytest.raises(ConfigError, match="wrong setting"):
        RewardCombination({"odd": WeightedReward(Odd(ConfigError("wrong setting")))}).answers(group_of("7"))

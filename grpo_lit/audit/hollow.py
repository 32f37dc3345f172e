r"""Completions that deserve nothing, built without knowing which of their parts is right.

A verifier that pays for one of them teaches a policy to write it. Every kind comes in each place where verifiers look
for an answer: a box, an answer tag, after ``####``, the end of the text.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence

from grpo_lit.rewards.choice import LETTERS
from grpo_lit.rollout import Prompt

#: How an answer is put where a verifier looks for it.
PLACES: dict[str, Callable[[str], str]] = {
    "box": lambda answer: rf"\boxed{{{answer}}}",
    "tag": lambda answer: f"<think></think><answer>{answer}</answer>",
    "hashes": lambda answer: f"#### {answer}",
    "text": lambda answer: f"The answer is {answer}",
}
#: What each kind is, for the report.
KINDS = {
    "empty": "nothing, or white space",
    "format only": "the places for an answer, left empty",
    "question repeated": "the question where the answer should be",
    "spam in one place": "the answer among its neighbours, in one place",
    "spam in many places": "the answer among its neighbours, each in a place of its own, a wrong one last",
}
#: Neighbours of an answer on each side of it.
_NEIGHBOURS = 3
_INTEGER = re.compile(r"-?[0-9]{1,3}(?:,?[0-9]{3})*")


def neighbours(answer: str, answers: Sequence[str]) -> list[str]:
    """Return wrong answers that look like the right one: the next integers, the other letters, or other answers.

    Args:
        answer: The right one.
        answers: Those of all prompts.
    """
    if _INTEGER.fullmatch(answer):
        value = int(answer.replace(",", ""))
        return [str(value + step) for step in range(-_NEIGHBOURS, _NEIGHBOURS + 1) if step]
    if answer in LETTERS and len(answer) == 1:
        return [letter for letter in LETTERS[:5] if letter != answer]
    others = sorted(set(answers) - {answer})
    return random.Random(answer).sample(others, min(2 * _NEIGHBOURS, len(others)))


def hollow(prompt: Prompt, answers: Sequence[str]) -> dict[str, list[str]]:
    """Return hollow completions of one prompt by kind.

    Args:
        prompt: The question.
        answers: The gold answers of all prompts; neighbours are taken from them where the answer is no number.
    """
    answer = prompt.answer or ""
    wrong = neighbours(answer, answers)
    half = len(wrong) // 2
    # The wrong one at the end: what stands last is what a verifier may rightly take for the answer.
    listed = [*wrong[:half], answer, *wrong[half:]] if wrong else []
    return {
        "empty": ["", " \n"],
        "format only": [place("") for place in PLACES.values()],
        "question repeated": [place(prompt.question) for place in PLACES.values()],
        "spam in one place": [place(mark.join(listed)) for place in PLACES.values() for mark in (", ", " or ", " ")]
        if listed
        else [],
        "spam in many places": [mark.join(map(place, listed)) for place in PLACES.values() for mark in ("\n", " ")]
        if listed
        else [],
    }


def guesses(answers: Iterable[str | None]) -> list[str]:
    """Return the letters to guess where all answers are letters of a multiple choice, else nothing."""
    letters = {(answer or "").strip("() .") for answer in answers}
    if not letters or not all(len(letter) == 1 and letter in LETTERS for letter in letters):
        return []
    return list(LETTERS[: max(4, LETTERS.index(max(letters)) + 1)])

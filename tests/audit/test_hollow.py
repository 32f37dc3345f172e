import pytest

from grpo_lit.audit.hollow import KINDS, guesses, hollow, neighbours
from grpo_lit.rollout import Prompt


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("18", ["15", "16", "17", "19", "20", "21"]),
        ("1,000", ["997", "998", "999", "1001", "1002", "1003"]),
        ("-1", ["-4", "-3", "-2", "0", "1", "2"]),
        ("C", ["A", "B", "D", "E"]),
    ],
)
def test_neighbours_of_numbers_and_letters(answer, expected):
    assert neighbours(answer, ["7", "8"]) == expected


def test_neighbours_of_anything_else_are_the_other_answers():
    assert sorted(neighbours("x+1", ["x+1", "2x", "x^2", "2x"])) == ["2x", "x^2"]
    many = [f"{n}x" for n in range(100)]
    assert neighbours("5x", many) == neighbours("5x", many)
    assert len(set(neighbours("5x", many)) - {"5x"}) == 6
    assert neighbours("x", ["x"]) == []


def test_hollow_completions_never_end_in_the_answer():
    kinds = hollow(Prompt(id="q", question="9 + 9 =", answer="18"), ["18"])
    assert kinds.keys() == KINDS.keys()
    assert r"\boxed{}" in kinds["format only"]
    assert r"\boxed{9 + 9 =}" in kinds["question repeated"]
    assert r"\boxed{15, 16, 17, 18, 19, 20, 21}" in kinds["spam in one place"]
    assert "#### 15\n#### 16\n#### 17\n#### 18\n#### 19\n#### 20\n#### 21" in kinds["spam in many places"]
    for kind in ("spam in one place", "spam in many places"):
        ends = [text.removesuffix("</answer>").rstrip("}") for text in kinds[kind]]
        assert all("18" in end and end.endswith("21") for end in ends)


def test_a_lone_answer_has_no_neighbours_to_hide_among():
    kinds = hollow(Prompt(id="q", question="?", answer="x"), ["x"])
    assert kinds["spam in one place"] == kinds["spam in many places"] == []


@pytest.mark.parametrize(
    ("answers", "letters"),
    [
        (["A", "(B)"], ["A", "B", "C", "D"]),
        (["A", "F"], ["A", "B", "C", "D", "E", "F"]),
        (["A", "7"], []),
        (["A", None], []),
        ([], []),
    ],
)
def test_letters_are_guessed_where_all_answers_are_letters(answers, letters):
    assert guesses(answers) == letters

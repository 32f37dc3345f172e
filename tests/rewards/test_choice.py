import time

import pytest

from grpo_lit.rewards.choice import MultipleChoice
from grpo_lit.rollout import Completion, Prompt

OPTIONS = ["3", "4", "a dog", "Five apples."]


def score(text, answer="B", extract="announced", options=OPTIONS, prefill=""):
    metadata = {"prefill": prefill} | ({} if options is None else {"options": options})
    prompt = Prompt(id="q/0", question="", answer=answer, metadata=metadata)
    return MultipleChoice(extract)(prompt, [Completion((), (), text, "stop", 0)])[0]


LETTER_FORMS = [
    "B",
    "b",
    "B.",
    "B)",
    "(B)",
    "[B]",
    "**B**",
    "**(B)**",
    "$B$",
    r"\(B\)",
    r"\text{B}",
    "Option B",
    "The answer is B",
    "The answer is B.",
    "The answer is (B).",
    "The answer is: B",
    "The correct answer is **B**.",
    "So the final answer is $\\text{B}$.",
    "**Answer:** B",
    "**Answer**: B\nThat was easy.",
    "Answer: B",
    "ANSWER: B",
    "the answer is option B",
    "The correct option is B",
    "The answer is:\n\nB",
    "A is wrong, and C too. The answer is B",
    "The answer is A. No, wait: the answer is B.",
    "The answer is B because 2 + 2 is even.",
    "The answer is B, since A dog has four legs and I counted them.",
    r"\boxed{B}",
    r"\boxed{\text{B}}",
    r"\boxed{\textbf{(B)}}",
    r"First \boxed{A}. Wrong; it is $\boxed{B}$.",
    r"\fbox{B}",
    "<answer>B</answer>",
    "<answer>\n(B)\n</answer>",
    "Let me think about A and C.\n\nB",
    "reasoning\nB\n",
]


@pytest.mark.parametrize("options", [OPTIONS, None, dict(zip("ABCD", OPTIONS, strict=True))])
@pytest.mark.parametrize("text", LETTER_FORMS)
def test_every_way_to_name_one_letter(text, options):
    assert score(text, options=options) == 1.0
    assert score(text, answer="C", options=options) == 0.0


@pytest.mark.parametrize("text", ["B) 4", "B: 4", "(B) 4.", "The answer is B) 4", r"\boxed{B) 4}", "B. 4", "B - 4"])
def test_a_letter_with_its_own_text(text):
    assert score(text) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "B"),
        ("The answer is 4.", "B"),
        (r"\boxed{4}", "B"),
        ("a dog", "C"),
        ("A Dog.", "C"),
        ("five  apples", "D"),
        (r"\boxed{\text{Five apples}}", "D"),
        ("<answer>five apples</answer>", "D"),
    ],
)
def test_the_text_of_an_option_is_as_good(text, answer):
    assert score(text, answer) == 1.0
    assert score(text, "A") == 0.0


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B)", "4", "B) 4"])
def test_the_right_answer_may_be_written_in_any_form(gold):
    assert score("B", gold) == 1.0
    assert score("C", gold) == 0.0


@pytest.mark.parametrize("options", [OPTIONS, None])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "A B C D",
        "ABCD",
        "A, B",
        "B, A",
        "B, C",
        "A or B",
        "B or C",
        "B, or A is possible",
        "(A)(B)",
        "(B)(A)",
        "(B) (C)",
        "A/B",
        "B/C",
        "A and B",
        "B & C",
        r"\boxed{A, B}",
        r"\boxed{B, C}",
        r"\boxed{\text{B or C}}",
        "The answer is A or B",
        "The answer is B or C.",
        "The answer is B, C, D",
        "Answer: A B C D",
        "A\nB\nC\nD\nB",
        "C)\nB)",
        "(C)\n\n(B)",
        "Banana",
        "Bee: B",
        r"\boxed{B",
        "<answer></answer> B",
        r"\boxed{} B",
        "B) and also C) and D)",
    ],
)
def test_no_letter_or_several_earn_nothing(text, options):
    assert [score(text, answer, options=options) for answer in "ABCD"] == [0.0] * 4


def test_the_question_repeated_is_no_answer():
    question = "Which?\nA) 3\nB) 4\nC) a dog\nD) Five apples."
    assert [score(question, answer) for answer in "ABCD"] == [0.0] * 4


@pytest.mark.parametrize("text", ["B) 3", "The answer is B: a dog", "E", r"\boxed{E}", "5"])
def test_a_letter_with_another_text_and_what_is_no_option(text):
    assert [score(text, answer) for answer in "ABCD"] == [0.0] * 4


def test_letters_go_before_texts_that_look_like_letters():
    # Option A reads "C": who answers C means option C.
    options = ["C", "D", "A", "A, B"]
    assert score("C", "C", options=options) == 1.0
    assert score("C", "A", options=options) == 0.0
    # The whole text of an option names it, though it holds letters.
    assert score("A, B", "D", options=options) == 1.0
    # Roman numerals are texts where I is no option.
    assert score("I", "A", options=["I", "II"]) == 1.0


@pytest.mark.parametrize(
    ("text", "extract", "expected"),
    [
        ("<answer>B</answer>\nC", "answer_tag", 1.0),
        ("B", "answer_tag", 0.0),
        (r"\boxed{B} so C", "boxed", 1.0),
        ("B", "boxed", 0.0),
        (r"\boxed{C}" + "\nB", "last_line", 1.0),
        ("so\n" + r"$\boxed{B}$", "last_line", 1.0),
        ("the answer is B\nI am sure", "last_line", 0.0),
    ],
)
def test_where_the_answer_stands(text, extract, expected):
    assert score(text, extract=extract) == expected


def test_a_tag_that_the_template_opened_counts():
    assert score("B</answer>", extract="answer_tag", prefill="<|im_start|>assistant\n<answer>") == 1.0


@pytest.mark.parametrize("answer", [None, "", "E", "7", "A or B"])
def test_an_answer_that_is_no_option_abstains_and_is_counted(answer):
    reward = MultipleChoice()
    prompts = [Prompt(id=f"q/{i}", question="", answer=answer, metadata={"options": OPTIONS}) for i in range(3)]
    with pytest.warns(UserWarning, match="abstains on prompt q/0") as caught:
        assert [reward(p, [Completion((), (), "B", "stop", 0)] * 2) for p in prompts] == [[None, None]] * 3
    assert len(caught) == 1
    assert reward.unreadable == 3
    assert [reward.problem(prompt) for prompt in prompts] == ["an answer that is not one of the options"] * 3
    assert reward.problem(Prompt(id="q", question="", answer="b", metadata={"options": OPTIONS})) is None


@pytest.mark.parametrize("options", [None, "ABCD", 4, ["x"] * 27])
def test_options_of_another_kind_abstain_and_are_counted(options):
    reward = MultipleChoice()
    prompt = Prompt(id="q/0", question="", answer="B", metadata={"options": options})
    with pytest.warns(UserWarning, match="abstains on prompt q/0.*options that are neither a list of at most 26 texts"):
        assert reward(prompt, [Completion((), (), "B", "stop", 0)]) == [None]
    assert reward.unreadable == 1
    assert reward.problem(prompt).startswith("options that are neither")


@pytest.mark.parametrize(
    "piece", ["A", "(A)", "answer: ", "answer is ", "the answer ", "\n", " ", r"\boxed{", "so the best "]
)
@pytest.mark.parametrize("end", ["", "B", "\nB"])
def test_200_kb_take_linear_time(piece, end):
    text = piece * (200_000 // len(piece)) + end
    started = time.process_time()
    score(text)
    assert time.process_time() - started < 2

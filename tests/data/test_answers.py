"""Where in a row the ground truth stands, and which rows have none."""

import pytest

from grpo_lit.data.answers import ground_truth
from grpo_lit.data.rows import BadRow


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        ("  \\frac{1}{2}\n", "text", "\\frac{1}{2}"),
        ("yes", "text", "yes"),
        (" 1,080 ", "number", "1,080"),
        ("$5", "number", "$5"),
        ("48/2 = <<48/2=24>>24 clips\n#### 72", "gsm8k", "72"),
        ("#### 1\nno, wrong\n#### -1,080.5 ", "gsm8k", "-1,080.5"),
        (r"First \boxed{5}. Wrong; it is \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{\text{E}} and then \boxed{\frac{1}{2 never closed", "boxed", r"\text{E}"),
        (r"\fbox{7}", "boxed", "7"),
    ],
)
def test_the_answer_is_found(text, extract, answer):
    assert ground_truth(text, extract) == answer


@pytest.mark.parametrize(
    ("text", "extract", "reason"),
    [
        (" ", "text", "an empty answer"),
        ("five", "number", "an answer that is not one number"),
        ("5 or 6", "number", "an answer that is not one number"),
        ("she makes 18", "gsm8k", "no `#### number` in the answer"),
        ("#### ", "gsm8k", "an empty answer"),
        ("#### many", "gsm8k", "an answer that is not one number"),
        ("#### 5\nor 6", "gsm8k", "an answer that is not one number"),
        ("#### 3 #### ", "gsm8k", "an empty answer"),  # not the 3 before it
        (r"\boxed{}", "boxed", "an empty answer"),
        (r"\boxed{ }", "boxed", "an empty answer"),
        (r"\boxed{\frac{1}{2", "boxed", r"no complete \boxed{...} in the answer"),
        ("5", "boxed", r"no complete \boxed{...} in the answer"),
    ],
)
def test_an_answer_that_is_none_makes_the_row_bad(text, extract, reason):
    with pytest.raises(BadRow) as error:
        ground_truth(text, extract)
    assert str(error.value) == reason

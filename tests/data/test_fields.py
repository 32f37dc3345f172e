"""Which column holds what: nested paths, and texts exactly as they are written."""

import datetime

import pytest

from grpo_lit.data.fields import Fields, cell, text_of
from grpo_lit.data.rows import BadRow

ROW = {
    "question": " 3 + 4 = \n",
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    "a.b": "a name with a dot",
    "a": {"b": "nested"},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("question", " 3 + 4 = \n"),
        ("reward_model.ground_truth", "7"),
        ("prompt.1.content", "u"),
        ("a.b", "a name with a dot"),  # a column of that very name comes first
        ("nothing", None),
        ("reward_model.nothing", None),
        ("prompt.2.content", None),
        ("prompt.-1.content", None),
        ("question.0", None),
    ],
)
def test_a_path_goes_into_nested_fields_and_lists(path, value):
    assert cell(ROW, path) == value


@pytest.mark.parametrize(("value", "text"), [("007", "007"), (" x ", " x "), (7, "7"), (-0.5, "-0.5"), ("NA", "NA")])
def test_a_text_is_left_as_it_is_and_a_number_is_written_out(value, text):
    assert text_of({"answer": value}, "answer") == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no `answer`"),
        ({"answer": None}, "no `answer`"),
        ({"answer": ""}, "an empty `answer`"),
        ({"answer": " \n\t"}, "an empty `answer`"),
        ({"answer": True}, "a `answer` of type bool, which is no text"),
        ({"answer": ["7"]}, "a `answer` of type list, which is no text"),
        ({"answer": {"value": "7"}}, "a `answer` of type dict, which is no text"),
        ({"answer": datetime.date(2020, 1, 1)}, "a `answer` of type date, which is no text"),
        ({"answer": float("nan")}, "a `answer` that is not finite"),
        ({"answer": float("-inf")}, "a `answer` that is not finite"),
        ({"answer": "\ud800"}, "a `answer` that is not valid Unicode"),
    ],
)
def test_what_is_no_text_makes_a_row_bad(row, reason):
    with pytest.raises(BadRow) as error:
        text_of(row, "answer")
    assert str(error.value) == reason


def test_columns_that_are_not_used_are_not_asked_for():
    assert Fields().paths() == {"question": "question", "answer": "answer"}
    fields = Fields("q", None, id="name", domain="topic", metadata={"tests": "test_list"})
    assert fields.paths() == {"question": "q", "id": "name", "domain": "topic", "metadata.tests": "test_list"}

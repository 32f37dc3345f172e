import json

import pytest

from grpo_lit.audit.samples import Fields, read_samples
from grpo_lit.errors import ConfigError

ROW = {"question": "3 + 4 =", "gold": "7", "completion": "7", "correct": True}


def write(tmp_path, *lines):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_rows_become_samples(tmp_path):
    file = write(tmp_path, {**ROW, "id": "a/1", "metadata": {"options": ["x"]}}, "", {**ROW, "gold": 7, "correct": 0})
    first, second = read_samples(file, Fields())
    assert (first.prompt.id, first.prompt.answer, first.prompt.metadata) == ("a/1", "7", {"options": ["x"]})
    assert (first.text, first.correct) == ("7", True)
    assert (second.prompt.id, second.prompt.answer, second.correct) == ("3", "7", False)


@pytest.mark.parametrize(
    ("label", "correct"), [(True, True), (False, False), (1, True), (0, False), ("True", True), ("false", False)]
)
def test_labels(tmp_path, label, correct):
    assert read_samples(write(tmp_path, {**ROW, "correct": label}), Fields())[0].correct is correct


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_line_breaks_end_a_row(tmp_path, end):
    # JSON allows all of these inside a text as they are; str.splitlines cuts there.
    text = "one\u2028two\u2029three\u0085four"
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({**ROW, "completion": text}, ensure_ascii=False), "", json.dumps({**ROW, "correct": 0})]
    file.write_bytes(end.join(rows).encode())
    first, second = read_samples(file, Fields())
    assert (first.text, first.prompt.id) == (text, "1")
    assert (second.prompt.id, second.correct) == ("3", False)


def test_a_form_feed_in_a_text_is_told_with_its_true_line(tmp_path):
    # JSON forbids it there, and the row after it keeps its number.
    with pytest.raises(ConfigError, match=r"rows.jsonl line 2: Invalid control character"):
        read_samples(write(tmp_path, ROW, '{"question": "a\x0cb"}', ROW), Fields())


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW), encoding="utf-8-sig")
    assert read_samples(file, Fields())[0].prompt.question == "3 + 4 ="


def test_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(ROW).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl line 2: .*can't decode byte 0xff"):
        read_samples(file, Fields())


def test_fields_have_any_name(tmp_path):
    row = {"problem": "3 + 4 =", "answer": None, "output": "7", "ok": 1}
    fields = Fields(question="problem", answer="answer", completion="output", label="ok")
    sample = read_samples(write(tmp_path, row), fields)[0]
    assert (sample.prompt.question, sample.prompt.answer, sample.text) == ("3 + 4 =", None, "7")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "expected labelled rows, but got .*rows.jsonl, which has none"),
        ([ROW, "{"], "JSON object per line, but got in rows.jsonl line 2"),
        (["[1]"], "JSON object per line, but got in rows.jsonl line 1: list"),
        ([{**ROW, "correct": "maybe"}], "`fields.label` expected true or false, but got 'maybe' in rows.jsonl line 1"),
        ([{**ROW, "correct": None}], "`fields.label` expected true or false, but got None"),
        ([{**ROW, "correct": 2}], "`fields.label` expected true or false, but got 2"),
        (
            [{"question": "?", "correct": 1}],
            "`fields.answer` expected a field of the rows, but got 'gold'.*it has 'que",
        ),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        read_samples(write(tmp_path, *lines), Fields())


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"`file` expected a JSONL file, but got .*: No such file"):
        read_samples(tmp_path / "none.jsonl", Fields())

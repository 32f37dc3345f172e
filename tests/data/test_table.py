"""Which rows of a table are asked, and what is said of the others."""

import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from grpo_lit.data import table
from grpo_lit.data.fields import Fields
from grpo_lit.data.files import FileDataset
from grpo_lit.data.mixture import Mixture, MixturePart
from grpo_lit.data.source import PromptSource, is_heldout
from grpo_lit.errors import ConfigError


def rows(size: int) -> list[dict[str, Any]]:
    return [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(size)]


@pytest.fixture
def source(tmp_path):
    """``source(rows, **arguments)``: a source over these rows."""

    def make(content: list[Any], name: str = "sums.jsonl", **arguments: Any) -> FileDataset:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        return FileDataset(str(tmp_path / name), **arguments)

    return make


def questions(prompts: PromptSource) -> list[str]:
    return [prompt.question for prompt in prompts]


def test_a_prompt_holds_what_the_field_map_says(source):
    row = {"q": "1 + 1 =", "a": "so \\boxed{2}", "n": 17, "topic": "sums", "tests": ["assert"], "level": None}
    fields = Fields("q", "a", id="n", domain="topic", metadata={"cases": "tests", "level": "level"})
    (prompt,) = source([row], fields=fields, extract="boxed")
    assert (prompt.id, prompt.question, prompt.answer, prompt.domain) == ("17", "1 + 1 =", "2", "sums")
    assert prompt.metadata == {"cases": ["assert"], "level": None}
    assert prompt.token_ids == ()
    assert source(rows(1))[0].domain == "default"
    assert source(rows(1), domain="math")[0].domain == "math"
    assert source(rows(1), domain="math").domains == ("math",)
    topics = [{"question": str(i), "answer": "1", "topic": f"t{i % 3}"} for i in range(9)]
    assert source(topics, fields=Fields(domain="topic")).domains == ("t0", "t1", "t2")
    assert source(topics, fields=Fields(domain="topic"), limit=2).domains == ("t0", "t1")
    assert source(rows(1), fields=Fields(answer=None))[0].answer is None


def test_the_same_prompts_come_in_any_order_of_access(source):
    prompts = source(rows(20))
    order = list(range(20))
    random.Random(0).shuffle(order)
    assert {i: prompts[i] for i in order} == dict(enumerate(prompts))
    for index in (-1, 20):
        with pytest.raises(IndexError, match="0 to 19"):
            prompts[index]


def test_an_id_does_not_depend_on_part_limit_folder_or_the_rows_after_it(source, tmp_path):
    everything = {p.question: p.id for p in source(rows(200))}
    assert everything["7 + 1 ="] == "sums/7"
    for arguments in ({"part": "heldout"}, {"part": "train"}, {"limit": 30}, {"part": "train", "limit": 3}):
        some = source(rows(300), **arguments)
        assert all(everything.get(p.question, p.id) == p.id for p in some)
    (tmp_path / "other").mkdir()
    assert source(rows(3), name="other/sums.jsonl")[2].id == "sums/2"


# ------------------------------------------------------------------ bad rows

BAD = [
    ({"answer": "1"}, "no `question`"),
    ({"question": None, "answer": "1"}, "no `question`"),
    ({"question": " \n", "answer": "1"}, "an empty `question`"),
    ({"question": ["x"], "answer": "1"}, "a `question` of type list, which is no text"),
    ({"question": "x"}, "no `answer`"),
    ({"question": "x", "answer": ""}, "an empty `answer`"),
    ({"question": "x", "answer": None}, "no `answer`"),
    ({"question": "x", "answer": "seven"}, "an answer that is not one number"),
    ([1], "not an object with named fields"),
]


def test_bad_rows_are_counted_by_reason_named_and_never_asked(source):
    content = [*rows(3), *(bad for bad, _ in BAD), *rows(2)]
    with pytest.warns(UserWarning, match="bad and left out") as caught:
        prompts = source(content, extract="number")
    assert questions(prompts) == questions(source(rows(3))) + questions(source(rows(2)))
    (message,) = [str(warning.message) for warning in caught]
    assert "sums.jsonl: 9 of 14 rows are bad and left out" in message
    # Rows 3 to 11 are lines 4 to 12.
    assert "2 with no `question` (line 4, line 5)" in message
    assert "2 with no `answer` (line 8, line 10)" in message
    for _, reason in BAD:
        assert reason in message


def test_of_many_bad_rows_the_first_few_are_named_with_their_ids(source):
    content = [{"n": f"id{i}", "question": "", "answer": "1"} for i in range(7)]
    good = {"n": "good", "question": "x", "answer": "1"}
    nameless = {"question": "x", "answer": "1"}
    with pytest.warns(UserWarning, match="7 with an empty `question`") as caught:
        source([*content, good, nameless], fields=Fields(id="n"))
    message = str(caught[0].message)
    assert "(line 1 with id id0, line 2 with id id1, line 3 with id id2, ...); 1 with no `n` (line 9)" in message


def test_a_table_of_bad_rows_only_is_refused_with_the_map_and_the_columns(source):
    content = [{"question": "x", "answer": "", "label": "5"}] * 4
    with pytest.raises(ConfigError) as error:
        source(content)
    for part in (
        "{question: question, answer: answer}",
        "all 4 rows are bad: 4 with an empty `answer`",
        "Its columns are question, answer, label",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (Fields("questoin"), r"`fields.question` expected .* got 'questoin': did you mean question\? Its columns are"),
        (Fields(answer="solution"), r"`fields.answer` expected .* Its columns are question, answer"),
        (Fields(id="uid"), "`fields.id` expected a column"),
        (Fields(domain="topic"), "`fields.domain` expected a column"),
        (Fields(metadata={"tests": "answers"}), r"`fields.metadata.tests` .* did you mean answer\?"),
        (Fields("prompt.0.content"), "`fields.question` expected a column"),
    ],
)
def test_a_column_that_no_row_has_is_refused_with_the_nearest(fields, message, source):
    with pytest.raises(ConfigError, match=message):
        source(rows(3), fields=fields)


def test_where_no_column_is_there_at_all_the_file_is_not_called_empty(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="Its columns are problem"):
        FileDataset(str(tmp_path / "rows.parquet"))


def test_a_column_that_some_rows_lack_is_no_misspelling(source):
    content = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2", "level": 3}]
    assert [p.metadata["level"] for p in source(content, fields=Fields(metadata={"level": "level"}))] == [None, 3]
    with pytest.warns(UserWarning, match=r"1 of 2 rows .* no `level` \(line 1\)"):
        assert len(source(content, fields=Fields(domain="level"))) == 1


def test_repeated_ids_are_told_apart_by_rule(source):
    names = ["a", "b", "a", "a#1", "a", "b"]
    content = [{"n": name, "question": f"q{i}", "answer": "1"} for i, name in enumerate(names)]
    with pytest.warns(UserWarning, match=r"4 rows repeat an id of `fields.id` \(n\), the first in line 3"):
        prompts = source(content, fields=Fields(id="n"))
    # The a of row 2 becomes a#1, so the row that is called so becomes a#1#1.
    assert [p.id for p in prompts] == ["a", "b", "a#1", "a#1#1", "a#2", "b#1"]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.sampled_from(["a", "a#1", "a#2", "a#1#1", "b"]), min_size=1, max_size=12))
@pytest.mark.filterwarnings("ignore:.*repeat an id")
def test_no_two_prompts_share_an_id(names, source):
    content = [{"n": name, "question": f"q{i}", "answer": "1"} for i, name in enumerate(names)]
    prompts = list(source(content, fields=Fields(id="n")))
    assert len({p.id for p in prompts}) == len(names)
    assert [p.question for p in prompts] == [f"q{i}" for i in range(len(names))]


def test_ids_that_all_repeat_take_no_quadratic_time(source):
    content = [{"n": "same", "question": f"q{i}", "answer": "1"} for i in range(2000)]
    with pytest.warns(UserWarning, match="1999 rows repeat"):
        assert source(content, fields=Fields(id="n"))[1999].id == "same#1999"


# ------------------------------------------------------------------ parts of the data


def test_the_two_parts_share_no_question_and_leave_none_out(source):
    content = rows(500) + rows(50)  # repeats stay on their side
    train, heldout = (source(content, part=part, heldout_fraction=0.2) for part in ("train", "heldout"))
    assert not set(questions(train)) & set(questions(heldout))
    assert sorted(questions(train) + questions(heldout)) == sorted(row["question"] for row in content)
    assert all(is_heldout(question, 0.2) for question in questions(heldout))
    # Binomial(500, .2): standard deviation 8.9, so 5 of them are 45.
    assert abs(len(set(questions(heldout))) - 100) < 45


def test_a_limit_takes_the_first_and_looks_no_further(source, recwarn):
    content = [*rows(5), {"question": "", "answer": ""}]
    assert questions(source(content, limit=5)) == questions(source(rows(5)))
    assert not recwarn.list
    assert len(source(rows(5), limit=50)) == 5
    heldout = source(rows(500), part="heldout", limit=7)
    assert questions(heldout) == questions(source(rows(500), part="heldout"))[:7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "heldout", "heldout_fraction": 0.0}, "`heldout_fraction` expected"),
        ({"part": "train", "heldout_fraction": 1.0}, "`heldout_fraction` expected"),
        ({"part": "train", "heldout_fraction": math.nan}, "`heldout_fraction` expected"),
        ({"part": "heldout", "heldout_fraction": 1e-9}, "`part` expected rows .* got heldout, which has none of 3"),
        ({"limit": 0}, "`limit` expected at least 1"),
        ({"domain": "math", "fields": Fields(domain="answer")}, "`domain` expected to be absent beside"),
        ({"extract": "boxed", "fields": Fields(answer=None)}, "`extract` expected a column"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, message, source):
    with pytest.raises(ConfigError, match=message):
        source(rows(3), **arguments)


def test_chunks_leave_no_trace(source, monkeypatch):
    whole = list(source(rows(25)))
    for size in (1, 7, 25, 26):
        monkeypatch.setattr(table, "CHUNK", size)
        assert list(source(rows(25))) == whole


# ------------------------------------------------------------------ with the rest of the library


def test_tables_mix_by_share_with_ids_and_domains_of_their_own(source):
    easy = source(rows(40), name="easy.jsonl", domain="sums")
    hard = source(
        [{"question": f"h{i}", "answer": "1", "topic": "t"} for i in range(40)], fields=Fields(domain="topic")
    )
    mixture = Mixture({"easy": MixturePart(easy, 3.0), "hard": MixturePart(hard), "twice": MixturePart(easy)}, size=50)
    prompts = list(mixture)
    # Shares 3/5, 1/5, 1/5 of 50.
    assert mixture.counts == {"easy": 30, "hard": 10, "twice": 10}
    assert len({p.id for p in prompts}) == 50
    assert {p.id.split("/")[0]: p.domain for p in prompts} == {"easy": "sums", "hard": "t", "twice": "sums"}
    assert set(mixture.domains) == {"sums", "t"}
    assert [mixture.prompt_id(i) for i in range(len(mixture))] == [p.id for p in prompts]
    assert prompts[0].id == "easy/easy/0"


def test_a_prompt_holds_plain_types_that_a_checkpoint_can_hold(source, tmp_path):
    fields = Fields(metadata={"cases": "cases"})
    (prompt,) = source([rows(1)[0] | {"cases": [{"in": 1, "out": [2.5, None]}]}], fields=fields)
    torch.save(prompt.metadata, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == {"cases": [{"in": 1, "out": [2.5, None]}]}
    assert pickle.loads(pickle.dumps(prompt)) == prompt


def test_the_yaml_shape_with_a_short_class_name(source, tmp_path):
    source([{"problem": "x", "solution": "\\boxed{2}", "level": 1}], name="rows.jsonl", fields=Fields("problem", None))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data.train", type=PromptSource)
    config = parser.parse_string(
        f"""
data:
  train:
    class_path: FileDataset
    init_args:
      path: {Path(tmp_path) / "rows.jsonl"}
      fields: {{question: problem, answer: solution, metadata: {{level: level}}}}
      extract: boxed
      domain: math
      limit: 10
"""
    )
    (prompt,) = parser.instantiate(config).data.train
    assert (prompt.question, prompt.answer, prompt.domain, prompt.metadata) == ("x", "2", "math", {"level": 1})

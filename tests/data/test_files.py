"""Files of every kind give the same prompts, keep texts as they are written, and lose one row to one bad row."""

import json
import pickle
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from grpo_lit.data.fields import Fields
from grpo_lit.data.files import FileDataset, JsonLines, open_file
from grpo_lit.data.rows import BadRow
from grpo_lit.errors import ConfigError

#: Texts that a reader which guesses types would change: a date, leading zeros, a missing value, a number, a truth.
TEXTS = ["2020-01-01", "007", "NA", "1.10", "true", "null", "1,234", 'a "quote", a comma\nand a line', "é∞"]
ROWS = [{"question": f"q{i}", "answer": text} for i, text in enumerate(TEXTS)]


def write(folder: Path, ending: str) -> str:
    file = folder / f"rows{ending}"
    if ending in (".jsonl", ".ndjson"):
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif ending == ".json":
        file.write_text(json.dumps(ROWS, indent=2))
    elif ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    else:
        mark = "\t" if ending == ".tsv" else ","
        quoted = [['"' + text.replace('"', '""') + '"' for text in row.values()] for row in ROWS]
        file.write_text("".join(mark.join(fields) + "\n" for fields in [["question", "answer"], *quoted]))
    return str(file)


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv"])
def test_every_kind_of_file_gives_the_same_prompts(ending, tmp_path, recwarn):
    source = FileDataset(write(tmp_path, ending))
    assert [(p.id, p.question, p.answer) for p in source] == [
        (f"rows/{i}", f"q{i}", text) for i, text in enumerate(TEXTS)
    ]
    assert [source[i] for i in (8, 0, 5)] == [list(source)[i] for i in (8, 0, 5)]
    assert list(pickle.loads(pickle.dumps(source))) == list(source)
    assert not recwarn.list


def test_json_lines_may_have_another_ending_blank_lines_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"question": "a", "answer": 1}\r\n\r\n{"question": "b", "answer": 2.5}')
    assert [(p.id, p.answer) for p in FileDataset(str(file))] == [("rows/0", "1"), ("rows/1", "2.5")]


def test_a_malformed_line_costs_one_row_and_is_named_by_its_line(tmp_path):
    good = json.dumps({"question": "a", "answer": "1"})
    file = tmp_path / "rows.jsonl"
    bad = [b'{"question": "cut', b"[1, 2]", b"7", b'{"question": "\xff", "answer": "1"}', b"[" * 100_000]
    file.write_bytes(b"\n".join([good.encode(), b"", *bad, good.encode()]))
    with pytest.warns(UserWarning, match="bad and left out") as caught:
        source = FileDataset(str(file))
    assert [p.id for p in source] == ["rows/0", "rows/6"]
    (message,) = [str(w.message) for w in caught]
    assert "5 of 7 rows" in message
    assert "3 with malformed JSON (line 3, line 6, line 7)" in message
    assert "2 with not an object with named fields (line 4, line 5)" in message


def test_a_json_file_of_another_shape_is_refused_with_the_right_one(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({"data": ROWS}, indent=1))
    with pytest.raises(ConfigError, match=r"all \d+ rows are bad: .* an array of objects, or one object per line"):
        FileDataset(str(tmp_path / "rows.json"))


def test_a_csv_row_of_another_width_costs_one_row(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\na,1\nb\nc,3,4\n"d\nd",4\n\n')
    with pytest.warns(UserWarning, match=r"2 with more or fewer fields than names \(line 3, line 4\)"):
        assert [(p.id, p.question) for p in FileDataset(str(file))] == [("rows/0", "a"), ("rows/3", "d\nd")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b'question,answer\na,"1"x\n', r"a .csv file.*line 2"),
        ("rows.json", b'[{"question": "a"}, ', r"a .json file.*cannot be read"),
        ("rows.parquet", b"PAR1 or not", r"a .parquet file.*cannot be read"),
        ("rows.jsonl.gz", b"", r"a file that ends in .jsonl, .*decompress it"),
        ("rows.jsonl", b"\n", "a table with rows"),
        ("rows.json", b"[]", "a table with rows"),
        ("rows.csv", b"question,answer\n", "a table with rows"),
        ("rows.csv", b"", "a table with rows"),
    ],
)
def test_what_cannot_be_read_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"`path` expected {message}"):
        FileDataset(str(tmp_path / name))


def test_a_path_without_a_file_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"a file that exists, but got nowhere.jsonl: .*HubDataset"):
        FileDataset("nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"got the folder .*SavedDataset"):
        FileDataset(str(tmp_path))
    with pytest.raises(ConfigError, match="at least one file"):
        FileDataset([])


def test_several_files_are_one_source_with_ids_of_their_own(tmp_path):
    for folder, questions in (("a", ["x", "y"]), ("b", ["z"])):
        (tmp_path / folder).mkdir()
        lines = [json.dumps({"question": question, "answer": "1"}) for question in questions]
        (tmp_path / folder / "part.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"question": ["w", ""], "answer": ["1", "1"]}), tmp_path / "more.parquet")
    with pytest.warns(UserWarning, match=r"1 of 5 rows .* an empty `question` \(more row 1\)"):
        source = FileDataset([f"{tmp_path}/*/part.jsonl", str(tmp_path / "more.parquet")])
    assert [(p.id, p.question) for p in source] == [
        ("part/0", "x"),
        ("part/1", "y"),
        ("part#1/0", "z"),  # b/part.jsonl: its folder is no part of an id, since folders move
        ("more/0", "w"),
    ]


def test_only_the_columns_that_are_used_are_read_from_parquet(tmp_path):
    table = pyarrow.table({"question": ["a"], "answer": ["1"], "image": [b"x" * 1000], "extra": [{"level": 3}]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = open_file(tmp_path / "rows.parquet", {"question", "extra", "extra.level"})
    assert rows.columns == ("question", "answer", "image", "extra")
    assert rows.read(0, 5) == [{"question": "a", "extra": {"level": 3}}]
    (prompt,) = FileDataset(str(tmp_path / "rows.parquet"), fields=Fields(metadata={"level": "extra.level"}))
    assert prompt.metadata == {"level": 3}
    with pytest.raises(ConfigError, match=r"did you mean image\? Its columns are question, answer, image, extra"):
        FileDataset(str(tmp_path / "rows.parquet"), fields=Fields("imag"))


def test_of_json_lines_memory_holds_their_places_only(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i} " + "x" * 10_000, "answer": "1"}) + "\n" for i in range(600)))
    tracemalloc.start()
    source = FileDataset(str(file))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 600 rows with two numbers each at opening and one that says which are asked, 8 bytes each: 14 kB of 6 MB.
    assert held < 100_000
    assert source[599].question.startswith("599 ")


def test_a_file_that_changed_is_not_asked_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n')
    source = FileDataset(str(file))
    file.write_text('{"question": "", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"stay as they were.*an empty `question` in line 1"):
        source[0]


def test_rows_are_read_over_the_borders_of_chunks_and_parts(tmp_path):
    for name, size in (("a", 3), ("b", 1), ("c", 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": "{name}{i}"}}\n' for i in range(size)))
    source = FileDataset(f"{tmp_path}/?.jsonl", fields=Fields("n", None))
    names = ["a0", "a1", "a2", "b0", "c0", "c1", "c2", "c3"]
    for start in range(8):
        for stop in range(start, 10):
            assert [row["n"] for row in source._rows.read(start, stop)] == names[start:stop]


def test_a_row_that_cannot_be_parsed_is_returned_in_its_place(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\nno\n{"a": 2}\n')
    first, second, third = JsonLines(tmp_path / "x.jsonl").read(0, 3)
    assert (first, third) == ({"a": 1}, {"a": 2})
    assert isinstance(second, BadRow)

"""A program can take the channel and speak the protocol itself: here every message it could send is written by hand."""

import builtins
import socket

import pytest

from grpo_lit.sandbox import frames, judge

#: Object 0 of the program, a function, under the name that tests call.
NAMES = {"f": {"value": ["other", 0]}}
ADD = "assert f(1, 2) == 3"
PROGRAM = judge.Program(socket.socket())


def passes(test, *messages, entry_point=None):
    """Return whether a test passes on a program that sends these messages, whatever it is asked."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in messages:
            frames.send(theirs, message)
        theirs.shutdown(socket.SHUT_WR)
        return judge._passes(test, ours, entry_point)


def gave(value, *arguments):
    return ["gave", value, list(arguments)]


ARGUMENTS = (["int", "1"], ["int", "2"])


def test_an_honest_program_passes_and_a_wrong_one_does_not():
    assert passes(ADD, NAMES, gave(["int", "3"], *ARGUMENTS))
    assert not passes(ADD, NAMES, gave(["int", "4"], *ARGUMENTS))
    assert not passes(ADD, NAMES)
    assert not passes(ADD)


SET = "assert set(f((3, 4))) == set((4, 5))"
#: What a stand-in of ``set`` needs: f gave something, set gave two objects, and these are equal.
SET_ANSWERS = (gave(["other", 2], ["tuple", [["int", "3"], ["int", "4"]]]), *[gave(["other", 3], ["other", 2])] * 2)


@pytest.mark.parametrize(
    "name", ["__builtins__", "__build_class__", "__import__", "__name__", "__loader__", "__debug__"]
)
@pytest.mark.parametrize(
    "value", [["dict", [["set", ["other", 1]]]], ["other", 1], ["dict", []], ["Counter", [["set", ["other", 1]]]], None]
)
def test_names_that_the_interpreter_reads_are_not_set(name, value):
    names = {**NAMES, name: {"value": value}}
    assert not passes(SET, names, *SET_ANSWERS, gave(True, ["other", 3]))
    assert not passes(SET, names, *SET_ANSWERS, gave(True, ["other", 3]), entry_point=name)
    # The same names do no harm to a right program: they are skipped.
    assert passes(ADD, names, gave(["int", "3"], *ARGUMENTS))
    seen = judge._names(PROGRAM, names, name)
    assert (seen["__builtins__"], seen["__name__"], set(seen)) == (builtins, "test", {"__builtins__", "__name__", "f"})


@pytest.mark.parametrize("name", [name for name in dir(builtins) if name.isidentifier()])
def test_no_builtin_is_replaced(name):
    for content in ({"value": ["other", 1]}, {"raises": ["Mine", "Exception"]}, {"module": "math"}):
        assert name not in judge._names(PROGRAM, {name: content}, None).keys() - {
            "__builtins__",
            "__name__",
        }
    assert judge._names(PROGRAM, {name: {"value": None}}, None)["__builtins__"] is builtins


def test_a_builtin_that_is_the_function_under_test_is_the_programs():
    assert passes("assert abs(1, 2) == 3", {"abs": NAMES["f"]}, gave(["int", "3"], *ARGUMENTS), entry_point="abs")


@pytest.mark.parametrize("name", ["", " f", "1", "a.b", "f\x00", "é!"])
def test_names_that_no_test_can_write_are_skipped(name):
    assert set(judge._names(PROGRAM, {name: {"value": None}}, None)) == {"__builtins__", "__name__"}


@pytest.mark.parametrize(
    "described",
    [
        None,
        7,
        [],
        "f",
        [["f", {"value": None}]],
        {"f": None},
        {"f": 7},
        {"f": {}},
        {"f": []},
        {"f": {"value": 3}},
        {"f": {"value": ["other", "0"]}},
        {"f": {"value": ["other", None]}},
        {"f": {"value": ["other", True]}},
        {"f": {"value": ["other", [0]]}},
        {"f": {"value": ["int", 3.7]}},
        {"f": {"value": ["list", "abc"]}},
        {"f": {"value": ["dict", {"a": None}]}},
        {"f": {"value": ["set", [["list", []]]]}},
        {"f": {"raises": []}},
        {"f": {"raises": "KeyError"}},
        {"f": {"raises": [7]}},
        {"f": {"raises": ["Mine"]}},
        {"f": {"raises": ["object"]}},
        {"f": {"module": ["os"]}},
        {"f": {"module": {}}},
    ],
)
def test_a_description_that_is_none_passes_no_test(described):
    assert not passes("pass", described)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        True,
        [],
        ["gave"],
        ["gave", ["int", "3"]],
        ["gave", ["int", "3"], []],
        ["gave", ["int", "3"], None],
        ["gave", ["int", "3"], "12"],
        ["gave", 3, [["int", "1"], ["int", "2"]]],
        ["passed", ["int", "3"], [["int", "1"], ["int", "2"]]],
        [["gave"], ["int", "3"], [["int", "1"], ["int", "2"]]],
        ["gave", ["other", 1], [["int", "1"], ["int", "2"]]],
        ["gave", ["other", 1], [["other", 1], ["other", 1]]],
        ["raised", ["SystemExit", "BaseException"], ""],
        ["raised", ["StopIteration", "Exception"], ""],
        ["raised", ["Mine", "StopIteration", "Exception"], ""],
        ["raised", "KeyError", ""],
        ["raised", [], ""],
        ["raised", ["KeyError"], 7],
        ["raised", ["int"], ""],
        ["raised", ["object"] * 2000, ""],
    ],
)
def test_an_answer_that_is_none_passes_no_test(answer):
    yes = [gave(True, ["other", 1])] * 5
    for test in (ADD, "assert abs(f(1, 2) - 3) < 1e-6", "assert not f(1, 2) != 3", "assert 3 in [f(1, 2)]"):
        assert not passes(test, NAMES, answer, *yes)


@pytest.mark.parametrize("kinds", [["StopIteration"], ["Mine", "StopIteration"], ["StopAsyncIteration"]])
def test_an_iteration_does_not_end_because_the_program_says_so(kinds):
    raised = ["raised", [*kinds, "Exception", "BaseException", "object"], ""]
    assert not passes("assert all(a == b for a, b in zip(map(f, [1, 2]), [3, 4]))", NAMES, raised)
    # Its own iterator ends, as that of an empty generator does.
    iterated = (gave(["other", 1], ["int", "1"]), gave(["other", 1]))
    assert passes("for _ in f(1):\n    assert False", NAMES, *iterated, ["raised", ["StopIteration", "Exception"], ""])


@pytest.mark.parametrize("operation", ["hash({})", "len({})", "bool({})", "str({})", "repr({})", "{} == {}", "3 in {}"])
def test_what_python_takes_in_one_type_only_comes_in_no_other(operation):
    test = "x = f\n" + operation.format("x", "x")
    for value in (["other", 1], None, ["float", "1.0"], ["list", []]):
        assert not passes(test, NAMES, *[gave(value, ["int", "3"])] * 2, *[gave(value)] * 2)
        assert not passes(test, NAMES, *[gave(value)] * 4)


@pytest.mark.parametrize("given", ["[3, 1]", "{3, 1}", "{3: 1}"])
@pytest.mark.parametrize("back", [["other", 1], ["tuple", [["int", "1"]]], "ab", None, ["frozenset", []]])
def test_an_argument_does_not_become_another_kind(given, back):
    assert not passes(f"x = {given}\nf(x)", NAMES, gave(None, back))


def test_modules_that_a_test_reads_are_pythons_own():
    names = {**NAMES, "math": {"value": ["other", 1]}}
    close = "assert math.isclose(f(1, 2), 3)"
    lies = (gave(["other", 2], "isclose"), gave(["int", "4"], *ARGUMENTS), gave(True, ["int", "4"], ["int", "3"]))
    assert not passes(close, names, *lies)
    assert passes(close, names, gave(["int", "3"], *ARGUMENTS))
    # A function of a module's name, which is called and not read from, is the program's.
    assert passes("assert copy(1, 2) == 3", {"copy": NAMES["f"]}, gave(["int", "3"], *ARGUMENTS))


@pytest.mark.parametrize("name", ["__array_interface__", "__deepcopy__", "__wrapped__", "__len__x", "__signature__"])
def test_libraries_that_trust_an_attribute_get_none(name):
    assert not passes(f"f.{name}", NAMES, gave(["int", "3"], name))
    assert passes("assert f.__name__ == 'f'", NAMES, gave("f", "__name__"))

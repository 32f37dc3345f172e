import json
import math
import socket
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lit.sandbox import frames


def there_and_back(value):
    """Return what arrives of a value, and the objects that did not travel."""
    kept = []
    message = json.loads(json.dumps(frames.encode(value, lambda other: kept.append(other) or len(kept) - 1)))
    return frames.decode(message, lambda number: ("stand-in", number)), kept


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value):
    back, kept = there_and_back(value)
    assert (back, type(back), kept) == (value, type(value), [])


@pytest.mark.parametrize(
    "value",
    [
        {1, "a", (2, 3)},
        frozenset([1.5]),
        Counter("aab"),
        OrderedDict(b=1, a=2),
        deque([1, 2]),
        Fraction(-1, 3),
        Decimal("0.10"),
        1 - 2j,
        -math.inf,
        {(1, 2): [None, True, b"\x00"]},
        "\ud800",
    ],
)
def test_collections_and_numbers_keep_their_type(value):
    back, kept = there_and_back(value)
    assert (back, type(back), str(back), kept) == (value, type(value), str(value), [])


def test_nan_arrives_and_a_defaultdict_is_a_dict():
    assert math.isnan(there_and_back(math.nan)[0])
    back, kept = there_and_back(defaultdict(list, a=[1]))
    assert (back, type(back), kept) == ({"a": [1]}, dict, [])


class EqualToAll(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [EqualToAll(3), object(), len, int, type("L", (list,), {})([1])])
def test_objects_of_other_classes_do_not_travel(value):
    back, kept = there_and_back([value])
    assert back == [("stand-in", 0)]
    assert kept[0] is value


@pytest.mark.parametrize(
    "message",
    [7, 1.5, {}, [], ["int"], ["int", "1", "2"], [1, 2], ["os.system", "true"], ["int", "x"], ["bytes", "zz"]],
)
def test_anything_else_is_no_value(message):
    with pytest.raises(ValueError, match=r"expected a value|invalid literal|non-hexadecimal"):
        frames.decode(message, lambda number: number)


def test_messages_keep_their_bounds():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in ([1, "é"], {"a": None}, "x" * 50_000):
            frames.send(ours, message)
            assert frames.receive(theirs) == message
        ours.sendall(struct.pack("!I", 5) + b"tru")
        ours.close()
        with pytest.raises(EOFError):
            frames.receive(theirs)


def test_a_message_that_would_fill_the_memory_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("!I", 2**32 - 1))
        with pytest.raises(ValueError, match="4294967295 bytes is longer"):
            frames.receive(theirs)
        with pytest.raises(ValueError, match="longer than"):
            frames.send(ours, "x" * frames.MAX_BYTES)

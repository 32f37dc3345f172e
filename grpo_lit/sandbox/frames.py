"""Messages between processes, and plain values in them: nothing a program sends can run code where it is read.

A message is a length in four bytes and that much JSON. ``pickle`` would let a program run code in whoever reads it.
"""

import json
import socket
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

#: A longer message is refused: a program must not fill the memory of whoever reads it.
MAX_BYTES = 16 * 2**20
#: What the training process sends may be longer: all inputs of a program are one message.
MAX_JOB_BYTES = 2**32 - 1

#: Kinds of collections that travel as lists of their members, by the name they travel under.
_COLLECTIONS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
#: Numbers that travel as text, which their class reads back.
_WRITTEN: dict[str, type] = {kind.__name__: kind for kind in (int, float, complex, Fraction, Decimal)}


def send(channel: socket.socket, message: Any, most: int = MAX_BYTES) -> None:
    """Send one message of at most ``most`` bytes.

    Raises:
        OSError: The other side is gone.
        ValueError: The message is longer than may be read.
    """
    data = json.dumps(message).encode()
    if len(data) > most:
        raise ValueError(f"a message of {len(data)} bytes is longer than {most}")
    channel.sendall(struct.pack("!I", len(data)) + data)


def receive(channel: socket.socket, most: int = MAX_BYTES) -> Any:
    """Return the next message, of at most ``most`` bytes.

    Raises:
        EOFError: The other side is gone.
        OSError: The same, or the channel's time is over.
        ValueError: What came is no message.
    """
    (size,) = struct.unpack("!I", _exactly(channel, 4))
    if size > most:
        raise ValueError(f"a message of {size} bytes is longer than {most}")
    return json.loads(_exactly(channel, size))


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return a value as JSON can hold it.

    Args:
        value: Anything. Only exact types of the standard library are values: a subclass may lie about what it equals.
        other: Called for everything else; its result travels as it is.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in _WRITTEN.values():
        return [kind.__name__, repr(value) if kind in (int, float, complex) else str(value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in _COLLECTIONS.values():
        return [kind.__name__, [encode(item, other) for item in value]]
    if kind in _MAPPINGS.values() or kind is defaultdict:
        name = "dict" if kind is defaultdict else kind.__name__
        return [name, [[encode(key, other), encode(item, other)] for key, item in value.items()]]
    return ["other", other(value)]


def decode(message: Any, other: Callable[[Any], Any]) -> Any:
    """Return the value that :func:`encode` wrote.

    Raises:
        ValueError: What came was not written by it.
    """
    if message is None or isinstance(message, (bool, str)):
        return message
    if not isinstance(message, list) or len(message) != 2 or not isinstance(message[0], str):
        raise ValueError(f"expected a value, but got {message!r:.80}")
    name, content = message
    if name != "other" and type(content) is not (str if name in _WRITTEN or name == "bytes" else list):
        raise ValueError(f"expected a value, but got {message!r:.80}")
    if name in _WRITTEN:
        return _WRITTEN[name](content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](decode(item, other) for item in content)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, other): decode(item, other) for key, item in content})
    if name != "other":
        raise ValueError(f"expected a value, but got {message!r:.80}")
    return other(content)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 2**16))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

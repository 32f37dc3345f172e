"""The process that runs test code against a program that it cannot be touched by.

The program runs elsewhere. Here its functions and objects are stand-ins: calls and results cross as plain values, and
an object of the program's own classes never equals a value, whatever its ``__eq__`` says. So a program that ends early,
prints "passed", reads its caller's variables or returns something equal to everything passes no test.

What tests cannot do: hand functions or objects of their own to the program, or look at its source. What tests should
not do: ask an object of the program whether it is right (``3 in f()``, ``f().startswith("a")``, ``f() == g()`` of two
such objects), as its class decides on the answer; ``list(f()) == [3]`` compares values.
"""

import ast
import builtins
import contextlib
import importlib
import os
import socket
import sys
from collections import defaultdict
from typing import Any

from grpo_lit.sandbox import frames
from grpo_lit.sandbox.limits import Limits, confine, protect


def main(channel_fd: int) -> None:
    """Take one job (``tests``, ``channels``, ``limits``, ``entry_point``, ``nonce``) and report on each test.

    A report is ``{"nonce": ..., "test": ..., "passed": ...}``.
    """
    protect()
    channel = socket.socket(fileno=channel_fd)
    frames.send(channel, "ready")
    job = frames.receive(channel, frames.MAX_JOB_BYTES)
    confine(Limits(**job["limits"]))
    for i, (test, fd) in enumerate(zip(job["tests"], job["channels"], strict=True)):
        player = socket.socket(fileno=fd)
        passed = _passes(test, player, job["entry_point"])
        player.close()
        frames.send(channel, {"nonce": job["nonce"], "test": i, "passed": passed})
    os._exit(0)


def _passes(test: str, player: socket.socket, entry_point: str | None) -> bool:
    # Whatever ends the test ends it without a pass: a failed assertion, a dead program, the wish to exit, an answer
    # that is none (a program can take the channel and write what it likes).
    with contextlib.suppress(BaseException):
        names = _names(Program(player), frames.receive(player), entry_point)
        names.update(_modules_read(test, names.keys() - {entry_point}))
        exec(compile(test, "test.py", "exec"), names)
        return True
    return False


def _names(program: "Program", described: dict[str, Any], entry_point: str | None) -> dict[str, Any]:
    """Return what the test sees: the program's names, but for builtins that it has redefined.

    A test that calls ``len`` must get Python's own, unless that is the very function it is to test; and names that the
    interpreter reads, ``__builtins__`` first, are nobody's to set.
    """
    names: dict[str, Any] = {}
    for name, content in described.items():
        if not name.isidentifier() or name.startswith("__") or (hasattr(builtins, name) and name != entry_point):
            continue
        if "raises" in content:
            names[name] = program.exception(content["raises"])
        elif "module" not in content:
            names[name] = program.decoded(content["value"])
        elif content["module"] in sys.stdlib_module_names:
            names[name] = importlib.import_module(content["module"])
    return {**names, "__name__": "test", "__builtins__": builtins}


def _modules_read(test: str, names: set[str | None]) -> dict[str, Any]:
    """Return Python's own modules for names of the program through which a test reads them, as in ``math.isclose``."""
    read = {
        node.value.id
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Attribute)
        if isinstance(node.value, ast.Name)
    }
    return {name: importlib.import_module(name) for name in read & names & sys.stdlib_module_names}


class Program:
    """The program at the other end of a channel.

    Args:
        channel: Where it takes calls.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._exceptions: dict[str, type[BaseException]] = {}

    def ask(self, operation: str, target: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Have something done to an object of the program, and return what it gave or raise what it raised."""
        sent = [frames.encode(value, _number) for value in arguments]
        frames.send(
            self.channel,
            [operation, target, sent, {name: frames.encode(value, _number) for name, value in named.items()}],
        )
        kind, result, rest = frames.receive(self.channel)
        if kind == "raised" and isinstance(rest, str):
            error = self.exception(result)
            # It would end ``map`` and all that reads from it, so that nothing is compared.
            if operation != "next" and issubclass(error, (StopIteration, StopAsyncIteration)):
                raise RuntimeError(f"the program raised {error.__name__} where nothing is iterated")
            raise error(rest)
        if kind != "gave" or not isinstance(rest, list):
            raise ValueError(f"expected what the program gave or raised, but got {kind!r:.80}")
        for mine, before, after in zip(arguments, sent, rest, strict=True):
            if before != after:
                _update(mine, self.decoded(after))
        return self.decoded(result)

    def decoded(self, message: Any) -> Any:
        """Return a value, or the stand-in of an object."""
        return frames.decode(message, self._remote)

    def _remote(self, number: Any) -> "Remote":
        if type(number) is not int:
            raise ValueError(f"expected the number of an object, but got {number!r:.80}")
        return Remote(self, number)

    def exception(self, kinds: list[str]) -> type[BaseException]:
        """Return the exception class of this name: Python's own, or one made here below its nearest parent."""
        if not isinstance(kinds, list) or not kinds or not isinstance(kinds[0], str):
            raise ValueError(f"expected names of exceptions, but got {kinds!r:.80}")
        name = kinds[0]
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if name not in self._exceptions:
            self._exceptions[name] = type(name, (self.exception(kinds[1:]),), {})
        return self._exceptions[name]


class Remote:
    """Stand-in of an object of the program.

    Args:
        program: Where it lives.
        number: Which it is.
    """

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_remote", (program, number))

    def __getattr__(self, name: str) -> Any:
        # Libraries ask for names such as __array_interface__ and trust the answer, an address in memory.
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(f"{name} of the program's objects is not to be had")
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function, or make an object of the class."""
        return _ask(self, "call", *arguments, **named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _plain(_ask(self, "eq", other), bool)

    def __lt__(self, other: object) -> Any:
        return _plain(_ask(self, "lt", other), bool) if isinstance(other, Remote) else NotImplemented

    def __le__(self, other: object) -> Any:
        return _plain(_ask(self, "le", other), bool) if isinstance(other, Remote) else NotImplemented

    def __add__(self, other: object) -> Any:
        return _ask(self, "add", other) if isinstance(other, Remote) else NotImplemented

    def __sub__(self, other: object) -> Any:
        return _ask(self, "sub", other) if isinstance(other, Remote) else NotImplemented

    def __mul__(self, other: object) -> Any:
        return _ask(self, "mul", other) if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        return _plain(_ask(self, "hash"), int)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and _plain(_ask(self, "isinstance", instance), bool)

    def __bool__(self) -> bool:
        return _plain(_ask(self, "bool"), bool)

    def __len__(self) -> int:
        return _plain(_ask(self, "len"), int)

    def __str__(self) -> str:
        return _plain(_ask(self, "str"), str)

    def __repr__(self) -> str:
        return _plain(_ask(self, "repr"), str)

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __contains__(self, item: Any) -> bool:
        return _plain(_ask(self, "contains", item), bool)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)


def _ask(target: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    program, number = object.__getattribute__(target, "_remote")
    return program.ask(operation, number, arguments, named)


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program answered {type(value).__name__} where Python takes {kind.__name__} only")
    return value


def _number(value: Any) -> int:
    """Return which object of the program a stand-in stands for; nothing else can be handed over."""
    if not isinstance(value, Remote):
        raise TypeError(f"a test cannot hand {type(value).__name__} to the program")
    return object.__getattribute__(value, "_remote")[1]


def _update(mine: Any, after: Any) -> None:
    """Change an argument in place as the program changed its copy."""
    if type(mine) is not type(after) and not (isinstance(mine, defaultdict) and type(after) is dict):
        raise ValueError(f"the program gave back {type(after).__name__} for {type(mine).__name__}")
    if isinstance(mine, list):
        mine[:] = after
    elif isinstance(mine, (set, dict)):
        mine.clear()
        mine.update(after)
    elif hasattr(mine, "extend"):  # deque
        mine.clear()
        mine.extend(after)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""The process that runs one program: as a script, or to have its functions called from elsewhere."""

import atexit
import builtins
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from grpo_lit.sandbox import frames


class Caught:
    """Context that catches everything, the wish to exit included: all of it is the program's own failure."""

    error: BaseException | None = None

    def __enter__(self) -> "Caught":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True


def run(program: str, channel: socket.socket | None) -> int:
    """Run a program and return its exit code.

    Args:
        program: Python source.
        channel: Where its functions are called from; ``None`` runs it as a script.
    """
    name = "__main__" if channel is None else "program"
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    # The interpreter's own were made for other files.
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 (for the whole run)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    with Caught() as caught:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    if channel is not None:
        if caught.error is None:
            with Caught() as caught:
                _serve(channel, module.__dict__)
        return 0 if caught.error is None else 1
    with Caught() as last:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
    return _exit_code(caught.error) or _exit_code(last.error)


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)


def _serve(channel: socket.socket, names: dict[str, Any]) -> None:
    """Do what comes: ``[operation, target, arguments, named arguments]``, answered by what it gave or raised."""
    objects: list[Any] = []

    def keep(value: Any) -> Any:
        objects.append(value)
        return len(objects) - 1

    frames.send(channel, {name: _describe(value, keep) for name, value in names.items() if not name.startswith("__")})
    while True:
        operation, target, arguments, named = frames.receive(channel)
        with Caught() as caught:
            args = [frames.decode(value, objects.__getitem__) for value in arguments]
            kwargs = {name: frames.decode(value, objects.__getitem__) for name, value in named.items()}
            result = _OPERATIONS[operation](objects[target], *args, **kwargs)
            answer = ["gave", frames.encode(result, keep), [frames.encode(value, keep) for value in args]]
        if caught.error is not None:
            kinds = [kind.__name__ for kind in type(caught.error).__mro__]
            answer = ["raised", kinds, str(caught.error)[:1000]]
        frames.send(channel, answer)


def _describe(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return what tests see under a name of the program: a module, an exception class by its parents, or a value."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, type) and issubclass(value, BaseException):
        return {"raises": [kind.__name__ for kind in value.__mro__]}
    with Caught():
        return {"value": frames.encode(value, keep)}
    return {"value": ["other", keep(value)]}  # a list that holds itself, for one


def _operate(name: str) -> Callable[..., Any]:
    return lambda target, *arguments: getattr(type(target), name)(target, *arguments)


#: What may be asked of an object. Operators go through its class, as Python's own do.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **named: target(*arguments, **named),
    "getattr": builtins.getattr,
    "setattr": builtins.setattr,
    "isinstance": lambda target, value: builtins.isinstance(value, target),
    "bool": builtins.bool,
    "str": builtins.str,
    "repr": builtins.repr,
    "len": builtins.len,
    "iter": builtins.iter,
    "next": builtins.next,
    "hash": builtins.hash,
    "contains": lambda target, item: item in target,
    "getitem": lambda target, key: target[key],
    "setitem": _operate("__setitem__"),
    "delitem": _operate("__delitem__"),
    "eq": lambda target, other: bool(target == other),
    "lt": lambda target, other: bool(target < other),
    "le": lambda target, other: bool(target <= other),
    "add": lambda target, other: target + other,
    "sub": lambda target, other: target - other,
    "mul": lambda target, other: target * other,
}

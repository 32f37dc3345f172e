"""The repository keeps the shape that its readers were promised."""

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "LICENSE",
    "README.md",
    "callbacks",
    "configs",
    "grpo_lit",
    "pyproject.toml",
    "scripts",
    "tests",
}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8
MAX_FIELDS = 15


def files(*, under: str = "", suffix: str = "") -> list[Path]:
    """Return what is part of the repository: everything that .gitignore does not name."""
    patterns = [line.rstrip("/") for line in (REPO / ".gitignore").read_text().splitlines() if line]

    def ignored(entry: Path) -> bool:
        at_top = f"/{entry.name}" if entry.parent == REPO else entry.name
        return entry.name == ".git" or any(
            fnmatch.fnmatch(at_top if pattern.startswith("/") else entry.name, pattern) for pattern in patterns
        )

    def walk(folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if not ignored(entry):
                yield from walk(entry) if entry.is_dir() else [entry]

    return [file for file in walk(REPO / under) if file.name.endswith(suffix)]


def name(file: Path) -> str:
    return str(file.relative_to(REPO))


def is_python(file: Path) -> bool:
    return file.suffix == ".py" or (file.suffix == "" and b"python" in file.read_bytes().split(b"\n", 1)[0])


SOURCES = [*files(under="grpo_lit", suffix=".py"), *files(under="callbacks", suffix=".py"), *files(under="scripts")]
PYTHON = [file for file in SOURCES if is_python(file)]


def test_nothing_new_lies_at_the_top():
    assert {file.relative_to(REPO).parts[0] for file in files()} <= TOP_LEVEL


def imports(tree: ast.AST) -> set[str]:
    """Return the modules imported anywhere in a file, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_the_library_runs_without_callbacks():
    trees = {name(file): ast.parse(file.read_text()) for file in files(under="grpo_lit", suffix=".py")}
    assert not [file for file, tree in trees.items() if any(m.split(".")[0] == "callbacks" for m in imports(tree))]


def test_one_idea_fits_one_file():
    lengths = {
        name(file): len(file.read_text().splitlines()) for file in SOURCES if file.suffix not in (".txt", ".png")
    }
    assert not {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in PYTHON:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name(file)}:{node.lineno} {node.name}", node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_a_function_fits_a_screen():
    assert not {where: lines_of(f) for where, f in functions() if lines_of(f) > MAX_FUNCTION_LINES}


def test_arguments_can_be_taken_in_at_a_glance():
    """A constructor may have more: its arguments are the keys of a YAML block."""

    def count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        return len([argument for argument in arguments if argument.arg not in ("self", "cls")])

    def most(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        return MAX_FIELDS if function.name == "__init__" else MAX_ARGUMENTS

    assert not {where: count(f) for where, f in functions() if count(f) > most(f)}


def test_no_error_is_swallowed():
    """Whoever catches everything may only clean up and raise again, here or in the thread that waits for the answer."""

    def is_broad(handler: ast.ExceptHandler) -> bool:
        caught = {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)} if handler.type else set()
        return not caught or bool(caught & {"Exception", "BaseException"})

    handlers = [
        (f"{name(file)}:{node.lineno}", node)
        for file in PYTHON
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ExceptHandler)
    ]

    def passes_on(node: ast.AST) -> bool:
        return isinstance(node, ast.Raise) or (isinstance(node, ast.Attribute) and node.attr == "set_exception")

    assert not [where for where, h in handlers if is_broad(h) and not any(passes_on(node) for node in ast.walk(h))]


def found(pattern: str) -> list[str]:
    """Return file and line of every match in the repository, this file apart."""
    return [
        f"{name(file)}:{number} {line.strip()}"
        for file in files()
        if file != Path(__file__) and file.name != "LICENSE" and file.suffix != ".png"
        for number, line in enumerate(file.read_text(errors="ignore").splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_nothing_is_left_to_do():
    assert not found(r"\b(TODO|FIXME|XXX|HACK)\b")


def test_no_line_knows_the_machine_it_was_written_on():
    # /tmp and system folders are everyone's; what follows a word, a variable or a dot is a relative path or an address.
    assert not found(r"(?<![\w.$}/<>-])/(root|work|workspace|home/\w+|Users/\w+|mnt/\w+)(?=/|\b)")

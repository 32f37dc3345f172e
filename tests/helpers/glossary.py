"""README's table of metrics."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
#: First part of a metric's name, and the set's name of a held-out one.
PANEL = re.compile(r"(val/<set>|reward|exploration|length|optimization|system|shadow)/")


def glossary() -> set[str]:
    """Return every metric of README's table in full, with ``*`` for what varies.

    In a row, names after the first leave the panel out, an ending such as ``_killed`` replaces the first one's, and
    ``@k`` goes with each name before it.
    """
    known = set()
    for row in README.read_text().split("## Metrics")[1].split("\n## ")[0].splitlines():
        names, panel = list[str](), ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]) if row.startswith("| `") else []:
            if full := PANEL.match(name):
                panel = full[1]
                names.append(name)
            elif name.startswith("_"):
                names.append(re.sub(r"_[a-z]+$", name, names[0]))
            elif name == "@k":
                names += [f"{before}@k" for before in names]
            else:
                names.append(f"{panel}/{name}")
        known |= {re.sub(r"<\w+>|(?<=@)[kj]$", "*", name) for name in names}
    return known


def unexplained(names: set[str], rewards: tuple[str, ...] = ()) -> list[str]:
    """Return the metrics that README does not explain.

    Args:
        names: Of metrics.
        rewards: Names of the run's rewards: nothing else is an instance of ``reward/<name>``.
    """
    patterns = glossary() - {"reward/*"} | {f"reward/{name}" for name in rewards}
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns))

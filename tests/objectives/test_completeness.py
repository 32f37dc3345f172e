"""Every part is documented, sourced and tested."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from grpo_lit import objectives

KINDS = (
    objectives.Advantage,
    objectives.Surrogate,
    objectives.Divergence,
    objectives.Correction,
    objectives.Reduction,
    objectives.Filter,
    objectives.Selection,
)
PARTS = [
    part
    for name in objectives.__all__
    if inspect.isclass(part := getattr(objectives, name)) and issubclass(part, KINDS) and not inspect.isabstract(part)
]


def test_all_kinds_have_members():
    assert {kind for kind in KINDS for part in PARTS if issubclass(part, kind)} == set(KINDS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_names_its_source(part):
    assert re.search(r"(Papers?|Source):?\s", part.__doc__)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_describes_every_argument_and_has_a_default_for_it(part):
    text = "".join(cls.__doc__ or "" for cls in part.__mro__ if cls.__module__.startswith("grpo_lit"))
    for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
        assert re.search(rf"\n\s+{field.name}: ", text), field.name
        assert field.default is not dataclasses.MISSING, field.name
    part()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_has_a_test_of_its_own(part):
    others = {"test_completeness.py", "test_properties.py", "test_recipes.py", "test_peers.py"}
    files = [path for path in Path(__file__).parent.rglob("test_*.py") if path.name not in others]
    assert any(re.search(rf"\b{part.__name__}\(", path.read_text()) for path in files)

"""The numbers of every recipe, pinned; a change of one must be a change of two files."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from grpo_lit.objectives import (
    CISPO,
    DPPO,
    K3,
    SAPO,
    ConstantLength,
    GDPOAdvantage,
    GeometricMean,
    GroupAdvantage,
    Objective,
    OffPolicySequenceMask,
    OverlongFilter,
    PolicyGradient,
    SequenceClip,
    SequenceMean,
    SequenceTokenClip,
    TokenClip,
    TokenMean,
    TruncatedIS,
    ZeroSignalFilter,
)

FOLDER = Path(__file__).parents[2] / "configs" / "recipe"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}

STD, MEAN_ONLY = GroupAdvantage("group_std"), GroupAdvantage("none")
BETAS = {"math": 0.0, "code": 0.02, "default": 0.001}
#: Advantage, surrogate, divergence, reduction, corrections, filters.
PINNED: dict[str, tuple] = {
    "grpo": (STD, TokenClip(0.2, 0.2), K3(0.04), SequenceMean(), (), ()),
    "dr_grpo": (MEAN_ONLY, TokenClip(0.2, 0.2), None, ConstantLength(256), (), ()),
    "dapo": (STD, TokenClip(0.2, 0.28), None, TokenMean(), (), (OverlongFilter(),)),
    "gspo": (STD, SequenceClip(3e-4, 4e-4, "geometric"), None, SequenceMean(), (), ()),
    "gspo_token": (STD, SequenceTokenClip(3e-4, 4e-4), None, SequenceMean(), (), ()),
    "gmpo": (STD, GeometricMean(0.4, 0.4), None, SequenceMean(), (), ()),
    "cispo": (STD, CISPO(1.0, 4.0), None, TokenMean(), (), ()),
    "sapo": (STD, SAPO(1.0, 1.05), None, SequenceMean(), (), ()),
    "dppo": (STD, DPPO("tv", 0.15, 0.15, 20.0, "sampler"), None, TokenMean(), (), ()),
    "gdpo": (GDPOAdvantage(), TokenClip(0.2, 0.2), None, TokenMean(), (), ()),
    "olmo3": (MEAN_ONLY, TokenClip(0.2, 0.272), None, TokenMean(), (TruncatedIS(2.0),), (ZeroSignalFilter(),)),
    "deepseek_v32": (
        MEAN_ONLY,
        TokenClip(10.0, 10.0),
        K3(BETAS, weighting="ratio"),
        SequenceMean(),
        (OffPolicySequenceMask(0.1, "sampler"),),
        (),
    ),
    "reinforce": (GroupAdvantage("none", True), PolicyGradient(), None, ConstantLength(256), (), ()),
}


class Host:
    """Takes an objective the way the LightningModule does."""

    def __init__(self, objective: Objective | None = None) -> None:
        self.objective = objective


def load(*texts: str) -> Objective:
    """Lay YAML texts over each other and return the objective, as the command line does."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Host, "model")
    parser.add_argument("--config", action="config")
    configs = [f"--config={_model_only(text)}" for text in texts]
    return parser.instantiate(parser.parse_args(configs)).model.objective


def _model_only(text: str) -> str:
    model = yaml.safe_load(text)["model"]["objective"]
    return yaml.safe_dump({"model": {"objective": model}})


def parts(objective: Objective) -> tuple:
    return tuple(getattr(objective, name) for name in NAMES)


NAMES = ("advantage", "surrogate", "divergence", "reduction", "corrections", "filters")


def test_every_recipe_is_pinned():
    assert sorted(FILES) == sorted(PINNED)


@pytest.mark.parametrize("name", FILES)
def test_numbers(name):
    objective = load(FILES[name].read_text())
    assert parts(objective) == PINNED[name]
    assert objective.entropy_coefficient == 0
    assert objective.selection is None


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_leaves_nothing_of_what_it_is_laid_over(name):
    # The base file holds GRPO's parts: what a recipe left out would stay, so it must write every number down.
    base = (FOLDER.parent / "base.yaml").read_text()
    assert parts(load(base, FILES[name].read_text())) == PINNED[name]


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_tells_its_source_and_its_command(name):
    comment = [line for line in FILES[name].read_text().splitlines() if line.startswith("#")]
    assert re.search(r"arXiv \d{4}\.\d{5}", comment[0] + comment[1])
    assert any(line.endswith(f"--config configs/recipe/{name}.yaml") and "grpo-lit fit" in line for line in comment)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_touches_the_objective_and_how_rollouts_are_made_and_cut_only(name):
    content: dict[str, Any] = yaml.safe_load(FILES[name].read_text())
    assert set(content) <= {"model", "data"}
    assert set(content["model"]) == {"objective"}
    assert set(content.get("data", {})) <= {"num_updates", "rollout"}
    assert {"advantage", "surrogate", "divergence", "reduction", "corrections"} <= set(content["model"]["objective"])

"""A part of one's own takes one module outside the package and one YAML file."""

import math
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from jsonargparse import ArgumentParser

from grpo_lit.objectives import Counts, Objective

MODULE = '''
from dataclasses import dataclass

from grpo_lit.objectives import Correction, CorrectionOutput, Surrogate, SurrogateOutput, Terms
from grpo_lit.shapes import TokenFloat


@dataclass
class SquaredRatio(Surrogate):
    """Half the squared ratio: f = A r^2 / 2.

    Args:
        scale: Times f.
    """

    scale: float = 1.0

    def __call__(self, terms: Terms) -> SurrogateOutput:
        value = self.scale * terms.advantages * terms.ratio**2 / 2
        nowhere = terms.advantages != terms.advantages
        return SurrogateOutput(value, nowhere, nowhere)


@dataclass
class Halved(Correction):
    """Every token at half weight."""

    def __call__(self, terms: Terms) -> CorrectionOutput:
        half = 0 * terms.sampler_logprobs + 0.5
        return CorrectionOutput(half, half > 1, 0 * half)
'''

RECIPE = """
objective:
  surrogate: {class_path: my_parts.SquaredRatio, init_args: {scale: 4.0}}
  corrections: [{class_path: my_parts.Halved}]
"""


@pytest.fixture
def parser(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective)
    yield parser
    sys.modules.pop("my_parts", None)


def test_a_part_of_ones_own_trains(parser, make_batch):
    objective = parser.instantiate(parser.parse_string(RECIPE)).objective
    assert type(objective.surrogate).__module__ == "my_parts"
    # A = 1, r = e^.5, f = 4 r^2 / 2, half weight: the loss is -r^2 w and its gradient -2 r^2 w, with w = 1.
    batch = make_batch([0], advantages=torch.tensor([1.0]), old_logprobs=torch.tensor([-1.0]))
    batch = replace(batch, weights=objective.weights(batch, Counts(1, 1, 1)))
    logprobs = torch.tensor([-0.5], requires_grad=True)
    output = objective.loss(batch, logprobs, torch.zeros(1))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-math.e)
    assert logprobs.grad.item() == pytest.approx(-2 * math.e)
    assert output.rates.compute()["system/is_cut_Halved"] == 0.0


def test_a_misspelt_argument_of_ones_own_part_is_refused(parser):
    with pytest.raises(Exception, match="scael"):
        parser.parse_string(RECIPE.replace("scale", "scael"))


@pytest.mark.parametrize("name", ["SequenceClip", "TokenClip", "SAPO"])
def test_members_need_no_path(parser, name):
    objective = parser.instantiate(parser.parse_string(f"objective: {{surrogate: {name}}}")).objective
    assert type(objective.surrogate).__name__ == name


def test_help_of_a_part_is_its_docstring(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--objective.help", "Objective"])
    assert "entropy bonus" in capsys.readouterr().out

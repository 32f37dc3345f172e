from pathlib import Path

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.lab.cli import RECIPES
from grpo_lit.lab.enumeration import Estimate, estimate, single_group_steps, step_gradients
from grpo_lit.lab.recipes import kl_estimators, load_recipes
from grpo_lit.lab.world import Policies
from grpo_lit.objectives import K1, K3, ConstantLength, GroupAdvantage, TokenClip

NAMES = [path.stem for path in sorted(RECIPES.glob("*.yaml"))]


@pytest.fixture(scope="module")
def recipes():
    return load_recipes([RECIPES], max_length=2)


@pytest.fixture(scope="module")
def on_policy(recipes, world, logits) -> dict[str, Estimate]:
    steps = single_group_steps(world, Policies(logits, logits, reference=logits), 2)
    return {name: estimate(recipe, steps) for name, recipe in recipes.items()}


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_equals_step_by_step(recipes, world, logits, through_theta, name):
    # The lab adds up all steps of a recipe in one call of its loss, and treats steps that look alike once. Right only
    # if no part mixes steps: engine, old policy and reference all differ here.
    engine, old, reference = (world.random_logits(0.7, seed) for seed in (31, 32, 33))
    steps = single_group_steps(world, Policies(logits, engine, old=old, reference=reference), 2)
    want = through_theta(recipes[name], steps, every=7)
    torch.testing.assert_close(step_gradients(recipes[name], steps)[::7], want, rtol=1e-9, atol=1e-13)


def test_reinforce_is_unbiased(on_policy, world, logits):
    # Leave-one-out and a constant length, whose L is that of the lab.
    want = world.policy_gradient(logits).flatten() / 2
    torch.testing.assert_close(on_policy["reinforce"].mean, want, rtol=0, atol=1e-10)


def test_dr_grpo_is_unbiased_up_to_its_factor(on_policy, world, logits):
    # (G-1)/G = 1/2.
    want = world.policy_gradient(logits).flatten() / 2 / 2
    torch.testing.assert_close(on_policy["dr_grpo"].mean, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("alike", [("grpo", "gmpo", "gspo", "gspo_token", "sapo"), ("cispo", "dppo")])
def test_ratio_one_leaves_no_difference(on_policy, alike):
    # At ratio 1 every surrogate has gradient A grad log pi, and k3 at the reference has none: recipes that share
    # advantage and reduction share mean and variance.
    for name in alike[1:]:
        torch.testing.assert_close(on_policy[name].mean, on_policy[alike[0]].mean, rtol=0, atol=1e-12)
        assert on_policy[name].variance == pytest.approx(on_policy[alike[0]].variance, rel=1e-10)


def test_gspo_token_is_gspo_off_policy(recipes, world, logits):
    # All tokens of a completion share one advantage, and then the two have one gradient (GSPO, section 4.3).
    old = world.random_logits(1.0, 41)
    steps = single_group_steps(world, Policies(logits, old, old=old, reference=old), 2)
    left, right = (step_gradients(recipes[name], steps) for name in ("gspo", "gspo_token"))
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


def test_reads_a_file_as_the_command_line_does(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {objective: {advantage: {class_path: GroupAdvantage, init_args: {scale: none}},"
        " surrogate: {class_path: TokenClip, init_args: {low: 1.0e-1}}, reduction: ConstantLength,"
        " divergence: {class_path: K3, init_args: {beta: {math: 0.0, default: 0.02}}}}}"
    )
    objective = load_recipes([file], max_length=5)["mine"]
    assert objective.advantage == GroupAdvantage("none")
    assert objective.surrogate == TokenClip(low=0.1)
    assert objective.reduction == ConstantLength(5)
    assert objective.divergence == K3(beta={"math": 0.0, "default": 0.02})


def test_refuses_what_is_no_recipe(tmp_path: Path):
    (tmp_path / "data.yaml").write_text("data: {seed: 1}")
    with pytest.raises(ConfigError, match=r"model\.objective.*data\.yaml"):
        load_recipes([tmp_path], max_length=2)
    with pytest.raises(ConfigError, match="`recipes` expected"):
        load_recipes([tmp_path / "nothing"], max_length=2)


def test_refuses_a_part_that_does_not_exist(tmp_path: Path):
    file = tmp_path / "typo.yaml"
    file.write_text("model: {objective: {surrogate: TokenClap}}")
    with pytest.raises(ConfigError, match=r"(?s)typo\.yaml.*TokenClap"):
        load_recipes([file], max_length=2)


def test_kl_estimators_pay_each_estimate_once():
    names = kl_estimators()
    assert list(names) == ["k1", "k2", "k3", "k1 x ratio", "k2 x ratio", "k3 x ratio"]
    assert names["k1 x ratio"].divergence == K1(beta=1.0, weighting="ratio")

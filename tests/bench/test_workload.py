"""The work is the same for every arm, and what the presets say."""

import statistics

import pytest
import torch

from grpo_lit.batch import TokenBatch
from grpo_lit.bench.options import RECIPES
from grpo_lit.bench.settings import PRESETS, Settings
from grpo_lit.bench.workload import make_batch, make_groups, make_models, make_objective, with_weights
from grpo_lit.errors import ConfigError


def lengths_of(preset: str, count: int) -> list[int]:
    return PRESETS[preset].draw(count, torch.Generator().manual_seed(0))


def test_short_completions_have_any_length_up_to_64() -> None:
    drawn = lengths_of("short", 4000)
    assert PRESETS["short"].prompt == 53
    assert set(drawn) == set(range(1, 65))
    assert statistics.mean(drawn) == pytest.approx(32.5, rel=0.05)


def test_long_completions_are_log_normal_around_200_up_to_512() -> None:
    drawn = lengths_of("long", 4000)
    assert PRESETS["long"].prompt == 256
    assert statistics.median(drawn) == pytest.approx(200, rel=0.05)
    # ln(512 / 200) / .5 = 1.88 standard deviations: 3 % are cut.
    assert max(drawn) == 512
    assert sum(k == 512 for k in drawn) / 4000 == pytest.approx(0.03, abs=0.01)
    # One standard deviation below the median: 200 / e^.5 = 121.
    assert statistics.quantiles(drawn, n=1000)[158] == pytest.approx(121, rel=0.05)


def test_a_group_does_not_depend_on_how_many_there_are() -> None:
    few, many = (make_groups(PRESETS["short"], n, 8, 1000, seed=3) for n in (2, 5))
    assert few == many[:2]
    assert make_groups(PRESETS["short"], 2, 8, 1000, seed=4) != few


def test_no_completion_can_be_skipped(settings: Settings) -> None:
    objective, batch = make_objective(settings), make_batch(settings, 3)
    batch = with_weights(objective, batch)
    assert len(batch.lengths) == 24
    assert bool(objective.contributes(batch).all())
    assert float(batch.advantages.abs().min()) > 0.5


def test_weights_are_seeded_and_the_reference_is_another_model(settings: Settings) -> None:
    one, two = make_models(settings, True), make_models(settings, False)
    pairs = list(zip(one.policy.parameters(), two.policy.parameters(), one.reference.parameters(), strict=True))
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)
    assert two.reference is None


def test_recipes_of_several_passes_are_refused(settings: Settings, tmp_path) -> None:
    recipe = tmp_path / "selects.yaml"
    recipe.write_text("model: {objective: {selection: {class_path: TopEntropy, init_args: {share: 0.2}}}}\n")
    settings.recipe = recipe
    with pytest.raises(ConfigError, match=r"`recipe` expected one that scores no rollout beforehand.*selects.yaml"):
        make_objective(settings)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_measured(settings: Settings, recipe) -> None:
    settings.recipe = recipe
    batch: TokenBatch = with_weights(make_objective(settings), make_batch(settings, 2))
    assert bool((batch.weights > 0).all())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "`rounds` expected to be >= 1, but got 0"),
        ({"group_size": 1}, "`group_size` expected to be >= 2"),
        ({"threads": -1}, "`threads` expected to be >= 0"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**wrong)


def test_a_file_in_no_folder_is_refused_before_the_work(tmp_path) -> None:
    with pytest.raises(ConfigError, match="`json` expected a file in a folder that exists"):
        Settings(json=tmp_path / "none" / "a.json")


def test_settings_survive_json(settings: Settings) -> None:
    assert Settings.from_plain(settings.to_plain()) == settings
    assert Settings.from_plain(Settings().to_plain()) == Settings()

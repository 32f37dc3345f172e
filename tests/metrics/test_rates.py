import math

import pytest
import torch

from grpo_lit.metrics.rates import Rates


def test_a_mean_over_unequal_pieces_is_not_a_mean_of_means():
    # 3 5 | 7: 15 / 3 = 5, where the mean of means is (4 + 7) / 2.
    rates = Rates()
    rates.add("length/mean", torch.tensor([3.0, 5.0]))
    rates.add("length/mean", torch.tensor([7.0]))
    assert rates.compute()["length/mean"] == 5.0


def test_a_given_count_replaces_the_number_of_values():
    rates = Rates()
    rates.add("x", torch.tensor([1.0, 2.0]), count=6)
    assert rates.compute()["x"] == 0.5


def test_flags_and_integers_are_means_too():
    rates = Rates()
    rates.add("flag", torch.tensor([True, False, False, True]))
    rates.add("number", torch.tensor([1, 2]))
    assert rates.compute() == {"flag": 0.5, "number": 1.5}


def test_sums_do_not_lose_small_values_among_many():
    # In float32 sixteen million ones swallow the next.
    rates = Rates()
    rates.add("x", torch.tensor([2.0**24]), count=0)
    for _ in range(8):
        rates.add("x", torch.tensor([1.0]))
    assert rates.compute()["x"] == (2**24 + 8) / 8


def test_maxima_and_reserved_names():
    rates = Rates()
    rates.maximum("top", torch.zeros(0))
    rates.add("mean", torch.zeros(0))
    empty = rates.compute()
    assert empty["top"] == -math.inf
    assert math.isnan(empty["mean"])
    rates.maximum("top", torch.tensor([1.0, 3.0]))
    rates.maximum("top", torch.tensor([2.0]))
    assert rates.compute()["top"] == 3.0


def test_merge_adds_both_kinds():
    one, two = Rates(), Rates()
    one.add("mean", torch.tensor([1.0]))
    one.maximum("top", torch.tensor([1.0]))
    two.add("mean", torch.tensor([2.0, 3.0]))
    two.add("other", torch.tensor([5.0]))
    two.maximum("top", torch.tensor([4.0]))
    assert one.merge(two) is one
    assert one.compute() == {"mean": 2.0, "other": 5.0, "top": 4.0}


def test_ranks_add_as_one_vector_in_an_order_of_names_alone():
    # Whoever came first on a rank, the vector is sorted by name.
    first, second = Rates(), Rates()
    first.add("b", torch.tensor([1.0]))
    first.add("a", torch.tensor([10.0]))
    second.add("a", torch.tensor([20.0]))
    second.add("b", torch.tensor([3.0, 5.0, 7.0]))  # three values beside one: (1 + 15) / 4, where means give 3
    shipped = []
    second.compute(lambda x: shipped.append(x) or x)
    assert first.compute(lambda x: x + shipped[0]) == {"a": 15.0, "b": 4.0}
    first.maximum("top", torch.tensor([1.0]))
    assert first.compute(max_ranks=lambda x: x + 1)["top"] == 2.0


def test_a_rate_carries_no_graph():
    value = torch.tensor([1.0], requires_grad=True)
    rates = Rates()
    rates.add("x", value)
    rates.maximum("y", value)
    assert rates.compute() == {"x": 1.0, "y": 1.0}
    assert not any(t.requires_grad for t in [*rates._sums.values(), *rates._maxima.values()])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(value):
    rates = Rates()
    rates.add("x", torch.tensor([1.0, value]))
    assert not math.isfinite(rates.compute()["x"])

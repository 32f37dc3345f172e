"""Rates: sums of numerators over sums of denominators, and maxima, added over micro-batches and ranks."""

from collections.abc import Callable

import torch
from torch import Tensor


class Rates:
    """Named means that stay exact however a batch is split.

    A mean of micro-batch means is wrong when they differ in size; here both sums are kept apart until the end. Every
    rank must add the same names (a value may be empty), since the sums travel as one vector.

    Example::

        rates = Rates()
        rates.add("length/mean", torch.tensor([3.0, 5.0]))
        rates.add("length/mean", torch.tensor([7.0]))
        rates.compute()["length/mean"]  # 5.0, where the mean of means is 5.5
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, count: int | float | None = None) -> None:
        """Add ``values`` to a mean; ``count`` replaces their number as denominator."""
        values = values.detach().double().cpu()  # sums of any device meet here
        pair = torch.stack([values.sum(), values.new_tensor(values.numel() if count is None else count)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def maximum(self, name: str, values: Tensor) -> None:
        """Add ``values`` to a maximum; an empty tensor only reserves the name."""
        top = values.detach().double().cpu().flatten()
        top = torch.cat([top, top.new_full((1,), -torch.inf)]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], top) if name in self._maxima else top

    def merge(self, other: "Rates") -> "Rates":
        """Add another one's sums and maxima to this one's."""
        for name, pair in other._sums.items():
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair
        for name, top in other._maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], top) if name in self._maxima else top
        return self

    def compute(
        self,
        sum_ranks: Callable[[Tensor], Tensor] = lambda x: x,
        max_ranks: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> dict[str, float]:
        """Return each mean and maximum over all ranks; NaN for a mean of nothing."""
        result: dict[str, float] = {}
        if self._sums:
            names = sorted(self._sums)
            totals = sum_ranks(torch.stack([self._sums[name] for name in names])).cpu()
            result |= {n: float(a / b) if b else float("nan") for n, (a, b) in zip(names, totals, strict=True)}
        if self._maxima:
            names = sorted(self._maxima)
            tops = max_ranks(torch.stack([self._maxima[name] for name in names])).cpu()
            result |= dict(zip(names, tops.tolist(), strict=True))
        return result

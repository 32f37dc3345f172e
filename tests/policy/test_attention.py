"""Which kernel attention over gathered rows asks for, beside a device that this machine may not have."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_lit.policy.attention import _fused


@pytest.mark.parametrize(
    ("device", "masked", "value_size", "heads"),
    [("cpu", True, 8, 2), ("meta", False, 8, 2), ("meta", True, 8, 4), ("meta", False, 16, 4), ("meta", False, 512, 4)],
)
def test_keys_are_repeated_where_a_gpu_has_no_kernel_for_shared_ones(
    device: str, masked: bool, value_size: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for every device that is no CPU."""
    asked: list[tuple[int, bool]] = []
    attention = nn.functional.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert key.shape[1] == value.shape[1]
        asked.append((key.shape[1], options["enable_gqa"]))
        return attention(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    size = 512 if value_size == 512 else 8
    query, key = torch.empty(3, 5, 4, size, device=device), torch.empty(3, 5, 2, size, device=device)
    value = torch.empty(3, 5, 2, value_size, device=device)
    mask = torch.ones(5, 5, dtype=torch.bool, device=device).tril().expand(3, 1, 5, 5) if masked else None
    assert _fused(query, key, value, mask, 1.0).shape == (3, 5, 4, value_size)
    assert asked == [(heads, heads == 2)]

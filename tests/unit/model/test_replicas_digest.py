"""The digest of a weight: exact, and the same however the weight lies in memory."""

from __future__ import annotations

import pytest
import torch

from megapack.model import replicas
from megapack.model.replicas import values_digest

VALUES = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
ONE_BIT = VALUES.clone()
ONE_BIT.view(torch.int32)[4, 7] ^= 1
EXCHANGED = VALUES[[1, 0, 2, 3, 4]]


@pytest.mark.parametrize("other", [ONE_BIT, EXCHANGED, -VALUES, VALUES.bfloat16()])
def test_other_values_have_another_digest(other: torch.Tensor) -> None:
    assert values_digest(other) != values_digest(VALUES)


def test_the_last_bytes_count_if_they_are_not_8() -> None:
    assert values_digest(ONE_BIT.flatten()[1:]) != values_digest(VALUES.flatten()[1:])


def test_also_if_only_the_sign_of_a_zero_differs() -> None:
    zeros = torch.zeros(2)
    assert values_digest(zeros) != values_digest(-zeros)


def test_the_place_in_memory_does_not_matter() -> None:
    bf16 = VALUES.bfloat16()
    shifted = torch.cat([torch.zeros(1, dtype=torch.bfloat16), bf16.flatten()])[1:]
    assert values_digest(shifted) == values_digest(bf16)
    assert values_digest(VALUES.T.contiguous().T) == values_digest(VALUES)


def test_parts_that_are_mixed_one_by_one_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values_digest(VALUES)
    monkeypatch.setattr(replicas, "_PART_BYTES", 32)
    assert values_digest(VALUES) == whole


def test_a_tensor_without_values_has_a_digest() -> None:
    assert values_digest(VALUES[:0]) == 0

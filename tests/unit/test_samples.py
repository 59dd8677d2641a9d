"""Samples as ragged fields: all constructors, the way back to [B, S], and all refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megapack.errors import DataError
from megapack.samples import SampleBatch, to_padded

pytestmark = pytest.mark.unit

# [5 6 7] and [8 9] in a [2, 5] tensor, left-padded, right-padded and in the middle.
LEFT_MASK = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])


def padded(mask: torch.Tensor, *rows: list[float]) -> torch.Tensor:
    """The rows' values where the mask is set; 99, which no row has, elsewhere."""
    out = torch.full(mask.shape, 99.0)
    for row, values, columns in zip(out, rows, mask, strict=True):
        row[columns.bool()] = torch.tensor(values, dtype=row.dtype)
    return out


def batch_of(**fields: list[Any]) -> SampleBatch:
    return SampleBatch([[5, 6, 7], [8, 9]], fields)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_tokens_of_any_sequence_type_become_int64(kind: Callable[[Any], Any]) -> None:
    batch = SampleBatch([kind([5, 6, 7]), kind([8])])
    assert batch.lengths == [3, 1]
    assert (len(batch), batch.length(0)) == (2, 3)
    assert batch.tokens(0).dtype == torch.int64
    assert batch.tokens(0).tolist() == [5, 6, 7]


def test_without_a_mask_all_tokens_but_the_first_count() -> None:
    batch = SampleBatch([[5, 6, 7], [8]])
    assert batch.response_mask(0).tolist() == [True, True, True]
    assert batch.num_loss_tokens == [2, 0]
    assert batch.field_names == ()


def test_prompt_and_response_make_the_mask() -> None:
    batch = SampleBatch.from_prompt_response([[1, 2], [], [3]], [[4], [5, 6], []])
    assert [batch.tokens(i).tolist() for i in range(3)] == [[1, 2, 4], [5, 6], [3]]
    assert batch.response_mask(0).tolist() == [False, False, True]
    # The mask includes the first token of a sample without a prompt, but nothing predicts it.
    assert batch.response_mask(1).tolist() == [True, True]
    assert batch.num_loss_tokens == [1, 1, 0]
    assert batch.field_names == ()


def test_a_response_field_belongs_to_the_last_tokens() -> None:
    batch = batch_of(advantages=[[0.5, 2.0], [3.0]], old=[[1.0, 2.0, 3.0], []], reward=[1.5, 2.5])
    assert batch.field("advantages", 0).tolist() == [0.0, 0.5, 2.0]
    assert batch.field("advantages", 1).tolist() == [0.0, 3.0]
    assert batch.field("old", 0).tolist() == [1.0, 2.0, 3.0]
    assert batch.field("old", 1).tolist() == [0.0, 0.0]
    assert batch.field("reward", 1).dim() == 0
    assert batch.field("reward", 1).item() == 2.5
    assert batch.field_names == ("advantages", "old", "reward")


def test_a_response_mask_excludes_the_prompt() -> None:
    batch = batch_of(response_mask=[[1.0, 0.0], [1]])
    assert batch.response_mask(0).tolist() == [False, True, False]
    assert batch.num_loss_tokens == [1, 1]
    assert batch.field_names == ()


def test_one_sample_with_fractions_makes_the_field_float() -> None:
    batch = batch_of(advantages=[1, -0.5])
    assert [batch.field("advantages", i).item() for i in range(2)] == [1.0, -0.5]
    assert batch.field_dtype("advantages") == torch.float32


def test_integer_fields_stay_integers() -> None:
    batch = batch_of(kind=[[1, 2], [3]])
    assert batch.field_dtype("kind") == torch.int64
    assert batch.field("kind", 0).tolist() == [0, 1, 2]


def test_fields_are_detached() -> None:
    values = torch.ones(3, requires_grad=True) * 2
    assert not batch_of(old=[values, [1.0]]).field("old", 0).requires_grad


def test_fields_of_fewer_columns_are_the_last_columns() -> None:
    # Two prompt columns padded on the left, three response columns padded on the right.
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    old_BR = torch.tensor([[0.5, 99.0, 99.0], [1.0, 2.0, 3.0]])
    batch = SampleBatch.from_padded(torch.ones(2, 5).long(), mask, {"old": old_BR})
    assert batch.field("old", 0).tolist() == [0.0, 0.0, 0.5]
    assert batch.field("old", 1).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_one_number_each_for_more_samples_than_columns() -> None:
    reward_B = torch.arange(6.0)
    batch = SampleBatch.from_padded(torch.ones(6, 2).long(), torch.ones(6, 2), {"r": reward_B})
    assert [batch.field("r", i).item() for i in range(6)] == reward_B.tolist()


def test_an_empty_row_of_the_mask_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 1.*empty"):
        SampleBatch.from_padded(torch.ones(2, 2).long(), torch.tensor([[1, 1], [0, 0]]))


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (10,)])
def test_ids_and_mask_of_different_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"\(2, 5\).*must both be \[B, S\]"):
        SampleBatch.from_padded(torch.ones(2, 5).long(), torch.ones(shape))


@pytest.mark.parametrize("shape", [(3,), (3, 5), (2, 6), (2, 5, 1), ()])
def test_a_padded_field_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"'x' has shape .* for 2 samples of 5 columns"):
        SampleBatch.from_padded(torch.ones(2, 5).long(), LEFT_MASK, {"x": torch.ones(shape)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.ones(3), torch.ones(3)], r"row 1: 3 values for 2 tokens"),
        ([torch.ones(3)], r"1 .*2"),
        ([torch.ones(3), torch.ones(2), torch.ones(2)], r"3 .*2"),
    ],
)
def test_to_padded_refuses_values_that_do_not_fit(values: list[torch.Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_padded(values, LEFT_MASK)


def test_tokens_can_be_set_after_from_lengths() -> None:
    whole = SampleBatch.from_prompt_response([[1, 2], []], [[3], [4, 5]], {"advantages": [1, 2]})
    batch = SampleBatch.from_lengths([2, 0], [1, 2], {"advantages": [1, 2]})
    assert batch.lengths == whole.lengths == [3, 2]
    assert batch.num_loss_tokens == whole.num_loss_tokens
    batch.set_tokens(1, [], [4, 5])
    assert batch.tokens(1).tolist() == [4, 5]
    assert batch.response_mask(0).tolist() == [False, False, True]
    batch.set_field("old_logprobs", [[0.5], [0.1, 0.2]])
    assert batch.field("old_logprobs", 0).tolist() == [0, 0, 0.5]
    with pytest.raises(DataError, match="sample 0 has no tokens on this rank"):
        batch.tokens(0)
    with pytest.raises(DataError, match="sample 0 has 2 tokens, its length in the batch is 3"):
        batch.set_tokens(0, [1], [2])
    with pytest.raises(DataError, match="sample 1 has no tokens; leave it out"):
        SampleBatch.from_lengths([1, 0], [0, 0])


def test_masks_can_be_set_after_from_lengths() -> None:
    masks = [[0, 0, 1], [0, 1, 1], [1, 1]]
    whole = SampleBatch([[1, 2, 3], [4, 5, 6], [7, 8]], {"response_mask": masks})
    batch = SampleBatch.from_lengths([1, 1, 0], [2, 2, 2], loss_tokens=[1, 2, 1])
    assert batch.num_loss_tokens == whole.num_loss_tokens == [1, 2, 1]
    with pytest.raises(DataError, match="sample 0 has no mask on this rank; call set_tokens"):
        batch.response_mask(0)
    # All tokens of the others' responses count.
    assert batch.response_mask(1).tolist() == [False, True, True]
    for mask in (None, [1, 1], [0, 0]):
        with pytest.raises(
            DataError, match=r"sample 0: \d tokens count in the loss, in the batch 1"
        ):
            batch.set_tokens(0, [1], [2, 3], mask)
    with pytest.raises(
        DataError, match=r"sample 0: loss_mask has shape \(1,\) for a response of 2"
    ):
        batch.set_tokens(0, [1], [2, 3], [1])
    batch.set_tokens(0, [1], [2, 3], [0, 1])
    batch.set_tokens(1, [4], [5, 6])
    batch.set_tokens(2, [], [7, 8], [1, 1])
    for sample in range(3):
        assert batch.tokens(sample).tolist() == whole.tokens(sample).tolist()
        found = batch.response_mask(sample).tolist()
        assert found[1:] == whole.response_mask(sample).tolist()[1:]
    assert batch.num_loss_tokens == whole.num_loss_tokens

"""Images of samples: places, positions, keys, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megapack.errors import DataError
from megapack.images import ImageNumbers, ImageRef, positions
from megapack.prefixes import SharedPrefixes
from megapack.samples import SampleBatch, TensorField

pytestmark = pytest.mark.unit

CAT = ImageRef(offset=2, grid=(1, 4, 6), key="cat")
DOG = dataclasses.replace(CAT, key="dog")


def test_positions_after_two_images() -> None:
    wide = ImageRef(offset=1, grid=(1, 2, 8), key="wide")
    tall = ImageRef(offset=6, grid=(1, 4, 2), key="tall")
    found = positions((wide, tall), 10).tolist()
    assert found[:5] == [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 4]]
    # The text goes on after the largest of the image's positions.
    assert found[5:] == [[5, 5, 5], [6, 6, 6], [6, 7, 6], [8, 8, 8], [9, 9, 9]]


def test_positions_never_exceed_the_index() -> None:
    # Rotary tables are as long as the longest sample.
    for grid in ((1, 2, 20), (1, 20, 2), (1, 6, 8)):
        ref = ImageRef(offset=3, grid=grid, key="one")
        found = positions((ref,), ref.end + 4)
        assert (found.max(axis=1) <= np.arange(ref.end + 4)).all()


@pytest.mark.parametrize(
    ("refs", "message"),
    [
        ([CAT, CAT], "begins at token 2, the one before it ends at 8"),
        ([dataclasses.replace(CAT, offset=5)], "stands at tokens 5 to 10 of 9"),
        ([dataclasses.replace(CAT, offset=3)], "ends with the last of 9 tokens"),
        ([dataclasses.replace(CAT, grid=(2, 4, 6))], "videos are not trained"),
        ([dataclasses.replace(CAT, grid=(1, 3, 6))], "rows and columns that 2 divides"),
        (["cat"], "give an ImageRef"),
        (None, "sample 0: images are None; give a list of ImageRefs"),
        ([dataclasses.replace(CAT, grid=torch.tensor([1, 4, 6]))], "the grid as a tuple of three"),
        ([dataclasses.replace(CAT, grid=(4, 6))], "the grid as a tuple of three"),
        ([dataclasses.replace(CAT, grid=(1, 4.0, 6))], "give offset and merge as integers"),
        ([dataclasses.replace(CAT, merge=0)], "give offset and merge as integers"),
        ([dataclasses.replace(CAT, key=b"cat")], "and the key as text"),
    ],
)
def test_wrong_images_are_refused(refs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SampleBatch([range(9)], images=[refs])


@pytest.mark.parametrize("other", [{"grid": (1, 6, 4)}, {"merge": 1}])
def test_one_key_has_one_grid(other: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"give different images different keys"):
        SampleBatch([range(99), range(99)], images=[[CAT], [dataclasses.replace(CAT, **other)]])


def test_a_list_per_sample_is_needed() -> None:
    with pytest.raises(DataError, match="give a list per sample, 2 lists"):
        SampleBatch([range(9), range(9)], images=[[CAT]])


def test_image_tokens_do_not_count() -> None:
    batch = SampleBatch.from_prompt_response([[1, 2]], [range(7)], images=[[CAT]])
    assert batch.response_mask(0).nonzero().flatten().tolist() == [8]
    assert batch.num_loss_tokens == [1]
    planned = SampleBatch.from_lengths([2], [7], images=[[CAT]])
    assert planned.num_loss_tokens == [1]
    planned.set_tokens(0, [1, 2], range(7))
    assert torch.equal(planned.response_mask(0), batch.response_mask(0))


def test_a_mask_that_trains_an_image_token_is_refused() -> None:
    with pytest.raises(DataError, match="counts token 4, which is an image's"):
        SampleBatch([range(9)], {"response_mask": [[0, 0, 0, 0, 1, 0, 0, 0, 1]]}, images=[[CAT]])
    planned = SampleBatch.from_lengths([2], [7], images=[[CAT]], loss_tokens=[1])
    with pytest.raises(DataError, match="counts token 5, which is an image's"):
        planned.set_tokens(0, [1, 2], range(7), loss_mask=[0, 0, 0, 1, 0, 0, 0])


def test_prompts_with_other_images_share_only_what_comes_before() -> None:
    ids = [[5, 6, *[9] * 6, 7], [5, 6, *[9] * 6, 8], [5, 6, *[9] * 6, 7, 1]]
    found = SharedPrefixes.from_samples(ids, images=[[CAT], [DOG], [CAT]])
    assert dict(zip(found.order, found.common, strict=True))[1] == 2
    # The two with the cat share the image and the token after it.
    assert max(found.common) == 9
    assert max(SharedPrefixes.from_samples(ids).common) == 9


def test_numbers_do_not_depend_on_how_far_samples_are_read() -> None:
    numbers = ImageNumbers()
    ids = np.array([5, 6, *[9] * 6, 7], dtype=np.uint16)
    whole = numbers.compared(ids, (CAT,))
    for first in range(9):
        for last in range(first, 10):
            part = numbers.compared(ids[first:last], (CAT,), first)
            assert np.array_equal(part, whole[first:last])


def test_images_beside_tensors_differ_by_signature() -> None:
    batch = SampleBatch([range(9)], images=[[CAT]])
    other = SampleBatch([range(9)], images=[[DOG]])
    plain = SampleBatch([range(9)], tensors={"pixels": TensorField([[1.0]])})
    assert batch.image_signature != other.image_signature
    assert plain.image_signature == ""
    assert not plain.has_images

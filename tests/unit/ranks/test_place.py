"""The text of a rank's place."""

from __future__ import annotations

import pytest

from megapack.ranks.place import Phase, Place

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("phase", "chunk", "microbatch", "text"),
    [
        ("pack", None, None, "step 4, pack"),
        ("forward", 0, 0, "step 4, forward of micro-batch 0"),
        ("backward", 1, 3, "step 4, backward of micro-batch 3 on chunk 1"),
    ],
)
def test_the_text_names_phase_micro_batch_and_chunk(
    phase: Phase, chunk: int | None, microbatch: int | None, text: str
) -> None:
    place = Place()
    place.step = "step 4"
    place.enter(phase, chunk, microbatch)
    assert str(place) == text
    assert place.within == f" in {text}"


def test_the_text_names_the_last_exchange_of_the_schedule() -> None:
    place = Place()
    place.enter("schedule")
    place.exchange = "sends activations to rank 3"
    place.enter("forward", 0, 1)
    assert str(place) == "forward of micro-batch 1, which sends activations to rank 3"
    place.enter("reduction")
    assert str(place) == "reduction, which sends activations to rank 3"
    place.enter("output")
    assert str(place) == "output"

"""The fuzz targets of tools/fuzz.py under hypothesis: what is refused, is refused as documented."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.fuzz_targets import DOCUMENTS, hold_schedule

pytestmark = pytest.mark.property

# atheris runs many more; here the time of a test run counts.
MANY = int(os.environ.get("MEGAPACK_EXAMPLES", "10000")) // 3


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Thousands of plans warn thousands of times."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def hold_document(target: str, data: st.DataObject) -> None:
    """A document that was mutated a few times over, or bytes of no kind."""
    documents = DOCUMENTS[target]
    document = data.draw(st.sampled_from(documents.seeds()) | st.binary(max_size=60))
    rng = Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(0, 3))):
        document = documents.mutate(document, rng)
    documents.hold(document)


@pytest.mark.parametrize("target", DOCUMENTS)
def test_seeds_are_taken(target: str) -> None:
    """A target that refuses all would find nothing."""
    documents = DOCUMENTS[target]
    assert all(documents.hold(seed) for seed in documents.seeds())


@pytest.mark.parametrize("target", DOCUMENTS)
@given(data=st.data())
@examples(100)
def test_documents(target: str, data: st.DataObject) -> None:
    hold_document(target, data)


@given(data=st.data())
@examples(100)
def test_schedules(data: st.DataObject) -> None:
    hold_schedule(lambda low, high: data.draw(st.integers(low, high)))


@pytest.mark.slow
@pytest.mark.parametrize("target", DOCUMENTS)
@given(data=st.data())
@examples(MANY)
def test_many_documents(target: str, data: st.DataObject) -> None:
    hold_document(target, data)


@pytest.mark.slow
@given(data=st.data())
@examples(MANY)
def test_many_schedules(data: st.DataObject) -> None:
    hold_schedule(lambda low, high: data.draw(st.integers(low, high)))

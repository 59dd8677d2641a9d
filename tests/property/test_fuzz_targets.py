"""The targets of tools/fuzzing under hypothesis: bad inputs give their documented errors."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.fuzzing.targets import DOCUMENTS

pytestmark = pytest.mark.property

MANY = int(os.environ.get("MEGAPACK_EXAMPLES", "10000")) // 3


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


PIECES = (
    st.binary(max_size=8)
    | st.integers().map(lambda number: str(number).encode())
    | st.sampled_from([b"null", b"true", b"0.5", b"nan", b"[", b"{}", b'"', b":", b",", b"\n"])
)


@st.composite
def documents(draw: st.DrawFn, target: str) -> bytes:
    """A valid document or random bytes, with up to three words replaced."""
    document: bytes = draw(st.sampled_from(DOCUMENTS[target].seeds()) | st.binary(max_size=60))
    for _ in range(draw(st.integers(0, 3))):
        words = [word.span() for word in re.finditer(rb"\w+|\W", document)]
        start, end = draw(st.sampled_from(words or [(0, 0)]))
        document = document[:start] + draw(PIECES) + document[end:]
    return document


@pytest.mark.parametrize("target", DOCUMENTS)
def test_seeds_are_accepted(target: str) -> None:
    """A target that refuses every input would find nothing."""
    documents = DOCUMENTS[target]
    assert all(documents.hold(seed) for seed in documents.seeds())


@pytest.mark.parametrize("target", DOCUMENTS)
@given(data=st.data())
@examples(100)
def test_documents(target: str, data: st.DataObject) -> None:
    DOCUMENTS[target].hold(data.draw(documents(target)))


@pytest.mark.slow
@pytest.mark.parametrize("target", DOCUMENTS)
@given(data=st.data())
@examples(MANY)
def test_many_documents(target: str, data: st.DataObject) -> None:
    DOCUMENTS[target].hold(data.draw(documents(target)))

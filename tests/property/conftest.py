"""Fixtures of the property tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Thousands of plans would log thousands of warnings."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)

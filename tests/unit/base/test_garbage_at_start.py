"""Python looks for cyclic garbage less often while modules are imported and data is read."""

from __future__ import annotations

import contextlib
import gc

import pytest

from megapack.base.garbage import no_collections, rare_collections

pytestmark = pytest.mark.unit


def test_what_is_imported_is_never_looked_at_again() -> None:
    before = gc.get_freeze_count()
    try:
        with contextlib.suppress(ImportError), no_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_thresholds_are_given_back() -> None:
    before = gc.get_threshold()
    with contextlib.suppress(ValueError), rare_collections():
        assert gc.get_threshold()[0] > 10 * before[0]
        raise ValueError
    assert gc.get_threshold() == before

"""Rows that pad a vocabulary have neither probability nor gradient, on any tensor-parallel rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


def test_padding_never_counts(tmp_path: Path) -> None:
    checked_job(4, "tests.dist.model.vocabulary_worker", [str(tmp_path)], timeout_s=120)
    for report in rank_reports(tmp_path, 4):
        # Two ranks have ids alone, one has both, one has padding alone.
        assert max(report["errors"]) < 1e-5
        assert report["given_equals_marked"]
        assert report["padding_that_counts"] > 0.01
        assert "has the token id" in report["an_id_that_is_padding"]
        assert "vocab_size=129, the model's vocabulary has 128 rows" in report["too_many_ids"]

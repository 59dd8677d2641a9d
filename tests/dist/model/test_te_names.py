"""A model's names, initial weights and frozen parameters do not depend on its kind of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.marks import needs_te
from tests.te_python import VERSION

pytestmark = pytest.mark.dist


@needs_te
def test_transformer_engines_layers_have_the_weights_of_local_ones(tmp_path: Path) -> None:
    checked_job(1, "tests.dist.model.te_names_worker", [str(tmp_path)], timeout_s=180, te=VERSION)
    (found,) = rank_reports(tmp_path, 1)
    for variant, differences in found.items():
        assert differences.pop("num_frozen") > 10, variant
        assert not any(differences.values()), f"{variant}: {differences}"

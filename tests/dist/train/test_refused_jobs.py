"""What this machine cannot run is refused in one line of one rank, before Megatron has groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

REFUSED = {
    "model.recompute=selective model.recompute_modules=[layernorm]": "recompute_modules=['layerno",
    "model.normalization=LayerNorm model.layernorm_zero_centered_gamma=true": "zero_centered_gamma",
    "model.gradient_accumulation_fusion=true": "gradient_accumulation_fusion=true cannot run here",
    "model.attention=te": "model.attention=te cannot run here",
    "optim.distributed_optimizer=true optim.overlap_param_gather=true": "true cannot run here",
}
# tests/unit/config and tests/unit/job/gpt have what else they refuse.
WEEKLY_CASES = {case for case in REFUSED if "zero_centered" not in case}
FREEZE = "model.freeze=[nothing.*]"
"""Names of parameters are known once a model has been built."""


@pytest.mark.parametrize("case", [*REFUSED, FREEZE])
def test_a_config_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    args = [str(tmp_path), *case.split()]
    checked_job(2, "tests.dist.train.refusal_worker", args, timeout_s=60, te="")
    first, second = rank_reports(tmp_path, 2)
    assert (first["code"], second["code"], second["text"]) == (2, 2, "")
    assert first["text"].startswith("megapack: ")
    assert len(first["text"].splitlines()) == 1
    assert REFUSED.get(case, "no parameter matches 'nothing.*'") in first["text"]
    assert first["had_groups"] == second["had_groups"] == (case == FREEZE)

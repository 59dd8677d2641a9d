"""One bit of one copy of a weight is found, named and raised on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.marks import needs_te
from tests.te_python import VERSION

pytestmark = pytest.mark.dist

# The tensor as it is saved.
EXPECTED = {
    "dp": "decoder.layers.3.mlp.linear_fc1.weight[48:96, 0:32]",
    "tp": "decoder.layers.2.input_layernorm.weight",
    "tied": "embedding.word_embeddings.weight",
    "experts": "decoder.layers.1.mlp.experts.experts.linear_fc2.weight[2:3, 0:32, 0:24]",
    "latent": "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
}


def check(folder: Path, names: list[str], te: str) -> None:
    checked_job(2, "tests.dist.model.replicas_worker", [str(folder), *names], timeout_s=120, te=te)
    first, second = rank_reports(folder, 2)
    assert first == second
    for name in names:
        before, after = first[name]
        assert before == ""
        assert after.startswith(f"ScheduleError: {EXPECTED[name]} must be equal on 2 ranks")
        assert "but ranks [1] differ from the other 1; 1 of the shared" in after


def test_a_changed_bit_is_found_on_every_kind_of_replica(tmp_path: Path) -> None:
    check(tmp_path, ["dp", "tp", "tied", "experts"], te="")


@needs_te
def test_layers_of_transformer_engine_begin_with_equal_whole_projections(tmp_path: Path) -> None:
    check(tmp_path, ["latent"], te=VERSION)


def test_the_main_job_does_not_train_on_them(tmp_path: Path) -> None:
    checked_job(2, "tests.dist.model.replicas_worker", [str(tmp_path)], timeout_s=120, te="")
    first, second = rank_reports(tmp_path, 2)
    assert first == second
    assert first.startswith("ScheduleError: decoder.final_layernorm.weight must be equal")
    assert not list(tmp_path.glob("runs/*"))

"""Megatron's DDP, clipping and distributed optimizer: every layout gives the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.checkpoint.optimizer_worker import CLIP
from tests.dist.spawn import checked_job
from tests.marks import needs_muon, needs_te
from tests.te_python import VERSION

pytestmark = pytest.mark.dist

# Others have the same parts.
WEEKLY_CASES = {
    *("2-1-1-1-distributed", "2-1-2-2-distributed", "2-1-2-1-adam", "loss_alone"),
    *("adam-adam", "muon-muon", "dp2"),
}


def train(
    folder: Path,
    dp: int,
    tp: int,
    pp: int,
    vpp: int,
    optimizer: str,
    frozen: bool = False,
    variant: str = "plain",
    split: tuple[str, ...] = (),
    te: str | None = None,
) -> list[Any]:
    """The results of each rank."""
    folder.mkdir()
    args = [str(folder), str(dp), str(tp), str(pp), str(vpp), optimizer, str(frozen)]
    args += [variant, *split]
    checked_job(dp * tp * pp, "tests.dist.checkpoint.optimizer_worker", args, timeout_s=180, te=te)
    ranks = [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]
    assert len(ranks) == dp * tp * pp
    return ranks


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (rank,) = train(tmp_path_factory.mktemp("single") / "out", 1, 1, 1, 1, "adam")
    return dict(rank)


@pytest.fixture(scope="module")
def single_muon(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (rank,) = train(tmp_path_factory.mktemp("single_muon") / "out", 1, 1, 1, 1, "muon")
    return dict(rank)


def piece(whole: torch.Tensor, rank: dict[str, Any], name: str, tp: int) -> torch.Tensor:
    """The part of a whole parameter that a rank holds."""
    if rank["partitions"][name] is None:
        return whole
    dim, stride = rank["partitions"][name]
    return torch.cat(whole.chunk(stride * tp, dim)[rank["tp_rank"] :: tp], dim)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "vpp", "optimizer"),
    [
        *((2, 1, 1, 1, "distributed"), (2, 1, 2, 2, "distributed")),
        *((2, 1, 2, 1, "adam"), (2, 2, 1, 1, "distributed")),
    ],
)
def test_three_clipped_steps_reach_the_same_weights(
    dp: int, tp: int, pp: int, vpp: int, optimizer: str, single: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train(tmp_path / "out", dp, tp, pp, vpp, optimizer)
    assert min(single["norms"]) > CLIP, "clipping would change nothing"
    assert len(set(single["norms"])) == 3, "the weights did not move"
    check_weights(ranks, single, tp)


@pytest.mark.parametrize(
    ("dp", "pp", "vpp", "text"),
    [(2, 2, 1, "E|t*8L"), (1, 2, 2, "Et*3|t|t*4|L")],
    ids=["embedding_alone", "loss_alone"],
)
def test_uneven_stages_reach_the_same_weights(
    dp: int, pp: int, vpp: int, text: str, single: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train(tmp_path / "out", dp, 1, pp, vpp, "distributed", split=(text,))
    check_weights(ranks, single, tp=1)


@pytest.mark.weekly
@needs_te
def test_whole_projections_of_latent_attention_over_transformer_engine(tmp_path: Path) -> None:
    (single,) = train(tmp_path / "single", 1, 1, 1, 1, "adam", variant="mla", te="")
    assert min(single["norms"]) > CLIP
    ranks = train(tmp_path / "tp2", 1, 2, 1, 1, "distributed", variant="mla", te=VERSION)
    check_weights(ranks, single, tp=2)


def check_weights(ranks: list[dict[str, Any]], single: dict[str, Any], tp: int) -> None:
    """Check that gradient norms and parameters of all ranks equal those of one process."""
    assert {name for rank in ranks for name in rank["parameters"]} == set(single["parameters"])
    for rank in ranks:
        assert rank["norms"][0] == pytest.approx(single["norms"][0], rel=1e-5)
        assert rank["norms"] == pytest.approx(single["norms"], rel=1e-4)
        for name, value in rank["parameters"].items():
            whole = piece(single["parameters"][name], rank, name, tp)
            assert torch.allclose(value, whole, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    ("single", "optimizer"),
    [
        *(("adam", "adam"), ("adam", "distributed")),
        pytest.param("muon", "muon", marks=needs_muon),
    ],
)
def test_a_stage_whose_parameters_are_all_frozen(
    single: str, optimizer: str, tmp_path: Path
) -> None:
    (alone,) = train(tmp_path / "single", 1, 1, 1, 1, single, frozen=True)
    ranks = train(tmp_path / "pp2", 1, 1, 2, 1, optimizer, frozen=True)
    assert not ranks[0]["trained"]
    assert ranks[1]["trained"]
    check_weights(ranks, alone, tp=1)


@needs_muon
@pytest.mark.parametrize(
    ("dp", "tp", "pp", "vpp", "split"),
    [
        pytest.param(2, 1, 1, 1, (), id="dp2"),
        pytest.param(1, 2, 1, 1, (), id="tp2"),
        # The first stage has no matrix but the embedding.
        pytest.param(1, 1, 2, 1, ("E|t*8L",), id="pp2"),
        pytest.param(1, 1, 2, 2, (), id="pp2_vpp2", marks=pytest.mark.weekly),
    ],
)
def test_muon_reaches_the_same_weights(
    dp: int,
    tp: int,
    pp: int,
    vpp: int,
    split: tuple[str, ...],
    single_muon: dict[str, Any],
    single: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Muon has the matrices of the layers, Adam the others."""
    ranks = train(tmp_path / "out", dp, tp, pp, vpp, "muon", split=split)
    assert min(single_muon["norms"]) > CLIP
    assert len(set(single_muon["norms"])) == 3, "the weights did not move"
    check_weights(ranks, single_muon, tp)
    in_muon = {name for rank in ranks for name in rank["in_muon"]}
    matrices = {n for n, p in single_muon["parameters"].items() if p.dim() == 2}
    assert in_muon == matrices - {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert not single["in_muon"]

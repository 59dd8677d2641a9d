"""The memory model's number of NCCL communicators is that of groups that the main job uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapack.config import load_config
from megapack.cost.communicators import num_communicators
from megapack.job.config.sections import TrainConfig
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

CONFIG = Path(__file__).parents[3] / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
ONE_STAGE = ("layout.pp=1", "layout.vpp=1")
EXPERTS = ("model.num_experts=4", "layout.ep=2")
WHOLE = "optim.distributed_optimizer=false"
# One step: which groups it uses does not depend on the number of samples.
SMALL = ("data.num_generated=16", "data.prompts_per_batch=4", "plan.global_batch_size=16")


CASES = [
    (1, [4], (*ONE_STAGE, "layout.dp=1")),
    (4, [9] * 4, ("train.executor=operations",)),
]
MORE_CASES = [
    (4, [9] * 4, (*ONE_STAGE, *EXPERTS, WHOLE, "layout.cp=2")),
    (4, [7] * 4, ()),
    (4, [6, 6, 6, 6], ("model.untie_embeddings=true",)),
    (4, [5, 4, 4, 5], ("layout.dp=1", "layout.pp=4", "layout.vpp=1")),
    (
        4,
        [7, 8, 8, 7],
        ("layout.dp=1", "layout.pp=4", "layout.vpp=1", "train.executor=operations", WHOLE),
    ),
    (
        4,
        [9] * 4,
        (*ONE_STAGE, *EXPERTS, "layout.tp=2", "layout.etp=2", "layout.sequence_parallel=true"),
    ),
]


@pytest.mark.parametrize(
    ("world", "numbers", "settings"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.rehearsal) for case in MORE_CASES)],
)
def test_it_is_the_number_of_groups_and_pairs_that_a_rank_uses(
    world: int, numbers: list[int], settings: tuple[str, ...], tmp_path: Path
) -> None:
    args = [str(tmp_path), str(CONFIG), *SMALL, *settings]
    checked_job(world, "tests.dist.ranks.communicators_worker", args, timeout_s=120)
    config = load_config(CONFIG, list(settings), TrainConfig)
    layout = config.layout.to_layout(world)
    expected = [
        num_communicators(
            layout,
            rank * layout.pp // world,
            executor=config.executor,
            distributed_optimizer=config.optim.distributed_optimizer,
            tied_embeddings=not config.model.untie_embeddings,
        )
        for rank in range(world)
    ]
    assert rank_reports(tmp_path, world) == expected == numbers

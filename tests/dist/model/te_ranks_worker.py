"""Rows over several ranks under Transformer Engine's contract, against rows of one rank.

torchrun --nproc-per-node 2 -m tests.dist.model.te_ranks_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack import Layout, Policy, launch
from megapack.loss import SFT
from megapack.model.attention.packed import gather_rows
from megapack.model.attention.paths import key_paths
from megapack.model.attention.sdpa import path_causal_attention
from megapack.model.attention.te_rows import hook_te_attention, te_attentions
from megapack.plan import Plan, StepPlan, check_plan
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.row_groups import RowGroups
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks
from tests.made_rows import Slot, made_ranks

LENGTHS = [44, 7, 12, 30, 5]
LAYOUT = Layout(dp=2)
MODELS = {
    "dense": dataclasses.replace(problem.MODEL, num_layers=2),
    "latent": dataclasses.replace(problem.MLA_MODEL, num_layers=2),
}
WIDE: list[Slot] = [[(2, [0])], [(1, [1, 2]), (1, [4])], [(2, [3])]]
FIXED: list[Slot] = [[(1, [0]), (1, [3])], [(1, [1, 2]), (1, [4])]]


class TEDotProductAttention(torch.nn.Module):
    """In place of Megatron's wrapper, whose kernels need a GPU.

    It keeps the ranks that the last row named, and cuts `cu_seqlens` by their number.
    """

    cp_stream: Any = object()

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.config = core.config
        self.layer_number = 1
        self.scale = core.softmax_scale
        self.cp_group: Any = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention of the group's slices."""
        if packed_seq_params.cp_group is not None:
            self.cp_group = packed_seq_params.cp_group
        elif packed_seq_params.local_cp_size is not None:
            assert packed_seq_params.local_cp_size == 1
            self.cp_group = None
        lengths = torch.diff(packed_seq_params.cu_seqlens_q).tolist()
        cp, rank = 1, 0
        if self.cp_group is not None:
            cp, rank = self.cp_group.size(), self.cp_group.rank()
        paths = key_paths(lengths, (), cp=cp, cp_rank=rank)
        key, value = gather_rows(key, value, paths.order_K, self.cp_group)
        return path_causal_attention(query, key, value, paths, self.scale).flatten(1)


def plan_of(slots: Sequence[Slot], policy: Policy) -> Plan:
    """The plan whose ranks run these micro-batches: width and samples, from DP rank 0 on."""
    ranks = made_ranks(slots, LENGTHS, LAYOUT)
    kept = tuple(range(len(LENGTHS)))
    step = StepPlan(ranks, len(slots), None, kept, ())
    plan = Plan((step,), LAYOUT, policy, 100, None, len(LENGTHS), None)
    check_plan(plan, LENGTHS)
    return plan


def gradient(adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch) -> Tensor:
    """This rank's gradients of a step."""
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    adapter.step(plan, batch, objective=SFT())
    return torch.cat([p.main_grad.flatten() for c in adapter.chunks for p in c.parameters()])


def compared(name: str) -> dict[str, float]:
    """Relative differences of the gradients to those of PackedSDPA on rows of one rank."""
    adapter = ScheduleAdapter(build_chunks(LAYOUT, model=MODELS[name]), layout=LAYOUT)
    generator = torch.Generator().manual_seed(7)
    batch = SampleBatch([torch.randint(0, 90, (n,), generator=generator) for n in LENGTHS])
    fixed = plan_of(FIXED, Policy())
    wide = plan_of(WIDE, Policy(context_parallel="dynamic"))
    wanted = gradient(adapter, fixed, batch)
    for module in list(adapter.chunks[0].modules()):
        if hasattr(module, "core_attention"):
            core = TEDotProductAttention(module.core_attention)
            # The layer that is replaced has the hooks of rotary embeddings.
            hooks = [name for name in vars(core) if name.startswith("_forward_")]
            vars(core).update({name: vars(module.core_attention)[name] for name in hooks})
            module.core_attention = core
    hook_te_attention(adapter.chunks)
    errors = {}
    # The fixed plan comes again after the wide one, whose last row named two ranks.
    for number, plan in enumerate([fixed, wide, fixed]):
        found = gradient(adapter, plan, batch)
        errors[f"step {number}"] = float((found - wanted).norm() / wanted.norm())
    # A second adapter would use the groups of the first.
    dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    cp = parallel_state.get_context_parallel_group()
    other = RowGroups(LAYOUT, cp=cp, dp_cp=dp_cp)
    other.make({2}, torch.device("cpu"))
    pair = [groups._groups[2] for groups in (other, adapter.runner.row_groups)]
    errors["same group"] = pair[0] is pair[1]
    cores = list(te_attentions(adapter.chunks[0].module))
    errors["left"] = sum(core.cp_group is not None for core in cores)
    errors["layers"] = len(cores)
    return errors


def main(out_dir: str) -> None:
    """Run both models; each rank writes what it found."""
    launch.start("cpu")
    found = {}
    for name in MODELS:
        found[name] = compared(name)
        end_model_parallel()
    (Path(out_dir) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

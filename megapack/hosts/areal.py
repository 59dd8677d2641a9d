"""AReaL: the micro-batches and the count that ranks agree on, with rows within the budget.

Without a layout they are those of AReaL's own packing algorithms. Checked against AReaL 1.0.4 and
2.0.0.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import HostRuntimeError
from megapack.hosts import patching
from megapack.hosts.shared.families import callers_tokens, real_tokens, shared_ids
from megapack.hosts.shared.options import HostOptions, PlannerOptions
from megapack.hosts.shared.rank_items import RankItems
from megapack.hosts.shared.rank_rows import Rows, agree_on_need

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = [
    "ArealOptions",
    "allocate_balanced_mbs_synced",
    "compute_forward_result",
    "configure",
]

logger = logging.getLogger(__name__)

_FORWARD_RESULT = "areal.engine.megatron_engine.MegatronEngine._compute_forward_result"


@dataclass(frozen=True, kw_only=True)
class ArealOptions(PlannerOptions):
    """Where the replacements may differ from AReaL's own behaviour."""

    restore_cp_outputs: bool = False
    """With cp > 1, give log-probs and values of forward passes in the order of the tokens. AReaL
    1.0.4 compares a rank's own logits with labels of other positions, see docs/hosts/areal.md. 2.0
    does not, and the option changes nothing there."""


_OPTIONS = HostOptions(ArealOptions())
configure = _OPTIONS.configure


def allocate_balanced_mbs_synced(
    mb_spec: Any, lens: Sequence[int], group: dist.ProcessGroup | None = None
) -> Rows:
    """Pack a rank's sequences into as many micro-batches as every other rank of the group has.

    Collective over `group`; None is all ranks. AReaL packs again until all ranks have the same
    count, and a rank that cannot leaves the others waiting; here all agree once, and a rank with
    fewer micro-batches packs once more or splits its heaviest ones.

    Args:
        mb_spec: AReaL's MicroBatchSpec.
        lens: tokens of each sequence, or of each `granularity` of them.

    Returns:
        The indices of each micro-batch, ascending; micro-batches by their first index, or with a
        configured layout in the order in which the pipeline runs them.

    Raises:
        HostRuntimeError: on every rank, if one has a sequence over the budget or too few sequences.
        ScheduleError: on every rank, if settings differ.
    """
    options = _OPTIONS.current
    capacity = int(mb_spec.max_tokens_per_mb)
    divisor = int(mb_spec.n_mbs_divisor or 1)
    token_ids = shared_ids(options, lambda: callers_tokens(lens, _tokens_of))

    def read() -> RankItems:
        return RankItems(
            lengths=np.asarray(lens, dtype=np.int64),
            max_tokens=capacity,
            budget="max_tokens_per_mb",
            partition=functools.partial(_partition, mb_spec),
            options=options,
            step=divisor,
            least=max(int(mb_spec.n_mbs or 1), divisor),
            token_ids=token_ids,
            work_of=_tokens_as_work,
            error=HostRuntimeError,
        )

    settings = f"{capacity} {mb_spec.n_mbs} {divisor} {options}"
    rank, need = agree_on_need(read, settings, group)
    rows = rank.rows(rank.shared_count(need))
    return rows if options.layout is not None else sorted(sorted(row) for row in rows)


def _partition(mb_spec: Any, tokens: list[int], count: int) -> Rows:
    """AReaL's own packing into `count` micro-batches or more; [] where it finds none."""
    from areal.utils.seqpack import get_allocate_fn

    allocate = get_allocate_fn(getattr(mb_spec, "packing_algorithm", "ffd"))
    try:
        rows = allocate(tokens, mb_spec.max_tokens_per_mb, count, mb_spec.n_mbs_divisor or 1)
    except RuntimeError:
        return []
    return [[int(i) for i in row] for row in rows]


def _tokens_as_work(lengths: Ints) -> Ints:
    return lengths


def compute_forward_result(self: Any, output: torch.Tensor, inputs: dict[str, Any]) -> Any:
    """Log-probs of next tokens, or a critic's values, of one micro-batch: [real tokens].

    Method of AReaL's MegatronEngine, which is called where the option changes nothing: with cp = 1,
    in tree training, and since AReaL 2.0, whose forward passes gather outputs before. 1.0 gives it
    this CP rank's share of them with cp > 1: tokens 0, 1, 6, 7 of a sequence of 8 on rank 0 of 2.
    With `restore_cp_outputs` the shares of all ranks are gathered, padding is removed, and values
    are those of cp = 1.

    Args:
        self: the engine.
        output: logits [tokens, vocabulary], or values [tokens, 1].
        inputs: AReaL's micro-batch; under CP with `_cp_` fields about the row before its split.
    """
    is_split = inputs.get("_cp_local_labels") is not None and not self.enable_tree_training
    if not is_split or not _OPTIONS.current.restore_cp_outputs:
        if is_split:
            _warn_of_positions()
        return patching.original(_FORWARD_RESULT)(self, output, inputs)
    host = importlib.import_module("areal.engine.megatron_engine")
    if self.config.is_critic:
        values = output.squeeze(-1)
    else:
        labels = inputs["_cp_local_labels"]
        values = host.gather_logprobs(output, labels, **_softmax_options(host, self))
    ends = inputs["_cp_padded_cu_seqlens"]
    whole = host.reassemble_cp_packed_logprobs(values, ends)
    padding = inputs.get("_cp_padding_length", 0)
    return host.unpad_logits(whole, padding, ends, inputs.get("_cp_old_cu_seqlens"))


def _softmax_options(host: Any, engine: Any) -> dict[str, Any]:
    is_split = host.mpu.get_tensor_model_parallel_world_size() > 1
    group = host.mpu.get_tensor_model_parallel_group() if is_split else None
    return {"temperature": engine.config.temperature, "tp_group": group}


@functools.cache
def _warn_of_positions() -> None:
    logger.warning(
        "areal: with cp > 1 forward passes give log-probs of other positions; set "
        "megapack.hosts.areal.configure(restore_cp_outputs=True) on all ranks"
    )


def _tokens_of(data: dict[str, Any]) -> Sequence[Any] | None:
    """The token ids of AReaL's padded batch."""
    ids, mask = data.get("input_ids"), data.get("attention_mask")
    return None if ids is None or mask is None else real_tokens(ids, mask)

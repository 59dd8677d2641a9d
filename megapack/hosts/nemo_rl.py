"""NeMo-RL: packers, `BatchedDataDict.shard_by_batch_size`, and the padding of its pipeline's rows.

The packers keep NeMo-RL's rules; if it requires more bins than a rule makes, the heaviest bins are
split. With a layout configured, batches are planned for its pipeline instead. Written for NeMo-RL's
commit 7ea279a.
"""

from __future__ import annotations

import enum
import functools
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megapack.cost.model import CostModel
from megapack.errors import ConfigError, HostAssertionError
from megapack.hosts import megatron_core, patching
from megapack.hosts.shared import bin_packers, nemo_rl_shards
from megapack.hosts.shared.native import NativeSettings
from megapack.hosts.shared.options import HostOptions, shares_prefixes
from megapack.hosts.shared.rank_rows import Rows, log_budget
from megapack.layout import Layout

logger = logging.getLogger(__name__)

__all__ = [
    "NemoRLOptions",
    "PackingMetrics",
    "configure",
    "get_packer",
    "megatron_forward_backward",
    "pack_sequence_parameters",
    "read_settings",
    "shard_by_batch_size",
]

_RULES: dict[str, bin_packers.Rule] = {
    "CONCATENATIVE": bin_packers.next_fit,
    "FIRST_FIT_DECREASING": bin_packers.first_fit_decreasing,
    "FIRST_FIT_SHUFFLE": bin_packers.first_fit_shuffle,
    "MODIFIED_FIRST_FIT_DECREASING": bin_packers.modified_first_fit_decreasing,
}
_WORKER_MODULES = "nemo_rl.models.megatron"
_HOST_MODULE = "nemo_rl.data.packing.algorithms"
_HOST_CLASSES = {
    "CONCATENATIVE": "ConcatenativePacker",
    "FIRST_FIT_DECREASING": "FirstFitDecreasingPacker",
    "FIRST_FIT_SHUFFLE": "FirstFitShufflePacker",
    "MODIFIED_FIRST_FIT_DECREASING": "ModifiedFirstFitDecreasingPacker",
}


@dataclass(frozen=True, kw_only=True)
class NemoRLOptions:
    """Where the replacements may differ from NeMo-RL's own behaviour."""

    layout: Layout | None = None
    """The job's layout; its dp is the number of shards. Sequences are distributed over shards and
    packed for its pipeline, and every M is one that its interleaved schedule runs. None: shards get
    the packer's bins in turn, without regard to the pipeline."""
    cost: CostModel | None = None
    """Seconds of a micro-batch, for planning with a layout; None counts its tokens and 256 more."""
    share_prefixes: bool = field(default_factory=shares_prefixes)
    """Sequences of a step with common beginnings are packed into one micro-batch, in which
    `megatron_core` lets them share these. The budget counts every copy."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.layout is None:
            raise ConfigError("cost is used with a layout only; set both")


_OPTIONS = HostOptions(NemoRLOptions())
configure = _OPTIONS.configure
_SETTINGS = NativeSettings(_OPTIONS, megatron_core.OPTIONS)


def read_settings(config: Any) -> None:
    """Set the options of `policy.megapack`; the driver's policy and its workers call it.

    Args:
        config: NeMo-RL's `policy`.

    Raises:
        ConfigError: an unknown key or a value that is refused.
    """
    _SETTINGS.take(config.get("megapack"), "policy.megapack")


class PackingMetrics:
    """Metrics over all packings, under NeMo-RL's names."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._packings: list[dict[str, float]] = []

    def update(
        self, sequence_lengths: Sequence[int], bins: Rows, bin_capacity: int
    ) -> dict[str, float]:
        """Add one packing; returns its own metrics."""
        stats = packing_stats(sequence_lengths, bins, bin_capacity)
        self._packings.append(stats)
        return stats

    def get_aggregated_stats(self) -> dict[str, float]:
        """Totals, and the mean, least and largest utilization; {} before the first packing."""
        if not self._packings:
            return {}
        names = self._packings[0]
        total = {name: sum(stats[name] for stats in self._packings) for name in names}
        used = [stats["average_utilization"] for stats in self._packings]
        wasted = [stats["waste_ratio"] for stats in self._packings]
        capacity = total["total_bin_capacity"]
        bins = total["num_bins"]
        # The fewest bins that could hold all tokens at the mean capacity, rounded up.
        fewest = -(-total["total_sequence_length"] * bins // capacity) if capacity else 0
        return {
            "total_sequences": total["num_sequences"],
            "total_bins": bins,
            "average_utilization": total["total_sequence_length"] / capacity if capacity else 0.0,
            "min_utilization": min(used),
            "max_utilization": max(used),
            "average_waste_ratio": total["total_waste"] / capacity if capacity else 0.0,
            "min_waste_ratio": min(wasted),
            "max_waste_ratio": max(wasted),
            "average_bin_count": bins / len(self._packings),
            "bin_efficiency": fewest / bins if bins else 0.0,
        }


class Packer(bin_packers.SequencePacker):
    """A packer that can keep metrics of its packings."""

    metrics: PackingMetrics | None = None

    def pack(self, sequence_lengths: Sequence[int]) -> Rows:
        bins = super().pack(sequence_lengths)
        if self.metrics is not None:
            self.metrics.update(sequence_lengths, bins, self.bin_capacity)
        return bins

    @property
    def collect_metrics(self) -> bool:
        return self.metrics is not None

    def compute_metrics(self, sequence_lengths: Sequence[int], bins: Rows) -> dict[str, float]:
        """Metrics of one packing, not added to the kept ones."""
        return packing_stats(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Metrics of all packings since the last reset; {} if the packer keeps no metrics."""
        return {} if self.metrics is None else self.metrics.get_aggregated_stats()

    def reset_metrics(self) -> None:
        if self.metrics is not None:
            self.metrics.reset()

    def print_metrics(self) -> None:
        """Log the aggregated metrics."""
        logger.info("packing: %s", self.get_aggregated_metrics() or "no metrics are kept")


def get_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Packer:
    """Make a packer by name or by the host's enum member.

    Args:
        algorithm: "concatenative", "first_fit_decreasing", "first_fit_shuffle" (here always the
            same order) or "modified_first_fit_decreasing".
        bin_capacity: padded tokens of a bin.
        collect_metrics: keep metrics of the packings.
        min_bin_count: least number of bins, none of them empty.
        bin_count_multiple: the number of bins is a multiple of it.

    Returns:
        a packer; where NeMo-RL is loaded, an instance of its class for the algorithm too.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    name, rule = bin_packers.find_rule(algorithm, _RULES)
    packer_class = bin_packers.class_for_host(Packer, _HOST_MODULE, _HOST_CLASSES[name])
    packer = packer_class(rule, bin_capacity, min_bin_count, bin_count_multiple)
    if collect_metrics:
        packer.metrics = PackingMetrics()
    return packer


def shard_by_batch_size(
    data: Any,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic_batching_args: dict[str, Any] | None = None,
    sequence_packing_args: dict[str, Any] | None = None,
) -> list[Any] | tuple[list[Any], list[int]]:
    """Split a BatchedDataDict into shards for the DP ranks; in NeMo-RL a method of `data`.

    `batch_size` consecutive rows (sequences) are one optimizer step, distributed over all shards.
    Sequence packing counts lengths padded to `sequence_length_pad_multiple` against
    `max_tokens_per_microbatch`.

    Args:
        data: has `select_indices`, `slice` and `data`, a dict of fields.
        shards: number of DP ranks.
        batch_size: rows of a step over all shards; None: all rows.
        allow_uneven_shards: the last shards may get fewer rows; without packing and steps only.
        dynamic_batching_args: as NeMo-RL's; not with `sequence_packing_args`.
        sequence_packing_args: as NeMo-RL's.

    Returns:
        shards: rows step after step. With packing or dynamic batching they have
            `micro_batch_indices` and `micro_batch_lengths`, with packing `elem_counts_per_gb` too.
        indices: only with packing or dynamic batching: the row of `data` of each row of the shards;
            shard after shard with packing, step after step with dynamic batching.

    Raises:
        HostAssertionError: rows that do not divide, or packing and dynamic batching together.
        PlanError: a sequence over the budget, or too few rows in a step for the least M.
    """
    if allow_uneven_shards and batch_size is not None:
        raise HostAssertionError("batch_size must be None if allow_uneven_shards is True")
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise HostAssertionError(
            "dynamic_batching_args and sequence_packing_args cannot be passed together; leave one"
        )
    steps = nemo_rl_shards.step_rows(data, shards, batch_size, allow_uneven_shards)
    if sequence_packing_args is not None:
        layout = _OPTIONS.current.layout
        packing = nemo_rl_shards.PackingArgs.read(
            data, sequence_packing_args, with_ids=_OPTIONS.current.share_prefixes
        )
        log_budget("NeMo-RL", packing.max_tokens, layout and layout.cp)
        if layout is None:
            packer = get_packer(
                sequence_packing_args["algorithm"],
                packing.max_tokens,
                min_bin_count=shards,
                bin_count_multiple=shards,
            )
            plan = [nemo_rl_shards.pack_step(packer, packing, rows, shards) for rows in steps]
        else:
            cost = _OPTIONS.current.cost
            if layout.pp > 1 and not any(s.host == "nemo_rl_rows" for s in patching.status()):
                _warn_of_padding()
            plan = nemo_rl_shards.plan_steps(packing, steps, shards, layout, cost)
        return nemo_rl_shards.packed_shards(data, packing, plan, shards)
    if dynamic_batching_args is not None:
        return nemo_rl_shards.dynamic_shards(data, steps, shards, dynamic_batching_args)
    return nemo_rl_shards.plain_shards(data, steps, shards)


@functools.cache
def _warn_of_padding() -> None:
    logger.warning(
        "NeMo-RL's workers pad each row to the longest one of their step, which these plans do not "
        "count: apply the patch nemo_rl_rows too, here and in the workers"
    )


def pack_sequence_parameters(
    megatron_cfg: dict[str, Any],
    pad_individual_seqs_to_multiple_of: int,
    max_seq_len_in_batch: int,
) -> tuple[int, int, int | None]:
    """How rows are padded, in tokens before CP; in NeMo-RL a function of its workers.

    Under the patch `nemo_rl_rows` rows are padded as without pipeline stages: rows of 96 and 60
    tokens stay as they are, where NeMo-RL makes 96 and 96 of them.

    Returns:
        the multiple for each sequence, the multiple for a row, and the length of all rows or None.
    """
    own = patching.original(f"{_WORKER_MODULES}.data._get_pack_sequence_parameters_for_megatron")
    padding: tuple[int, int, int | None] = own(
        {**megatron_cfg, "pipeline_model_parallel_size": 1},
        pad_individual_seqs_to_multiple_of,
        max_seq_len_in_batch,
    )
    return padding


def megatron_forward_backward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's step or forward-only pass, whose stages expect rows of any length.

    The patch `nemo_rl_rows` puts it into the workers.

    Raises:
        ConfigError: a setting of the model needs rows of one length.
    """
    from megatron.core.utils import get_model_config

    from megapack.schedule.overrides import config_with

    own = patching.original(f"{_WORKER_MODULES}.train.megatron_forward_backward")
    config = get_model_config(model)
    if config.pipeline_model_parallel_size == 1:
        return own(model, *args, **kwargs)
    _refuse_fixed_lengths(config)
    with config_with(config, {"variable_seq_lengths": True}):
        return own(model, *args, **kwargs)


def _refuse_fixed_lengths(config: Any) -> None:
    """Raise ConfigError where Megatron needs rows of one length."""
    dispatcher = getattr(config, "moe_token_dispatcher_type", None)
    if getattr(config, "num_moe_experts", None) and dispatcher == "allgather":
        raise ConfigError(
            "moe_token_dispatcher_type=allgather needs rows of one length; set alltoall, or leave "
            "out the patch nemo_rl_rows"
        )
    graphs = getattr(config, "cuda_graph_impl", "none")
    if getattr(config, "enable_cuda_graph", False) or graphs not in (None, "none"):
        raise ConfigError(
            f"CUDA graphs (cuda_graph_impl={graphs}) need rows of one length; turn them off, or "
            "leave out the patch nemo_rl_rows"
        )


def packing_stats(
    sequence_lengths: Sequence[int], bins: Rows, bin_capacity: int
) -> dict[str, float]:
    """Metrics of one packing; all 0 without bins.

    `bin_balance` is 1 minus the standard deviation (n - 1) of the bins' tokens over their mean.
    """
    loads = [sum(int(sequence_lengths[i]) for i in row) for row in bins]
    total = sum(loads)
    capacity = len(bins) * bin_capacity
    fewest = -(-total // bin_capacity)
    spread = statistics.stdev(loads) / statistics.fmean(loads) if len(bins) > 1 else 0.0
    return {
        "num_sequences": sum(map(len, bins)),
        "num_bins": len(bins),
        "total_sequence_length": total,
        "total_bin_capacity": capacity,
        "total_waste": capacity - total,
        "average_utilization": total / capacity if bins else 0.0,
        "waste_ratio": (capacity - total) / capacity if bins else 0.0,
        "bin_balance": 1.0 - spread if bins else 0.0,
        "theoretical_min_bins": fewest,
        "bin_efficiency": fewest / len(bins) if bins else 0.0,
    }

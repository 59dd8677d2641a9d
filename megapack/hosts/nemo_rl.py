"""NeMo-RL: packers, `BatchedDataDict.shard_by_batch_size`, and the padding of its pipeline's rows.

All of these call NeMo-RL's own. If it requires more bins than a packer makes, the heaviest bins are
split. With a layout configured, the bins of a step are a plan for its pipeline: NeMo-RL deals bins
out to the shards in turn, so they are listed as `[micro-batch][shard]`. Written for NeMo-RL's
commit 7ea279a.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, tee
from typing import Any

import numpy as np

from megapack.base.arrays import Ints, check_count
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError
from megapack.hosts import megatron_core, patching
from megapack.hosts.shared.bins import with_heaviest_split
from megapack.hosts.shared.families import (
    family_parts,
    has_lengths,
    members_of,
    plan_families,
)
from megapack.hosts.shared.images import GRIDS, Patches, patches_of, with_images
from megapack.hosts.shared.native import NativeSettings
from megapack.hosts.shared.options import HostOptions, PlannerOptions
from megapack.hosts.shared.rank_rows import Rows, log_budget, log_own
from megapack.layout import Layout
from megapack.policy import Policy

logger = logging.getLogger(__name__)

_WORKER_MODULES = "nemo_rl.models.megatron"


_OPTIONS = HostOptions(PlannerOptions())
configure = _OPTIONS.configure
_SETTINGS = NativeSettings(_OPTIONS, megatron_core.OPTIONS)


def read_settings(config: Any) -> None:
    """Set the options of `policy.megapack`; the driver's policy and its workers call it.

    Args:
        config: NeMo-RL's `policy`.

    Raises:
        ConfigError: an unknown key, a value that is refused, or what virtual stages do not run.
    """
    _SETTINGS.take(config.get("megapack"), "policy.megapack")
    megatron = config.get("megatron_cfg") or {}
    overrides = megatron.get("model_overrides") or {}
    vpp = overrides.get("virtual_pipeline_model_parallel_size") or 1
    check_count("virtual_pipeline_model_parallel_size", vpp)
    # Both look at one chunk.
    for key in ("draft", "router_replay"):
        if vpp > 1 and (config.get(key) or {}).get("enabled"):
            raise ConfigError(f"policy.{key} does not run with vpp={vpp}; turn one of them off")
    if (config.get("sequence_packing") or {}).get("enabled"):
        pp = megatron.get("pipeline_model_parallel_size") or 1
        _OPTIONS.current.refuse_other_stages(pp, vpp, "policy.megapack")
    else:
        log_own("NeMo-RL", "set policy.sequence_packing.enabled=true")
    if vpp > 1 and not any(s.host == "nemo_rl_vpp" for s in patching.status()):
        raise ConfigError(f"vpp={vpp} needs the patch nemo_rl_vpp; apply it here and in workers")


def get_packer(*args: Any, **named: Any) -> Any:
    """NeMo-RL's own packer, which makes missing bins by splitting the heaviest ones.

    Inside `shard_by_batch_size` it is one that packs as the options say.

    Raises:
        ValueError: NeMo-RL's own, on an unknown name or a number out of range.
    """
    own = patching.original("nemo_rl.data.packing.algorithms.get_packer")
    packer = with_heaviest_split(own(*args, **named))
    plan_with = _PLANNED.get()
    return packer if plan_with is None else plan_with(packer)


def shard_by_batch_size(
    data: Any,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic_batching_args: dict[str, Any] | None = None,
    sequence_packing_args: dict[str, Any] | None = None,
) -> list[Any] | tuple[list[Any], list[int]]:
    """Split a BatchedDataDict into shards for the DP ranks; in NeMo-RL a method of `data`.

    NeMo-RL's own method with its own checks. With sequence packing, and a layout or shared
    prefixes, the bins that it asks its packer for are planned.

    Returns:
        shards: rows step after step; with packing they have the boundaries of micro-batches.
        indices: only with packing or dynamic batching: the row of `data` of each row of the shards.

    Raises:
        PlanError: a sequence over the budget, or too few rows in a step for the least M.
    """
    own = patching.original(
        "nemo_rl.distributed.batched_data_dict.BatchedDataDict.shard_by_batch_size"
    )
    settings = (allow_uneven_shards, dynamic_batching_args, sequence_packing_args)
    options = _OPTIONS.current
    layout = options.layout
    plan_with = None
    if sequence_packing_args is not None:
        max_tokens = int(sequence_packing_args["max_tokens_per_microbatch"])
        log_budget("NeMo-RL", max_tokens, layout and layout.cp)
        shares = options.share_prefixes
        token_ids = _token_ids(data, sequence_packing_args) if shares else None
        if layout is not None or token_ids is not None:
            if layout is not None:
                _check_layout(layout, shards)
            patches = _patches(data)
            plan_with = functools.partial(_StepPacker, shards, options, token_ids, patches)
    before = _PLANNED.set(plan_with)
    try:
        return own(data, shards, batch_size, *settings)  # type: ignore[no-any-return]
    finally:
        _PLANNED.reset(before)


def _token_ids(data: Any, args: dict[str, Any]) -> list[Ints] | None:
    """The token ids of each row; None where the driver has placeholders of other lengths."""
    lengths = [int(length) for length in data.data[args["input_lengths_key"]]]
    ids = data.data[args["input_key"]].cpu().numpy()
    rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    return rows if has_lengths(rows, lengths) else None


def _patches(data: Any) -> Patches | None:
    """Of the images of each row, whose grids are in NeMo-RL's `PackedTensor`s."""
    grids = {name: data.data[name] for name in GRIDS if name in data.data}
    num_rows = len(next(iter(grids.values()), ()))
    return patches_of(
        {name: packed.slice([row]).as_tensor() for name, packed in grids.items()}
        for row in range(num_rows)
    )


def _check_layout(layout: Layout, shards: int) -> None:
    if layout.dp != shards:
        raise ConfigError(f"the configured layout has dp={layout.dp}, the batch {shards} shards")
    if layout.pp > 1 and not any(s.host == "nemo_rl_rows" for s in patching.status()):
        _warn_of_padding()


@dataclass
class _StepPacker:
    """Packs the sequences of one step after the other, which NeMo-RL's method gives it in turn."""

    shards: int
    options: PlannerOptions
    token_ids: list[Ints] | None
    """Of all rows, to pack rows with common beginnings together."""
    patches: Patches | None
    """Of the images of all rows."""
    packer: Any
    """NeMo-RL's own."""
    start: int = 0
    """The first row of the step."""

    def pack(self, sequence_lengths: Sequence[int]) -> Rows:
        """Bins of one step: micro-batch 0 of each shard, then micro-batch 1 of each, ..."""
        padded = np.array(sequence_lengths, dtype=np.int64)
        own = slice(self.start, self.start + padded.size)
        ids = None if self.token_ids is None else self.token_ids[own]
        patches = None if self.patches is None else self.patches[own]
        self.start += padded.size
        if self.options.layout is None:
            rows: Rows = self._pack_families(padded, ids) or self.packer.pack(sequence_lengths)
            return rows
        return self._plan(padded, ids, patches, self.options.layout)

    def _pack_families(self, padded: Ints, ids: list[Ints] | None) -> Rows | None:
        """Bins of whole parts of families; None if there are none, or they do not fill the bins."""
        if ids is None:
            return None
        part_of = family_parts(ids, padded, None, self.packer.bin_capacity, num_rows=self.shards)
        if part_of is None:
            return None
        parts = members_of(part_of)
        with contextlib.suppress(ValueError):
            bins = self.packer.pack([int(padded[part].sum()) for part in parts])
            return [sorted(chain.from_iterable(parts[p] for p in row)) for row in bins]
        return None

    def _plan(
        self, padded: Ints, ids: list[Ints] | None, patches: Patches | None, layout: Layout
    ) -> Rows:
        # A shard cannot express a micro-batch without rows.
        policy = Policy(oversize="error", unreachable="error")
        settings = with_images(
            patches, padded, layout=layout, cost=self.options.cost, policy=policy
        )
        settings["max_tokens_per_gpu"] = self.packer.bin_capacity // layout.cp
        plan = None if ids is None else plan_families(ids, padded, [0] * padded.size, **settings)
        plan = plan or build_dp_schedule(padded, **settings)
        (step,) = plan.steps
        micro_batches = chain.from_iterable(zip(*step.ranks, strict=True))
        return [list(micro_batch.samples) for micro_batch in micro_batches]


_PLANNED: ContextVar[Callable[[Any], _StepPacker] | None] = ContextVar("planned", default=None)
"""What `get_packer` makes its packer into, inside of `shard_by_batch_size`."""


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


def megatron_forward_backward(model: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's step or forward-only pass, whose stages expect rows of any length.

    Each chunk of a virtual stage reads the micro-batches for itself.

    The patch `nemo_rl_rows` puts it into the workers.

    Raises:
        ConfigError: a setting of the model needs rows of one length.
    """
    from megatron.core.utils import get_model_config

    from megapack.hosts.shared.chunks import OneModel
    from megapack.model.replaced import replaced

    own = patching.original(f"{_WORKER_MODULES}.train.megatron_forward_backward")
    config = get_model_config(model)
    if config.pipeline_model_parallel_size == 1:
        return own(model, data_iterator, *args, **kwargs)
    _refuse_fixed_lengths(config)
    last = model
    if isinstance(model, OneModel):
        model = list(model.chunks)
        last = model[-1]
        data_iterator = list(tee(data_iterator, len(model)))
    scaling = _scaling_logits(last, kwargs.pop("sampling_params", None))
    with replaced(config, variable_seq_lengths=True), scaling:
        return own(model, data_iterator, *args, **kwargs)


def _scaling_logits(chunk: Any, sampling: Any) -> contextlib.AbstractContextManager[Any]:
    """Divide logits by the temperature; NeMo-RL divides the hidden states of stages, too."""
    from megapack.model.head import unwrapped

    def divide(_: Any, __: Any, output: Any) -> Any:
        return (output[0] if isinstance(output, tuple) else output).div_(sampling.temperature)

    if not sampling or sampling.temperature == 1 or not unwrapped(chunk).post_process:
        return contextlib.nullcontext()
    # At the end of a block that it opens, torch removes a hook.
    hook: contextlib.AbstractContextManager[Any] = chunk.register_forward_hook(divide)
    return hook


def get_model(*args: Any, **kwargs: Any) -> list[Any]:
    """The model that NeMo-RL's setup makes: its worker keeps the first of this list.

    The patch `nemo_rl_vpp` puts it into the workers.

    Returns:
        one model, which has all chunks of the rank if there are several.
    """
    from megapack.hosts.shared.chunks import OneModel

    own = patching.original(f"{_WORKER_MODULES}.setup.get_model")
    chunks: list[Any] = own(*args, **kwargs)
    return chunks if len(chunks) == 1 else [OneModel(chunks)]


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

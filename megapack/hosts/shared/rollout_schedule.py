"""Schedules of whole rollouts, in the format of slime and miles.

    samples of R rollouts -> steps of `global_batch_size` rollouts -> Plan -> lists of the host

The host's arguments give the budget per GPU and the model's sizes. Rollouts that do not fill a step
are left out, as in the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from megapack.cost.model import cost_in_tokens
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, HostAssertionError, PlanError
from megapack.hosts import megatron_core, patching
from megapack.hosts.shared.families import callers_data, plan_families
from megapack.hosts.shared.flops import model_flops
from megapack.hosts.shared.images import DECODER_FLOPS, patches_of, with_images
from megapack.hosts.shared.native import NativeSettings, Provider
from megapack.hosts.shared.options import HostOptions, shares_prefixes
from megapack.hosts.shared.rank_rows import log_budget, log_own
from megapack.layout import Layout
from megapack.plan.plan import Plan
from megapack.policy import Policy

CountRule = Literal["multiple", "legal"]
Unreachable = Literal["drop", "error"]

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
"""partitions[dp][sample], micro_batch_indices[dp][micro-batch][index into partitions[dp]],
num_microbatches[step], rollouts kept[step]."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options that `configure` of slime and miles sets.

    Raises:
        ConfigError: a value that is not allowed.
    """

    count_rule: CountRule = "multiple"
    """"multiple": M is a multiple of G, as the host's tests require. "legal": every M that
    Megatron runs; needs `args.pipeline_model_parallel_size`."""
    unreachable: Unreachable = "drop"
    """If a step's samples fill no allowed number of micro-batches: drop whole trailing rollouts, or
    raise. Padding micro-batches are not an option: the host's batches cannot be empty."""
    search: int | None = None
    """Evaluations of the planner's search per step. None: the planner's default if the host's flags
    ask for balance; otherwise 8 per rank, which takes about as long as the host's first-fit."""
    share_prefixes: bool = field(default_factory=shares_prefixes)
    """Samples with common beginnings are packed into one row, in which `megatron_core` lets them
    share these. The budget counts every copy."""

    def __post_init__(self) -> None:
        for name, choices in (("count_rule", CountRule), ("unreachable", Unreachable)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name}={getattr(self, name)!r}; set one of {get_args(choices)}")
        if self.search is not None:
            Policy(search=self.search)

    def policy(self, dp: int, *, balanced: bool) -> Policy:
        """The planner's policy on `dp` ranks."""
        search = self.search
        if search is None:
            search = Policy.search if balanced else 8 * dp
        return Policy(count_rule=self.count_rule, unreachable=self.unreachable, search=search)


OPTIONS = HostOptions(RolloutOptions())
"""Of slime and of miles; a process runs one of them."""
SETTINGS = NativeSettings(OPTIONS, megatron_core.OPTIONS)


def read_settings(args: Any) -> None:
    """Set the options of `--megapack-...`; the host's actors call it with their arguments.

    Raises:
        ConfigError: an unknown name or a value that is refused.
    """
    SETTINGS.take_arguments(args)


def with_settings(add_custom_arguments: Provider | None) -> Provider:
    """What adds a host's caller's arguments, and before them one `--megapack-...` for each option.

    The patches give it to the hosts' functions that make their arguments.
    """
    if add_custom_arguments is None:
        return SETTINGS.add_arguments
    return lambda parser: add_custom_arguments(SETTINGS.add_arguments(parser))


def log_static(host: str) -> None:
    """Say once that static batches are the host's own."""
    log_own(host, "set --use-dynamic-batch-size and --max-tokens-per-gpu")


def own_schedule(host: str, *args: Any, **ids: Any) -> Schedule:
    """The host's own schedule, which it makes without dynamic batches."""
    log_static(host)
    own = patching.original(f"{host}.utils.dp_schedule.build_dp_schedule")
    return own(*args, **ids)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Rollouts:
    """The samples that are planned, and the number of rollouts of each step."""

    samples: list[int]
    """Indices into the host's samples."""
    rollout_of: list[int]
    """The rollout of each planned sample, numbered in order of first appearance."""
    per_step: list[int]
    """Number of rollouts of each step."""

    @classmethod
    def read(
        cls,
        rollout_indices: Sequence[Any],
        global_batch_size: int,
        *,
        partial: bool = False,
        noun: str = "rollouts",
    ) -> Rollouts:
        """Make steps of `global_batch_size` rollouts; with `partial`, a last step of what is left.

        Args:
            noun: what the host calls rollouts, for the error.

        Raises:
            HostAssertionError: fewer rollouts than a step needs.
        """
        number_of = {index: k for k, index in enumerate(dict.fromkeys(rollout_indices))}
        num_rollouts = len(number_of)
        num_whole_steps = num_rollouts // global_batch_size if global_batch_size > 0 else 0
        if num_whole_steps < 1:
            raise HostAssertionError(
                f"num_{noun} ({num_rollouts}) < global_batch_size ({global_batch_size}); give at "
                f"least one step's {noun}"
            )
        per_step = [global_batch_size] * num_whole_steps
        if partial and num_rollouts > sum(per_step):
            per_step.append(num_rollouts - sum(per_step))
        rollout_of = [number_of[index] for index in rollout_indices]
        samples = [i for i, rollout in enumerate(rollout_of) if rollout < sum(per_step)]
        return cls(samples, [rollout_of[i] for i in samples], per_step)

    @property
    def ids(self) -> list[int] | None:
        """`rollout_of`; None, which is faster, if every sample is its own rollout."""
        return None if sum(self.per_step) == len(self.samples) else self.rollout_of


def layout_of(args: Any, config: Mapping[str, Any]) -> Layout:
    """The layout in the host's parallel config and Megatron's arguments.

    Args:
        args: `pipeline_model_parallel_size`, `tensor_model_parallel_size`,
            `expert_model_parallel_size` and `expert_tensor_parallel_size` are read if they are
            present. The last is tp if it is absent, and without expert parallelism it changes no
            plan.
        config: `dp_size`, `cp_size`, `vpp_size` (None is 1) and
            `microbatch_group_size_per_vp_stage`.
    """
    group = config["microbatch_group_size_per_vp_stage"] or 1
    vpp = config["vpp_size"] or 1
    pp = getattr(args, "pipeline_model_parallel_size", None) or 1
    if vpp > 1 and pp == 1:
        # The arguments do not give pp; Megatron's G is pp unless a larger one was set.
        pp = group
    vpp = vpp if pp > 1 else 1
    tp = getattr(args, "tensor_model_parallel_size", None) or 1
    ep = getattr(args, "expert_model_parallel_size", None) or 1
    etp = getattr(args, "expert_tensor_parallel_size", None) or tp
    return Layout(
        dp=config["dp_size"],
        cp=config["cp_size"],
        tp=tp,
        ep=ep,
        etp=etp if ep > 1 else 1,
        pp=pp,
        vpp=vpp,
        microbatch_group_size=group if vpp > 1 else None,
    )


def plan_dynamic(
    args: Any,
    config: Mapping[str, Any],
    lengths: Sequence[int],
    rollouts: Rollouts,
    *,
    host: str,
) -> Schedule:
    """Plan rows of at most `args.max_tokens_per_gpu`.

    Ranks are balanced by FLOPs if the arguments have the model's sizes, otherwise by the default
    cost. The search may take longer if the host's flags ask for balance.

    Args:
        config: see `layout_of`.
        lengths: tokens of each of the host's samples.

    Raises:
        HostAssertionError: no budget, or a step that no allowed M fits; it is a ValueError too.
    """
    if args.max_tokens_per_gpu is None:
        raise HostAssertionError("use_dynamic_batch_size without max_tokens_per_gpu; set it")
    options = OPTIONS.current
    layout = layout_of(args, config)
    log_budget(host, args.max_tokens_per_gpu * layout.cp, layout.cp)
    own_lengths = [lengths[i] for i in rollouts.samples]
    flops = model_flops(args)
    cost = None if flops is None else cost_in_tokens(layout, per_token_sq=flops[1] / flops[0])
    balanced = any(getattr(args, flag, False) for flag in ("balance_data", "balance_by_flops"))
    data, token_ids = callers_data(lengths, lambda data: data.get("tokens"))
    images = data.get("multimodal_train_inputs")
    patches = None if images is None else patches_of(images[i] for i in rollouts.samples)
    scale = 1.0 if flops is None else DECODER_FLOPS / flops[0]
    settings = with_images(
        patches,
        own_lengths,
        layout=layout,
        cost=cost,
        policy=options.policy(layout.dp, balanced=bool(balanced)),
        # slime's towers are whole on each tensor-parallel rank, those of Megatron-Bridge are split.
        scale=scale if host == "slime" else scale / layout.tp,
    )
    settings["max_tokens_per_gpu"] = int(args.max_tokens_per_gpu)
    slots = data.get("adapter_slots")
    if slots is not None:
        settings["adapter_ids"] = [slots[i] for i in rollouts.samples]
        # miles divides an adapter's gradient by the samples that it had before.
        settings["policy"] = replace(settings["policy"], unreachable="error")
    if options.share_prefixes and token_ids is not None:
        plan = plan_families(
            [token_ids[i] for i in rollouts.samples],
            own_lengths,
            [rollout // rollouts.per_step[0] for rollout in rollouts.rollout_of],
            **{**settings, "policy": replace(settings["policy"], unreachable="error")},
        )
        if plan is not None:
            return _lists_of(plan, rollouts.samples, rollouts.per_step)
    try:
        plan = build_dp_schedule(
            own_lengths,
            rollout_ids=rollouts.ids,
            global_batch_size=rollouts.per_step[0],
            **settings,
        )
    except PlanError as error:
        problem = str(error).partition(";")[0]
        align_to = layout.dp * (layout.group_size if layout.vpp > 1 else 1)
        raise HostAssertionError(
            f"cannot align micro-batches to align_to={align_to}: {problem}; set another "
            "global_batch_size, n_samples_per_prompt or max_tokens_per_gpu"
        ) from error
    kept = [len(step.kept_rollouts) for step in plan.steps]
    return _lists_of(plan, rollouts.samples, kept)


def _lists_of(plan: Plan, samples: list[int], kept: Sequence[int]) -> Schedule:
    dp = plan.layout.dp
    partitions: list[list[int]] = [[] for _ in range(dp)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp)]
    for step in plan.steps:
        for rank, rows in enumerate(step.ranks):
            for row in rows:
                start = len(partitions[rank])
                partitions[rank] += [samples[i] for i in row.samples]
                micro_batch_indices[rank].append(list(range(start, len(partitions[rank]))))
    counts = [len(step.ranks[0]) for step in plan.steps]
    return partitions, micro_batch_indices, counts, list(kept)

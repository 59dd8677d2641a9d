"""UniRL: micro-batches of one data-parallel rank under a token budget.

    lengths -> equal updates in track order -> rows under the budget -> K rows, as many as the rank
    that needs most -> an order of the track, and ranges of it

Ranks run collectives in every micro-batch (FSDP), so they need equal counts. They agree on the
counts of all updates at once; either all ranks go on or all raise.

The patch puts this into UniRL's `TrainStack`; `plan_micro_batches` is for a stack of one's own.

Modules:
    plan: micro-batches of a track, as many on every rank
"""

from __future__ import annotations

import dataclasses
import logging
from itertools import chain
from typing import Any, Literal

from megapack.base.arrays import check_count
from megapack.errors import ConfigError, PlanError
from megapack.hosts import patching
from megapack.hosts.shared.rank_rows import log_own
from megapack.hosts.unirl.plan import MicroPlan, Range, plan_micro_batches

__all__ = [
    "MicroPlan",
    "init_stack",
    "optimizer_step_slices",
    "plan_micro_batches",
    "prepare_segment",
    "train",
    "trimmed",
]

logger = logging.getLogger(__name__)

_STACK = "unirl.train.stack.TrainStack"


def init_stack(
    self: Any,
    *,
    algorithm: Any,
    micro_token_budget: int | None = None,
    micro_cost_model: str = "dense",
    **own: Any,
) -> None:
    """`TrainStack.__init__` with a token budget.

    Args:
        micro_token_budget: computed tokens per micro-batch; None: `micro_batch_size` samples.
        micro_cost_model: "dense", the padded rectangle that UniRL's stages compute.
        own: what UniRL's takes, too.

    Raises:
        ConfigError: no budget, or the loss does not go with one.
    """
    patching.original(f"{_STACK}.__init__")(self, algorithm=algorithm, **own)
    check_count("micro_token_budget", micro_token_budget)
    if micro_token_budget is not None and micro_cost_model != "dense":
        raise ConfigError(f"{micro_cost_model!r}: UniRL's replays pad; set micro_cost_model=dense")
    self.micro_plan = None
    self.micro_token_budget = micro_token_budget
    if micro_token_budget is not None:
        mean_over(algorithm)
        logger.info("UniRL counts tokens per micro-batch: token_budget=%d", micro_token_budget)
    else:
        log_own("UniRL", "set micro_token_budget in the recipe's stack")


def optimizer_step_slices(self: Any, total: int) -> list[list[Range]]:
    """`TrainStack._optimizer_step_slices`: the plan's ranges, or by count without a plan.

    With a plan these are positions in its order, not in the track.
    """
    plan = getattr(self, "micro_plan", None)
    if plan is None:
        by_count: list[list[Range]] = patching.original(f"{_STACK}._optimizer_step_slices")(
            self, total
        )
        return by_count
    return [list(update) for update in plan.updates]


def prepare_segment(self: Any, resp_track: Any) -> None:
    """`TrainStack.prepare_segment`: plan the track, and replay its anchors by micro-batch.

    Collective with a budget. Anchors are put back into track order.
    """
    self.micro_plan = _plan_of_track(self, resp_track)
    if self.micro_plan is None:
        patching.original(f"{_STACK}.prepare_segment")(self, resp_track)
        return
    import torch

    names = replayed_anchors(self.algorithm, resp_track.segment)
    if not names:
        self.algorithm.prepare_segment(conditions=resp_track.conditions, segment=resp_track.segment)
        return
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for start, end in chain.from_iterable(self.micro_plan.updates):
        micro, filled = _micro_batch(resp_track, self.micro_plan, start, end)
        self.algorithm.prepare_segment(conditions=micro.conditions, segment=micro.segment)
        for name, values in parts.items():
            value = getattr(micro.segment, name)
            if value is None:
                raise PlanError(f"{type(self.algorithm).__name__} left its anchor {name} empty")
            values.append(value[:0] if filled else value)
    arranged = resp_track.segment.select(self.micro_plan.order)
    for name, values in parts.items():
        setattr(arranged, name, torch.cat(values))
    in_track_order = arranged.select(self.micro_plan.places)
    for name in names:
        setattr(resp_track.segment, name, getattr(in_track_order, name))


def train(
    self: Any, resp_track: Any, *, micro_slices: list[Range], training_progress: float
) -> Any:
    """`TrainStack.train`: one optimizer step.

    With a plan, micro-batches weigh their share of samples or of response tokens, and the loss is
    the update's mean in place of UniRL's sum over micro-batches.

    Returns:
        TrainStepResult; with a budget it has the metrics `num_micro_batches` and
        `packing_efficiency`.
    """
    plan: MicroPlan | None = getattr(self, "micro_plan", None)
    if plan is None:
        own_train = patching.original(f"{_STACK}.train")
        return own_train(
            self, resp_track, micro_slices=micro_slices, training_progress=training_progress
        )
    from unirl.train.stack import TrainStepResult, aggregate_numeric_metrics

    if resp_track.advantages is None:
        raise PlanError("the track has no advantages; compute them before train_track")
    update = plan.updates.index(micro_slices)
    over_tokens = mean_over(self.algorithm) == "tokens"
    weights = plan.token_shares(update) if over_tokens else plan.sample_shares(update)
    own = {"num_micro_batches": float(len(micro_slices)), "packing_efficiency": plan.efficiency}
    self.fsdp_backend.zero_grad()
    results, metrics = [], []
    loss = 0.0
    for (start, end), weight in zip(micro_slices, weights, strict=True):
        # UniRL may reduce gradients in the backward of the last micro-batch alone.
        self.fsdp_backend.set_grad_sync(end == micro_slices[-1][1])
        micro, filled = _micro_batch(resp_track, plan, start, end)
        result = self.algorithm.compute_loss_and_backward(
            conditions=micro.conditions,
            segment=micro.segment,
            advantages=micro.advantages,
            training_progress=training_progress,
            loss_scale=weight,
        )
        results.append(result)
        loss += weight * result.loss
        if result.metrics and not filled:
            metrics.append(result.metrics)
    if not all(result.has_backward for result in results):
        raise PlanError("a micro-batch had no backward, so gradients were not reduced")
    norm = self.fsdp_backend.optimizer_step(max_grad_norm=self.max_grad_norm)
    return TrainStepResult(
        loss=loss,
        grad_norm=float(norm),
        lr=self._current_lr(),
        has_backward=True,
        micros=results,
        metrics={**aggregate_numeric_metrics(metrics), **own},
    )


def _plan_of_track(stack: Any, track: Any) -> MicroPlan | None:
    """None: by count, because there is no budget or a rank has no lengths. Collective."""
    budget = getattr(stack, "micro_token_budget", None)
    if budget is None:
        return None
    num_samples = int(track.batch_size)
    prompts = _prompt_lengths(track, num_samples)
    # Without the prompts' tokens no budget can be counted.
    return plan_micro_batches(
        None if prompts is None else _segment_lengths(track, num_samples),
        num_samples=num_samples,
        num_updates=stack.num_updates_per_batch,
        micro_token_budget=budget,
        prompt_lengths=prompts,
    )


def mean_over(algorithm: Any) -> Literal["samples", "tokens"]:
    """What a micro-batch's loss is the mean of.

    Raises:
        ConfigError: neither.
    """
    name = type(algorithm).__name__
    mode = str(getattr(algorithm, "loss_agg_mode", None))
    if mode == "token-mean":
        return "tokens"
    if name == "DRPO" and mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"loss_agg_mode={mode!r}: DRPO does not know it and takes the mean over tokens; set "
            "token-mean or seq-mean-token-sum-norm"
        )
    if mode.startswith("seq-mean"):
        return "samples"
    raise ConfigError(
        f"loss_agg_mode={mode!r} of {name} is no mean over sequences or tokens, so its gradient "
        "would change with the micro-batches; set token-mean or a seq-mean mode, or "
        "micro_token_budget=null"
    )


def replayed_anchors(algorithm: Any, segment: Any) -> tuple[str, ...]:
    """Fields of the segment that the algorithm's `prepare_segment` replays."""
    if algorithm.recomputes_anchor():
        return tuple(algorithm.anchor_fields)
    # DRPO replays the whole track at once and declares no field.
    replays = getattr(algorithm, "old_logp_source", None) == "replay"
    return ("log_probs",) if replays and segment.log_probs is not None else ()


def _micro_batch(track: Any, plan: MicroPlan, start: int, end: int) -> tuple[Any, bool]:
    """The samples of a range as the plan counts them, and whether a response was put in."""
    return with_response(trimmed(track.select(plan.order[start:end])))


def trimmed(micro: Any) -> Any:
    """The micro-batch, its prompts padded to the longest of its own.

    A track's prompts are padded to the track's longest, and UniRL's replays of Qwen3 compute what
    they are given. Only columns that are padding in every prompt are cut off; positions are counted
    from attention masks, so log-probs and gradients stay.

    Args:
        micro: samples of a track, as `select` and `slice` give them.
    """
    lengths = _prompt_lengths(micro, int(micro.batch_size))
    if lengths is None:
        return micro
    prompt = micro.conditions["prompt"]
    # A replay reads the first log-prob behind the prompt's last column, so one column stays.
    width = max(1, *lengths)
    own = {name: getattr(prompt, name)[:, :width] for name in ("input_ids", "attention_mask")}
    conditions = {**micro.conditions, "prompt": dataclasses.replace(prompt, **own)}
    return dataclasses.replace(micro, conditions=conditions)


def with_response(micro: Any) -> tuple[Any, bool]:
    """The micro-batch; one without any response token with a token of no advantage, and True.

    UniRL skips forward and backward of micro-batches without tokens, and the other ranks would wait
    in FSDP's collectives. With an advantage of 0 the loss and its gradient are exactly 0.
    """
    import torch

    segment = micro.segment
    if segment.tokens is None or len(segment.tokens):
        return micro, False
    num_empty = int(micro.batch_size) - 1

    def one_value(packed: Any) -> Any:
        return None if packed is None else [packed.new_zeros(1), *[packed[:0]] * num_empty]

    packed = {name: one_value(getattr(segment, name)) for name in ("tokens", "log_probs")}
    filled = type(segment).pack(**packed, loss_mask=one_value(segment.loss_mask))
    advantages = (
        micro.advantages if micro.advantages is None else torch.zeros_like(micro.advantages)
    )
    return dataclasses.replace(micro, segment=filled, advantages=advantages), True


def _segment_lengths(part: Any, num_samples: int) -> list[int] | None:
    lengths = getattr(getattr(part, "segment", None), "lengths", None)
    if lengths is None or len(lengths) != num_samples:
        return None
    return [int(length) for length in lengths]


def _prompt_lengths(part: Any, num_samples: int) -> list[int] | None:
    """Columns up to each prompt's last token, by the attention mask [samples, columns] of
    `part.conditions["prompt"]`; None without such a mask."""
    mask = getattr(part.conditions.get("prompt"), "attention_mask", None)
    if mask is None or mask.ndim != 2 or len(mask) != num_samples or not mask.numel():
        return None
    is_token = mask.ne(0).long()
    ends: list[int] = (
        (is_token * is_token.new_tensor(range(1, mask.shape[1] + 1))).amax(-1).tolist()
    )
    return ends

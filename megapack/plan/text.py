"""The text form of a plan, and the reader of its JSON. A payload is the plan as JSON types.

The text: header lines `key value`, then per step a `step` line and one line per rank with a cell
per micro-batch. A cell reads

    samples:row_tokens:tokens:tokens_sq          0,3,5:1024:1000:340418
    samples:row_tokens:tokens:tokens_sq:padded   if the row is longer than its padded tokens
    samples:row_tokens:tokens:tokens_sq:padded:shared   if its samples share tokens
    samples:row_tokens:tokens:tokens_sq:padded:shared:width   if so many ranks share the row
    samples:row_tokens:tokens:tokens_sq:padded:shared:width:start:end   if it has only this piece of
                                                                        its first sample; two more
                                                                        for each other piece
    -:row_tokens                                 a padding micro-batch

If the step has orders, a line for each stage of each rank follows:

    order 0 1 | 0F0 0B0 1F0 1B0      what stage 1 of rank 0 runs, see `plan.order`

and if its samples have images, a line for each different one:

    image ["a cat", 64, 16, 3, [0, 5]]   key, patches, tokens, the GPU that encodes it, its samples

Consecutive rollout ids are written as a range, `0..2047`. A plan without `colocate_ids` has no such
line, and neither has one without `prefixes`, `row_lengths` or `adapter_ids`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from megapack.base.arrays import is_id
from megapack.base.files import strict_json
from megapack.errors import MegapackError, PlanError
from megapack.layout import Layout
from megapack.policy import Policy

P = TypeVar("P")

# Sizes are int64.
_MAX_COUNT = 2**63 - 1
_REMEDY = "give the plan as it was written"

_TITLE = "megapack plan"
_CELLS = "# cells: samples:row_tokens:tokens:tokens_sq[:padded_tokens]"
# In the JSON that a run writes: the cost model that it planned with. It is not part of the plan.
COST = "cost"


def format_plan(payload: Mapping[str, Any]) -> str:
    """The text form of a payload."""
    lines = [_TITLE, *(f"{key} {json.dumps(payload[key])}" for key in payload if key != "steps")]
    lines.append(_CELLS)
    for number, step in enumerate(payload["steps"]):
        lines.append(f"step {number}")
        lines += [f"{key} {_format_value(step[key])}" for key in _STEP if key != "ranks"]
        for rank, row in enumerate(step["ranks"]):
            lines.append(f"rank {rank} | " + " ".join(_format_cell(cell) for cell in row))
        for rank, stages in enumerate(step.get("orders", ())):
            lines += [f"order {rank} {stage} | {text}" for stage, text in enumerate(stages)]
        lines += [f"image {json.dumps(image)}" for image in step.get("images", ())]
    return "\n".join(lines) + "\n"


def _format_value(value: Any) -> str:
    is_ids = isinstance(value, tuple) and len(value) > 2 and {type(i) for i in value} == {int}
    if is_ids and value == tuple(range(value[0], value[0] + len(value))):
        return f"{value[0]}..{value[-1]}"
    return json.dumps(value)


def _format_cell(cell: tuple[Any, ...]) -> str:
    samples, row_tokens, tokens, tokens_sq, padded, *others = cell
    if not samples:
        return f"-:{row_tokens}"
    text = f"{','.join(map(str, samples))}:{row_tokens}:{tokens}:{tokens_sq}"
    if others:
        return ":".join(map(str, (text, padded, *others)))
    return text if padded == row_tokens else f"{text}:{padded}"


def parse_json(text: str, build: Callable[[dict[str, Any]], P]) -> P:
    """Build a plan from the JSON that `Plan.to_json` wrote.

    Raises:
        PlanError: what is wrong, and where.
    """
    try:
        payload = strict_json(text)
    except ValueError as error:
        raise PlanError(f"not a plan in JSON: {error}; {_REMEDY}") from None
    _check_payload(payload)
    try:
        return build(payload)
    except MegapackError as error:
        raise PlanError(f"not a plan: {error}") from None
    except RecursionError:
        raise PlanError(f"not a plan: brackets too deep in layout or policy; {_REMEDY}") from None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_image(cell: Any) -> bool:
    is_cell = isinstance(cell, list) and len(cell) == 5 and isinstance(cell[0], str)
    if not is_cell or not isinstance(cell[4], list):
        return False
    return all(map(_is_count, [*cell[1:3], *cell[4], 0 if cell[3] is None else cell[3]]))


def _list_of(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(good, value))


class _Kind(NamedTuple):
    """What a value of the JSON must be."""

    good: Callable[[Any], bool]
    name: str

    def or_null(self) -> _Kind:
        return _Kind(lambda value: value is None or self.good(value), f"null or {self.name}")

    def check(self, value: Any, where: str) -> None:
        if not self.good(value):
            raise PlanError(f"not a plan: {where} must be {self.name}")


_ANY = _Kind(lambda value: True, "any value")
_BOOL = _Kind(lambda value: isinstance(value, bool), "true or false")
_COUNT = _Kind(_is_count, "an integer")
_COUNTS = _Kind(_list_of(_is_count), "a list of integers")
_IDS = _Kind(_list_of(is_id), "a list of int64 integers and strings")
_LIST = _Kind(lambda value: isinstance(value, list), "a list")
_OBJECT = _Kind(lambda value: isinstance(value, dict), "an object")
_TEXTS = _Kind(
    _list_of(_list_of(lambda text: isinstance(text, str))), "a list of lists of texts, per rank"
)

_PLAN = {
    "layout": _OBJECT,
    "policy": _OBJECT,
    "max_tokens_per_gpu": _COUNT.or_null(),
    "micro_batch_size": _COUNT.or_null(),
    "forward_only": _BOOL,
    "num_samples": _COUNT,
    "rollout_ids": _IDS.or_null(),
    "steps": _LIST,
}
_PLAN_OPTIONAL = {"prefixes": _OBJECT, "row_lengths": _COUNTS, COST: _ANY}
_PLAN_OPTIONAL |= {"colocate_ids": _IDS, "adapter_ids": _IDS}
_PREFIXES = {"order": _COUNTS, "common": _COUNTS, "own_tokens": _COUNT}
_STEP = {
    "num_microbatches": _COUNT,
    "group_size": _COUNT.or_null(),
    "kept_rollouts": _IDS,
    "dropped_rollouts": _IDS,
    "ranks": _LIST,
}
_IMAGES = _Kind(_list_of(_is_image), "a list of [key, patches, tokens, GPU or null, [samples]]")
_STEP_OPTIONAL = {"orders": _TEXTS, "images": _IMAGES}


def _check_payload(payload: Any) -> None:
    _check_object(payload, "plan", _PLAN, _PLAN_OPTIONAL)
    for key, cls in (("layout", Layout), ("policy", Policy)):
        # Absent settings get their defaults, so that plans from before a setting stay readable.
        names = {field.name: _ANY for field in dataclasses.fields(cls)}
        _check_object(payload[key], key, {}, names)
    if "prefixes" in payload:
        _check_object(payload["prefixes"], "prefixes", _PREFIXES)
    for number, step in enumerate(payload["steps"]):
        where = f"steps[{number}]"
        _check_object(step, where, _STEP, _STEP_OPTIONAL)
        for rank, row in enumerate(step["ranks"]):
            _LIST.check(row, f"{where}.ranks[{rank}]")
            for k, cell in enumerate(row):
                _check_cell(cell, f"{where}.ranks[{rank}][{k}]", len(step["ranks"]))


def _check_object(
    value: Any, where: str, needed: dict[str, _Kind], optional: Mapping[str, _Kind] = {}
) -> None:
    """Raise PlanError unless a value is an object of these keys, of the right kinds."""
    _OBJECT.check(value, where)
    kinds = {**needed, **optional}
    wrong = (set(value) - kinds.keys()) | (needed.keys() - set(value))
    if wrong:
        names = f"an object of {sorted(kinds)}; see {sorted(wrong)!s:.80}"
        raise PlanError(f"not a plan: {where} must be {names}")
    for key, own in value.items():
        kinds[key].check(own, key if where == "plan" else f"{where}.{key}")


def _check_cell(cell: Any, where: str, num_ranks: int) -> None:
    good = isinstance(cell, list) and len(cell) >= 5 and isinstance(cell[0], list)
    good = good and all(map(_is_count, cell[0])) and all(map(_is_count, cell[1:]))
    if good and len(cell) > 6:
        # A damaged width must not make a list of 2**60 ranks.
        ends = cell[7:]
        good = 1 <= cell[6] <= num_ranks and len(ends) % 2 == 0 and len(ends) <= 2 * len(cell[0])
        good = good and all(start < end for start, end in zip(ends[::2], ends[1::2], strict=True))
    if not good:
        raise PlanError(
            f"not a plan: {where} must be [[samples], row_tokens, tokens, tokens_sq, "
            "padded_tokens(, shared_tokens(, width(, start, end, ...)))]"
        )

"""The text form of a plan, and parsers of both forms. A payload is the plan as JSON types.

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

Consecutive rollout ids are written as a range, `0..2047`. A plan without `colocate_ids` has no such
line, and neither has one without `prefixes` or `row_lengths`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from megapack.base.arrays import is_id
from megapack.base.files import strict_json
from megapack.errors import MegapackError, PlanError
from megapack.layout import Layout
from megapack.policy import Policy

P = TypeVar("P")
Build = Callable[[dict[str, Any]], P]

_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
# Ranges expand to lists, so a damaged text could ask for all memory. All ranges together may have
# one id per character of the text, which is enough for kept rollouts (a sample takes at least two
# characters in its cell, "3,"), and this many more, for dropped rollouts.
_MAX_FREE_IDS = 2**16
# Sizes are int64.
_MAX_COUNT = 2**63 - 1
_REMEDY = "give the plan as it was written"
_SETTINGS = {"layout": Layout, "policy": Policy}

_TITLE = "megapack plan"
_CELLS = "# cells: samples:row_tokens:tokens:tokens_sq[:padded_tokens]"
_HEADER = (
    "layout",
    "policy",
    "max_tokens_per_gpu",
    "micro_batch_size",
    "forward_only",
    "num_samples",
    "rollout_ids",
)
_COLOCATE = "colocate_ids"
_PREFIXES = "prefixes"
_LENGTHS = "row_lengths"
_OPTIONAL = (_COLOCATE, _PREFIXES, _LENGTHS)
# In the JSON that a run writes: the cost model that it planned with. It is not part of the plan.
COST = "cost"
_STEP = ("num_microbatches", "group_size", "kept_rollouts", "dropped_rollouts")
_ORDERS = "orders"


def format_plan(payload: dict[str, Any]) -> str:
    """The text form of a payload."""
    header = [key for key in (*_HEADER, *_OPTIONAL) if key in payload]
    lines = [_TITLE, *(f"{key} {json.dumps(payload[key])}" for key in header), _CELLS]
    for number, step in enumerate(payload["steps"]):
        lines.append(f"step {number}")
        lines += [f"{key} {_format_value(step[key])}" for key in _STEP]
        for rank, row in enumerate(step["ranks"]):
            lines.append(f"rank {rank} | " + " ".join(_format_cell(cell) for cell in row))
        for rank, stages in enumerate(step.get(_ORDERS, ())):
            lines += [f"order {rank} {stage} | {text}" for stage, text in enumerate(stages)]
    return "\n".join(lines) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > 2 and {type(i) for i in value} == {int}:
        text = f"{value[0]}..{value[-1]}"
        if _RANGE.fullmatch(text) and list(value) == list(range(value[0], value[0] + len(value))):
            return text
    return json.dumps(value)


def _format_cell(cell: tuple[Any, ...]) -> str:
    samples, row_tokens, tokens, tokens_sq, padded, *others = cell
    if not samples and tokens == tokens_sq == padded == 0:
        return f"-:{row_tokens}"
    # An edited plan may have tokens without samples; `check_plan` reports it.
    text = f"{','.join(map(str, samples)) or '-'}:{row_tokens}:{tokens}:{tokens_sq}"
    if others:
        return ":".join(map(str, (text, padded, *others)))
    return text if padded == row_tokens else f"{text}:{padded}"


def parse_json(text: str, build: Build[P]) -> P:
    """Build a plan from the JSON that `Plan.to_json` wrote.

    Raises:
        PlanError: what is wrong, and where.
    """
    try:
        payload = strict_json(text)
    except ValueError as error:
        raise PlanError(f"not a plan in JSON: {error}; {_REMEDY}") from None
    return _build_checked(payload, build)


def parse_text(text: str, build: Build[P]) -> P:
    """Build a plan from the text that `str(plan)` wrote.

    Raises:
        PlanError: what is wrong, and in which line.
    """
    return _build_checked(_TextReader(text).payload(), build)


class _TextReader:
    """Reads the lines of a plan's text in order."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.next_line = 0
        self.ids_left = _MAX_FREE_IDS + len(text)

    def payload(self) -> dict[str, Any]:
        if self._line() != _TITLE:
            raise self._error(f"a plan begins with {_TITLE!r}")
        payload = {key: self._value(key) for key in _HEADER}
        for key in _OPTIONAL:
            if self._next_starts_with(f"{key} "):
                payload[key] = self._value(key)
        if self._line() != _CELLS:
            raise self._error(f"expected {_CELLS!r}")
        payload["steps"] = []
        while self.next_line < len(self.lines):
            payload["steps"].append(self._step(len(payload["steps"])))
        return payload

    def _next_starts_with(self, start: str) -> bool:
        return self.next_line < len(self.lines) and self.lines[self.next_line].startswith(start)

    def _line(self) -> str:
        self.next_line += 1
        if self.next_line > len(self.lines):
            raise self._error("the text ends early")
        return self.lines[self.next_line - 1]

    def _value(self, key: str) -> Any:
        name, _, value = self._line().partition(" ")
        if name != key:
            raise self._error(f"expected {key!r}, found {name[:40]!r}")
        try:
            ids = _RANGE.fullmatch(value)
            return strict_json(value) if ids is None else self._range(int(ids[1]), int(ids[2]))
        except ValueError as error:
            raise self._error(f"{key}: {error}") from None

    def _range(self, first: int, last: int) -> list[int]:
        self.ids_left -= last - first + 1
        if last < first or self.ids_left < 0:
            raise ValueError(f"{first}..{last} is empty, or too long a range for so short a text")
        return list(range(first, last + 1))

    def _step(self, number: int) -> dict[str, Any]:
        if self._line() != f"step {number}":
            raise self._error(f"expected 'step {number}'")
        step = {key: self._value(key) for key in _STEP}
        step["ranks"] = []
        while self._next_starts_with("rank "):
            step["ranks"].append(self._rank(len(step["ranks"])))
        orders: list[list[str]] = []
        while self._next_starts_with("order "):
            self._order(orders)
        return {**step, _ORDERS: orders} if orders else step

    def _order(self, orders: list[list[str]]) -> None:
        head, _, text = self._line().partition(" | ")
        if head == f"order {len(orders)} 0":
            orders.append([])
        if not orders or head != f"order {len(orders) - 1} {len(orders[-1])}":
            raise self._error("expected 'order RANK STAGE | ...', rank after rank")
        orders[-1].append(text)

    def _rank(self, number: int) -> list[Any]:
        head, _, cells = self._line().partition(" | ")
        if head != f"rank {number}":
            raise self._error(f"expected 'rank {number} | ...'")
        return [self._cell(k, cell) for k, cell in enumerate(cells.split())]

    def _cell(self, k: int, cell: str) -> list[Any]:
        samples, *sizes = cell.split(":")
        try:
            numbers = [int(size) for size in sizes]
            if samples == "-" and len(numbers) == 1:
                return [[], numbers[0], 0, 0, 0]
            if len(numbers) == 3:
                numbers.append(numbers[0])
            if len(numbers) in (4, 5) or len(numbers) % 2 == 0:
                return [[int(i) for i in samples.split(",") if samples != "-"], *numbers]
        except ValueError:
            pass
        raise self._error(f"cell {k} {cell[:40]!r} is not {_CELLS[9:]}")

    def _error(self, what: str) -> PlanError:
        return PlanError(f"not a plan in text: line {self.next_line}: {what}; {_REMEDY}")


def _build_checked(payload: Any, build: Build[P]) -> P:
    _check_payload(payload)
    try:
        return build(payload)
    except MegapackError as error:
        raise PlanError(f"not a plan: {error}") from None
    except RecursionError:
        raise PlanError(f"not a plan: brackets too deep in layout or policy; {_REMEDY}") from None


def _check_payload(payload: Any) -> None:
    _require(isinstance(payload, dict), "plan", "an object")
    _keys(payload, "plan", {*_HEADER, "steps", *({*_OPTIONAL, COST} & set(payload))})
    for key, cls in _SETTINGS.items():
        names = {field.name for field in dataclasses.fields(cls)}
        # Absent settings get their defaults, so that plans from before a setting stay readable.
        _keys(payload[key], key, names, optional=True)
    for key in ("max_tokens_per_gpu", "micro_batch_size"):
        _require(payload[key] is None or _is_count(payload[key]), key, "null or an integer")
    _require(isinstance(payload["forward_only"], bool), "forward_only", "true or false")
    _require(_is_count(payload["num_samples"]), "num_samples", "an integer")
    if payload["rollout_ids"] is not None:
        _check_ids(payload["rollout_ids"], "rollout_ids")
    if _COLOCATE in payload:
        _check_ids(payload[_COLOCATE], _COLOCATE)
    if _PREFIXES in payload:
        _check_prefixes(payload[_PREFIXES])
    if _LENGTHS in payload:
        lengths = payload[_LENGTHS]
        good = isinstance(lengths, list) and all(map(_is_count, lengths))
        _require(good, _LENGTHS, "a list of integers")
    _require(isinstance(payload["steps"], list), "steps", "a list")
    for number, step in enumerate(payload["steps"]):
        _check_step(step, f"steps[{number}]")


def _check_step(step: Any, where: str) -> None:
    _keys(step, where, {*_STEP, "ranks", *({_ORDERS} & set(step))})
    for key in ("num_microbatches", "group_size"):
        _require(step[key] is None or _is_count(step[key]), f"{where}.{key}", "null or an integer")
    for key in ("kept_rollouts", "dropped_rollouts"):
        _check_ids(step[key], f"{where}.{key}")
    _require(isinstance(step["ranks"], list), f"{where}.ranks", "a list")
    for rank, row in enumerate(step["ranks"]):
        _require(isinstance(row, list), f"{where}.ranks[{rank}]", "a list")
        for k, cell in enumerate(row):
            _check_cell(cell, f"{where}.ranks[{rank}][{k}]", len(step["ranks"]))
    if _ORDERS in step:
        _check_orders(step[_ORDERS], f"{where}.{_ORDERS}")


def _check_orders(value: Any, where: str) -> None:
    good = isinstance(value, list) and all(isinstance(stages, list) for stages in value)
    good = good and all(isinstance(text, str) for stages in value for text in stages)
    _require(good, where, "a list of texts per rank")


def _check_cell(cell: Any, where: str, num_ranks: int) -> None:
    good = isinstance(cell, list) and len(cell) >= 5 and isinstance(cell[0], list)
    good = good and all(map(_is_count, cell[0])) and all(map(_is_count, cell[1:]))
    if good and len(cell) == 7:
        # A damaged width must not make a list of 2**60 ranks.
        good = 2 <= cell[6] <= num_ranks
    if good and len(cell) > 7:
        ends = cell[7:]
        good = 1 <= cell[6] <= num_ranks and len(ends) % 2 == 0 and len(ends) <= 2 * len(cell[0])
        good = good and all(start < end for start, end in zip(ends[::2], ends[1::2], strict=True))
    _require(
        good,
        where,
        "[[samples], row_tokens, tokens, tokens_sq, padded_tokens(, shared_tokens(, width(, start, "
        "end, ...)))]",
    )


def _check_prefixes(value: Any) -> None:
    _keys(value, _PREFIXES, {"order", "common", "own_tokens"})
    for key in ("order", "common"):
        good = isinstance(value[key], list) and all(map(_is_count, value[key]))
        _require(good, f"{_PREFIXES}.{key}", "a list of integers")
    _require(_is_count(value["own_tokens"]), f"{_PREFIXES}.own_tokens", "an integer")


def _check_ids(ids: Any, where: str) -> None:
    good = isinstance(ids, list) and all(map(is_id, ids))
    _require(good, where, "a list of int64 integers and strings")


def _keys(value: Any, where: str, keys: set[str], optional: bool = False) -> None:
    _require(isinstance(value, dict), where, "an object")
    wrong = set(value) - keys if optional else set(value) ^ keys
    _require(not wrong, where, f"an object of {sorted(keys)}; see {sorted(wrong)!s:.80}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _require(good: bool, where: str, what: str) -> None:
    if not good:
        raise PlanError(f"not a plan: {where} must be {what}")

"""Mutations that keep a document's structure, so that what comes out gets past its parser.

A JSON document is changed in its tree; other text is changed in its tokens and lines. Both are
given by the random numbers alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

_TOKEN = re.compile(r"[^\W\d]\w*|\d+|\s+|.", re.DOTALL)
_MOST_TOKENS = 4000
_DEEP = 1000

NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    64,
    -1,
    255,
    2**20,
    2**28,
    2**31,
    2**40,
    2**63 - 1,
    2**63,
    10**18,
    10**400,
]
STRINGS = [
    "",
    "a",
    "\n",
    "\ud800",
    "legal",
    "multiple",
    "per_rank",
    "pad",
    "drop",
    "error",
    "alone",
]
STRINGS += ["planned", "uniform", "time", "balanced", "search", "fixed", "mxfp8"]
VALUES = [None, True, False, 0.5, 1e308, -1e308, "a", "\ud800"]
WORDS = ["null", "true", "~", "..", "*a", "&a", "!!x", "<<", "nan", "1e999", "0x" + "f" * 4000]
MARKS = [":", ",", "-", "[", "]", "{", "}", '"', "'", "|", "#", "\n", "\r", " ", "\t", "\0"]
MARKS += ["\x1c", "\u2028", "\ufeff", "\u0663"]


def mutate_json(data: bytes, rng: Random) -> bytes:
    """A JSON document with up to four changes in its tree; tokens are changed where it is none."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_text(data, rng)
    for _ in range(_num_changes(rng)):
        tree = _changed(tree, rng)
    try:
        return json.dumps(tree, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return data


def mutate_json_lines(data: bytes, rng: Random) -> bytes:
    """JSON Lines, or any lines, with changes in one line or in their order."""
    lines = data.splitlines(keepends=True)
    if not lines or rng.random() < 0.2:
        return mutate_text(data, rng)
    at = rng.randrange(len(lines))
    if rng.random() < 0.6:
        lines[at] = mutate_json(lines[at], rng) + b"\n"
    else:
        _shuffle_part(lines, at, rng)
    return b"".join(lines)


def mutate_text(data: bytes, rng: Random) -> bytes:
    """Text with up to four changed tokens or lines; undecodable bytes stay what they are."""
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(_num_changes(rng)):
        parts: list[Any] = _TOKEN.findall(text)[:_MOST_TOKENS]
        if rng.random() < 0.2:
            parts = text.splitlines(keepends=True)
        if not parts:
            parts = [""]
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
        places = numbers if numbers and rng.random() < 0.5 else range(len(parts))
        _change_part(parts, rng.choice(places), rng)
        text = "".join(parts)
    return text.encode("utf-8", "surrogateescape")


def _num_changes(rng: Random) -> int:
    return rng.choice([1, 1, 1, 2, 4])


def _change_part(parts: list[Any], at: int, rng: Random) -> None:
    if rng.random() < 0.3:
        _shuffle_part(parts, at, rng)
    elif parts[at].isdecimal() and rng.random() < 0.9:
        parts[at] = str(_number(int(parts[at][:18]), rng))
    else:
        parts[at] = rng.choice([*map(str, NUMBERS), *WORDS, *MARKS])


def _shuffle_part(parts: list[Any], at: int, rng: Random) -> None:
    """Leave out, repeat, copy or swap one of the parts."""
    other = rng.randrange(len(parts))
    kind = rng.randrange(4)
    if kind == 0:
        del parts[at]
    elif kind == 1:
        parts[at:at] = [parts[at]] * rng.choice([1, 1, 2, 30])
    elif kind == 2:
        parts[at] = parts[other]
    else:
        parts[at], parts[other] = parts[other], parts[at]


def _number(value: int, rng: Random) -> int:
    """A number near to this one, mostly; what is near stays legal more often."""
    near = [value, value + 1, max(0, value - 1), 2 * value, rng.randint(0, 2 * abs(value) + 1)]
    return rng.choice(near if rng.random() < 0.8 else [-value, *NUMBERS])


def _changed(tree: Any, rng: Random) -> Any:
    """The tree with one node changed, mostly a deep one."""
    if isinstance(tree, dict | list) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if rng.random() < 0.15:
            _change_items(tree, key, rng)
        else:
            tree[key] = _changed(tree[key], rng)
        return tree
    return _leaf(tree, rng)


def _leaf(value: Any, rng: Random) -> Any:
    kind = rng.randrange(10)
    if type(value) is int and kind < 9:
        return _number(value, rng)
    if isinstance(value, str) and kind < 6:
        return rng.choice(STRINGS)
    if kind == 6:
        return [value] * rng.randint(0, 3)
    if kind == 7:
        return {rng.choice(["a", "dp", "group", "a\nb"]): value}
    if kind == 9 and rng.random() < 0.2:
        return _nested(value, rng.randint(1, _DEEP))
    return rng.choice([*VALUES, *NUMBERS])


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _change_items(tree: Any, key: Any, rng: Random) -> None:
    if isinstance(tree, list):
        _shuffle_part(tree, key, rng)
    elif rng.random() < 0.5:
        del tree[key]
    else:
        tree[rng.choice([*tree, "a\nb", ""])] = tree[key]

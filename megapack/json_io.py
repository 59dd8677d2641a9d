"""Strict JSON: a doubled key is an error, for one of its values would be lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megapack.errors import brief


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: not valid JSON (a ValueError with the position).
        ValueError: a doubled key, brackets too deep, or an integer that Python does not read. The
            message is one line.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("brackets too deep") from None


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {brief(key)} stands twice")
        values[key] = value
    return values


# `json.loads` would make a decoder for every text.
_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)

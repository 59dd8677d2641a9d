"""Strict JSON: a doubled key is an error, for one of its values would be lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megapack.errors import brief


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is none; a ValueError that knows the place.
        ValueError: a doubled key, a number too long, or brackets too deep.

    Every message is one line.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("brackets too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        # Behind the semicolon of a number that is too long Python names a setting of its own.
        raise ValueError(str(error).partition(";")[0]) from None


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {brief(key)} stands twice")
        values[key] = value
    return values


# `json.loads` would make a decoder for every text.
_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)

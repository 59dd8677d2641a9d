"""One line of a rollouts file: JSON into checked fields, or the reason why not."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from megapack.inputs import is_id
from megapack.json_io import parse
from megapack.tokenizer import ByteTokenizer, Ids


class BadLine(Exception):
    """Why a line cannot be taken; the reader adds file and line."""


@dataclasses.dataclass(frozen=True)
class LineParser:
    """Lines into checked fields."""

    tokenizer: ByteTokenizer
    vocab_size: int
    """Token ids must be below it."""

    def parse(self, line: bytes | dict[str, Any]) -> dict[str, Any]:
        """The fields of one line, or of a row that is parsed already.

        Returns:
            `prompt_ids` and `response_ids` (int64), and those given of `reward`, `advantage`
            (finite floats), `group`, `rollout` (int or str).

        Raises:
            BadLine: the line is no such object.
        """
        row = _json_object(line) if isinstance(line, bytes) else line
        prompt_ids, response_ids = self._tokens(row)
        if len(prompt_ids) + len(response_ids) == 0:
            raise BadLine(
                "the sample is empty: neither prompt nor response has a token; leave it out"
            )
        fields: dict[str, Any] = {"prompt_ids": prompt_ids, "response_ids": response_ids}
        checks = {"reward": _number, "advantage": _number, "group": _identity, "rollout": _identity}
        for key, check in checks.items():
            # null and absent are the same.
            if row.get(key) is not None:
                fields[key] = check(key, row[key])
        return fields

    def _tokens(self, row: dict[str, Any]) -> tuple[Ids, Ids]:
        text = [key for key in row if key in ("prompt", "response")]
        ids = [key for key in row if key in ("prompt_ids", "response_ids")]
        if text and ids:
            raise BadLine(f"has both {text[0]} and {ids[0]}; give text or ids")
        if text and self.vocab_size < self.tokenizer.vocab_size:
            raise BadLine(
                f"text needs a vocabulary of {self.tokenizer.vocab_size}, the model has "
                f"{self.vocab_size}; set model.vocab_size, or give ids"
            )
        if len(text) == 2:
            return (
                self._encoded(row, "prompt", self.tokenizer.encode_prompt),
                self._encoded(row, "response", self.tokenizer.encode_response),
            )
        if len(ids) == 2:
            return self._ids(row, "prompt_ids"), self._ids(row, "response_ids")
        raise BadLine(
            f"has {' and '.join(text + ids) or 'no tokens'}; give prompt and response, or "
            "prompt_ids and response_ids"
        )

    def _encoded(self, row: dict[str, Any], key: str, encode: Callable[[str], Ids]) -> Ids:
        if not isinstance(row[key], str):
            raise BadLine(f"{key} is {_shown(row[key])}, expected a string")
        try:
            return encode(row[key])
        except UnicodeEncodeError:
            raise BadLine(f"{key} holds half of a surrogate pair; write it again") from None

    def _ids(self, row: dict[str, Any], key: str) -> Ids:
        values = row[key]
        if not isinstance(values, list):
            raise BadLine(f"{key} is {_shown(values)}, expected a list of integers")
        for index, value in enumerate(values):
            # bool is an int in Python and no token id.
            if type(value) is not int:
                raise BadLine(f"{key}[{index}] is {_shown(value)}, expected an integer")
            if not 0 <= value < self.vocab_size:
                raise BadLine(
                    f"{key}[{index}] is {_shown(value)}, outside the vocabulary of "
                    f"{self.vocab_size}; set model.vocab_size if the model has more"
                )
        return np.array(values, dtype=np.int64)


def _json_object(line: bytes) -> dict[str, Any]:
    cut_off = "" if line.endswith(b"\n") else "; the last line is cut off"
    remedy = f"{cut_off}; write it again"
    try:
        row = parse(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start} is not UTF-8{remedy}") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} at column {error.colno}{remedy}") from None
    except ValueError as error:
        raise BadLine(f"not JSON: {error}{remedy}") from None
    if not isinstance(row, dict):
        raise BadLine(f"is {_shown(row)}, expected an object with prompt and response")
    return row


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{key} is {_shown(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadLine(f"{key} is {_shown(value)}, expected a finite number")
    return number


def _identity(key: str, value: Any) -> int | str:
    if not is_id(value):
        raise BadLine(f"{key} is {_shown(value)}, expected an int64 or a string")
    return value


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = "nested brackets"
    return text if len(text) <= 40 else text[:37] + "..."

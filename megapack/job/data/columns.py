"""Rows of one simple form -> their token block, column by column, without an object per sample.

The rows all give text, or all give token ids, with masks or without, and no routes. All checks are
those of `lines`, made for all rows at once. Where one fails, or a row is unusual in another way,
there is no token block: `lines` then reads them one by one, and names what it refuses.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import is_id
from megapack.job.data.files import COLUMNS, Block, Lines, TableRows
from megapack.job.data.token_blocks import ROW_DTYPE, ReadSettings, TokenBlock
from megapack.job.data.tokenizer import Ids, TextTokens

_TEXT = {"prompt", "response"}
_IDS = {"prompt_ids", "response_ids"}
_MASKS = ("response_mask", "loss_mask")
_FORMS = (_TEXT, _IDS, *(_IDS | {name} for name in _MASKS))
_IDENTITIES = ("group", "rollout")
_NUMBERS = ("reward", "advantage")
# Columns that say what a sample's tokens are, and those that are refused.
_OF_TOKENS = {*COLUMNS} - {*_IDENTITIES, *_NUMBERS}
_NONE = type(None)
_SCALARS = {str, int, float, bool, _NONE}
# Objects become tuples of pairs, so that a key that appears twice is not lost.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple)

Column = Sequence[Any]


def read_columns(block: Block, file: int, settings: ReadSettings) -> TokenBlock | None:
    """Parse and tokenize rows together.

    Args:
        file: the file's number; it and the row's number identify a sample without `group`.

    Returns:
        None: these rows must be read one by one.
    """
    try:
        if isinstance(block, Lines):
            return _token_block(_of_lines(block.data.decode()), block.first, file, settings)
        if isinstance(block, TableRows):
            return _token_block(_of_table(block.table()), block.first, file, settings)
    # Invalid UTF-8 or JSON, deep brackets, integers of too many digits, text without ids.
    except (ValueError, RecursionError, OverflowError):
        pass
    return None


def _of_lines(text: str) -> dict[str, Column]:
    """The values of each key, by line; {} if there are others than `_token_block` reads."""
    row, end = _DECODER.raw_decode(text)
    if not isinstance(row, tuple):
        return {}
    # Chats, for example, need not be parsed twice.
    if {key for key, value in row if value is not None} & _OF_TOKENS not in _FORMS:
        return {}
    rows = [row]
    size = len(text)
    while end + 1 < size:
        if text[end] != "\n":
            return {}
        row, end = _DECODER.raw_decode(text, end + 1)
        rows.append(row)
    # Each line break is between two lines: none is white space inside an object.
    if text.count("\n") != len(rows) - (end == size) or text[end:] not in ("", "\n"):
        return {}
    if _types(rows) != {tuple}:
        return {}
    names = tuple(key for key, _ in row)
    keys, values = zip(*itertools.chain.from_iterable(rows), strict=True)
    is_even = set(map(len, rows)) == {len(names)} and keys == names * len(rows)
    if is_even and len(set(names)) == len(names):
        return {name: values[place :: len(names)] for place, name in enumerate(names)}
    if not all(map(_has_unique_keys, rows)):
        return {}
    objects = list(map(dict, rows))
    return {name: [each.get(name) for each in objects] for name in COLUMNS}


def _of_table(table: Any) -> dict[str, Column]:
    """The values of each column; {} if there are others than `_token_block` reads."""
    given = {
        name: column
        for name, column in zip(table.column_names, table.columns, strict=True)
        if column.null_count < table.num_rows
    }
    is_simple = given.keys() & _OF_TOKENS in _FORMS
    return {name: column.to_pylist() for name, column in given.items()} if is_simple else {}


def _token_block(
    columns: dict[str, Column], first: int, file: int, settings: ReadSettings
) -> TokenBlock | None:
    # null and absent are the same.
    columns = {name: each for name, each in columns.items() if each.count(None) < len(each)}
    given = columns.keys() & _OF_TOKENS
    if given not in _FORMS:
        return None
    tokens = _of_text(columns, settings) if given == _TEXT else _of_ids(columns, settings)
    if tokens is None or not all(_is_good(name, column) for name, column in columns.items()):
        return None
    prompt_tokens = tokens.prompt_tokens
    response_tokens = tokens.response_tokens
    lengths = prompt_tokens + response_tokens
    most = settings.max_length
    if lengths.min() < 1 or (most is not None and lengths.max() > most):
        return None
    loss_tokens = np.maximum(response_tokens - (prompt_tokens == 0), 0)
    for name in given.intersection(_MASKS):
        counted = _sign(tokens, columns[name])
        if counted is None:
            return None
        loss_tokens = counted
    rows = np.zeros(len(lengths), dtype=ROW_DTYPE)
    rows["number"] = np.arange(first, first + len(rows))
    rows["prompt_tokens"] = prompt_tokens
    rows["response_tokens"] = response_tokens
    rows["loss_tokens"] = loss_tokens
    for name in _NUMBERS:
        rows[name] = _floats(columns[name]) if name in columns else np.nan
    own_ids = [f"{file} line-{number}" for number in range(first, first + len(rows))]
    groups, rollouts = (_filled(columns.get(name, own_ids), own_ids) for name in _IDENTITIES)
    return TokenBlock(rows, groups, rollouts, tokens.ids)


def _of_text(columns: dict[str, Column], settings: ReadSettings) -> TextTokens | None:
    prompts = columns["prompt"]
    responses = columns["response"]
    if _types(prompts) | _types(responses) != {str}:
        return None
    tokens = settings.tokenizer.encode_texts(prompts, responses)
    is_inside = tokens.ids.size == 0 or int(tokens.ids.max()) < settings.num_ids
    return tokens if is_inside else None


def _of_ids(columns: dict[str, Column], settings: ReadSettings) -> TextTokens | None:
    prompts = columns["prompt_ids"]
    responses = columns["response_ids"]
    if _types(prompts) | _types(responses) != {list}:
        return None
    pairs = zip(prompts, responses, strict=True)
    chain = itertools.chain.from_iterable
    values = list(chain(chain(pairs)))
    # Of one type: bool is a subclass of int, but not a token id.
    if _types(values) != {int}:
        return None
    ids = np.array(values, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= settings.num_ids:
        return None
    return TextTokens(
        ids.astype(np.int32),
        np.array(list(map(len, prompts)), dtype=np.int64),
        np.array(list(map(len, responses)), dtype=np.int64),
    )


def _sign(tokens: TextTokens, column: Column) -> Ids | None:
    """Mark the tokens that do not count, as `token_blocks.Tokens` says.

    Returns:
        Each sample's response tokens that count in the loss; None if a mask is bad.
    """
    response_tokens = tokens.response_tokens
    if _types(column) != {list} or list(map(len, column)) != response_tokens.tolist():
        return None
    values = list(itertools.chain.from_iterable(column))
    if not _types(values) <= {int, bool}:
        return None
    mask = np.array(values, dtype=np.int64)
    stops = np.cumsum(response_tokens)
    starts = stops - response_tokens
    sums = np.concatenate([[0], np.cumsum(mask)])
    counted: Ids = sums[stops] - sums[starts]
    if mask.min() < 0 or mask.max() > 1 or counted.min() < 1:
        return None
    spans = np.stack([tokens.prompt_tokens, response_tokens], axis=1).reshape(-1)
    is_response = np.repeat(np.tile([False, True], len(column)), spans)
    apart = np.flatnonzero(is_response)[mask == 0]
    tokens.ids[apart] = -1 - tokens.ids[apart]
    # A sample's first token never counts.
    counted -= (tokens.prompt_tokens == 0) & (mask[starts] == 1)
    return counted


def _is_good(name: str, column: Column) -> bool:
    types = _types(column)
    if name in _IDENTITIES:
        integers = [value for value in column if isinstance(value, int)]
        is_in_range = not integers or (is_id(min(integers)) and is_id(max(integers)))
        return types <= {str, int, _NONE} and is_in_range
    if name in _NUMBERS:
        # None is NaN.
        num_finite = np.isfinite(_floats(column)).sum() if types <= {int, float, _NONE} else -1
        return bool(num_finite == len(column) - column.count(None))
    return types <= _SCALARS or name in _OF_TOKENS or all(map(_has_unique_keys, column))


def _filled(column: Column, own_ids: list[str]) -> list[int | str]:
    if None not in column:
        return list(column)
    return [own if one is None else one for one, own in zip(column, own_ids, strict=True)]


def _has_unique_keys(value: Any) -> bool:
    if isinstance(value, tuple):
        is_unique = len(dict(value)) == len(value)
        return is_unique and all(_has_unique_keys(one) for _, one in value)
    return not isinstance(value, list) or all(map(_has_unique_keys, value))


def _floats(column: Column) -> npt.NDArray[np.float64]:
    return np.array(column, dtype=np.float64)


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))

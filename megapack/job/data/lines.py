"""One line or row of a data file -> its checked samples.

The columns are described in `rollouts`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import is_id
from megapack.base.files import not_utf8, strict_json
from megapack.job.data.files import Row
from megapack.job.data.images.reader import ImageReader
from megapack.job.data.images.rows import LineImages
from megapack.job.data.messages import (
    BadLine,
    Conversation,
    conversation,
    filled,
    shown,
    template_arguments,
    tools_of,
)
from megapack.job.data.rollouts import TOKEN_COLUMNS, UNREAD_COLUMNS, Rollout
from megapack.job.data.tokenizer import Chat, Ids, Mask, TextError, Tokenizer

# The columns that a sample's tokens come from, by kind, and those that may stand beside them.
_FORMS = {
    "text": ("prompt", "response"),
    "ids": ("prompt_ids", "response_ids"),
    "chat": ("messages",),
    "pair": ("chosen", "rejected"),
    "pair_ids": ("prompt_ids", "chosen_ids", "rejected_ids"),
}
# A data set of chats often repeats its first message as `prompt`; it is checked.
_ALSO = {"chat": {"prompt"}, "pair": {"prompt"}}
_TOKEN_COLUMNS = tuple(dict.fromkeys(name for names in _FORMS.values() for name in names))
# Columns that are read beside chats alone.
_OF_CHATS = ("tools", "chat_template_kwargs")
# Those that may have messages or tools.
_NESTED = ("prompt", "messages", "chosen", "rejected", *_OF_CHATS)
_ONLY_CHATS = "only a chat has; give messages, or leave it out"
_MASKS = ("response_mask", "loss_mask")
_MAX_EXPERT = 2**16 - 1


@dataclass(frozen=True)
class LineParser:
    """Parses and checks the samples of one line."""

    tokenizer: Tokenizer
    vocab_size: int
    """Token ids must be below it."""
    images: ImageReader | None = None
    """None: images are refused."""

    @cached_property
    def _image_text(self) -> str:
        """What the tokenizer reads as an image token."""
        return self.tokenizer.token_texts([self.images.image_token])[0] if self.images else ""

    @cached_property
    def _checks_text(self) -> bool:
        """Whether the tokenizer has token ids that the model has not."""
        return self.tokenizer.vocab_size > self.vocab_size

    def parse(self, line: Row, own_id: str) -> list[Rollout]:
        """The samples of one line: one, two of a preference pair, or several of a chat.

        Args:
            own_id: prompt group and rollout of a line that gives none.

        Raises:
            BadLine: the line is not such an object.
        """
        if isinstance(line, bytes):
            row = json_object(line)
        else:
            row = {key: filled(value) if key in _NESTED else value for key, value in line.items()}
        # null and absent are the same.
        if None in row.values():
            row = {key: value for key, value in row.items() if value is not None}
        for key, value in row.items():
            # An empty list of images says nothing.
            if key in UNREAD_COLUMNS and value not in ([], "", {}):
                raise BadLine(f"has {key}, which is not read; {UNREAD_COLUMNS[key]}")
        form = _form(tuple(row))
        if form != "ids":
            why = "is per token id; give prompt_ids and response_ids with it"
            _refuse(row, (*_MASKS, "routed_experts", *TOKEN_COLUMNS), why)
        images = LineImages(self.images, row.get("images"))
        # The method has the name of the form.
        samples: list[dict[str, Any]] = getattr(self, f"_{form}")(row, images)
        shared: dict[str, Any] = {"group": own_id, "rollout": own_id}
        for key, check in _CHECKS:
            if key in row:
                shared[key] = check(key, row[key])
        for fields in samples:
            if len(fields["prompt_ids"]) + len(fields["response_ids"]) == 0:
                raise BadLine(
                    "the sample is empty: neither prompt nor response has a token; leave it out"
                )
            images.place(fields)
        return [Rollout(**shared, part=part, **fields) for part, fields in enumerate(samples)]

    def _text(self, row: dict[str, Any], images: LineImages) -> list[dict[str, Any]]:
        _refuse(row, (*_OF_CHATS, "images"), _ONLY_CHATS)
        prompt_ids = self._encoded("prompt", row["prompt"], self.tokenizer.encode_prompt)
        response_ids = self._encoded("response", row["response"], self.tokenizer.encode_response)
        return [{"prompt_ids": prompt_ids, "response_ids": response_ids}]

    def _ids(self, row: dict[str, Any], images: LineImages) -> list[dict[str, Any]]:
        fields: dict[str, Any] = {
            "prompt_ids": self._token_ids(row, "prompt_ids"),
            "response_ids": self._token_ids(row, "response_ids"),
        }
        num_prompt = len(fields["prompt_ids"])
        num_response = len(fields["response_ids"])
        masks = [name for name in _MASKS if name in row]
        if len(masks) == 2:
            raise BadLine("has both response_mask and loss_mask; give one of them")
        if masks:
            fields["loss_mask"] = _mask(masks[0], row[masks[0]], num_response)
        if "routed_experts" in row:
            fields["routed_experts"] = _routes(row["routed_experts"], num_prompt + num_response)
        fields["columns"] = {
            name: self._column(row, name, num_response) for name in TOKEN_COLUMNS if name in row
        }
        return [fields]

    def _column(self, row: dict[str, Any], key: str, num_response: int) -> npt.NDArray[Any]:
        """A column of values per response token, see `rollouts`."""
        is_topk = "topk" in key
        wanted = f"expected one {'list of k numbers' if is_topk else 'number'} per response id"
        values = _array(key, row[key], wanted)
        if num_response == 0 and values.size == 0:
            values = np.zeros((0, 1) if is_topk else 0)
        is_ids = key.endswith("_ids")
        if (
            values.ndim != 1 + is_topk
            or values.shape[0] != num_response
            or 0 in values.shape[1:]
            or (values.dtype.kind not in ("i" if is_ids else "if") and values.size)
        ):
            raise BadLine(f"{key} is {shown(row[key])} for {num_response} response_ids, {wanted}")
        if is_ids and values.size and not 0 <= values.min() <= values.max() < self.vocab_size:
            odd = values.min() if values.min() < 0 else values.max()
            raise BadLine(f"{key} has {odd}, outside the vocabulary of {self.vocab_size}")
        if not np.isfinite(values).all():
            raise BadLine(f"{key} has a number that is not finite; leave the line out")
        return values.astype(TOKEN_COLUMNS[key])

    def _chat(self, row: dict[str, Any], images: LineImages) -> list[dict[str, Any]]:
        chat = conversation(row.get("prompt"), "messages", row["messages"])
        return self._chat_samples("messages", images.find("messages", chat), row, images)

    def _pair(self, row: dict[str, Any], images: LineImages) -> list[dict[str, Any]]:
        prompt = row.get("prompt")
        if isinstance(row["chosen"], str):
            if not isinstance(prompt, str):
                raise BadLine(f"chosen is text and prompt is {shown(prompt)}, expected a string")
            _refuse(row, (*_OF_CHATS, "images"), _ONLY_CHATS)
            prompt_ids = self._encoded("prompt", prompt, self.tokenizer.encode_prompt)
            return _pair(
                {
                    "prompt_ids": prompt_ids,
                    "response_ids": self._encoded(key, row[key], self.tokenizer.encode_response),
                }
                for key in ("chosen", "rejected")
            )
        chats = {
            key: images.find(key, conversation(prompt, key, row[key]))
            for key in ("chosen", "rejected")
        }
        num_shared = 0
        for one, other in zip(*(chat.messages for chat in chats.values()), strict=False):
            if one != other:
                break
            num_shared += 1
        # Chats that are equal differ in nothing; the last turn is then the response.
        num_shared = min(num_shared, *(len(chat.messages) - 1 for chat in chats.values()))
        sides = []
        for key, chat in chats.items():
            samples = self._chat_samples(key, chat, row, images, num_shared)
            if len(samples) > 1:
                raise BadLine(
                    f"{key} differs from the other in {len(samples)} turns that the template "
                    "writes otherwise when later turns follow; leave one of them"
                )
            sides += samples
        return _pair(sides)

    def _pair_ids(self, row: dict[str, Any], images: LineImages) -> list[dict[str, Any]]:
        prompt_ids = self._token_ids(row, "prompt_ids")
        return _pair(
            {"prompt_ids": prompt_ids, "response_ids": self._token_ids(row, key)}
            for key in ("chosen_ids", "rejected_ids")
        )

    def _chat_samples(
        self, key: str, chat: Conversation, row: dict[str, Any], images: LineImages, first: int = 0
    ) -> list[dict[str, Any]]:
        """The samples of a chat of which the turns from message `first` on count."""
        given = Chat(chat.messages, tools_of(row), chat.turns(first), template_arguments(row))
        try:
            samples = self.tokenizer.encode_chat(given)
        except TextError as error:
            raise BadLine(f"{key} {error}") from None
        if not samples:
            raise BadLine(f"{key} {chat.why_no_turns(first)}")
        found = []
        for sample in samples:
            self._check_text(sample.ids)
            ids, mask, placed = images.of_chat(key, sample, chat.messages, self._image_text)
            if not mask[1:].any():
                raise BadLine(f"{key}: no token counts in the loss; leave the line out")
            found.append({**_split(ids, mask), "images": placed})
        return found

    def _encoded(self, key: str, text: Any, encode: Callable[[str], Ids]) -> Ids:
        if not isinstance(text, str):
            raise BadLine(f"{key} is {shown(text)}, expected a string")
        try:
            ids = encode(text)
        except TextError as error:
            raise BadLine(f"{key} {error}") from None
        self._check_text(ids)
        return ids

    def _check_text(self, ids: Ids) -> None:
        if self._checks_text and len(ids) and int(ids.max()) >= self.vocab_size:
            raise BadLine(
                f"text needs a vocabulary of {self.tokenizer.vocab_size}, the model has "
                f"{self.vocab_size}; set model.vocab_size, or give ids"
            )

    def _token_ids(self, row: dict[str, Any], key: str) -> Ids:
        values = row[key]
        if not isinstance(values, list):
            raise BadLine(f"{key} is {shown(values)}, expected a list of integers")
        # bool is a subclass of int, but not a token id.
        if set(map(type, values)) - {int}:
            odd = next(index for index, value in enumerate(values) if type(value) is not int)
            raise BadLine(f"{key}[{odd}] is {shown(values[odd])}, expected an integer")
        with contextlib.suppress(OverflowError):
            ids = np.array(values, dtype=np.int64)
            if ids.size == 0 or 0 <= ids.min() <= ids.max() < self.vocab_size:
                return ids
        odd = next(i for i, value in enumerate(values) if not 0 <= value < self.vocab_size)
        raise BadLine(
            f"{key}[{odd}] is {shown(values[odd])}, outside the vocabulary of "
            f"{self.vocab_size}; set model.vocab_size if the model has more"
        )


@lru_cache(maxsize=1024)  # Rows of a file have few different sets of columns.
def _form(columns: tuple[str, ...]) -> str:
    """The kind of samples that a row has, by the columns that it gives.

    Raises:
        BadLine: none, or columns that do not go together.
    """
    given = [key for key in columns if key in _TOKEN_COLUMNS]
    ids = [key for key in given if key.endswith("_ids")]
    text = [key for key in given if key not in ids]
    if text and ids:
        raise BadLine(f"has both {text[0]} and {ids[0]}; give text or ids")
    for form, names in _FORMS.items():
        if set(names) <= set(given) <= {*names, *_ALSO.get(form, ())}:
            return form
    raise BadLine(
        f"has {' and '.join(given) or 'no tokens'}; give prompt and response, prompt_ids and "
        "response_ids, messages, or chosen and rejected"
    )


def _refuse(row: dict[str, Any], keys: tuple[str, ...], why: str) -> None:
    """Refuse columns that would not be read, if they say anything."""
    for key in keys:
        if row.get(key):
            raise BadLine(f"has {key}, which {why}")


def _pair(sides: Any) -> list[dict[str, Any]]:
    samples = [{**fields, "pair_sign": sign} for fields, sign in zip(sides, (1, -1), strict=True)]
    for name, fields in zip(("chosen", "rejected"), samples, strict=True):
        mask = fields.get("loss_mask")
        counts = len(fields["response_ids"]) if mask is None else int(mask.sum())
        if counts - (len(fields["prompt_ids"]) == 0) < 1:
            raise BadLine(f"{name} has no token that counts in the loss; leave the pair out")
    chosen, rejected = (np.concatenate([one["prompt_ids"], one["response_ids"]]) for one in samples)
    if np.array_equal(chosen, rejected) and len({one.get("images") for one in samples}) == 1:
        raise BadLine(
            "chosen and rejected have the same tokens (a template may leave out what differs, such "
            "as thoughts); leave the pair out"
        )
    return samples


def _split(ids: Ids, loss_mask: Mask) -> dict[str, Any]:
    """Prompt, response and mask of a chat: the response begins at the first token that counts."""
    first = int(np.argmax(loss_mask))
    mask = loss_mask[first:]
    return {
        "prompt_ids": ids[:first],
        "response_ids": ids[first:],
        "loss_mask": None if mask.all() else mask,
    }


def _mask(key: str, values: Any, num_response: int) -> Mask | None:
    if not isinstance(values, list):
        raise BadLine(f"{key} is {shown(values)}, expected a list of 0 and 1")
    if len(values) != num_response:
        raise BadLine(
            f"{key} has {len(values)} values for {num_response} response_ids; give one per token"
        )
    types = (int, bool)
    if {*map(type, values)}.difference(types) or {*values} - {0, 1}:
        bad = (
            i for i, value in enumerate(values) if type(value) not in types or value not in (0, 1)
        )
        odd = next(bad)
        raise BadLine(f"{key}[{odd}] is {shown(values[odd])}, expected 0 or 1")
    mask = np.array(values, dtype=np.bool_)
    if not mask.any():
        raise BadLine(f"{key} has no 1, so that no token counts in the loss; leave the line out")
    return None if mask.all() else mask


def _array(key: str, values: Any, wanted: str) -> npt.NDArray[Any]:
    try:
        return np.array(values)
    except (ValueError, OverflowError):
        raise BadLine(f"{key} is ragged, {wanted}") from None


def _routes(values: Any, num_tokens: int) -> npt.NDArray[np.uint16]:
    """Experts per token, [tokens, MoE layers, k].

    An engine does not run the last token that it sampled; the experts of the token before stand in,
    which nothing that is trained depends on.
    """
    wanted = "expected one list [MoE layers][k] of expert numbers per token"
    routes = _array("routed_experts", values, wanted)
    if routes.ndim != 3 or routes.dtype.kind != "i" or routes.size == 0:
        raise BadLine(f"routed_experts is {shown(values)}, {wanted}")
    if len(routes) not in (num_tokens, num_tokens - 1):
        raise BadLine(
            f"routed_experts has {len(routes)} tokens, the sample {num_tokens}; give all, or all "
            "but the last"
        )
    if routes.min() < 0 or routes.max() > _MAX_EXPERT:
        odd = routes.min() if routes.min() < 0 else routes.max()
        raise BadLine(f"routed_experts has expert {odd}, expected 0 to {_MAX_EXPERT}")
    missing = num_tokens - len(routes)
    return np.concatenate([routes, routes[len(routes) - missing :]]).astype(np.uint16)


def json_object(
    line: bytes, expected: str = "an object with prompt and response"
) -> dict[str, Any]:
    """The object of one line, with its line break.

    Raises:
        BadLine: it is something else than what is expected.
    """
    cut_off = "" if line.endswith((b"\n", b"\r")) else "; the last line is cut off"
    remedy = f"{cut_off}; write it again"
    try:
        row = strict_json(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise BadLine(f"{not_utf8(error)}{cut_off}") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} at column {error.colno}{remedy}") from None
    except ValueError as error:
        raise BadLine(f"not JSON: {error}{remedy}") from None
    if not isinstance(row, dict):
        raise BadLine(f"is {shown(row)}, expected {expected}")
    return row


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{key} is {shown(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadLine(f"{key} is {shown(value)}, expected a finite number")
    return number


def _identity(key: str, value: Any) -> int | str:
    if not is_id(value):
        raise BadLine(f"{key} is {shown(value)}, expected an int64 or a string")
    return value


# Columns that all samples of a row share.
_CHECKS: tuple[tuple[str, Callable[[str, Any], Any]], ...] = (
    ("reward", _number),
    ("advantage", _number),
    ("group", _identity),
    ("rollout", _identity),
)

"""Tokenizers: what text becomes token ids, and the built-in one.

The built-in tokenizer has one token per UTF-8 byte. It needs no files and loses nothing, so text
trains out of the box. A real run names its model's own (`hf_tokenizer`), or brings token ids, which
pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megapack.cost.options import BYTE_VOCAB_SIZE

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Message = Mapping[str, Any]
"""A turn of a chat: `role`, `content` (text, or parts of text and images), and what else a template
reads."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call."""

    text: str
    """As JSON, as the data have it if they have text."""


class TextError(ValueError):
    """Why a text or a chat cannot become a sample."""


@dataclass(frozen=True)
class Chat:
    """A chat to tokenize."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    turns: Sequence[int]
    """Numbers of the messages that count in the loss."""
    arguments: Mapping[str, Any]
    """Of the template, by name."""


@dataclass(frozen=True, eq=False)
class ChatTokens:
    """A chat as one sample."""

    ids: Ids
    loss_mask: Mask
    """Per token: whether it counts in the loss."""
    num_messages: int
    """Messages that it has, from the first on."""


class Tokenizer(Protocol):
    """Turns text into token ids, equally on every machine. It can be pickled."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def digest(self) -> str:
        """Names everything that decides the ids: two tokenizers with one digest are equal."""

    def encode_prompt(self, text: str) -> Ids:
        """The ids of a prompt, with the special tokens that begin a sample."""

    def encode_response(self, text: str) -> Ids:
        """The ids of a response, with the special token that ends it.

        Raises:
            TextError: the tokenizer cannot encode it.
        """

    def encode_chat(self, chat: Chat) -> list[ChatTokens]:
        """The samples of a chat; see `chats.chat_texts`.

        Raises:
            TextError: the tokenizer has no chats, or the template refuses this one.
        """

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token's text by itself, special tokens by name; for people."""


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes; three special tokens follow.

    | id | token | where |
    |---|---|---|
    | 0-255 | the byte of that value | in the text |
    | 256 | `bos` | before every prompt |
    | 257 | `eos` | after every response |
    | 258 | `pad` | in padding only, never in a sample |
    """

    bos = 256
    eos = 257
    pad = 258
    vocab_size = BYTE_VOCAB_SIZE

    @property
    def digest(self) -> str:
        """See `Tokenizer`."""
        return f"bytes {self.vocab_size}"

    def encode_prompt(self, text: str) -> Ids:
        """`bos`, then the bytes."""
        return _ID_OF_BYTE[np.frombuffer(_BOS_BYTE + _utf8(text), dtype=np.uint8)]

    def encode_response(self, text: str) -> Ids:
        """The bytes, then `eos`."""
        return _ID_OF_BYTE[np.frombuffer(_utf8(text) + _EOS_BYTE, dtype=np.uint8)]

    def encode_chat(self, chat: Chat) -> list[ChatTokens]:
        """See `Tokenizer`."""
        raise TextError("needs a chat template, bytes have none; set data.tokenizer=hf")

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """See `Tokenizer`; bytes outside of ASCII as `\\xe9`."""
        names = {self.bos: "<bos>", self.eos: "<eos>", self.pad: "<pad>"}
        return [names.get(i) or (chr(i) if i < 128 else f"\\x{i:02x}") for i in map(int, ids)]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise TextError("has half of a surrogate pair; write it again") from None


_BOS_BYTE = b"\xfe"
_EOS_BYTE = b"\xff"
_ID_OF_BYTE = np.arange(256, dtype=np.int64)
_ID_OF_BYTE[[_BOS_BYTE[0], _EOS_BYTE[0]]] = [ByteTokenizer.bos, ByteTokenizer.eos]

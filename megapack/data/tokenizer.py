"""The built-in tokenizer: one token per UTF-8 byte. It needs no files and loses nothing.

With it text trains out of the box. A real run brings token ids of its model's own tokenizer
(`prompt_ids`, `response_ids`), which pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megapack.config.model import BYTE_VOCAB_SIZE

Ids = npt.NDArray[np.int64]


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

    def encode(self, text: str) -> Ids:
        """The bytes of a text, int64, without special tokens.

        Raises:
            UnicodeEncodeError: the text has half of a surrogate pair.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_prompt(self, text: str) -> Ids:
        """`bos`, then the bytes."""
        return np.concatenate([_BOS, self.encode(text)])

    def encode_response(self, text: str) -> Ids:
        """The bytes, then `eos`."""
        return np.concatenate([self.encode(text), _EOS])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in map(int, ids) if 0 <= token < 256).decode(errors="replace")


_BOS = np.array([ByteTokenizer.bos], dtype=np.int64)
_EOS = np.array([ByteTokenizer.eos], dtype=np.int64)

"""A token block: the token ids of a block's samples, and what the index keeps of them.

Token blocks are made one by one, in any process. Each depends on its block and the settings alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.choices import Overlong
from megapack.job.data.lines import LineParser
from megapack.job.data.messages import BadLine
from megapack.job.data.rollouts import ROUTES, TOKEN_COLUMNS, Rollout
from megapack.job.data.tokenizer import ByteTokenizer, Tokenizer

Tokens = npt.NDArray[np.int32]
"""Token ids of samples one after another. A response token that does not count in the loss is
stored as -1 - id: 7 becomes -8, and 0 becomes -1."""
Routes = npt.NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """How samples are read."""

    tokenizer: Tokenizer = dataclasses.field(default_factory=ByteTokenizer)
    vocab_size: int | None = None
    """Token ids must be below it; None = the tokenizer's."""
    max_length: int | None = None
    """Largest length of a sample in tokens; None = no limit."""
    overlong: Overlong = "error"
    """How a sample above `max_length` is treated: "error" refuses it, "truncate" keeps its first
    `max_length` tokens, "skip" leaves it out, as "truncate" does if no token would be left that
    counts in the loss. Of a preference pair both samples are left out. A warning says how many were
    truncated or skipped."""

    @property
    def num_ids(self) -> int:
        """Token ids are below it."""
        return self.tokenizer.vocab_size if self.vocab_size is None else self.vocab_size

    def parser(self) -> LineParser:
        """A parser with this tokenizer and vocabulary."""
        return LineParser(self.tokenizer, self.num_ids)

    def fit(self, samples: list[Rollout]) -> list[Rollout]:
        """Apply `overlong` to the samples of one line: those that are kept, perhaps shorter.

        If nothing changes, the list itself is returned.

        Raises:
            BadLine: one is too long, and `overlong` is "error".
        """
        most = self.max_length
        if most is None or all(sample.num_tokens <= most for sample in samples):
            return samples
        if self.overlong == "error":
            longest = max(sample.num_tokens for sample in samples)
            raise BadLine(
                f"{longest} tokens, max_length is {most}; raise it, or set overlong to truncate or "
                "skip"
            )
        kept = [sample for sample in samples if sample.num_tokens <= most]
        if self.overlong == "truncate":
            cut = [sample.cut(most) for sample in samples]
            kept = [
                after
                for after, before in zip(cut, samples, strict=True)
                if before.num_tokens <= most or after.num_loss_tokens
            ]
        is_pair = any(sample.pair_sign for sample in samples)
        return [] if is_pair and len(kept) < len(samples) else kept


ROW_DTYPE = np.dtype(
    [
        ("number", np.int64),  # line or row, from 1
        ("part", np.int32),  # number of the sample within its line, from 0
        ("prompt_tokens", np.int32),
        ("response_tokens", np.int32),
        ("loss_tokens", np.int32),  # response tokens that count in the loss
        ("pair_sign", np.int8),  # 1 = preferred, -1 = the other, 0 = no pair
        ("reward", np.float64),  # NaN = not given
        ("advantage", np.float64),  # NaN = not given
        ("arrays", np.int8),  # bit k: the k-th of ARRAYS is given
    ]
)
"""What is known of a sample without those before it. The columns that the index has too have its
names."""
ARRAYS: dict[str, npt.DTypeLike] = {ROUTES: "<u2", **TOKEN_COLUMNS}
"""Arrays of values per token, and the type that they are stored with."""
BITS = {name: 1 << k for k, name in enumerate(ARRAYS)}


@dataclass
class TokenBlock:
    """The samples of a block in order."""

    rows: npt.NDArray[np.void]
    """`ROW_DTYPE` [samples]."""
    groups: list[int | str]
    """Each sample's prompt group, as the file names it."""
    rollouts: list[int | str]
    """Each sample's rollout within its prompt group, as the file names it."""
    tokens: Tokens
    """Of all samples, one after another: prompt, then response."""
    arrays: dict[str, list[npt.NDArray[Any]]] = dataclasses.field(default_factory=dict)
    """By name in `ARRAYS`, those of the samples that have one: [tokens or response tokens, ...]."""
    num_skipped: int = 0
    num_truncated: int = 0
    error: str = ""
    """Line number and reason of the first line that is refused; "" without one."""


def make_token_block(samples: Iterable[tuple[int, Rollout]]) -> TokenBlock:
    """The token block of these samples, each with the number of its line."""
    nan = float("nan")
    rows = []
    groups: list[int | str] = []
    rollouts: list[int | str] = []
    tokens: list[npt.NDArray[np.int64]] = []
    arrays: dict[str, list[npt.NDArray[Any]]] = {}
    for number, sample in samples:
        tokens += [sample.prompt_ids, _signed(sample)]
        for name, values in sample.arrays.items():
            arrays.setdefault(name, []).append(values)
        rows.append(
            (
                *(number, sample.part, len(sample.prompt_ids), len(sample.response_ids)),
                *(sample.num_loss_tokens, sample.pair_sign),
                nan if sample.reward is None else sample.reward,
                nan if sample.advantage is None else sample.advantage,
                sum(map(BITS.__getitem__, sample.arrays)),
            )
        )
        groups.append(sample.group)
        rollouts.append(sample.rollout)
    joined = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
    return TokenBlock(
        np.array(rows, dtype=ROW_DTYPE), groups, rollouts, joined.astype(np.int32), arrays
    )


def join(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """Those of consecutive rows, at least one, as one; only the last may have an error."""
    if len(blocks) == 1:
        return blocks[0]
    chain = itertools.chain.from_iterable
    return TokenBlock(
        rows=np.concatenate([block.rows for block in blocks]),
        groups=list(chain(block.groups for block in blocks)),
        rollouts=list(chain(block.rollouts for block in blocks)),
        tokens=np.concatenate([block.tokens for block in blocks]),
        arrays={
            name: list(chain(block.arrays.get(name, []) for block in blocks))
            for name in ARRAYS
            if any(name in block.arrays for block in blocks)
        },
        num_skipped=sum(block.num_skipped for block in blocks),
        num_truncated=sum(block.num_truncated for block in blocks),
        error=blocks[-1].error,
    )


def _signed(sample: Rollout) -> npt.NDArray[np.int64]:
    if sample.loss_mask is None:
        return sample.response_ids
    return np.where(sample.loss_mask, sample.response_ids, -1 - sample.response_ids)

"""A block of a data file -> a piece: its samples' token ids and what the index keeps of them.

Pieces are made one by one, in any process; a piece depends on its block and the settings alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapack.base.choices import Overlong
from megapack.data.files import Block
from megapack.data.lines import BadLine, LineParser
from megapack.data.rollouts import Rollout
from megapack.data.tokenizer import ByteTokenizer, Tokenizer

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

    def parser(self) -> LineParser:
        """A parser with this tokenizer and vocabulary."""
        vocab_size = self.tokenizer.vocab_size if self.vocab_size is None else self.vocab_size
        return LineParser(self.tokenizer, vocab_size)

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


class IndexRow(NamedTuple):
    """A sample without its tokens."""

    number: int
    part: int
    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    pair_sign: int
    group: int | str
    rollout: int | str
    reward: float | None
    advantage: float | None
    has_routes: bool


@dataclass
class Piece:
    """The samples of a block in order."""

    rows: list[IndexRow]
    tokens: Tokens
    """Of all samples, one after another: prompt, then response."""
    routes: list[Routes]
    """Of the samples that have them, each [tokens, MoE layers, k]."""
    num_skipped: int = 0
    num_truncated: int = 0
    error: str = ""
    """Line number and reason of the first line that is refused; "" without one."""


def read_block(block: Block, file: int, settings: ReadSettings, parser: LineParser) -> Piece:
    """Parse and tokenize the rows of a block.

    Args:
        file: the file's number; it and the row's number identify a sample without `group`.
        parser: of the settings; made once, because a tokenizer may take seconds to load.
    """
    samples: list[tuple[int, Rollout]] = []
    num_skipped = 0
    num_truncated = 0
    error = ""
    for number, row in block.rows():
        try:
            whole = parser.parse(row, f"{file} line-{number}")
            kept = settings.fit(whole)
        except BadLine as bad:
            error = f"{number}: {bad}"
            break
        if kept is not whole:
            num_skipped += len(whole) - len(kept)
            before = {sample.part: sample.num_tokens for sample in whole}
            num_truncated += sum(sample.num_tokens < before[sample.part] for sample in kept)
        samples += [(number, sample) for sample in kept]
    piece = make_piece(samples)
    piece.num_skipped = num_skipped
    piece.num_truncated = num_truncated
    piece.error = error
    return piece


def make_piece(samples: Iterable[tuple[int, Rollout]]) -> Piece:
    """The piece of these samples, each with the number of its line."""
    rows: list[IndexRow] = []
    tokens: list[npt.NDArray[np.int64]] = []
    routes: list[Routes] = []
    for number, sample in samples:
        tokens += [sample.prompt_ids, _signed(sample)]
        if sample.routed_experts is not None:
            routes.append(sample.routed_experts)
        rows.append(
            # By position: names would take a tenth of the time of a whole line.
            IndexRow(
                number,
                sample.part,
                len(sample.prompt_ids),
                len(sample.response_ids),
                sample.num_loss_tokens,
                sample.pair_sign,
                sample.group,
                sample.rollout,
                sample.reward,
                sample.advantage,
                sample.routed_experts is not None,
            )
        )
    joined = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
    return Piece(rows, joined.astype(np.int32), routes)


def _signed(sample: Rollout) -> npt.NDArray[np.int64]:
    if sample.loss_mask is None:
        return sample.response_ids
    return np.where(sample.loss_mask, sample.response_ids, -1 - sample.response_ids)

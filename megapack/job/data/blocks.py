"""A block of a data file -> its token block.

Rows of one simple form are read together (`columns`), all others one by one (`lines`).
"""

from __future__ import annotations

from megapack.job.data.columns import read_columns
from megapack.job.data.files import Block, Lines
from megapack.job.data.lines import LineParser
from megapack.job.data.messages import BadLine
from megapack.job.data.rollouts import Rollout
from megapack.job.data.token_blocks import ReadSettings, TokenBlock, join, make_token_block

# Lines that are read together. An unusual line slows down those that share its part alone: in
# lines of 120 bytes, 1100 of them.
_PART_BYTES = 1 << 17


def read_block(block: Block, file: int, settings: ReadSettings, parser: LineParser) -> TokenBlock:
    """Parse and tokenize the rows of a block.

    Args:
        file: the file's number; it and the row's number identify a sample without `group`.
        parser: of the settings; made once, because a tokenizer may take seconds to load.
    """
    parts = block.parts(_PART_BYTES) if isinstance(block, Lines) else [block]
    found: list[TokenBlock] = []
    for part in parts:
        token_block = read_columns(part, file, settings) or _read_rows(part, file, settings, parser)
        found.append(token_block)
        if token_block.error:
            break
    return join(found)


def _read_rows(block: Block, file: int, settings: ReadSettings, parser: LineParser) -> TokenBlock:
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
    token_block = make_token_block(samples)
    token_block.num_skipped = num_skipped
    token_block.num_truncated = num_truncated
    token_block.error = error
    return token_block

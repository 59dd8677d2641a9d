"""Blocks of files -> token blocks, in order, tokenized by several processes.

The processes run this module's `serve`. Each has one block at a time, and blocks go round, so the
result is that of one process.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterable, Iterator

from megapack.base.garbage import rare_collections
from megapack.errors import DataError
from megapack.job.data.files import Block
from megapack.job.data.lines import LineParser
from megapack.job.data.processes import AnsweringProcess, ProcessEnded, answer_messages
from megapack.job.data.token_blocks import ReadSettings, TokenBlock, read_block

Blocks = Iterable[tuple[int, Block]]
"""The number of a file, and a block of it."""

# Starting a process takes seconds where the tokenizer is loaded: fewer blocks are read here.
_FEW_BLOCKS = 8
# A bar is shown only of what takes longer, in seconds.
_BAR_AFTER_S = 1.0


def read_token_blocks(
    blocks: Blocks, settings: ReadSettings, num_workers: int | None, total_bytes: int
) -> Iterator[tuple[int, TokenBlock]]:
    """Yield the number of the file and the tokens of each block, in the order of the blocks.

    Args:
        num_workers: processes; None = one per core that this process may use.
        total_bytes: of all blocks, for the progress bar.
    """
    from tqdm import tqdm

    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0))
    blocks = iter(blocks)
    first = list(itertools.islice(blocks, _FEW_BLOCKS))
    is_small = len(first) < _FEW_BLOCKS or num_workers == 1
    read = _read_here if is_small else _read_by_processes
    bar = tqdm(
        desc="tokenizing",
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=_BAR_AFTER_S,
        # None: no bar where nobody looks.
        disable=None,
    )
    with bar, rare_collections():
        for block_file, num_bytes, token_block in read(
            itertools.chain(first, blocks), settings, num_workers
        ):
            bar.update(num_bytes)
            yield block_file, token_block


def _read_here(
    blocks: Blocks, settings: ReadSettings, num_workers: int
) -> Iterator[tuple[int, int, TokenBlock]]:
    parser = settings.parser()
    for file, block in blocks:
        yield file, block.num_bytes, read_block(block, file, settings, parser)


def _read_by_processes(
    blocks: Blocks, settings: ReadSettings, num_workers: int
) -> Iterator[tuple[int, int, TokenBlock]]:
    # By file and size of its block; the oldest block's process is the next to be free.
    waiting: collections.deque[tuple[int, int, AnsweringProcess]] = collections.deque()
    processes: list[AnsweringProcess] = []
    try:
        for file, block in blocks:
            if len(processes) < num_workers:
                processes.append(process := _start())
            else:
                done_file, num_bytes, process = waiting.popleft()
                yield done_file, num_bytes, process.receive()
            process.send((settings, file, block))
            waiting.append((file, block.num_bytes, process))
        for file, num_bytes, process in waiting:
            yield file, num_bytes, process.receive()
    except ProcessEnded as ended:
        raise DataError(
            f"a process that tokenizes ended with exit code {ended.code}; look at its output, or "
            "set data.workers=1"
        ) from None
    finally:
        for process in processes:
            process.end()


def _start() -> AnsweringProcess:
    # The processes are the parallelism: the tokenizer's own threads would share their cores.
    code = "from megapack.job.data.workers import serve; serve()"
    return AnsweringProcess(code, TOKENIZERS_PARALLELISM="false")


def serve() -> None:
    """In a process: make token blocks of blocks."""
    # Made once, because a tokenizer may take seconds to load; all blocks have the same settings.
    parsers: list[LineParser] = []

    def work(message: tuple[ReadSettings, int, Block]) -> TokenBlock:
        settings, file, block = message
        if not parsers:
            parsers.append(settings.parser())
        return read_block(block, file, settings, parsers[0])

    with rare_collections():
        answer_messages(work)

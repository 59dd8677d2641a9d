"""Blocks of files -> token blocks, in order, tokenized by several processes.

The processes run this module's `serve`; they are not forked, because the job that reads the data
has threads and perhaps a GPU. Each has one block at a time, and blocks go round, so the result is
that of one process.
"""

from __future__ import annotations

import collections
import itertools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from megapack.base.garbage import rare_collections
from megapack.base.processes import python_command
from megapack.errors import DataError
from megapack.job.data.blocks import read_block
from megapack.job.data.files import Block
from megapack.job.data.token_blocks import ReadSettings, TokenBlock

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
    waiting: collections.deque[tuple[int, int, _Process]] = collections.deque()
    processes: list[_Process] = []
    try:
        for file, block in blocks:
            if len(processes) < num_workers:
                processes.append(process := _Process(settings))
            else:
                # The oldest block's process has read all that was sent to it, so that neither side
                # waits for the other to read.
                done_file, done_bytes, process = waiting.popleft()
                token_block = process.receive()
                process.send((file, block))
                waiting.append((file, block.num_bytes, process))
                yield done_file, done_bytes, token_block
                continue
            process.send((file, block))
            waiting.append((file, block.num_bytes, process))
        while waiting:
            done_file, done_bytes, process = waiting.popleft()
            yield done_file, done_bytes, process.receive()
    finally:
        for process in processes:
            process.end()


class _Process:
    """A process that makes token blocks of blocks."""

    def __init__(self, settings: ReadSettings) -> None:
        code = "from megapack.job.data.workers import serve; serve()"
        # The processes are the parallelism: the tokenizer's own threads would share their cores.
        self._process = subprocess.Popen(
            python_command(code),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self.send(settings)

    def send(self, message: Any) -> None:
        """Send settings or a block."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            pickle.dump(message, stdin, protocol=5)
            stdin.flush()
        except OSError:
            raise self._ended() from None

    def receive(self) -> TokenBlock:
        """The token block of the oldest block that was sent.

        Raises:
            DataError: the process has ended.
            MegapackError: it failed, for example because a package is missing.
        """
        stdout = self._process.stdout
        assert stdout is not None
        try:
            answer = pickle.load(stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, TokenBlock)
        return answer

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _ended(self) -> DataError:
        code = self._process.wait()
        return DataError(
            f"a process that tokenizes ended with exit code {code}; look at its output, or set "
            "data.workers=1"
        )


def serve() -> None:
    """Read settings and blocks from standard input, write token blocks to standard output."""
    # Ctrl-C reaches this process too; the parent ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    # What a library prints must not come between the token blocks.
    os.dup2(2, 1)
    with rare_collections():
        _serve(sys.stdin.buffer, out)


def _serve(stdin: BinaryIO, out: BinaryIO) -> None:
    settings: ReadSettings = pickle.load(stdin)
    parser = None
    while True:
        try:
            file, block = pickle.load(stdin)
        except EOFError:
            return
        answer: TokenBlock | Exception
        try:
            parser = parser or settings.parser()
            answer = read_block(block, file, settings, parser)
        except Exception as error:  # raised in the parent
            answer = error
        pickle.dump(answer, out, protocol=5)
        out.flush()

"""Samples that several processes tokenize are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.errors import ConfigError, DataError
from megapack.job.data import files, workers
from megapack.job.data.files import Block
from megapack.job.data.index import StoredSamples, load_samples
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer, Ids

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that few rows are many blocks."""
    monkeypatch.setattr(files, "_BLOCK_BYTES", 500)
    monkeypatch.setattr(files, "_BLOCK_ROWS", 7)


def rows() -> list[dict[str, Any]]:
    routes = [[[1, 2]], [[3, 4]]]
    lines: list[dict[str, Any]] = []
    for number in range(200):
        if number % 3 == 0:
            lines.append({"prompt": "a" * (number % 50), "response": "é", "group": number // 7})
        elif number % 3 == 1:
            ids = {"prompt_ids": [number], "response_ids": [1, 2], "response_mask": [0, 1]}
            lines.append({**ids, "rollout": number // 2, "reward": number / 3})
        else:
            lines.append({"prompt_ids": [5], "response_ids": [6], "routed_experts": routes})
    return lines


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "a.jsonl").write_text(text)
    (folder / "b.jsonl").write_text(text)
    return folder


def load(path: Path, num_workers: int | None, **settings: Any) -> StoredSamples:
    for stored in path.glob(".*.npy"):
        stored.unlink()
    return load_samples(path, ReadSettings(**settings), path, num_workers)


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "data", *rows())
    one = load(path, 1)
    index = np.array(one.index)
    tokens = np.array(one.all_tokens)
    routes = np.array(one.arrays["routed_experts"])
    assert len(index) == 400
    assert len(routes) == 2 * 2 * 66
    for num_workers in (2, 3, None):
        again = load(path, num_workers)
        np.testing.assert_array_equal(again.all_tokens, tokens)
        np.testing.assert_array_equal(again.arrays["routed_experts"], routes)
        for name in index.dtype.names or ():
            np.testing.assert_array_equal(again.index[name], index[name])


def test_the_first_bad_line_is_reported_by_any_number(tmp_path: Path) -> None:
    lines = rows()
    lines[150] = {"prompt_ids": [-1], "response_ids": []}
    lines[190] = {"prompt_ids": "no", "response_ids": []}
    path = write(tmp_path / "data", *lines)
    for num_workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl:151: prompt_ids\[0\] is -1"):
            load(path, num_workers)
    assert sorted(file.name for file in path.iterdir()) == ["a.jsonl", "b.jsonl"]


class Fails(ByteTokenizer):
    """Fails in the processes, as if a package were missing there."""

    def encode_prompt(self, text: str) -> Ids:
        raise ConfigError("data.tokenizer=hf needs transformers; pip install transformers")


class Dies(ByteTokenizer):
    """Ends the process that encodes."""

    def encode_prompt(self, text: str) -> Ids:
        import os

        os._exit(3)


def test_a_process_that_fails_or_dies_ends_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "data", *rows())
    with pytest.raises(ConfigError, match=r"pip install transformers"):
        load(path, 2, tokenizer=Fails())
    with pytest.raises(DataError, match=r"ended with exit code 3; .* set data\.workers=1"):
        load(path, 2, tokenizer=Dies())
    assert sorted(file.name for file in path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_few_blocks_are_read_without_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data", *rows()[:6])

    def refused(*args: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers, "_start", refused)
    assert len(load(path, 2).index) == 12


def test_blocks_are_whole_lines_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join([b"1" * (n % 300) for n in range(400)]))
    blocks: list[Block] = list(files.read_blocks(path))
    assert len(blocks) > 50
    assert sum(block.num_bytes for block in blocks) == path.stat().st_size
    found = [(number, row) for block in blocks for number, row in block.rows()]
    lines = path.read_bytes().split(b"\n")
    assert [(number, row.strip()) for number, row in found if isinstance(row, bytes)] == [
        (number, line) for number, line in enumerate(lines, start=1) if line
    ]

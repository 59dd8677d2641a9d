"""Rows that are read together give what they give one by one, or are left to that."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.job.data import blocks
from megapack.job.data.blocks import read_block
from megapack.job.data.columns import read_columns
from megapack.job.data.files import Block, Lines, open_file
from megapack.job.data.token_blocks import ReadSettings, TokenBlock
from megapack.job.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.unit

TEXT = [
    {"prompt": "", "response": "4", "reward": 1},
    {"prompt": "2+2=", "response": "", "reward": -0.5},
    {"prompt": 'naïve\n\\ "quoted" \u0000', "response": "\U0001f600 ü", "reward": 1e300},
    {"prompt": "}\n{", "response": "null", "reward": 2**60},
]
IDS = [
    {"group": "a", "rollout": 1, "prompt_ids": [], "response_ids": [5], "advantage": 0.25},
    {"group": "b", "rollout": -(2**63), "prompt_ids": [258], "response_ids": [], "advantage": 2},
    {"group": "a", "rollout": 2**63 - 1, "prompt_ids": [1, 2], "response_ids": [3, 0, 4],
     "advantage": -1e-320},
]  # fmt: skip
MASKED = [
    {**row, "loss_mask": mask} for row, mask in zip(IDS[::2], ([1], [0, True, 0]), strict=True)
]
# Absent or null.
UNEVEN: list[dict[str, Any]] = [
    {"prompt": "a", "response": "b", "reward": 1, "group": 1},
    {"response": "b", "prompt": "a", "rollout": "r", "x": {"y": [{"z": 1}]}},
    {"prompt": "a", "response": "b", "reward": None, "group": None, "rollout": None},
    {"prompt": "a", "response": "b", "group": "1", "messages": None},
]
# What may stand beside the columns that are read.
BESIDE: list[dict[str, Any]] = [
    {},
    {"extra": {"a": [1, {"b": 2}], "c": None}, "tools": None, "n": 10**400},
    {"reward": None, "messages": None, "x": [None, True]},
    {"group": 7, "rollout": "r"},
]
# Good or bad; each must be read as it is by itself.
ODD = [
    b'{"prompt": "a", "response": "b"}',
    b'{"response": "b", "prompt": "a", "reward": 1}',
    b'{"prompt": "a", "response": "b", "reward": 1} ',
    b' {"prompt": "a", "response": "b", "reward": 1}',
    b'{"prompt": "a", "response": "b", "reward": 1}\r',
    b"",
    b"   ",
    b'{"prompt": "a", "response": "b", "reward": 1}{"prompt": "a", "response": "b", "reward": 1}',
    b'{"prompt": "a", "response": "b", "reward": 1},',
    b'{"prompt": "a", "response": "b",\n"reward": 1}',
    b'{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "b", "reward": 1, "x": 2}',
    b'{"prompt": "a", "response": "b", "reward": 1, "reward": 2}',
    b'{"prompt": "a", "response": "b", "response": "c"}',
    b'{"prompt": "a", "response": "b", "reward": null}',
    b'{"prompt": "a", "response": "b", "reward": true}',
    b'{"prompt": "a", "response": "b", "reward": "1"}',
    b'{"prompt": "a", "response": "b", "reward": NaN}',
    b'{"prompt": "a", "response": "b", "reward": 1e999}',
    b'{"prompt": "a", "response": "b", "reward": ' + b"9" * 400 + b"}",
    b'{"prompt": "a", "response": "b", "reward": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800", "response": "b", "reward": 1}',
    b'{"prompt": "\xff", "response": "b", "reward": 1}',
    b'{"prompt": 1, "response": "b", "reward": 1}',
    b'{"prompt": {}, "response": "b", "reward": 1}',
    b'{"prompt": "a", "response": "' + b"b" * 400 + b'", "reward": 1}',
    b'{"prompt": "a", "response_ids": [1], "reward": 1}',
    b"[1, 2, 3]",
    b"5",
    b"{}",
    b"[" * 100_000,
]
ODD_BY_ITSELF = [
    b'{"prompt": "a", "response": "b", "group": 1.0}',
    b'{"prompt": "a", "response": "b", "group": true}',
    b'{"prompt": "a", "response": "b", "rollout": 9223372036854775808}',
    b'{"prompt": "a", "response": "b", "x": {"y": 1, "y": 2}}',
    b'{"prompt": "a", "response": "b", "x": [{"y": 1, "y": 2}]}',
    b'{"prompt": "a", "response": "b", "prompt_ids": [1]}',
    b'{"prompt": "a", "response": "b", "response_mask": [1]}',
    b'{"prompt": "a", "response": "b", "messages": []}',
    b'{"prompt": "a", "response": "b", "messages": null, "prompt_ids": null}',
    b'{"prompt_ids": {}, "response_ids": [1]}',
    b'{"prompt_ids": [], "response_ids": []}',
    b'{"prompt_ids": [], "response_ids": [true]}',
    b'{"prompt_ids": [], "response_ids": [1.0]}',
    b'{"prompt_ids": [], "response_ids": [-1]}',
    b'{"prompt_ids": [], "response_ids": [259]}',
    b'{"prompt_ids": [], "response_ids": [9223372036854775808]}',
    b'{"prompt_ids": [[1]], "response_ids": [1]}',
    b'{"prompt_ids": [1, 2], "response_ids": [1], "response_mask": [1]}',
    b'{"prompt_ids": [1], "response_ids": [1, 2], "loss_mask": [0, 1]}',
    b'{"prompt_ids": [], "response_ids": [1, 2], "loss_mask": [1, 0]}',
    b'{"prompt_ids": [1], "response_ids": [1, 2], "loss_mask": [0, 2]}',
    b'{"prompt_ids": [1], "response_ids": [1, 2], "loss_mask": [0, -1]}',
    b'{"prompt_ids": [1], "response_ids": [1, 2], "loss_mask": [0, 1.0]}',
    b'{"prompt_ids": [1], "response_ids": [1, 2], "loss_mask": [0, 0]}',
    b'{"prompt_ids": [1], "response_ids": [], "loss_mask": []}',
    b'{"prompt_ids": [1], "response_ids": [1], "loss_mask": [1], "response_mask": [1]}',
]


def encoded(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(data: bytes | Block, **settings: Any) -> TokenBlock:
    given = ReadSettings(**settings)
    block = Lines(11, data) if isinstance(data, bytes) else data
    return read_block(block, 3, given, given.parser())


def assert_as_one_by_one(
    data: bytes | Block, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    together = read(data, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "read_columns", lambda *_: None)
        alone = read(data, **settings)
    for field in dataclasses.fields(TokenBlock):
        found, expected = (getattr(token_block, field.name) for token_block in (together, alone))
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes()
        else:
            # 1 and True would be equal, too.
            assert repr(found) == repr(expected)


@pytest.mark.parametrize("rows", [TEXT, IDS, MASKED, UNEVEN])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("ending", [b"\n", b""])
def test_plain_lines_are_read_together(
    rows: list[dict[str, Any]],
    beside: dict[str, Any],
    ending: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encoded([{**row, **beside} for row in rows])[:-1] + ending
    token_block = read_columns(Lines(11, data), 3, ReadSettings())
    assert token_block is not None
    assert token_block.rows["number"].tolist() == [11 + place for place in range(len(rows))]
    assert_as_one_by_one(data, monkeypatch)


@pytest.mark.parametrize("odd", [*ODD, *ODD_BY_ITSELF], ids=lambda odd: odd[:60].decode("latin1"))
def test_an_odd_line_is_read_as_it_is_alone(odd: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = encoded([{"prompt": "a", "response": "b", "reward": 1}] * 2)
    for before, after in ((b"", b""), (plain, b""), (b"", plain), (plain, plain)):
        data = before + odd + b"\n" + after
        assert_as_one_by_one(data, monkeypatch, max_length=300)
    assert_as_one_by_one(plain + odd, monkeypatch)


@pytest.mark.parametrize("overlong", ["error", "truncate", "skip"])
def test_long_samples_are_left_to_lines(overlong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded([{"prompt": "a" * n, "response": "b"} for n in range(10)])
    assert read_columns(Lines(1, data), 0, ReadSettings(max_length=8)) is None
    assert_as_one_by_one(data, monkeypatch, max_length=8, overlong=overlong)


def test_text_is_checked_against_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(TEXT)
    assert read_columns(Lines(1, data), 0, ReadSettings(vocab_size=257)) is None
    assert_as_one_by_one(data, monkeypatch, vocab_size=257)


# With whether the rows are read together.
TABLES: list[tuple[bool, list[dict[str, Any]]]] = [
    (True, [{**row, "reward": float(row["reward"]), "messages": None} for row in TEXT]),
    (True, [{**row, "advantage": float(row["advantage"])} for row in IDS]),
    (False, [{"prompt": "a", "response": "b", "tools": tools} for tools in ("x", None)]),
    (False, [{"prompt": "a", "response": "b", "weight": weight} for weight in (0, None)]),
    (True, [{"prompt": "a", "response": "b", "reward": reward} for reward in (1.0, None)]),
    (True, [{**row, "response_mask": [1] * len(row["response_ids"])} for row in IDS[::2]]),
    (False, [{"prompt": "a", "response": "b", "reward": reward} for reward in (1.0, np.inf)]),
    (False, [{"prompt": "a", "response": response} for response in ("b", None)]),
    (False, [{"prompt_ids": ids, "response_ids": [1]} for ids in ([1], [None])]),
    (False, [{**row, "response_mask": [1] * len(row["response_ids"])} for row in IDS]),
]


@pytest.mark.parametrize(("is_together", "rows"), TABLES)
def test_rows_of_parquet_are_read_together(
    is_together: bool, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (block,) = open_file(path).blocks()
    assert (read_columns(block, 3, ReadSettings()) is not None) == is_together
    assert_as_one_by_one(block, monkeypatch)


def test_random_files_are_read_as_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # Parts of a few lines: some are read together, and some are not.
    monkeypatch.setattr(blocks, "_PART_BYTES", 150)
    rng = random.Random(0)
    for _ in range(100):
        lines = encoded(
            rng.choices(TEXT + UNEVEN, k=20) + rng.choices(IDS + MASKED, k=20)
        ).splitlines(True)
        for _ in range(rng.randrange(3)):
            lines.insert(rng.randrange(len(lines)), rng.choice(ODD[:-1]) + b"\n")
        data = bytearray(b"".join(lines))
        if rng.random() < 0.3:
            data[rng.randrange(len(data))] = rng.choice(b' \n\r{}[]",:\\0\xff')
        assert_as_one_by_one(bytes(data), monkeypatch)


def test_texts_are_encoded_together_as_one_by_one() -> None:
    tokenizer = ByteTokenizer()
    prompts = ["", "a", "naïve \U0001f600"]
    responses = ["é", "", "\x00b"]
    together = tokenizer.encode_texts(prompts, responses)
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        expected += [tokenizer.encode_prompt(prompt), tokenizer.encode_response(response)]
    assert together.ids.tolist() == np.concatenate(expected).tolist()
    assert together.prompt_tokens.tolist() == list(map(len, expected[::2]))
    assert together.response_tokens.tolist() == list(map(len, expected[1::2]))

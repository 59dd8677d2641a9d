"""Rollouts, from files and generated, and their batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack.errors import ConfigError, DataError
from megapack.job.data.advantages import SampleReward
from megapack.job.data.dataset import Dataset
from megapack.job.data.generated import generate_pairs, generate_rollouts
from megapack.job.data.rollouts import group_batches
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.unit

TOKENIZER = ByteTokenizer()
IDS: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3]}


def write(path: Path, *rows: dict[str, Any] | str | bytes) -> Path:
    lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return path


def decode(ids: Any) -> str:
    """The text of bytes' token ids, without special tokens."""
    return bytes(token for token in ids.tolist() if token < 256).decode()


def read(path: Path, **settings: Any) -> Dataset:
    return Dataset.from_files(path, ReadSettings(**settings), path.parent)


@given(st.text(max_size=50))
def test_the_tokenizer_is_reversible(text: str) -> None:
    for ids in (TOKENIZER.encode_prompt(text), TOKENIZER.encode_response(text)):
        assert ids.dtype == np.int64
        assert len(ids) == len(text.encode()) + 1
        assert ids.max() < TOKENIZER.vocab_size
        assert decode(ids) == text


def test_text_token_ids_groups_and_rollouts_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        {"prompt": "a", "response": "é", "reward": 1, "group": 7, "rollout": "x", "other": [1]},
        "",
        {**IDS, "advantage": -0.5, "group": None},
        {"prompt_ids": [], "response_ids": [9], "group": "7"},
    )
    found = read(path)
    rows = np.arange(3)
    tokens = found.tokens(0)
    assert tokens.prompt_ids.tolist() == [256, 97]
    assert tokens.response_ids.tolist() == [0xC3, 0xA9, 257]
    assert found.tokens(2).prompt_ids.dtype == np.int64
    assert found.rollout_ids(rows) == [0, 1, 2]
    # The prompt groups 7 and "7" differ; a row without one is a prompt group by itself.
    assert found.rewards(rows) == [
        SampleReward(0, 0, reward=1.0),
        SampleReward(1, 1, advantage=-0.5),
        SampleReward(2, 2),
    ]


BAD_LINES: list[tuple[dict[str, Any] | str | bytes, str]] = [
    ("{", "not JSON"),
    ("[1]", "is [1], expected an object"),
    ("null", "is null, expected an object"),
    ("[" * 100_000, "brackets too deep"),
    (b'{"prompt": "\xff"}', "byte 12 (0xff) is not UTF-8; save the file as UTF-8"),
    ('{"prompt": "a", "prompt": "b", "response": ""}', "key 'prompt' appears twice"),
    ('{"a\\nb": 1, "a\\nb": 2}', "key 'a\\nb' appears twice"),
    ({}, "has no tokens"),
    ({"prompt": "a"}, "has prompt; give prompt and response"),
    ({"prompt_ids": [1]}, "has prompt_ids; give"),
    ({"prompt": "a", "response_ids": [1]}, "has both prompt and response_ids"),
    ({"prompt": "a", "response": "b", **IDS}, "has both prompt and prompt_ids"),
    ({"prompt": 1, "response": "b"}, "prompt is 1, expected a string"),
    ('{"prompt": "\\ud800", "response": "b"}', "half of a surrogate pair"),
    ({**IDS, "prompt_ids": "ab"}, 'prompt_ids is "ab", expected a list'),
    ({**IDS, "prompt_ids": [1, 2.0]}, "prompt_ids[1] is 2.0, expected an integer"),
    ({**IDS, "prompt_ids": [True]}, "prompt_ids[0] is true, expected an integer"),
    ({**IDS, "prompt_ids": [-1]}, "prompt_ids[0] is -1, outside the vocabulary of 259"),
    ({**IDS, "response_ids": [259]}, "response_ids[0] is 259, outside the vocabulary"),
    ({**IDS, "response_ids": [10**30]}, "outside the vocabulary"),
    ({"prompt_ids": [], "response_ids": []}, "the sample is empty"),
    ({**IDS, "reward": float("nan")}, "reward is NaN, expected a finite number"),
    ({**IDS, "advantage": float("inf")}, "advantage is Infinity, expected a finite number"),
    ({**IDS, "reward": 10**400}, "expected a finite number"),
    ({**IDS, "reward": "1"}, 'reward is "1", expected a number'),
    ({**IDS, "reward": True}, "reward is true, expected a number"),
    ({**IDS, "group": 1.5}, "group is 1.5, expected an int64 or a string"),
    ({**IDS, "rollout": [1]}, "rollout is [1], expected an int64 or a string"),
    ({**IDS, "rollout": 2**63}, "rollout is 9223372036854775808, expected an int64"),
]


def test_brackets_too_deep_to_print_are_a_data_error(tmp_path: Path) -> None:
    """Python reads JSON a few brackets deeper than it writes it."""
    path = tmp_path / "r.jsonl"
    for depth in range(900, 1000, 9):
        path.write_text('{"prompt": "a", "response": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(DataError, match=r"r\.jsonl:1: "):
            read(path)


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_names_file_line_and_reason(
    line: dict[str, Any] | str | bytes, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "r.jsonl", IDS, "", line)
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert reason in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 200


@given(st.binary(max_size=80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_rollouts_or_a_data_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError):
        read(path)


def test_token_ids_are_checked_against_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {**IDS, "response_ids": [999]})
    assert read(path, vocab_size=1000).tokens(0).response_ids.tolist() == [999]
    path = write(tmp_path / "t.jsonl", {"prompt": "a", "response": "b"})
    with pytest.raises(DataError, match="text needs a vocabulary of 259, the model has 100"):
        read(path, vocab_size=100)


def test_batches_have_whole_prompt_groups_and_all_samples() -> None:
    found = [rows.tolist() for rows in group_batches(np.arange(17) % 5, 2)]
    assert [len({row % 5 for row in rows}) for rows in found] == [2, 2, 1]
    assert found[0] == [0, 5, 10, 15, 1, 6, 11, 16]
    assert sorted(row for rows in found for row in rows) == list(range(17))
    with pytest.raises(ConfigError, match=r"data\.prompts_per_batch is 0"):
        next(group_batches(np.arange(17), 0))


def test_shuffled_batches_depend_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        found = group_batches(np.arange(64), 8, shuffle=True, seed=seed, epoch=epoch)
        return [row for rows in found for row in rows.tolist()]

    assert order(0, 0) == order(0, 0)
    assert sorted(order(0, 0)) == list(range(64))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    # Another version of NumPy must not change the order of a resumed run.
    assert order(0, 0)[:4] == [11, 3, 20, 13]


def test_generated_rollouts_have_the_promised_lengths() -> None:
    records = generate_rollouts(256, 4, seed=0)
    lengths = np.array([record.num_tokens for record in records])
    assert len(records) == 1024
    assert 105 < lengths.mean() < 135
    assert 500 < lengths.max() <= 600
    assert lengths.std() > 50
    assert {record.group for record in records} == set(range(256))
    assert len({(record.group, record.rollout) for record in records}) == 1024
    assert 0.6 < np.mean([float(record.reward or 0) for record in records]) < 0.8


def test_generated_rewards_and_signs_say_if_the_count_is_right() -> None:
    pairs = generate_pairs(16, 2, seed=1)
    assert [one.pair_sign for one in pairs] == [1, -1] * 32
    for record in [*generate_rollouts(64, 4, seed=1), *pairs]:
        words = decode(record.prompt_ids).rstrip(":").split()
        start = int(words[2])
        step = int(words[4])
        numbers = [int(word) for word in decode(record.response_ids).split()]
        right = numbers == list(range(start, start + step * len(numbers), step))
        assert right == (record.pair_sign > 0 if record.pair_sign else record.reward == 1.0)


def test_no_rollouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="set both to 1 or more"):
        generate_rollouts(0, 4, seed=0)

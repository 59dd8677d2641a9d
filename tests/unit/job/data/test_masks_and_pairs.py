"""Rollouts with loss masks, preference pairs and routed experts: read, stored, cut and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.errors import DataError
from megapack.job.data.dataset import Dataset
from megapack.job.data.files import read_blocks
from megapack.job.data.rollouts import group_batches
from megapack.job.data.token_blocks import ReadSettings
from megapack.layout import Layout

pytestmark = pytest.mark.unit

IDS: dict[str, Any] = {"prompt_ids": [1, 0], "response_ids": [0, 4, 5]}
ROUTES = [[[token, 1], [2, 3], [0, token]] for token in range(5)]
USER = {"role": "user", "content": "a"}
PAIR = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]}


def read(path: Path, *rows: dict[str, Any], **settings: Any) -> Dataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset.from_files(path, ReadSettings(**settings), path.parent)


@pytest.mark.parametrize("column", ["response_mask", "loss_mask"])
def test_masks_are_stored_with_the_tokens(tmp_path: Path, column: str) -> None:
    rows = [
        {**IDS, column: [0, 1, 0]},
        {**IDS, column: [1, True, 1]},
        {"prompt_ids": [], "response_ids": [7, 8], column: [1, 1]},
        {"prompt_ids": [], "response_ids": [7, 8, 9], column: [1, 0, 1]},
    ]
    data = read(tmp_path / "data.jsonl", *rows)
    tokens = [data.tokens(number) for number in range(4)]
    assert [one.response_ids.tolist() for one in tokens] == [row["response_ids"] for row in rows]
    masks = [None if one.loss_mask is None else one.loss_mask.tolist() for one in tokens]
    assert masks == [[False, True, False], None, None, [True, False, True]]
    # The first token of the last two never counts: nothing predicts it.
    assert data.loss_tokens(np.arange(4)) == [1, 3, 1, 1]
    plain = [{key: row[key] for key in IDS} for row in rows]
    assert data.digest() != read(tmp_path / "plain.jsonl", *plain).digest()


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [
        {**IDS, "loss_mask": [0, 1, 0], "routed_experts": ROUTES},
        PAIR,
        {"messages": [{"role": "assistant", "content": "a", "name": None}]},
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table.slice(0, 2), tmp_path / "data.parquet")
    settings = ReadSettings()
    found = Dataset.from_files(tmp_path / "data.parquet", settings, tmp_path)
    same = read(tmp_path / "data.jsonl", *rows[:2])
    assert found.digest() == same.digest()
    for number in range(3):
        for name in ("prompt_ids", "response_ids", "loss_mask", "routed_experts"):
            one = getattr(found.tokens(number), name)
            np.testing.assert_array_equal(one, getattr(same.tokens(number), name))
    parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data\.parquet:3: messages needs a chat template, bytes"):
        Dataset.from_files(tmp_path / "data.parquet", settings, tmp_path)


def test_parquet_routes_are_read_in_small_parts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    routes = np.random.default_rng(0).integers(0, 200, (128, 16, 8))
    rows = [{"prompt_ids": [1], "response_ids": [2] * 127, "routed_experts": routes.tolist()}] * 128
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, use_dictionary=False)
    blocks = list(read_blocks(path))
    assert len(blocks) == 32
    assert [number for block in blocks for number, _ in block.rows()] == list(range(1, 129))


def test_routes_are_returned_per_token(tmp_path: Path) -> None:
    data = read(
        tmp_path / "data.jsonl",
        {**IDS, "routed_experts": ROUTES},
        IDS,
        {**IDS, "routed_experts": ROUTES[:-1]},
    )
    whole, without, short = (data.tokens(number).routed_experts for number in range(3))
    assert whole is not None
    assert short is not None
    assert whole.tolist() == ROUTES
    assert without is None
    # An engine does not run the last token; the experts of the one before it stand in.
    assert short.tolist() == [*ROUTES[:-1], ROUTES[-2]]
    cut = read(
        *(tmp_path / "cut.jsonl", {**IDS, "routed_experts": ROUTES, "loss_mask": [1, 1, 0]}),
        **{"max_length": 4, "overlong": "truncate"},
    ).tokens(0)
    assert cut.routed_experts is not None
    assert cut.routed_experts.tolist() == ROUTES[:4]
    assert cut.response_ids.tolist() == [0, 4]
    assert cut.loss_mask is None


def test_a_pair_is_two_samples_of_one_rollout(tmp_path: Path) -> None:
    text = {"prompt": "a", "chosen": "yes", "rejected": "n", "group": 7}
    data = read(tmp_path / "data.jsonl", PAIR, {**IDS}, text)
    numbers = np.arange(5)
    assert data.pair_signs(numbers) == [1, -1, 0, 1, -1]
    assert data.rollout_ids(numbers) == [0, 0, 1, 2, 2]
    assert data.lines(numbers) == [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 3, 0), (0, 3, 1)]
    assert data.loss_tokens(numbers) == [3, 1, 3, 4, 2]
    assert data.tokens(1).prompt_ids.tolist() == [1, 2]
    assert data.tokens(1).response_ids.tolist() == [6]
    assert data.tokens(3).response_ids.tolist() == [*b"yes", 257]
    (first, second) = group_batches(data.index["group"], 2)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4]


def test_both_samples_of_an_overlong_pair_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(DataError, match=r"data\.jsonl:1: 5 tokens, max_length is 4"):
        read(path, PAIR, max_length=4)
    skipped = read(path, PAIR, {**IDS, "prompt_ids": [1]}, max_length=4, overlong="skip")
    assert skipped.pair_signs(np.arange(len(skipped))) == [0]
    assert "2 samples above 4 tokens skipped" in caplog.text
    cut = read(path, PAIR, max_length=4, overlong="truncate")
    assert [cut.tokens(i).response_ids.tolist() for i in range(2)] == [[3, 4], [6]]
    assert "1 samples truncated to 4 tokens" in caplog.text
    caplog.clear()
    # The prompt alone fills the samples: no token would count.
    kept = read(path, PAIR, {**IDS, "prompt_ids": [1]}, max_length=2, overlong="truncate")
    assert kept.pair_signs(np.arange(len(kept))) == [0]
    assert "2 samples above 2 tokens skipped" in caplog.text


BAD = [
    ({**IDS, "loss_mask": [1, 0]}, "loss_mask has 2 values for 3 response_ids"),
    ({**IDS, "response_mask": [1, 0, 2]}, "response_mask[2] is 2, expected 0 or 1"),
    ({**IDS, "response_mask": [1, 0, 0.5]}, "response_mask[2] is 0.5, expected 0 or 1"),
    ({**IDS, "response_mask": [0, 0, 0]}, "response_mask has no 1"),
    ({**IDS, "response_mask": 1}, "response_mask is 1, expected a list of 0 and 1"),
    ({**IDS, "response_mask": [1] * 3, "loss_mask": [1] * 3}, "both response_mask and loss_mask"),
    ({"prompt": "a", "response": "b", "loss_mask": [1]}, "has loss_mask, which is per token id"),
    ({**PAIR, "loss_mask": [1]}, "has loss_mask, which is per token id"),
    ({**IDS, "routed_experts": ROUTES[:3]}, "routed_experts has 3 tokens, the sample 5"),
    ({**IDS, "routed_experts": [[[1], [2, 3]]] * 5}, "routed_experts is ragged"),
    ({**IDS, "routed_experts": [[1]] * 5}, "expected one list [MoE layers][k]"),
    ({**IDS, "routed_experts": [[[1.5]]] * 5}, "expected one list [MoE layers][k]"),
    ({**IDS, "routed_experts": [[[-1]]] * 5}, "has expert -1, expected 0 to 65535"),
    ({**IDS, "routed_experts": [[[70000]]] * 5}, "has expert 70000, expected 0 to 65535"),
    ({**PAIR, "rejected_ids": []}, "rejected has no token that counts"),
    ({**PAIR, "prompt_ids": [], "rejected_ids": [1]}, "rejected has no token that counts"),
    ({**PAIR, "chosen_ids": [999]}, "chosen_ids[0] is 999, outside the vocabulary"),
    ({"prompt": "a", "chosen": "b"}, "has prompt and chosen; give"),
    ({"chosen": "b", "rejected": "c"}, "chosen is text and prompt is null, expected a string"),
    ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, 'rejected is ["c"], expected a string'),
    ({"messages": []}, "messages is [], expected a list of messages"),
    ({"messages": ["a"]}, 'messages[0] is "a", expected an object with role and content'),
    ({"messages": [USER], "tools": "{"}, "tools is text and not JSON"),
    ({"messages": [USER], "tools": [1]}, "tools is [1], expected a list of objects"),
    ({"messages": [USER], "response": "a"}, "has messages and response; give"),
    ({"messages": [USER, {"role": "user", "text": "a"}]}, "messages[1] has neither content nor"),
    ({"messages": [{**USER, "content": 1}]}, "messages[0].content is 1, expected a string"),
    ({"messages": [{**USER, "content": []}]}, "messages[0].content is [], expected a string"),
    (
        {"messages": [{**USER, "content": [{"type": "image"}]}]},
        "has images, which are not read; set model.vision",
    ),
    ({"messages": [{**USER, "tool_calls": "[]"}]}, 'tool_calls is "[]", expected a list of obj'),
    (
        {"messages": [{**USER, "tool_calls": [{"function": {"arguments": "[1]"}}]}]},
        'messages[0].tool_calls[0]: arguments is "[1]", expected an object, or the JSON of one',
    ),
    ({"messages": [USER], "prompt": "b"}, "prompt is no user's turn of messages; leave prompt out"),
    (
        {"messages": [USER], "prompt": [{"role": "system", "content": "b"}]},
        "messages begins neither with the messages of prompt nor with a turn of the assistant",
    ),
    ({**PAIR, "rejected_ids": PAIR["chosen_ids"]}, "chosen and rejected have the same tokens"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected have the same tokens"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_line_names_file_line_and_reason(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(DataError) as caught:
        read(path, IDS, row)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    assert reason in message
    assert len(message) < len(str(path)) + 200
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_batch_gets_masks_with_its_tokens(tmp_path: Path) -> None:
    from megapack import build_dp_schedule
    from megapack.samples import SampleBatch

    data = read(tmp_path / "data.jsonl", {**IDS, "loss_mask": [0, 1, 0]}, IDS, PAIR)
    numbers = np.arange(len(data))
    counts = data.loss_tokens(numbers)
    batch = SampleBatch.from_lengths(
        data.prompt_tokens(numbers), data.response_tokens(numbers), loss_tokens=counts
    )
    assert batch.num_loss_tokens == counts == [1, 3, 3, 1]
    plan = build_dp_schedule(batch.lengths, layout=Layout(), max_tokens_per_gpu=64)
    data.give_tokens(batch, numbers, (plan,), 0)
    assert batch.response_mask(0).tolist() == [False, False, False, True, False]
    assert batch.num_loss_tokens == counts

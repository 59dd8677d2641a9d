"""Random samples in any file format are read back unchanged."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.job.data.dataset import Dataset
from megapack.job.data.rollouts import group_batches
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.property

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ids = st.lists(st.integers(0, 258), max_size=8)
labels = {
    "group": st.integers(0, 3),
    "rollout": st.integers(0, 2),
    "reward": st.floats(-4, 4, width=32),
}
as_text = st.fixed_dictionaries({"prompt": text, "response": text}, optional=labels)
as_ids = st.fixed_dictionaries({"prompt_ids": ids, "response_ids": ids}, optional=labels).filter(
    lambda row: row["prompt_ids"] or row["response_ids"]
)
rows = st.lists(as_text | as_ids, min_size=1, max_size=12)


def write(folder: Path, files: list[list[dict[str, Any]]], kind: str) -> None:
    for number, rows in enumerate(files):
        path = folder / f"{number:02d}.{kind}"
        if kind != "parquet":
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(text) if kind == "jsonl.gz" else text)
            continue
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet as pq

        names = dict.fromkeys(name for row in rows for name in row)
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table, path, row_group_size=3)


def tokens(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    if "prompt_ids" in row:
        return row["prompt_ids"], row["response_ids"]
    tokenizer = ByteTokenizer()
    prompt_ids = tokenizer.encode_prompt(row["prompt"])
    response_ids = tokenizer.encode_response(row["response"])
    return prompt_ids.tolist(), response_ids.tolist()


@given(
    files=st.lists(rows, min_size=1, max_size=3),
    kind=st.sampled_from(["jsonl", "jsonl.gz", "parquet"]),
    order=st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_written_samples_are_read_back(
    files: list[list[dict[str, Any]]], kind: str, order: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, files, kind)
        data = Dataset.from_files(folder, ReadSettings(), folder / "spare")
        written = [row for rows in files for row in rows]
        numbers = list(range(len(written)))
        order.shuffle(numbers)
        for number in numbers:
            found = data.tokens(number)
            parts = [found.prompt_ids.tolist(), found.response_ids.tolist()]
            assert parts == list(tokens(written[number]))
        found_rewards = [one.reward for one in data.rewards(np.arange(len(written)))]
        assert found_rewards == [row.get("reward") for row in written]
        batches = list(
            group_batches(data.index["group"], 2, shuffle=True, seed=1, work=data.lengths, window=2)
        )
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(written)))
        for batch in batches:
            assert len({one.group for one in data.rewards(batch)}) <= 2

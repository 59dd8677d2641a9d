"""Data sets: the stored index, and tokens of single samples."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megapack.errors import DataError
from megapack.job.data import index as data_index
from megapack.job.data.advantages import SampleReward, group_advantages
from megapack.job.data.dataset import Dataset
from megapack.job.data.generated import generate_pairs
from megapack.job.data.index import load_samples
from megapack.job.data.rollouts import Rollout, group_batches
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.unit

ROWS: list[dict[str, Any]] = [
    {"group": 1, "rollout": 0, "prompt": "2+2=", "response": "4", "reward": 1.0},
    {"group": "1", "rollout": 0, "prompt": "", "response": "äöü", "reward": 0.5, "more": [1]},
    {"group": 1, "rollout": 1, "prompt_ids": [5, 6], "response_ids": [], "reward": 0.0},
    {"prompt_ids": [], "response_ids": [7, 8, 9], "advantage": -0.5},
    {"group": 1, "rollout": 1, "prompt": "x", "response": "y", "reward": 0.25},
]


def write_lines(path: Path, rows: Sequence[dict[str, Any]] = ROWS, end: str = "\n\n") -> Path:
    path.write_text("".join(json.dumps(row) + end for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], row_group_size: int = 2) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    # A column has one type: the group "1" of JSON Lines stays out.
    plain = [{**row, "group": str(row["group"])} if "group" in row else row for row in rows]
    names = dict.fromkeys(name for row in plain for name in row)
    table = pyarrow.table({name: [row.get(name) for row in plain] for name in names})
    parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def as_rollouts(rows: Sequence[dict[str, Any]]) -> list[Rollout]:
    """The rollouts that a file with these rows has."""
    tokenizer = ByteTokenizer()
    records = []
    for number, row in enumerate(rows):
        prompt_ids = row.get("prompt_ids")
        response_ids = row.get("response_ids")
        if "prompt" in row:
            prompt_ids = tokenizer.encode_prompt(row["prompt"])
            response_ids = tokenizer.encode_response(row["response"])
        records.append(
            Rollout(
                prompt_ids=np.array(prompt_ids, dtype=np.int64),
                response_ids=np.array(response_ids, dtype=np.int64),
                group=row.get("group", f"own {number}"),
                rollout=row.get("rollout", f"own {number}"),
                reward=row.get("reward"),
                advantage=row.get("advantage"),
            )
        )
    return records


def dataset(path: Path, spare: Path, **settings: Any) -> Dataset:
    return Dataset.from_files(path, ReadSettings(**settings), spare)


def assert_holds(found: Dataset, records: Sequence[Rollout]) -> None:
    """Assert that all that training reads from the data set equals these records."""
    rows = np.arange(len(records))
    assert len(found) == len(records)
    for number in reversed(rows.tolist()):
        tokens = found.tokens(number)
        assert tokens.prompt_ids.tolist() == records[number].prompt_ids.tolist()
        assert tokens.response_ids.tolist() == records[number].response_ids.tolist()
        assert tokens.loss_mask is None
    assert found.prompt_tokens(rows) == [len(r.prompt_ids) for r in records]
    assert found.response_tokens(rows) == [len(r.response_ids) for r in records]
    numbers: dict[Any, int] = {}
    keys = [(r.group, r.rollout) for r in records]
    assert found.rollout_ids(rows) == [numbers.setdefault(key, len(numbers)) for key in keys]
    assert found.num_rollouts(rows) == len(numbers)
    rewards = [SampleReward(r.group, r.rollout, r.reward, r.advantage) for r in records]
    if all(one.reward is not None or one.advantage is not None for one in rewards):
        assert (group_advantages(found.rewards(rows)) == group_advantages(rewards)).all()
    groups: dict[Any, int] = {}
    group_of = [groups.setdefault(r.group, len(groups)) for r in records]
    assert found.index["group"].tolist() == group_of


def test_json_lines_are_read_one_by_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl")
    assert_holds(dataset(path, tmp_path / "spare"), as_rollouts(ROWS))


def test_data_in_memory_equals_data_in_a_file(tmp_path: Path) -> None:
    records = as_rollouts(ROWS)
    assert_holds(Dataset.from_rollouts(records), records)
    in_file = dataset(write_lines(tmp_path / "data.jsonl"), tmp_path)
    assert Dataset.from_rollouts(records).digest() == in_file.digest()
    lengths, _ = in_file.digest().split()
    changed = [replace(record, reward=0.125) for record in records]
    assert Dataset.from_rollouts(changed).digest().split()[0] == lengths
    assert Dataset.from_rollouts(changed).digest() != in_file.digest()
    other = dataset(write_lines(tmp_path / "other.jsonl", ROWS[:-1]), tmp_path)
    assert other.digest() != in_file.digest()


def test_a_folder_is_its_files_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "b.jsonl", [ROWS[1]])
    write_parquet(folder / "c.parquet", [ROWS[3]])
    write_lines(folder / "a.jsonl", [ROWS[0], ROWS[2]])
    write_lines(folder / "notes.txt", ROWS)
    whole = [ROWS[i] for i in (0, 2, 1, 3)]
    assert_holds(dataset(folder, tmp_path / "spare"), as_rollouts(whole))


def test_overlong_samples_are_refused_truncated_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"prompt_ids": [1, 2], "response_ids": [3], "reward": 0.5}
    long = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "reward": 1.0}
    path = write_lines(tmp_path / "data.jsonl", [short, long], end="\n")
    assert len(dataset(path, tmp_path, max_length=5)) == 2
    with pytest.raises(DataError, match=r"data\.jsonl:2: 5 tokens, max_length is 4; raise it"):
        dataset(path, tmp_path, max_length=4)
    cut = as_rollouts([short, {**long, "response_ids": [4]}])
    assert_holds(dataset(path, tmp_path, max_length=4, overlong="truncate"), cut)
    assert "1 samples truncated to 4 tokens" in caplog.text
    assert_holds(dataset(path, tmp_path, max_length=4, overlong="skip"), as_rollouts([short]))
    assert "1 samples above 4 tokens skipped" in caplog.text
    caplog.clear()
    # Of the long one only its prompt would be left, in which nothing counts.
    assert_holds(dataset(path, tmp_path, max_length=3, overlong="truncate"), as_rollouts([short]))
    assert "1 samples above 3 tokens skipped" in caplog.text
    assert "truncated" not in caplog.text
    with pytest.raises(DataError, match=r"has no sample \(2 were above max_length=2\)"):
        dataset(path, tmp_path, max_length=2, overlong="truncate")
    with pytest.raises(DataError, match=r"2 were above max_length=1"):
        dataset(path, tmp_path, max_length=1, overlong="skip")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "data.jsonl:3: not JSON"),
        ('{"prompt_ids": [999], "response_ids": []}', "outside the vocabulary"),
        ('{"prompt": "' + "x" * 90 + '", "response": ""}', "92 tokens, max_length is 50"),
    ],
)
def test_a_bad_line_is_reported_and_leaves_no_index(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=says):
        dataset(path, tmp_path / "spare", max_length=50)
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


class Reads:
    """Counts how often a data set is read and stored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        write = data_index._write

        def counted(*args: Any) -> Any:
            self.count += 1
            return write(*args)

        monkeypatch.setattr(data_index, "_write", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def indexes(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith("index.npy")]


def test_the_index_is_kept_until_something_changes(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "data.jsonl")
    stored = load_samples(path, ReadSettings(), tmp_path / "spare")
    assert isinstance(stored.index, np.memmap)
    assert isinstance(stored.all_tokens, np.memmap)
    load_samples(path, ReadSettings(), tmp_path / "spare")
    assert reads.count == 1
    os.utime(path, ns=(0, 0))
    load_samples(path, ReadSettings(), tmp_path / "spare")
    assert reads.count == 1, "another time, but the same content"
    write_lines(path, ROWS[:2])
    assert len(load_samples(path, ReadSettings(), tmp_path / "spare").index) == 2
    assert reads.count == 2, "another size"
    for count, settings in enumerate(
        ({"vocab_size": 300}, {"max_length": 9}, {"max_length": 9, "overlong": "truncate"}), 3
    ):
        load_samples(path, ReadSettings(**settings), tmp_path / "spare")
        assert reads.count == count, settings
    assert len(indexes(tmp_path)) == 1, "outdated indexes were not removed"
    assert len(list(tmp_path.glob(".*.megapack-content"))) == 1
    monkeypatch.setattr(data_index, "_sources", lambda: "another version")
    load_samples(path, ReadSettings(max_length=9), tmp_path / "spare")
    assert reads.count == 6, "other code"


def ids_of(token: int) -> dict[str, Any]:
    return {"prompt_ids": [1] * 9, "response_ids": [token] * 700}


@pytest.mark.parametrize("way", ["in place", "a copy", "no times of change", "in a folder"])
def test_other_content_of_equal_size_and_time_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """`cp -p`, `rsync -t` and `tar -x` keep size and modification time."""
    # The change is in no piece that is looked at, but where the system tells no times.
    place = 0 if way == "no times of change" else 150
    path = write_lines(tmp_path / "data.jsonl", [ids_of(11)] * 500, end="\n")
    assert path.stat().st_size > 1 << 20
    source = tmp_path if way == "in a folder" else path
    if way == "no times of change":
        stat = Path.stat

        def no_change(path: Path, **options: Any) -> Any:
            found = stat(path, **options)
            names = ("st_mode", "st_size", "st_mtime_ns")
            kept = {name: getattr(found, name) for name in names}
            return SimpleNamespace(**kept, st_ctime_ns=0, st_ino=0)

        monkeypatch.setattr(Path, "stat", no_change)
    first = dataset(source, tmp_path)
    before = path.stat()
    other = path
    if way == "a copy":
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
    with open(other, "r+b") as file:
        lines = file.readlines()
        lines[place] = lines[place].replace(b"11", b"12")
        file.seek(0)
        file.writelines(lines)
    if way == "a copy":
        other.replace(path)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    found = dataset(source, tmp_path)
    assert found.tokens(place).response_ids.tolist() == [12] * 700
    assert found.digest() != first.digest()
    assert found.digest().split()[0] == first.digest().split()[0]


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "data.jsonl")
    read = data_index.read_token_blocks

    def written_again(*args: Any) -> Any:
        yield from read(*args)
        path.write_bytes(path.read_bytes().replace(b"2+2", b"3+3"))

    monkeypatch.setattr(data_index, "read_token_blocks", written_again)
    with pytest.raises(DataError, match=r"data\.jsonl changes while it is read; start when"):
        dataset(path, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_damaged_index_is_rebuilt(tmp_path: Path, reads: Reads) -> None:
    path = write_lines(tmp_path / "data.jsonl")
    for damage in (lambda b: b[:-3], lambda b: b[:40], lambda _: b"", lambda b: b"x" + b[1:]):
        dataset(path, tmp_path)
        (name,) = indexes(tmp_path)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(damage(whole))
        dataset(path, tmp_path)
        assert (tmp_path / name).read_bytes() == whole
    assert reads.count == 5


def test_the_index_of_a_read_only_folder_is_stored_elsewhere(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Patched, because permissions do not stop root, which runs tests in containers.
    folder = tmp_path / "data"
    spare = tmp_path / "runs" / ".index"
    folder.mkdir()
    path = write_lines(folder / "data.jsonl")
    writable = data_index._writable
    monkeypatch.setattr(data_index, "_writable", lambda f: f != folder and writable(f))
    for _ in range(2):
        load_samples(path, ReadSettings(), spare)
    assert reads.count == 1
    assert [p.name for p in folder.iterdir()] == ["data.jsonl"]
    assert len(indexes(spare)) == 1
    monkeypatch.setattr(data_index, "_writable", lambda _: False)
    with pytest.raises(DataError, match="set runs_dir"):
        load_samples(path, ReadSettings(max_length=99), spare)


def rewarded(rewards: Sequence[Sequence[float | None]], **more: Any) -> list[Rollout]:
    """Prompt groups with these rewards; sample k has k + 1 response tokens."""
    flat = [(g, r, reward) for g, group in enumerate(rewards) for r, reward in enumerate(group)]
    ids = np.arange(1, dtype=np.int64)
    return [
        Rollout(
            prompt_ids=ids,
            response_ids=np.full(k + 1, k),
            reward=reward,
            group=group,
            rollout=rollout,
            **more,
        )
        for k, (group, rollout, reward) in enumerate(flat)
    ]


def test_prompt_groups_of_equal_rewards_are_left_out() -> None:
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0, 0.0], [2.0], [1.0, 0.5]]
    whole = Dataset.from_rollouts(rewarded(rewards))
    data = whole.without_equal_rewards()
    assert (len(whole), len(data), data.num_dropped_groups) == (10, 5, 2)
    rows = np.arange(len(data))
    # Samples 2, 3 (group 1), 7 (a group of one rollout) and 8, 9 (group 4) are left.
    assert data.response_tokens(rows) == [3, 4, 8, 9, 10]
    assert [int(data.tokens(row).response_ids[0]) for row in rows] == [2, 3, 7, 8, 9]
    assert [one.reward for one in data.rewards(rows)] == [0.0, 1.0, 2.0, 1.0, 0.5]
    # Batches are filled with the groups that follow.
    batches = list(group_batches(data.index["group"], 2))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4]]
    assert [data.num_rollouts(batch) for batch in batches] == [3, 2]
    assert data.digest() != whole.digest()
    assert data.digest() == whole.without_equal_rewards().digest()


def test_fan_out_given_advantages_and_missing_rewards_are_no_equal_rewards() -> None:
    # One rollout of two samples: there is no other rollout to compare with.
    fan_out = [replace(record, rollout="same") for record in rewarded([[1.0, 1.0]])]
    given = [replace(record, group="given") for record in rewarded([[1.0, 1.0]], advantage=0.5)]
    missing = [replace(record, group="missing") for record in rewarded([[1.0, None]])]
    data = Dataset.from_rollouts([*fan_out, *given, *missing]).without_equal_rewards()
    assert len(data) == 6
    with pytest.raises(DataError, match="each of the 2 prompt groups has equal rewards; set"):
        Dataset.from_rollouts(rewarded([[1.0, 1.0], [0.0, 0.0]])).without_equal_rewards()


def test_a_pair_has_one_id_and_two_signs() -> None:
    data = Dataset.from_rollouts(generate_pairs(3, 2, seed=0))
    (first, second) = group_batches(data.index["group"], 2)
    assert data.pair_signs(first) == [1, -1] * 4
    assert data.pair_ids(first) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.pair_ids(second) == [0, 0, 1, 1]
    assert data.pair_ids(first[::-1]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.num_rollouts(first) == 4
    assert Dataset.from_rollouts(rewarded([[1.0, 0.0]])).pair_ids(np.arange(2)) is None

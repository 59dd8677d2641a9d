"""What a data file is: it is read where that is cheap, or its error names it and no line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from megapack import Layout, build_dp_schedule
from megapack.config.cost_file import read_cost
from megapack.config.load import load_config
from megapack.errors import ConfigError, DataError, MegapackError
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.sections import TrainConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.hf.folder import SINGLE, HfFolder
from megapack.plan.file import read_plan

pytestmark = pytest.mark.unit

ROWS = [
    {"prompt_ids": [1, 2], "response_ids": [3]},
    {"prompt": "\u00e9\u2028\x85", "response": "\r"},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
UTF8 = LINES.encode()


def read(path: Path, data: bytes) -> Dataset:
    path.write_bytes(data)
    return Dataset.from_files(path, ReadSettings(), path.parent)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", UTF8),
        ("a.jsonl", b"\xef\xbb\xbf" + UTF8),
        # What `cat` makes of two such files.
        ("a.jsonl", b"".join(b"\xef\xbb\xbf" + line for line in UTF8.splitlines(True))),
        ("a.jsonl", b"\n \r\n" + UTF8.replace(b"\n", b"\r\n\r\n")),
        ("a.jsonl", UTF8.rstrip()),
        ("a.jsonl.gz", gzip.compress(UTF8)),
        ("any", gzip.compress(UTF8[:9]) + gzip.compress(UTF8[9:])),
    ],
)
def test_marks_line_ends_and_gzip_are_read(tmp_path: Path, name: str, data: bytes) -> None:
    plain = read(tmp_path / "plain.jsonl", UTF8)
    assert read(tmp_path / name, data).digest() == plain.digest()


def test_parquet_is_read_under_any_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "a.jsonl")
    data = Dataset.from_files(tmp_path / "a.jsonl", ReadSettings(), tmp_path)
    assert data.tokens(0).prompt_ids.tolist() == [1, 2]


OBJECTS = [{"prompt": "a", "response": "b"}] * 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LINES.encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (UTF8.replace(b"\n", b"\r"), "lines end with CR alone; end them with LF (tr"),
        (bz2.compress(UTF8), "compressed by bzip2; unpack it with bunzip2"),
        (lzma.compress(UTF8), "compressed by xz; unpack it with unxz"),
        (b"\x28\xb5\x2f\xfd\x04", "compressed by zstd; unpack it with unzstd"),
        (b"ARROW1\0\0", "an Arrow file"),
        (bytes(99), "binary (byte 0 is 0; was it copied in full?)"),
        (b"\n<!DOCTYPE html>\n<html>", "an HTML page; download the file itself"),
        (json.dumps(OBJECTS).encode(), "a JSON array; write one object per line (jq -c"),
        (json.dumps(OBJECTS).replace("}, ", "},\n").encode(), "a JSON array; write one object"),
        (json.dumps(OBJECTS[0], indent=1).encode(), "an object over several lines; write one"),
        (gzip.compress(json.dumps(OBJECTS).encode()), "a JSON array"),
        (b"prompt,response\na,b\n", "no JSON Lines ('prompt,response'); give one object per line"),
        (gzip.compress(UTF8)[:-9], "cannot be read (Compressed file ended"),
    ],
)
def test_the_error_says_what_the_file_is_and_blames_no_line(
    tmp_path: Path, data: bytes, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.jsonl", data)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}: ")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_file_that_is_not_parquet_despite_its_name_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for data, words in (
        (gzip.compress(UTF8), "not Parquet, it is compressed by gzip"),
        (b"version https://git-lfs.github.com/spec/v1", "not Parquet, it is a Git LFS pointer"),
        (UTF8, "cannot be read"),
    ):
        with pytest.raises(DataError, match=words):
            read(tmp_path / "a.parquet", data)


@pytest.mark.parametrize("line", ['{"prompt": "a", "response"', "[1, 2]\n[3]", '{"a": "b\nc"}'])
def test_a_bad_first_line_is_blamed_itself(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: "):
        read(tmp_path / "a.jsonl", line.encode())


HF_KEYS = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
HF_KEYS |= {"num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
HF_KEYS |= {"max_position_embeddings": 512}
PLAN = build_dp_schedule([5, 6], layout=Layout(), max_tokens_per_gpu=16)
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a config": (
        lambda path: load_config(path, [], TrainConfig),
        "name: é\nplan: {max_tokens_per_gpu: 64}\n",
    ),
    "a cost model": (lambda path: read_cost(path, Layout()), "cost: {per_token: 1.0}\n"),
    "a plan": (read_plan, PLAN.to_json()),
    "a model's config": (lambda path: read_hf_config(str(path)), json.dumps(HF_KEYS)),
}


@pytest.mark.parametrize("reader", READERS)
def test_all_readers_of_text_say_what_a_file_is(tmp_path: Path, reader: str) -> None:
    read_file, text = READERS[reader]
    path = tmp_path / "config.json"
    path.write_text(text)
    plain = read_file(path)
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read_file(path) == plain
    for data, words in (
        (gzip.compress(text.encode()), "compressed by gzip; unpack it with gunzip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer in place of the file"),
        (b"a: \xe9", "byte 3 (0xe9) is not UTF-8"),
    ):
        path.write_bytes(data)
        with pytest.raises(MegapackError) as caught:
            read_file(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert words in message
        assert "line" not in message


def test_a_pointer_in_place_of_tensors_or_a_tokenizer_is_named(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    words = f"{SINGLE} is a Git LFS pointer in place of the file; run git lfs pull".replace(
        ".", r"\."
    )
    with pytest.raises(ConfigError, match=words):
        HfFolder(tmp_path)
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a Git LFS pointer"):
        HfTokenizer(tmp_path).encode_prompt("a")

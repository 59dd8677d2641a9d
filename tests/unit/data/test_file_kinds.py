"""What a data file is: it is read where that is cheap, or its error names it and no line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from megapack.base.files import text_of
from megapack.data.dataset import Dataset
from megapack.data.token_blocks import ReadSettings
from megapack.errors import DataError

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
        (LINES.encode("utf-16-le"), "UTF-16 text; save it as UTF-8"),
        (LINES.encode("utf-32"), "UTF-32 text; save it as UTF-8"),
        (UTF8.replace(b"\n", b"\r"), "lines end with CR alone; end them with LF (tr"),
        (bz2.compress(UTF8), "compressed by bzip2; unpack it with bunzip2"),
        (lzma.compress(UTF8), "compressed by xz; unpack it with unxz"),
        (b"\x28\xb5\x2f\xfd\x04", "compressed by zstd; unpack it with unzstd"),
        (b"PK\x03\x04\x14", "a zip archive"),
        (b"ARROW1\0\0", "an Arrow file"),
        (b"\xff\xff\xff\xff\x10\1\0\0", "an Arrow stream"),
        (bytes(99), "binary (byte 0 is 0; was it copied in full?)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "a Git LFS pointer in place of the file; run git lfs pull",
        ),
        (b"\n<!DOCTYPE html>\n<html>", "an HTML page; download the file itself"),
        (json.dumps(OBJECTS).encode(), "a JSON array; write one object per line (jq -c"),
        (json.dumps(OBJECTS, indent=1).encode(), "a JSON array; write one object per line"),
        (json.dumps(OBJECTS).replace("}, ", "},\n").encode(), "a JSON array; write one object"),
        (json.dumps(OBJECTS[0], indent=1).encode(), "an object over several lines; write one"),
        (b'{"data": [\n{"prompt": "a"}]}', "an object over several lines; write one"),
        (gzip.compress(json.dumps(OBJECTS).encode()), "a JSON array"),
        (gzip.compress(UTF8)[:-9], "cannot be read (Compressed file ended"),
        (b"\x1f\x8b" + UTF8, "cannot be read"),
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


def test_text_is_read_without_its_mark_and_named_where_it_is_none() -> None:
    assert text_of(b"\xef\xbb\xbfa: \xc3\xa9") == "a: é"
    with pytest.raises(ValueError, match=r"byte 3 \(0xe9\) is not UTF-8; save .* LATIN1"):
        text_of(b"a: \xe9")
    with pytest.raises(ValueError, match="it is compressed by gzip; unpack it with gunzip"):
        text_of(gzip.compress(b"a"))

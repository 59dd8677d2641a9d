"""Files of lengths: all formats give the same samples; errors name the line."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from megapack import ConfigError, DataError
from megapack.job.data.lengths import Columns, read_length_file

pytestmark = pytest.mark.unit

PROMPTS = [3, 0, 5]
RESPONSES = [4, 9, 1]
LENGTHS = [7, 9, 6]


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def csv_of_parts(path: Path) -> str:
    rows = zip(PROMPTS, RESPONSES, "aab", strict=True)
    return write(
        path, "id,prompt_len,response_len\n" + "".join(f"{g},{p},{r}\n" for p, r, g in rows)
    )


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("a.csv", "length\n7\n9\n6\n", "length"),
        ("a.csv", "\ufefflength,x\r\n7,1\r\n\r\n9,2\r\n6,3\r\n", "length"),
        ("a.csv", "anything\n7\n9\n6\n", "anything"),
        ("a.txt", "7\n9\n\n6", "length"),
        ("a.csv", "length\r7\r9\r6\r", "length"),
        # `str.strip` removes the file separator \x1c, but `int` refuses it.
        ("a.txt", "7\x1c\n 9\n6\t", "length"),
        # JSON allows Unicode's line breaks inside strings.
        ("a.jsonl", '{"length": 7, "x": "\u2028\x85"}\r\n{"length": 9}\n{"length": 6}', "length"),
        ("a.jsonl", '{"num_tokens": 7}\n{"num_tokens": 9}\n{"num_tokens": 6}', "num_tokens"),
        ("a.jsonl", "".join(f'{{"input_ids": {[1] * n}}}\n' for n in LENGTHS), "input_ids"),
        ("a.csv", "input_len,output_len\n3,4\n0,9\n5,1\n", "input_len + output_len"),
        ("a.tsv", "x\tlength\na,b\t7\nc\t9\n;\t6\n", "length"),
        ("a.csv", "length;reward\n7;0,5\n9;1,5\n6;2\n", "length"),
        # As pandas and numpy.savetxt write whole numbers.
        ("a.csv", "length\n7.0\n9.\n6.000\n", "length"),
        ("a.txt", "7.000000000000000000e+00\n9.0\n6e0\n", "length"),
        ("a.jsonl", '{"length": 7.0}\n{"length": 9}\n{"length": "6.0"}', "length"),
        ("a.csv.gz", gzip.compress(b"length\n7\n9\n6\n"), "length"),
        ("a.jsonl", gzip.compress(b'{"length": 7}\n{"length": 9}\n{"length": 6}'), "length"),
    ],
)
def test_how_a_file_begins_decides_its_format(
    tmp_path: Path, name: str, text: str | bytes, columns: str
) -> None:
    table = read_length_file(write(tmp_path / name, text), Columns())
    assert table.lengths.tolist() == LENGTHS
    assert table.columns == columns
    assert table.rollout_ids is table.colocate_ids is None


def test_prompt_and_response_add_up_and_ids_are_read(tmp_path: Path) -> None:
    path = csv_of_parts(tmp_path / "parts.csv")
    table = read_length_file(path, Columns(rollout="id", colocate="response_len"))
    assert table.lengths.tolist() == LENGTHS
    assert table.rollout_ids == ("a", "a", "b")
    assert table.colocate_ids == (4, 9, 1)
    by_name = Columns(prompt="prompt_len", response="response_len")
    assert read_length_file(path, by_name).lengths.tolist() == LENGTHS
    assert read_length_file(path, Columns(length="response_len")).lengths.tolist() == RESPONSES


def test_lengths_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"prompt_ids": [[1] * n for n in PROMPTS], "response_ids": [[1] * n for n in RESPONSES]}
    parquet.write_table(pyarrow.table({**rows, "uid": ["a", "b", "b"]}), tmp_path / "a.parquet")
    table = read_length_file(str(tmp_path / "a.parquet"), Columns(rollout="uid"))
    assert (table.lengths.tolist(), table.rollout_ids) == (LENGTHS, ("a", "b", "b"))
    # Under other names too.
    (tmp_path / "a").write_bytes((tmp_path / "a.parquet").read_bytes())
    assert read_length_file(str(tmp_path / "a"), Columns()).lengths.tolist() == LENGTHS


def test_text_is_counted_by_the_tokenizer_of_a_config(tmp_path: Path) -> None:
    config = write(tmp_path / "bytes.yaml", "name: a\nplan: {max_tokens_per_gpu: 64}\n")
    rows: list[dict[str, object]] = [
        {"prompt": "ab", "response": "c", "rollout": 5, "group": 1},
        {"prompt": "ab", "response": "", "rollout": 5, "group": 1},
        {"prompt": "a", "response": "bcd"},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    table = read_length_file(path, Columns(), config)
    assert table.lengths.tolist() == [5, 4, 6]
    assert (table.rollout_ids, table.colocate_ids, table.prefixes) == ((0, 0, 1), None, None)
    assert table.columns == "counted by the tokenizer of bytes"
    shared = read_length_file(path, Columns(group="group"), config).prefixes
    assert shared is not None
    pair = '{"prompt": "ab", "chosen": "c", "rejected": "cde"}'
    table = read_length_file(write(tmp_path / "pair.jsonl", pair), Columns(), config)
    assert (table.lengths.tolist(), table.colocate_ids) == ([5, 7], (0, 0))
    with pytest.raises(ConfigError, match="knows its columns; leave"):
        read_length_file(path, Columns(rollout="reward"), config)
    # Lengths need no tokenizer.
    lengths = write(tmp_path / "lengths.csv", "prompt,length\nx,7\n")
    assert read_length_file(lengths, Columns(), "no such config").lengths.tolist() == [7]


def test_patches_of_images_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt_len": 30, "response_len": 4, "q": "a", "patches": [64, 16]},
        {"prompt_len": 30, "response_len": 9, "q": "a", "patches": [64, 16]},
        {"prompt_len": 7, "response_len": 2, "q": "b", "patches": []},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    images = read_length_file(path, Columns(patches="patches", group="q")).images
    assert images is not None
    assert [[ref.patches for ref in own] for own in images] == [[64, 16], [64, 16], []]
    assert images[0][1].offset == 16
    # Samples of a group have the same images, others have their own.
    assert [ref.key for ref in images[0]] == [ref.key for ref in images[1]]
    apart = read_length_file(path, Columns(patches="patches")).images
    assert apart is not None
    assert len({ref.key for own in apart for ref in own}) == 4
    assert read_length_file(path, Columns()).images is None
    table = "length,patches\n40,64 16\n9,\n"
    cells = read_length_file(write(tmp_path / "a.csv", table), Columns(patches="patches")).images
    assert cells is not None
    assert [[ref.patches for ref in own] for own in cells] == [[64, 16], []]


@pytest.mark.parametrize("cell", ['"a"', "[64, 3]", "[-4]", "[1.5]", "[[2, 2]]", "true", "0"])
def test_other_patches_are_refused(tmp_path: Path, cell: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"length": 40, "patches": {cell}}}\n')
    with pytest.raises(DataError, match=r"a.jsonl: line 1: patches is .*multiples of 4"):
        read_length_file(path, Columns(patches="patches"))


def test_lengths_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7\n9\n6\n")))
    assert read_length_file("-", Columns()).lengths.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", ["no samples"]),
        ("a.csv", "length\n", ["no samples"]),
        ("a.csv", "length\n5\n0\n", ["line 3", "length is 0", "at least 1"]),
        ("a.csv", "length\n5\n-2\n", ["line 3", "length is -2", "at least 1"]),
        ("a.csv", "length\n5.5\n", ["line 2", "'5.5'", "whole number"]),
        ("a.csv", "length\nnan\n", ["line 2", "'nan'"]),
        ("a.csv", "length\n1_000\n", ["line 2", "'1_000'"]),
        ("a.csv", "length\n\n5\n ,\n", ["line 4", "2 cells under 1 column"]),
        ("a.csv", "length\n999999999999\n", ["line 2", "at most 268435456"]),
        ("a.csv", "374,44\n396,109\n", ["line 1", "'374'", "header"]),
        ("a.csv", "prompt_len,response_len\n-1,5\n", ["line 2: prompt_len is -1; give 0 or"]),
        ("a.csv", "5.5\n6\n", ["line 1", "'5.5'", "whole number"]),
        ("a.csv", 'length\n"1,587"\n', ["line 2: length is '1,587'; give a whole number"]),
        ("a.csv", "length\n1.587\n", ["line 2: length is '1.587'; give a whole number"]),
        ("a.csv", "name,age\nx,5\n", ["name, age", "--length-column"]),
        ("a.csv", "length,b\n1\n", ["line 2", "1 cells under 2 columns"]),
        ("a.csv", 'length,"x\n5,6\n', ["no samples"]),
        ("a.txt", "5\n6\nseven\n", ["line 3", "'seven'"]),
        ("a.csv", b"\x00\xff\xfe\x89PNG", ["it is binary (byte 0 is 0"]),
        ("a.jsonl", '{"length": 5}\n{"len', ["line 2", "not JSON", "cut off"]),
        ("a.jsonl", '{"length": 5}\n[6]\n', ["line 2", "an object per line"]),
        ("a.jsonl", '{"length": 5}\n{"tokens": 6}\n', ["line 2", "'length'", "tokens"]),
        ("a.jsonl", '{"length": true}\n', ["line 1", "true"]),
        ("a.jsonl", '{"length": NaN}\n', ["line 1", "nan"]),
        ("a.jsonl", '{"length": 5.5}\n', ["line 1", "5.5"]),
        ("a.jsonl", '{"lengths": [5, 6]}\n', ["line 1: lengths is a list of 2; give one number"]),
        ("a.jsonl", '{\n"length": 5\n}\n', ["it is JSON with an object over several lines"]),
        ("a.json", "[5, 6]", ["it is a JSON array; write one object per line (jq -c '.[]'"]),
        ("a.csv", "length\n7\n".encode("utf-16"), ["it is UTF-16 text; save it as UTF-8"]),
        ("a.csv", b"length,m\xe9\n7,8\n", ["byte 8 (0xe9) is not UTF-8"]),
        ("a.parquet", gzip.compress(b""), ["not .parquet, it is compressed by gzip"]),
        ("a.csv", b"version https://git-lfs", ["it is a Git LFS pointer"]),
        ("a.npy", b"\x93NUMPY", ["an array of numpy.save; write it by numpy.savetxt"]),
        ("a.csv", gzip.compress(b"length\n7\n")[:-3], ["cannot be read (Compressed file ended"]),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', ["line 1: messages", "--config"]),
        ("a.jsonl", '{"conversations": ["a", "b"]}\n', ["line 1: conversations", "--config"]),
        ("a.jsonl", '{"input_ids": [1, 2.5]}\n', ["line 1: input_ids is a list of other things"]),
        ("a.jsonl", '{"text": "abc"}\n', ["line 1: text is text, which a tokenizer counts"]),
        ("a.jsonl", '{"length": null}\n', ["line 1", "null"]),
        (
            "a.jsonl",
            '{"prompt": "2+2", "response": "4"}\n',
            ["has prompt, response, which a tokenizer counts; give", "--config"],
        ),
        ("a.jsonl", '{"a\\nb": 5, "c": 6}', ["no column of lengths among 'a\\nb', c"]),
        ("a.jsonl", '{"a\\nb": {}}', ["line 1: 'a\\nb' is a mapping"]),
        ("a.parquet", "length\n5\n", ["not Parquet"]),
    ],
)
def test_an_error_is_one_line_with_file_and_line_number(
    tmp_path: Path, name: str, text: str | bytes, words: list[str]
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = write(tmp_path / name, text)
    with pytest.raises(DataError) as raised:
        read_length_file(path, Columns())
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "columns", [{"prompt": "a"}, {"response": "a"}, {"length": "a", "prompt": "b", "response": "c"}]
)
def test_contradicting_columns_are_refused(columns: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set "):
        Columns(**columns)


@pytest.mark.parametrize(
    "text",
    [
        '{"n": 300, "p": [256, 64]}\n{"n": 9, "p": []}\n{"n": 90, "p": null}\n{"n": 90, "p": 64}\n',
        "n;p\n300;256 64\n9;[]\n90;\n90;64\n",
        'n,p\n300,"[256, 64]"\n9,[]\n90,\n90,[64]\n',
    ],
)
def test_patches_are_those_of_images_from_the_first_token_on(tmp_path: Path, text: str) -> None:
    table = read_length_file(write(tmp_path / "n", text), Columns(length="n", patches="p"))
    assert table.images is not None
    places = [[(ref.offset, ref.patches, ref.tokens) for ref in refs] for refs in table.images]
    assert places == [[(0, 256, 64), (64, 64, 16)], [], [], [(0, 64, 16)]]
    assert len({ref.key for refs in table.images for ref in refs}) == 3


def test_samples_of_a_group_have_the_same_images(tmp_path: Path) -> None:
    rows = [("a", 64), ("a", 64), ("b", 64)]
    text = "".join(json.dumps({"g": g, "s": 30, "r": 9, "p": [n]}) + "\n" for g, n in rows)
    columns = Columns(prompt="s", response="r", group="g", patches="p")
    images = read_length_file(write(tmp_path / "n.jsonl", text), columns).images
    assert images is not None
    assert [refs[0].key for refs in images] == ["a image 0", "a image 0", "b image 0"]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ('[256, "x"]', "give the patches of each image, multiples of 4"),
        ("[256, 0]", "multiples of 4"),
        ("66", "multiples of 4"),
        ("[64.0]", "multiples of 4"),
        ("[true]", "multiples of 4"),
        ("[64, 136]", "tokens, 4 patches each, and the sample has 50; give it more"),
    ],
)
def test_patches_that_no_sample_has_are_refused(tmp_path: Path, cell: str, message: str) -> None:
    path = write(tmp_path / "n.jsonl", f'{{"n": 9, "p": []}}\n{{"n": 50, "p": {cell}}}\n')
    with pytest.raises(DataError, match=f"n.jsonl: line 2: p (is|are) .*{message}"):
        read_length_file(path, Columns(length="n", patches="p"))


def test_text_ids_become_integers_if_none_is_lost(tmp_path: Path) -> None:
    text = "length,id\n5,7\n6,07\n"
    table = read_length_file(write(tmp_path / "a.csv", text), Columns(rollout="id"))
    assert table.rollout_ids == ("7", "07")
    lines = "".join(json.dumps({"length": 5, "id": i}) + "\n" for i in (1, "1"))
    table = read_length_file(write(tmp_path / "a.jsonl", lines), Columns(rollout="id"))
    assert table.rollout_ids == (1, "1")
    with pytest.raises(DataError, match="line 1: id is null"):
        read_length_file(
            write(tmp_path / "b.jsonl", '{"length": 5, "id": null}'), Columns(rollout="id")
        )

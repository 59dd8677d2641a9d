"""`megapack data toy`: a model, a tokenizer and data that the shipped config trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megapack.config import find_config, load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.data.batches import open_dataset
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.toy import write_toy

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_toy_is_the_same_each_time_and_never_written_over(call: Call) -> None:
    assert call("data", "toy", "toy")[0] == 0
    write_toy("other/toy")
    files = {path.name: path.read_bytes() for path in Path("toy").iterdir()}
    assert files == {path.name: path.read_bytes() for path in Path("other/toy").iterdir()}
    code, _, err = call("data", "toy", "toy")
    assert (code, "set a folder that does not exist" in err) == (2, True)


def test_its_tokenizer_gives_bytes_and_special_tokens() -> None:
    write_toy("toy")
    tokenizer = HfTokenizer(Path("toy"))
    text = bytes(range(1, 128)).decode() + "é€ <|im_end|>"
    ids = tokenizer.encode_prompt(text)
    assert ids.tolist() == [*text.removesuffix("<|im_end|>").encode(), 258]
    assert tokenizer.vocab_size == json.loads(Path("toy/config.json").read_text())["vocab_size"]


def test_the_shipped_config_trains_answers_and_calls_with_their_ends() -> None:
    write_toy("toy")
    config = load_config(find_config("sft_toy_cpu"), [], TrainConfig)
    data = open_dataset(config)
    trained = []
    for number in (0, 1):
        tokens = data.tokens(number)
        ids = np.concatenate([tokens.prompt_ids, tokens.response_ids])
        counted = ids[tokens.counts.astype(bool)]
        texts = bytes(counted[counted < 256].astype(np.uint8)).decode()
        trained.append((texts, int((counted == 258).sum())))
    call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 0}}</tool_call>'
    assert trained == [(f"It is 12.{call}It is 12.", 3), ("It is 11.It is 12.", 2)]


def test_a_missing_toy_says_how_it_is_made(call: Call) -> None:
    code, _, err = call("train", "sft_toy_cpu", "--dry-run", "world=1")
    assert code == 2
    assert err.endswith("; megapack data toy toy\n")

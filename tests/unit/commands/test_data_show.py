"""`megapack data show`: a sample as it will be trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit

CONFIG = str(Path(__file__).resolve().parents[3] / "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "response": "b\n", "reward": 0.5},
    {"prompt_ids": [97, 32], "response_ids": [98, 0xE9, 257], "loss_mask": [1, 0, 1]},
]
PAIRS = [{"prompt": "q", "chosen": "y", "rejected": "n", "group": 3}]
DPO = ("objective.kind=dpo", "objective.kl_coef=0", "objective.loss_weighting=seq-mean-token-mean")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_tokens_that_count_are_in_brackets(call: Any, data: str) -> None:
    code, out, err = call("data", "show", data, "--config", CONFIG)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "2 samples, 10 tokens, 5 count in the loss",
        f"sample 0: {data}:1, sample 0 of its line, prompt group 0 of 2, "
        "rollout 0 of 2, reward 0.5",
        "2 tokens of the prompt, 3 of the response; 3 count in the loss (in brackets)",
        r"  <bos>/256 a/97 [b/98] [\n/10] [<eos>/257]",
    ]
    _, out, _ = call("data", "show", data, "--config", CONFIG, "--sample", "1")
    assert out.splitlines()[-1] == r"  a/97 ␣/32 [b/98] \xe9/233 [<eos>/257]"


def test_the_samples_of_a_pair_are_named(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    code, out, err = call("data", "show", str(path), "--config", CONFIG, *DPO, "--sample", "1")
    assert (code, err) == (0, "")
    assert (
        f"{path}:1, sample 1 of its line, prompt group 0 of 1, rollout 0 of 1, other of a pair"
        in out
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--sample", "4"], "sample 4 of 2; set --sample from 0 to 1"),
        (["data.tokenizer=hf", "data.tokenizer_path=/nowhere"], "model.vocab_size=null; set"),
        (
            ["data.tokenizer=hf", "data.tokenizer_path=/nowhere", "model.vocab_size=300"],
            "/nowhere has no tokenizer.json; set data.tokenizer_path",
        ),
        (
            ["data.tokenizer=bytes", "data.tokenizer_path=/nowhere"],
            "has no effect under data.tokenizer=bytes",
        ),
        (["data.workers=0"], "data.workers is 0; set 1 or more"),
    ],
)
def test_errors_are_one_line(call: Any, data: str, args: list[str], says: str) -> None:
    code, out, err = call("data", "show", data, "--config", CONFIG, *args)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_an_image_is_a_box_in_place_of_its_tokens(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    folder = str(tmp_path / "toy")
    assert call("data", "toy", folder, "--images")[0] == 0
    args = ["data", "show", f"{folder}/rollouts.jsonl", "--config", "sft_toy_cpu", "--sample", "4"]
    args.append(f"model.hf_path={folder}")
    code, out, err = call(*args, "model.vision=train")
    assert (code, err) == (0, "")
    first, _, third, *cells = out.splitlines()
    assert first == "32 samples, 1380 tokens, 48 images with 1520 patches, 488 count in the loss"
    assert third.startswith("23 tokens of the prompt, 26 of the response; 12 count in the loss")
    found = re.findall(r"\[(image [^]]*), key [0-9a-f]{6}\]", "\n".join(cells))
    assert found == ["image 8x4 patches, 8 tokens", "image 6x8 patches, 12 tokens"]
    assert "image_pad" not in out
    assert cells[-1].endswith("<|vision_end|>/260 [r/114] [e/101] [d/100] [<|im_end|>/258]")
    code, _, err = call(*args)
    says = "rollouts.jsonl:1: has images, which are not read; set model.vision to frozen or train"
    assert (code, says in err) == (2, True)

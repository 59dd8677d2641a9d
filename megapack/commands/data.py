"""Show a sample of a data file as it will be trained, or make toy data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.commands.arguments import add_json, add_overrides, integer, print_json
from megapack.config.load import load_config
from megapack.config.shipped import find_config
from megapack.errors import ConfigError
from megapack.job.config.sections import TrainConfig
from megapack.job.data.batches import open_dataset, read_settings
from megapack.job.data.files import list_files
from megapack.job.data.toy import write_toy

if TYPE_CHECKING:
    from megapack.job.data.dataset import Dataset

EXAMPLE = """megapack data show chats.jsonl --config sft.yaml --sample 0
megapack data toy FOLDER"""
_WIDTH = 100
_PAIR = {1: "preferred of a pair", -1: "other of a pair", 0: ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `toy`, and `show` with FILE, a config, the values to change in it, and --sample."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    summary = "make a tiny model with a tokenizer, chats and lengths, to try megapack with"
    toy = actions.add_parser("toy", help=summary, description=write_toy.__doc__)
    toy.add_argument("folder", metavar="FOLDER", help="to write; it must not exist")
    summary = "print a sample as it will be trained: its tokens, and which count in the loss"
    show = actions.add_parser("show", help=summary, description=summary)
    show.add_argument("file", metavar="FILE", help="a data file, or a folder of them")
    add_overrides(show)
    show.add_argument(
        "--config",
        required=True,
        metavar="CONFIG",
        help="a YAML file, or the name of a config that megapack ships: its `data` and `model`",
    )
    show.add_argument(
        "--sample", type=integer, default=0, metavar="N", help="number of the sample, from 0 (0)"
    )
    add_json(show)


def run(args: argparse.Namespace) -> int:
    """Make a toy; or read the file as a run would, and print one sample.

    Samples, prompt groups and rollouts are numbered from 0 in the order of the files, whatever the
    columns `group` and `rollout` say.
    """
    if args.action == "toy":
        write_toy(args.folder)
        print(f"{args.folder}: model and tokenizer, chats.jsonl, lengths.csv")
        return 0
    # JSON strings are YAML, so that any path is read as a text.
    overrides = [*args.overrides, f"data.path={json.dumps(args.file)}"]
    config = load_config(find_config(args.config), overrides, TrainConfig)
    data = open_dataset(config)
    if not 0 <= args.sample < len(data):
        raise ConfigError(
            f"sample {args.sample} of {len(data)}; set --sample from 0 to {len(data) - 1}"
        )
    sample = _described(data, args.sample, list_files(args.file))
    ids = [token["id"] for token in sample["tokens"]]
    for token, text in zip(
        sample["tokens"], read_settings(config).tokenizer.token_texts(ids), strict=True
    ):
        token["text"] = text
    if args.json:
        print_json(sample)
        return 0
    _print(sample, data)
    return 0


def _described(data: Dataset, number: int, files: list[Path]) -> dict[str, Any]:
    """What a run knows of a sample; its tokens without their texts."""
    one = np.array([number])
    everything = np.arange(len(data))
    (line,) = data.lines(one)
    (reward,) = data.rewards(one)
    tokens = data.tokens(number)
    counts = tokens.counts
    ids = np.concatenate([tokens.prompt_ids, tokens.response_ids])
    routes = tokens.routed_experts
    return {
        "sample": number,
        "num_samples": len(data),
        "file": str(files[line[0]]),
        "line": line[1],
        "part": line[2],
        "group": reward.group,
        "num_groups": data.num_groups(everything),
        "rollout": reward.rollout,
        "num_rollouts": data.num_rollouts(everything),
        "reward": reward.reward,
        "advantage": reward.advantage,
        "pair_sign": data.pair_signs(one)[0],
        "prompt_tokens": len(tokens.prompt_ids),
        "response_tokens": len(tokens.response_ids),
        "loss_tokens": int(counts.sum()),
        "routed_experts": None if routes is None else list(routes.shape),
        "tokens": [
            {"id": token, "weight": int(count)}
            for token, count in zip(ids.tolist(), counts.tolist(), strict=True)
        ],
    }


def _print(sample: dict[str, Any], data: Dataset) -> None:
    everything = np.arange(len(data))
    num_tokens = sum(data.prompt_tokens(everything)) + sum(data.response_tokens(everything))
    num_counting = sum(data.loss_tokens(everything))
    print(f"{len(data)} samples, {num_tokens} tokens, {num_counting} count in the loss")
    facts = [
        f"{sample['file']}:{sample['line']}",
        f"sample {sample['part']} of its line",
        f"prompt group {sample['group']} of {sample['num_groups']}",
        f"rollout {sample['rollout']} of {sample['num_rollouts']}",
        *(
            f"{name} {sample[name]:g}"
            for name in ("reward", "advantage")
            if sample[name] is not None
        ),
        *filter(None, [_PAIR[sample["pair_sign"]]]),
    ]
    if sample["routed_experts"] is not None:
        facts.append("experts of {} tokens in {} layers, {} each".format(*sample["routed_experts"]))
    print(f"sample {sample['sample']}: {', '.join(facts)}")
    print(
        f"{sample['prompt_tokens']} tokens of the prompt, {sample['response_tokens']} of the "
        f"response; {sample['loss_tokens']} count in the loss (in brackets)"
    )
    print(_cells(sample["tokens"]))


def _cells(tokens: list[dict[str, Any]]) -> str:
    """Each token as text/id, those that count in brackets, in lines of `_WIDTH`."""
    lines = [""]
    for token in tokens:
        cell = f"{_visible(token['text'])}/{token['id']}"
        cell = f"[{cell}]" if token["weight"] else cell
        if lines[-1] and len(lines[-1]) + len(cell) >= _WIDTH:
            lines.append("")
        lines[-1] += f"  {cell}" if not lines[-1] else f" {cell}"
    return "\n".join(lines)


def _visible(text: str) -> str:
    """A token's text on one line, with its spaces to be seen."""
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text)

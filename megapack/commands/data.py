"""Show a sample of a data file as it will be trained, or make toy data."""

from __future__ import annotations

import argparse
import json

import numpy as np

from megapack.commands.arguments import add_overrides, integer
from megapack.config.load import load_config
from megapack.config.shipped import find_config
from megapack.errors import ConfigError
from megapack.job.config.sections import TrainConfig
from megapack.job.data.batches import open_dataset, read_settings
from megapack.job.data.dataset import Dataset
from megapack.job.data.files import list_files
from megapack.job.data.tokenizer import Tokenizer
from megapack.job.data.toy import write_toy
from megapack.job.data.toy_images import write_image_model, write_images

EXAMPLE = """megapack data show chats.jsonl --config sft.yaml --sample 0
megapack data toy FOLDER
megapack data toy FOLDER --images qwen3_vl"""
_WIDTH = 100
_PAIR = {1: "preferred of a pair", -1: "other of a pair", 0: ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `toy`, and `show` with FILE, a config, the values to change in it, and --sample."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    summary = "make a tiny model with a tokenizer, chats and lengths, to try megapack with"
    toy = actions.add_parser("toy", help=summary, description=write_toy.__doc__)
    toy.add_argument("folder", metavar="FOLDER", help="to write; it must not exist")
    toy.add_argument("--images", action="store_true", help="a model and data with images")
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


def run(args: argparse.Namespace) -> int:
    """Make a toy; or read the file as a run would, and print one sample.

    Samples, prompt groups and rollouts are numbered from 0 in the order of the files, whatever the
    columns `group` and `rollout` say.
    """
    if args.action == "toy" and args.images:
        write_image_model(args.folder)
        write_images(args.folder)
        print(f"{args.folder}: model, tokenizer and image processor, chats.jsonl, rollouts.jsonl")
        return 0
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
    _print(data, args.sample, str(list_files(args.file)[data.lines(np.array([args.sample]))[0][0]]))
    print(_cells(data, args.sample, read_settings(config).tokenizer))
    return 0


def _print(data: Dataset, number: int, file: str) -> None:
    """What a run knows of a sample, but for its tokens."""
    one = np.array([number])
    everything = np.arange(len(data))
    ((_, line, part),) = data.lines(one)
    (known,) = data.rewards(one)
    (num_prompt,), (num_response,) = data.prompt_tokens(one), data.response_tokens(one)
    num_counting = sum(data.loss_tokens(everything))
    images = [image for refs in data.images(everything) for image in refs]
    num_patches = sum(image.patches for image in images)
    shown = f", {len(images)} images with {num_patches} patches" if images else ""
    tokens = data.lengths.sum()
    print(f"{len(data)} samples, {tokens} tokens{shown}, {num_counting} count in the loss")
    facts = [
        f"{file}:{line}",
        f"sample {part} of its line",
        f"prompt group {known.group} of {data.num_groups(everything)}",
        f"rollout {known.rollout} of {data.num_rollouts(everything)}",
        "" if known.reward is None else f"reward {known.reward:g}",
        "" if known.advantage is None else f"advantage {known.advantage:g}",
        _PAIR[data.pair_signs(one)[0]],
    ]
    print(f"sample {number}: {', '.join(filter(None, facts))}")
    print(
        f"{num_prompt} tokens of the prompt, {num_response} of the response; "
        f"{data.loss_tokens(one)[0]} count in the loss (in brackets)"
    )


def _cells(data: Dataset, number: int, tokenizer: Tokenizer) -> str:
    """Each token as text/id, those that count in brackets, in lines of `_WIDTH`; an image as a box
    in place of its tokens."""
    tokens = data.tokens(number)
    ids = np.concatenate([tokens.prompt_ids, tokens.response_ids]).tolist()
    cells = []
    for token, text, counts in zip(ids, tokenizer.token_texts(ids), tokens.counts, strict=True):
        cell = f"{_visible(text)}/{token}"
        cells.append(f"[{cell}]" if counts else cell)
    (images,) = data.images(np.array([number]))
    for image in reversed(images):
        _, rows, columns = image.grid
        box = f"[image {rows}x{columns} patches, {image.tokens} tokens, key {image.key[:6]}]"
        cells[image.offset : image.end] = [box]
    lines = [""]
    for cell in cells:
        if lines[-1] and len(lines[-1]) + len(cell) >= _WIDTH:
            lines.append("")
        lines[-1] += f"  {cell}" if not lines[-1] else f" {cell}"
    return "\n".join(lines)


def _visible(text: str) -> str:
    """A token's text on one line, with its spaces to be seen."""
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text)

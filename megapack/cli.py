"""Commands. Exit codes: 0 done, 1 found a problem, 2 bad input (one line, and what to set)."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from megapack.errors import MegapackError, ScheduleError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = _parser().parse_args(argv)
    on_first_rank = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        format="%(levelname)s %(name)s: %(message)s",
        level=logging.WARNING if on_first_rank else logging.ERROR,
    )
    try:
        return int(args.run(args))
    except MegapackError as error:
        if on_first_rank:
            print(f"megapack: {error}", file=sys.stderr)
        elif isinstance(error, ScheduleError) and not error.on_all_ranks:
            print(f"megapack: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapack", description="Packed, VPP-aligned training steps for Megatron-Core."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train on rollouts; start it with torchrun",
        description="Train a GPT on rollouts, as one rank of a job that torchrun or Slurm started.",
    )
    train.add_argument("config", help="a YAML file, or the name of a config that megapack ships")
    train.add_argument("overrides", nargs="*", metavar="section.key=value")
    train.set_defaults(run=_train)
    return parser


def _train(args: argparse.Namespace) -> int:
    from megapack.config import find_config, load_config
    from megapack.train_config import TrainConfig

    config = load_config(find_config(args.config), args.overrides, TrainConfig)
    from megapack.launch import quiet_known_warnings

    quiet_known_warnings()
    from megapack.train import train  # torch and Megatron-Core take seconds to import

    train(config)
    return 0

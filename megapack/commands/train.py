"""Train a GPT on rollouts, as one rank of a job that torchrun or Slurm started."""

from __future__ import annotations

import argparse

from megapack.commands.dry_run import add_dry_run, run_dry
from megapack.config.load import find_config, load_config
from megapack.config.sections import TrainConfig
from megapack.errors import ConfigError
from megapack.ranks.interrupt import Interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config and what to change in it."""
    parser.add_argument("config", help="a YAML file, or the name of a config that megapack ships")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Train; returns once all ranks are done."""
    config = load_config(find_config(args.config), args.overrides, TrainConfig)
    if args.dry_run is not None:
        return run_dry(args, config)
    if args.json:
        raise ConfigError("--json is for dry runs; set --dry-run world=N")
    with Interrupt(saves=config.train.save_interval is not None) as interrupt:
        from megapack.base.apex import warn_of_other_apex
        from megapack.launch import quiet_known_warnings

        quiet_known_warnings()
        warn_of_other_apex()
        from megapack.train.job import train  # torch and Megatron-Core take seconds to import

        train(config, interrupt)
    return 0

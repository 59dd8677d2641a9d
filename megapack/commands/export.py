"""Write the weights of a run, or of a checkpoint, as a Hugging Face folder.

One process is enough; torchrun starts several, each of which writes a part.
"""

from __future__ import annotations

import argparse
import os

from megapack.commands.arguments import integer
from megapack.errors import ConfigError

EXAMPLE = "megapack export runs/sft -o models/sft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add SOURCE, -o, --like, --dtype and --max-shard-bytes."""
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run's folder (its latest checkpoint), or one"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="to write; it must not exist"
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="what the run started from: names, config and tokenizer (its model.hf_path)",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="of the weights (as in the folder of --like)"
    )
    parser.add_argument(
        "--max-shard-bytes", type=integer, metavar="N", help="of a file (5000000000)"
    )


def run(args: argparse.Namespace) -> int:
    """Write."""
    shard = {} if args.max_shard_bytes is None else {"max_shard_bytes": args.max_shard_bytes}
    if args.max_shard_bytes is not None and args.max_shard_bytes < 1:
        raise ConfigError(f"--max-shard-bytes {args.max_shard_bytes}; set 1 or more")
    from megapack import launch
    from megapack.base.known_warnings import quiet_known_warnings

    quiet_known_warnings()
    from megapack.job.hf.checkpoint import export_checkpoint  # torch and Megatron-Core take seconds

    device = launch.start("cpu")
    try:
        exported = export_checkpoint(
            args.source, args.output, device=device, like=args.like, dtype=args.dtype, **shard
        )
    finally:
        launch.stop()
    if os.environ.get("RANK", "0") == "0":
        print(exported)
    return 0

"""What the ranks of the check run; `python -m tools.nccl.on_ranks.start MODULE ARGUMENTS`."""

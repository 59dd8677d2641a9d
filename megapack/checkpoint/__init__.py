"""Checkpoints of a run: written whole or not at all, loaded on any layout.

Modules:
    checkpoints: save, load, resume
    folders: names, completeness, removal
    state: tensors in Megatron's distributed checkpoint format
"""

from megapack.checkpoint.checkpoints import Checkpoints, samples_done_digest

__all__ = [
    "Checkpoints",
    "samples_done_digest",
]

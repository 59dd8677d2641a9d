"""Checkpoints of a run: written whole or not at all, loaded on any layout.

Modules:
    checkpoints: save, load, resume
    folders: names, completeness, removal
    state: all tensors of a rank in Megatron's distributed checkpoint format
    blocks: the distributed optimizer's state in that format, without a gather
    writer: plans all ranks' files and writes this rank's, on threads, while training goes on
    index: checks the pickled index before torch reads it
"""

from megapack.job.checkpoint.checkpoints import Checkpoints as Checkpoints
from megapack.job.checkpoint.checkpoints import samples_done_digest as samples_done_digest

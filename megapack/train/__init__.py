"""The main job: `python -m megapack train CONFIG`.

Modules:
    job: Trainer: batches -> passes -> optimizer -> checkpoint
    ahead: the next batch's plan and tokens, made while the steps of this one run
    passes: log-probs and gradients of a batch
    garbage: Python's garbage collection at the same steps on all ranks
    folder, metrics: what a run leaves behind
    trace, trackers: measured timelines; TensorBoard and W&B
"""

from megapack.train.job import Trainer, train

__all__ = [
    "Trainer",
    "train",
]

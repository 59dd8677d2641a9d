"""The main job: `python -m megapack train CONFIG`.

Modules:
    job: Trainer: batches -> passes -> optimizer -> checkpoint
    kernels: what computes the model, equal on all ranks
    learner: the policy or the critic: its chunks, optimizer and steps
    critic: values, advantages and the critic's steps
    passes: log-probs and gradients of a batch
    calibrator: the run's own seconds -> the cost model of its next plans
    garbage: Python's garbage collection at the same steps on all ranks
    first_lines: what a run says before its first step
    folder, metrics: what a run leaves behind
    trace, trackers: measured timelines; TensorBoard, W&B, MLflow, SwanLab
    marks: points in a rank's work, on the GPU's or the host's clock
"""

from megapack.job.train.job import Trainer as Trainer
from megapack.job.train.job import train as train

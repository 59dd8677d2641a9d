"""What a run says before its first step, and when Ctrl-C ends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megapack import cpu
from megapack.job.gpt.settings import describe, layer_settings
from megapack.job.train.folder import SETTINGS_FILE


def first_lines(run: Any) -> Iterator[str]:
    """The lines before the first step; also writes those about the machine to settings.txt.

    Args:
        run: the `train.job.Trainer`.
    """
    config = run.config
    yield f"{len(run.data)} samples, {run.layout.label}"
    if config.data.drop_equal_rewards:
        yield f"{run.data.num_dropped_groups} prompt groups of equal rewards left out"
    settings = layer_settings(config.model, run.kernels.attention)
    of_machine = [
        str(run.kernels),
        describe(settings, run.reduction),
        f"cost model {run.cost_basis}",
    ]
    if run.data.stored_images is not None:
        # transformers has two of each, which may resize otherwise.
        of_machine.append(f"images by {run.data.stored_images.reader.backend}")
    if run.folder is not None:
        run.folder.write_text(SETTINGS_FILE, "\n".join([*of_machine, ""]))
    if cpu.uses_cuda():
        yield from of_machine
    else:
        yield f"CPU run: GPU kernels, fusions and overlap are off (see {SETTINGS_FILE})"
    if run.policy.loaded is not None:
        yield f"loaded {run.policy.loaded}"
    if run.critic is not None and run.critic.loaded is not None:
        yield f"critic loaded {run.critic.loaded}"
    if run.resumed is not None:
        yield f"resumed after step {run.num_steps}: {run.resumed.path}"
        if changed := run.checkpoints.changes_since(run.resumed):
            yield f"changed since then: {'; '.join(changed)}"


def last_line(run: Any) -> str:
    """How far a `Trainer` came that Ctrl-C ended, and how it goes on; None: it was not made yet."""
    if run is None:
        return "interrupted before the first step"
    done = f"interrupted after step {run.num_steps}"
    saved = run.checkpoints.last_saved
    if saved is not None:
        return f"{done}; go on from {saved} with train.resume=auto"
    every = run.config.train.save_interval
    why = "train.save_interval is not set" if every is None else f"train.save_interval={every}"
    return f"{done}; it has no checkpoint yet ({why}), so it would start anew"

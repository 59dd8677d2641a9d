"""Steps whose samples share prefixes, generated from a seed, and those of the traces with groups.

A sample is given by what a plan needs: its length and the tokens that it has in common with the
sample before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapack import SharedPrefixes

SEED = 0


@dataclass(frozen=True)
class FamilyStep:
    """The samples of one step, prompt group after prompt group."""

    name: str
    lengths: np.ndarray
    """int64 [n], tokens of each sample."""
    prefixes: SharedPrefixes
    budget: int
    """Tokens per row."""


def generated_steps(num_samples: int) -> list[FamilyStep]:
    """The generated steps of the page, 512 samples or so each."""
    return [
        _groups("math G=8", num_samples, 8, (100, 500), (500, 8000), 32768),
        _groups("math G=16", num_samples, 16, (100, 500), (500, 8000), 32768),
        _groups("agentic G=8", num_samples, 8, (2000, 16000), (200, 2000), 32768),
        _groups("agentic G=16", num_samples, 16, (2000, 16000), (200, 2000), 32768),
        _groups("agentic long G=8", num_samples, 8, (2000, 16000), (1000, 8000), 65536),
        _trees("trees G=8", num_samples, 8, 32768),
        _trees("trees G=16", num_samples, 16, 32768),
    ]


def trace_steps(folder: Path, num_samples: int) -> list[FamilyStep]:
    """The traces of answers to the same prompts: 4 and 16 per prompt."""
    files = [
        ("math500 G=4", "skythought_math500_g4.csv", 4, 36864),
        ("aime24 G=16", "skythought_aime24_longcot_g16.csv", 16, 51200),
    ]
    steps = []
    for name, file, size, budget in files:
        if not (folder / file).is_file():
            continue
        columns = np.loadtxt(folder / file, delimiter=",", skiprows=1, dtype=np.int64)
        prompts = columns[: num_samples // size * size, 0]
        answers = columns[: prompts.size, 1]
        groups = np.arange(prompts.size) // size
        prefixes = SharedPrefixes.from_groups(groups.tolist(), prompts.tolist())
        steps.append(FamilyStep(name, prompts + answers, prefixes, budget))
    return steps


def _log_uniform(rng: np.random.Generator, ends: tuple[int, int], size: int) -> np.ndarray:
    return np.exp(rng.uniform(*np.log(ends), size)).astype(np.int64)


def _groups(
    name: str,
    num_samples: int,
    size: int,
    prompt: tuple[int, int],
    answer: tuple[int, int],
    budget: int,
) -> FamilyStep:
    """Groups of `size` answers to one prompt; both lengths log-uniform within their ends."""
    rng = np.random.default_rng(SEED)
    num_groups = num_samples // size
    prompts = np.repeat(_log_uniform(rng, prompt, num_groups), size)
    answers = _log_uniform(rng, answer, num_groups * size)
    groups = np.repeat(np.arange(num_groups), size)
    prefixes = SharedPrefixes.from_groups(groups.tolist(), prompts.tolist())
    return FamilyStep(name, prompts + answers, prefixes, budget)


def _trees(name: str, num_samples: int, size: int, budget: int) -> FamilyStep:
    """Multi-turn rollouts that branch below one prompt.

    A prompt of 500 to 4,000 tokens, then turns of 300 to 3,000 tokens. Each sample but the first of
    its tree leaves the sample before it after 0 to 3 of that one's turns and has 1 to 4 own ones.
    """
    rng = np.random.default_rng(SEED)
    lengths = []
    common = []
    for _ in range(num_samples // size):
        # Where the turns of the last sample end.
        ends = [int(_log_uniform(rng, (500, 4000), 1)[0])]
        for k in range(size):
            kept = min(int(rng.integers(0, 4)), len(ends) - 2) if k else 0
            ends = ends[: 1 + kept]
            common.append(ends[-1] if k else 0)
            for turn in _log_uniform(rng, (300, 3000), int(rng.integers(1, 5))).tolist():
                ends.append(ends[-1] + turn)
            lengths.append(ends[-1])
    order = tuple(range(len(lengths)))
    return FamilyStep(name, np.array(lengths), SharedPrefixes(order, tuple(common)), budget)

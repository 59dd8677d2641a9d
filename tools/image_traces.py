"""Write docs/measured/image_traces.md: what the traces of images are like.

python tools/image_traces.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benching.image_traces import TRACES, images, lengths, trace
from tools.pages.measured import versions, write

PROMPTS = 4096
GROUP = 8


def table() -> Iterator[str]:
    """Yield the lines of the table, a row per trace."""
    yield "| trace | patches of an image | text of a prompt | image tokens | response |"
    yield "|---" * 5 + "|"
    for name in TRACES:
        samples = trace(name, PROMPTS, GROUP)
        patches = [ref.patches for own in images(samples[::GROUP]) for ref in own]
        text = np.mean([sample.text_tokens for sample in samples[::GROUP]])
        share = sum(sample.image_tokens for sample in samples) / sum(lengths(samples))
        response = _numbers([sample.response_tokens for sample in samples])
        yield f"| {name} | {_numbers(patches)} | {text:.0f} | {share:.0%} | {response} |"


def _numbers(values: Sequence[int]) -> str:
    """Their mean, median and p99."""
    found = (np.mean(values), *np.percentile(values, [50, 99]))
    return ", ".join(f"{value:,.0f}" for value in found)


def main() -> None:
    what = (
        f"Of {PROMPTS:,} prompts with {GROUP} responses each: mean, median and p99 of patches and "
        "of a response's tokens, mean tokens of a prompt's text, share of image tokens in all."
    )
    body = list(table())
    print("\n".join(body))
    write("image_traces", "Traces of images", what, body, versions("numpy", "transformers"))


if __name__ == "__main__":
    main()

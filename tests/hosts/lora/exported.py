"""Log-probs of transformers' model with the adapters of exported folders, by the peft package.

    python -m tests.hosts.lora.exported FOLDER NAME ...

Prints for each folder NAME the largest difference to the results of `reference`, in nats.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests import hf_models
from tests.dist.hf.hf_cases import samples
from tests.hosts.lora import packages


def largest_difference(folder: Path, name: str, family: str = "qwen3") -> float:
    """Of the responses' log-probs."""
    import peft

    base = hf_models.load(folder / family, family)
    model = peft.PeftModel.from_pretrained(base, folder / name)
    prompts, responses = samples()
    tokens = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    own, _ = hf_models.logprobs_and_entropies(model, tokens)
    want = torch.load(folder / f"{family}.pt")["logprobs"]
    return max(
        float((found[len(prompt) :] - expected).abs().max())
        for found, prompt, expected in zip(own, prompts, want, strict=True)
    )


def main(folder: str, out: str, *names: str) -> None:
    packages.add_peft()
    found = {name: largest_difference(Path(folder), name) for name in names}
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

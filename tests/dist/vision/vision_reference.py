"""What transformers computes with tiny models, in fp64, one unpadded sample at a time.

python -m tests.dist.vision.vision_reference FOLDER FAMILY ...

writes FOLDER/FAMILY, a model, and FOLDER/FAMILY.pt.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from megapack.images import positions
from tests.dist.hf.hf_worker import read
from tests.dist.vision.vision_samples import CHOSEN, IMAGE, Sample, make_samples
from tests.toy_towers import write_image_model


def inputs_of(sample: Sample, dtype: torch.dtype) -> dict[str, Any]:
    """A sample as the arguments of transformers' model."""
    inputs: dict[str, Any] = {
        "input_ids": sample.ids[None],
        "mm_token_type_ids": (sample.ids == IMAGE).int()[None],
    }
    if sample.refs:
        pixels = [ref.pixels() for ref in sample.refs if ref.pixels is not None]
        inputs["pixel_values"] = torch.cat(pixels).to(dtype)
        inputs["image_grid_thw"] = torch.tensor([ref.grid for ref in sample.refs])
    return inputs


def reference(folder: Path, samples: list[Sample]) -> dict[str, Any]:
    """Loss, log-probs and gradients of a folder's model, of SFT over all tokens that count.

    Gradients are saved as weights: so they have the names and shapes of the folder's tensors.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    # Other implementations round or have no fp64.
    eager = {"experts_implementation": "eager"} if "moe" in config.model_type else {}
    model = kind.from_pretrained(folder, dtype=torch.float64, **eager).eval()
    count = sum(int(sample.mask[1:].sum()) for sample in samples)
    logprobs = []
    for sample in samples:
        inputs = inputs_of(sample, torch.float64)
        if sample.refs:
            own = (inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])
            found, _ = model.model.get_rope_index(*own)
            made = positions(tuple(sample.refs), len(sample.ids))
            assert found[:, 0].T.tolist() == made.tolist()
        model.model.rope_deltas = None
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        values = logits.log_softmax(-1).gather(1, sample.ids[1:, None])[:, 0]
        kept = sample.mask[1:]
        (-(values[kept].sum()) / count).backward()
        own_logprobs = torch.zeros(len(sample.ids), dtype=torch.float64)
        own_logprobs[1:][kept] = values[kept].detach()
        logprobs.append(own_logprobs)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        gradients = read(Path(saved))
    return {
        "loss": -sum(float(one.sum()) for one in logprobs) / count,
        "logprobs": logprobs,
        "gradients": {name: grad for name, grad in gradients.items() if grad.any()},
    }


def main(folder: str, *families: str) -> None:
    """Make the models, and their references."""
    for family in families:
        path = Path(folder) / family
        write_image_model(path, family)
        found = {name: reference(path, make_samples(name)) for name in CHOSEN}
        torch.save(found, Path(folder) / f"{family}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

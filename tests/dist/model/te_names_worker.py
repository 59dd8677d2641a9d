"""Compares names and initial weights of models in Transformer Engine's and in local layers.

torchrun --nproc-per-node 1 -m tests.dist.model.te_names_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from megapack import Layout, launch
from megapack.base.choices import Attention
from megapack.job.config.sections import ModelConfig
from megapack.model.parameters import global_parameters
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks

VARIANTS = ("plain", "other", "moe_latent", "mla", "mtp")
FREEZE = ("*.mlp.*", "*.input_layernorm.*")


def main(out_dir: str) -> None:
    """Write `OUT_DIR/rank0.json`: by variant, what differs between the two kinds of layers."""
    launch.start("cpu")
    found = {name: _differences(problem.MODELS[name][0]) for name in VARIANTS}
    text = json.dumps(found, indent=1)
    (Path(out_dir) / "rank0.json").write_text(text, encoding="utf-8")
    launch.stop()


def _differences(model: ModelConfig) -> dict[str, Any]:
    te, te_frozen = _parameters(model, "te")
    local, local_frozen = _parameters(model, "sdpa")
    return {
        "names": sorted(te.keys() ^ local.keys()),
        "weights": [name for name in te.keys() & local.keys() if not te[name].equal(local[name])],
        "frozen": sorted(te_frozen ^ local_frozen),
        "num_frozen": len(local_frozen),
    }


def _parameters(model: ModelConfig, attention: Attention) -> tuple[dict[str, Tensor], set[str]]:
    """The parameters, and the names of those that `FREEZE` freezes."""
    model = dataclasses.replace(model, attention=attention, freeze=FREEZE)
    chunks = build_chunks(Layout(), model=model)
    named = {name: param for chunk in chunks for name, param in global_parameters(chunk)}
    end_model_parallel()
    frozen = {name for name, param in named.items() if not param.requires_grad}
    return {name: param.detach() for name, param in named.items()}, frozen


if __name__ == "__main__":
    main(sys.argv[1])

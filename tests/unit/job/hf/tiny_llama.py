"""A Llama of one layer as a folder and as Megatron's tensors, stacked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 5,
}
PADDED_VOCAB = 8


def hf_tensors() -> dict[str, Tensor]:
    """The folder's tensors."""
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (5, HIDDEN),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (8, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (4, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (4, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, 8),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}mlp.gate_proj.weight": (6, HIDDEN),
        f"{layer}mlp.up_proj.weight": (6, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, 6),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (5, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def megatron_tensors() -> dict[str, Tensor]:
    """Megatron's tensors of the same model."""
    hf = {name.removeprefix("model.layers.0."): t for name, t in hf_tensors().items()}
    q, k, v = (hf[f"self_attn.{name}_proj.weight"] for name in "qkv")
    padding = torch.full((PADDED_VOCAB - 5, HIDDEN), 7.0)
    layer = "decoder.layers.0."
    return {
        "embedding.word_embeddings.weight": torch.cat([hf["model.embed_tokens.weight"], padding]),
        f"{layer}self_attention.linear_qkv.layer_norm_weight": hf["input_layernorm.weight"],
        # Two groups of two query heads of width 2.
        f"{layer}self_attention.linear_qkv.weight": torch.cat(
            [q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]
        ),
        f"{layer}self_attention.linear_proj.weight": hf["self_attn.o_proj.weight"],
        f"{layer}mlp.linear_fc1.layer_norm_weight": hf["post_attention_layernorm.weight"],
        f"{layer}mlp.linear_fc1.weight": torch.cat(
            [hf["mlp.gate_proj.weight"], hf["mlp.up_proj.weight"]]
        ),
        f"{layer}mlp.linear_fc2.weight": hf["mlp.down_proj.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": torch.cat([hf["lm_head.weight"], padding]),
    }


def write_folder(folder: Path, *, num_files: int = 2, **keys: Any) -> Path:
    """Write the folder with an index, or with one file; returns it.

    Args:
        keys: other keys of config.json.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **keys}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = hf_tensors()
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def as_snapshot(folder: Path) -> Path:
    """The folder as the hub's cache has it: links to files whose names are digests."""
    cache = folder.with_name("models--toy--llama")
    snapshot = cache / "snapshots" / "3a0e93d9"
    for place in (snapshot, cache / "blobs"):
        place.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = cache / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Write the index."""
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}

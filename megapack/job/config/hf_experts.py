"""Experts of a config.json: their number and widths, and how a router chooses them."""

from __future__ import annotations

from typing import Any

from megapack.job.config.hf_reader import MISSING, MOST, Reader, Values

_WIDTH = {"moe_intermediate_size": "moe_ffn_hidden_size"}
_CHOSEN = {"num_experts_per_tok": "moe_top_k", **_WIDTH}
_ROUTED = _CHOSEN | {"n_routed_experts": "num_experts", "routed_scaling_factor": "moe_route_scale"}
# Keys of config.json -> options.
MIXTRAL = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_top_k",
    "intermediate_size": "moe_ffn_hidden_size",
}
ERNIE = {"moe_num_experts": "num_experts", "moe_k": "moe_top_k", **_WIDTH}
_BESIDE_MLP = {"num_experts": "num_experts", "top_k_experts": "moe_top_k", **_WIDTH}


def _num_experts(reader: Reader, *names: str) -> int:
    """The number of experts by one of these names."""
    present = [name for name in names if name in reader.keys] or [names[0]]
    counts = {reader.count(name, 1) for name in present}
    if len(counts) > 1:
        raise reader.error(present[0], reader.get(present[0]), f"{present[1]} differs: keep one")
    return counts.pop()


def _of_all_layers(reader: Reader, key: str, default: Any = MISSING) -> int:
    """A number, or a list of the same number for each layer."""
    value = reader.get(key, default)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    if type(value) is not int or not 0 < value <= MOST:
        raise reader.error(key, value, "expected a whole number of at least 1, the same in layers")
    return value


def hunyuan_experts(reader: Reader) -> Values:
    """Experts of Hunyuan, and a shared one, all as wide as `intermediate_size`."""
    width = reader.count("intermediate_size", 1)
    for key, value in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        found = _of_all_layers(reader, key, value)
        if found != value:
            raise reader.error(key, found, f"transformers has {value} whatever it says")
    return {
        "num_experts": _num_experts(reader, "num_experts", "num_local_experts"),
        "moe_top_k": _of_all_layers(reader, "moe_topk"),
        "moe_ffn_hidden_size": width,
        "moe_shared_ffn_hidden_size": width,
    }


def ernie_experts(reader: Reader) -> Values:
    """The dense first layers and shared experts of Ernie 4.5."""
    shared = reader.count("moe_intermediate_size", 1) * reader.count("moe_num_shared_experts")
    last = reader.count("num_hidden_layers", 1) - 1
    reader.require("moe_layer_end_index", -1, last)
    return {
        "moe_shared_ffn_hidden_size": shared or None,
        "moe_first_dense_layers": reader.count("moe_layer_start_index"),
    }


def softmax_experts(reader: Reader) -> Values:
    """Experts of Qwen: their number, width and scores."""
    count = _num_experts(reader, "num_experts", "num_local_experts")
    scores = {"norm_topk_prob": "moe_norm_top_k"}
    return {"num_experts": count, **reader.options(_CHOSEN | scores)}


def qwen_experts(reader: Reader) -> Values:
    """Experts after the first dense layers, with softmax scores."""
    reader.require("decoder_sparse_step", 1)
    dense = reader.layers("mlp_only_layers")
    if dense != set(range(len(dense))):
        raise reader.error("mlp_only_layers", dense, "only the first layers can be dense")
    return {**softmax_experts(reader), "moe_first_dense_layers": len(dense)}


def experts_beside_mlp(reader: Reader) -> Values:
    """Experts beside a dense MLP, which has the part of a shared expert (Gemma 4)."""
    if not reader.flag("enable_moe_block"):
        # They have no effect.
        reader.known.update(_BESIDE_MLP)
        return {}
    return {
        **reader.options(_BESIDE_MLP),
        "moe_shared_ffn_hidden_size": reader.count("intermediate_size", 1),
        "moe_inner_norms": True,
    }


def gated_shared_expert(reader: Reader) -> Values:
    width = reader.count("shared_expert_intermediate_size", 1)
    return {"moe_shared_ffn_hidden_size": width, "moe_shared_gate": True}


def sigmoid_experts(reader: Reader) -> Values:
    """Experts of DeepSeek: their number and width, sigmoid scores and groups."""
    if not reader.flag("norm_topk_prob"):
        raise reader.error("norm_topk_prob", False, "Megatron-Core normalises sigmoid scores")
    return {
        **reader.options(_ROUTED),
        **_groups(reader, best=2),
        "moe_score_function": "sigmoid",
        "moe_expert_bias": True,
    }


def deepseek_experts(reader: Reader) -> Values:
    """Experts after the first dense layers, with shared experts of their width."""
    return _with_shared_experts(reader, sigmoid_experts(reader))


def _groups(reader: Reader, *, best: int) -> Values:
    """Groups of experts, of which a token uses some: those with the best experts.

    Args:
        best: number of these experts in transformers; Megatron-Core's is top_k / chosen.
    """
    groups, chosen = reader.count("n_group", 1), reader.count("topk_group", 1)
    if groups == 1:
        return {}
    return {
        "moe_num_groups": groups,
        "moe_group_top_k": chosen,
        "moe_group_best": None if reader.count("num_experts_per_tok") == best * chosen else best,
    }


def unnormed_experts(reader: Reader) -> Values:
    """The same with softmax scores as they are (DeepSeek-V2)."""
    reader.require("topk_method", "greedy", "group_limited_greedy")
    reader.require("norm_topk_prob", False, None)
    values = {**reader.options(_ROUTED), "moe_norm_top_k": False}
    reader.known |= {"n_group", "topk_group"}
    if reader.get("topk_method") == "group_limited_greedy":
        values |= _groups(reader, best=1)
    return _with_shared_experts(reader, values)


def dense_first(reader: Reader) -> Values:
    """The kinds of MLPs, of which transformers knows no number of dense ones."""
    kinds = reader.get("mlp_layer_types", None)
    num_dense = reader.count("first_k_dense_replace")
    num_layers = reader.count("num_hidden_layers", 1)
    if kinds is None:
        # What transformers takes.
        reader.require("first_k_dense_replace", 1)
    elif kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        why = f"only the first layers can be dense, first_k_dense_replace={num_dense} of them"
        raise reader.error("mlp_layer_types", kinds, why)
    return {}


def _with_shared_experts(reader: Reader, values: Values) -> Values:
    shared = values["moe_ffn_hidden_size"] * reader.count("n_shared_experts", 1)
    return {
        **values,
        "moe_shared_ffn_hidden_size": shared,
        "moe_first_dense_layers": reader.count("first_k_dense_replace"),
    }

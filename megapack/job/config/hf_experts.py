"""Experts of a config.json: their number and widths, and how a router chooses them."""

from __future__ import annotations

from typing import Any

from megapack.job.config.hf_reader import MISSING, MOST, Reader, Values


def _num_experts(reader: Reader, *names: str) -> int:
    """The number of experts by one of these names."""
    present = [name for name in names if name in reader.keys] or [names[0]]
    counts = {reader.count(name, 1) for name in present}
    if len(counts) > 1:
        raise reader.error(present[0], reader.get(present[0]), f"{present[1]} differs: keep one")
    return counts.pop()


def _top_k(reader: Reader, *names: str) -> Values:
    """The number of experts by one of these names, and how many a token uses."""
    return {
        "num_experts": _num_experts(reader, *names),
        "moe_top_k": reader.count("num_experts_per_tok", 1),
    }


def _normed(reader: Reader, top_k: int, normed: bool, key: str = "num_experts_per_tok") -> Values:
    if normed and top_k == 1:
        raise reader.error(
            key,
            1,
            "a normalised score of one expert is 1, which Megatron-Core does not do",
        )
    return {"moe_norm_top_k": normed}


def mixtral_experts(reader: Reader) -> Values:
    values = _top_k(reader, "num_local_experts")
    values["moe_ffn_hidden_size"] = reader.count("intermediate_size", 1)
    return values | _normed(reader, values["moe_top_k"], True)


def clamped_experts(reader: Reader) -> Values:
    """Experts of gpt-oss, whose SwiGLU is clamped."""
    return {**mixtral_experts(reader), "activation_clamp": reader.number("swiglu_limit")}


def biased_experts(reader: Reader) -> Values:
    """Experts of MiniMax-M2: sigmoid scores, chosen with a bias, and no shared experts."""
    values = _top_k(reader, "num_local_experts")
    return {
        **values,
        **_normed(reader, values["moe_top_k"], True),
        "moe_ffn_hidden_size": reader.count("intermediate_size", 1),
        "moe_score_function": "sigmoid",
        "moe_expert_bias": True,
    }


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
    top_k = _of_all_layers(reader, "moe_topk")
    for key, value in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        found = _of_all_layers(reader, key, value)
        if found != value:
            raise reader.error(key, found, f"transformers has {value} whatever it says")
    return {
        "num_experts": _num_experts(reader, "num_experts", "num_local_experts"),
        "moe_top_k": top_k,
        "moe_ffn_hidden_size": width,
        "moe_shared_ffn_hidden_size": width,
        **_normed(reader, top_k, True, "moe_topk"),
    }


def ernie_experts(reader: Reader) -> Values:
    """Experts of Ernie 4.5 after the first layers: softmax scores, chosen with a bias."""
    last = reader.count("num_hidden_layers", 1) - 1
    top_k = reader.count("moe_k", 1)
    width = reader.count("moe_intermediate_size", 1)
    shared = width * reader.count("moe_num_shared_experts")
    reader.require("moe_layer_end_index", -1, last)
    return {
        "num_experts": reader.count("moe_num_experts", 1),
        "moe_top_k": top_k,
        "moe_ffn_hidden_size": width,
        "moe_shared_ffn_hidden_size": shared or None,
        "moe_first_dense_layers": reader.count("moe_layer_start_index"),
        "moe_expert_bias": True,
        **_normed(reader, top_k, True, "moe_k"),
    }


def softmax_experts(reader: Reader) -> Values:
    """Experts of Qwen: their number, width and scores."""
    values = _top_k(reader, "num_experts", "num_local_experts")
    values["moe_ffn_hidden_size"] = reader.count("moe_intermediate_size", 1)
    return values | _normed(reader, values["moe_top_k"], reader.flag("norm_topk_prob"))


def qwen_experts(reader: Reader) -> Values:
    """Experts after the first dense layers, with softmax scores."""
    reader.require("decoder_sparse_step", 1)
    dense = reader.layers("mlp_only_layers")
    if dense != set(range(len(dense))):
        raise reader.error("mlp_only_layers", dense, "only the first layers can be dense")
    return {**softmax_experts(reader), "moe_first_dense_layers": len(dense)}


def experts_beside_mlp(reader: Reader) -> Values:
    """Experts beside a dense MLP, which has the part of a shared expert (Gemma 4)."""
    names = {"num_experts", "top_k_experts", "moe_intermediate_size"}
    if not reader.flag("enable_moe_block"):
        # They have no effect.
        reader.known |= names
        return {}
    top_k = reader.count("top_k_experts", 1)
    return {
        "num_experts": reader.count("num_experts", 1),
        "moe_top_k": top_k,
        "moe_ffn_hidden_size": reader.count("moe_intermediate_size", 1),
        "moe_shared_ffn_hidden_size": reader.count("intermediate_size", 1),
        "moe_inner_norms": True,
        **_normed(reader, top_k, True, "top_k_experts"),
    }


def gated_shared_expert(reader: Reader) -> Values:
    width = reader.count("shared_expert_intermediate_size", 1)
    return {"moe_shared_ffn_hidden_size": width, "moe_shared_gate": True}


def sigmoid_experts(reader: Reader) -> Values:
    """Experts of DeepSeek: their number and width, sigmoid scores and groups."""
    values = _top_k(reader, "n_routed_experts")
    top_k = values["moe_top_k"]
    groups = reader.count("n_group", 1)
    chosen = reader.count("topk_group", 1)
    if not reader.flag("norm_topk_prob"):
        raise reader.error("norm_topk_prob", False, "Megatron-Core normalises sigmoid scores")
    _normed(reader, top_k, True)
    return {
        **values,
        "moe_ffn_hidden_size": reader.count("moe_intermediate_size", 1),
        **_groups(groups, chosen, top_k, best=2),
        "moe_route_scale": reader.number("routed_scaling_factor"),
        "moe_score_function": "sigmoid",
        "moe_expert_bias": True,
    }


def deepseek_experts(reader: Reader) -> Values:
    """Experts after the first dense layers, with shared experts of their width."""
    return _with_shared_experts(reader, sigmoid_experts(reader))


def _groups(groups: int, chosen: int, top_k: int, *, best: int) -> Values:
    """Groups of experts, of which a token uses some: those with the best experts.

    Args:
        best: number of these experts in transformers; Megatron-Core's is top_k / chosen.
    """
    if groups == 1:
        return {}
    return {
        "moe_num_groups": groups,
        "moe_group_top_k": chosen,
        "moe_group_best": None if top_k == best * chosen else best,
    }


def unnormed_experts(reader: Reader) -> Values:
    """The same with softmax scores as they are (DeepSeek-V2)."""
    reader.require("topk_method", "greedy", "group_limited_greedy")
    reader.require("norm_topk_prob", False, None)
    values = _top_k(reader, "n_routed_experts")
    reader.known |= {"n_group", "topk_group"}
    if reader.get("topk_method") == "group_limited_greedy":
        groups, chosen = (reader.count(key, 1) for key in ("n_group", "topk_group"))
        values |= _groups(groups, chosen, values["moe_top_k"], best=1)
    values = {
        **values,
        "moe_ffn_hidden_size": reader.count("moe_intermediate_size", 1),
        "moe_route_scale": reader.number("routed_scaling_factor"),
        "moe_norm_top_k": False,
    }
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

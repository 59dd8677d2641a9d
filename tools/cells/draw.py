"""Random cells: a model, an objective and samples (the problem), on a layout with a plan.

    name "SEED_N" -> Cell: a config of the main job, its file of samples, its ranks
                  -> the config of its reference: one process, one unpadded sample at a time

Cells of one problem follow each other, so that they have one reference. Most cells are within the
rules of the product; `_Dice.careless` lets some be outside of them, which must be refused.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

CELLS_PER_PROBLEM = 4
_VOCAB_SIZE = 61
_HEADS = 4
_CARELESS = 0.04
_WORLDS = (2,) * 14 + (4,) * 5 + (8,)

Keys = dict[str, Any]
"""`section.key` -> value."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A job and the one that it is compared with."""

    name: str
    problem: str
    """Equal for cells with the same reference."""
    world: int
    keys: Keys
    reference: Keys
    samples: list[dict[str, Any]]
    """Lines of the data file, in which all samples of a problem are."""


def draw_cell(seed: int, number: int) -> Cell:
    """The cell of this seed and number; equal arguments, equal cells."""
    problem = f"{seed}_{number - number % CELLS_PER_PROBLEM}"
    dice = _Dice(f"problem {problem}")
    keys = {"device": "cpu", "name": "run", "data.path": "../samples.jsonl"}
    keys |= _model(dice)
    keys |= _objective(dice, keys)
    keys |= _training(dice)
    samples = _samples(dice, keys)
    dice = _Dice(f"cell {seed}_{number}")
    world = dice.one(*_WORLDS)
    own = _layout(dice, world, keys)
    own |= _plan(dice, keys, own, max(map(_longest, samples)))
    own |= _execution(dice, keys, own)
    reference = keys | {
        "plan.micro_batch_size": 2 if _has_pairs(keys) else 1,
        "plan.share_prefixes": "off",
    }
    return Cell(
        name=f"{seed}_{number}",
        problem=problem,
        world=world,
        keys=keys | own,
        reference=reference,
        samples=samples,
    )


def nested(keys: Keys) -> dict[str, Any]:
    """The keys as sections, to be written as a config."""
    config: dict[str, Any] = {}
    for name, value in keys.items():
        *sections, last = name.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return config


class _Dice:
    """Draws that depend on a text alone."""

    def __init__(self, text: str) -> None:
        self.random = random.Random(text)
        self.careless = self.random.random() < _CARELESS

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def maybe(self, share: float, **keys: Any) -> Keys:
        """The keys, with this probability."""
        return keys if self.often(share) else {}

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(_VOCAB_SIZE) for _ in range(count)]


def _model(dice: _Dice) -> Keys:
    model: Keys = {
        "num_layers": dice.one(2, 2, 3, 4),
        "hidden_size": 32,
        "num_attention_heads": _HEADS,
        "ffn_hidden_size": 48,
        "vocab_size": _VOCAB_SIZE,
        "init_std": 0.2,
        "untie_embeddings": dice.one(False, True),
        "normalization": dice.one("RMSNorm", "RMSNorm", "LayerNorm"),
    }
    model |= dice.maybe(0.15, scale_embeddings=True) | dice.maybe(0.15, logit_cap=5.0)
    zero_centered = dice.maybe(0.15, layernorm_zero_centered_gamma=True)
    if model["normalization"] == "RMSNorm" or dice.careless:
        model |= zero_centered
    model |= dice.one({}, {}, {"gated_linear_unit": False}, {"activation": "gelu_tanh"})
    has_experts = dice.often(0.45)
    if has_experts:
        model |= _experts(dice, model["num_layers"])
    is_latent = dice.often(0.3)
    model |= _latent_attention(dice) if is_latent else _attention(dice, model)
    if "moe_shared_ffn_hidden_size" in model and not dice.careless:
        model.pop("linear_bias", None)
    alone = ("indexer_top_k", "attention_window", "attention_sinks", "norm_placement")
    if dice.careless or not any(model.get(name) for name in (*alone, "rotary_pattern")):
        model |= dice.maybe(0.2, mtp_num_layers=dice.one(1, 2), mtp_loss_coef=0.3)
    if not model.get("mtp_num_layers"):
        model |= dice.maybe(0.1, freeze=[dice.one("embedding.*", "decoder.layers.0.*")])
    return {f"model.{name}": value for name, value in model.items()}


def _experts(dice: _Dice, num_layers: int) -> Keys:
    grouped = {"num_experts": 8, "moe_top_k": 4, "moe_num_groups": 4, "moe_group_top_k": 2}
    plain = {"num_experts": dice.one(4, 4, 8), "moe_top_k": dice.one(1, 2, 2, 3)}
    keys: Keys = grouped if dice.often(0.25) else plain
    keys |= {"moe_ffn_hidden_size": 24, "moe_score_function": dice.one("softmax", "sigmoid")}
    if keys["moe_score_function"] == "softmax":
        keys |= dice.maybe(0.3, moe_norm_top_k=False)
    keys |= dice.maybe(0.3, moe_balance_loss_coef=0.3) | dice.maybe(0.3, moe_z_loss_coef=0.03)
    keys |= dice.maybe(0.2, moe_route_scale=2.5) | dice.maybe(0.2, moe_bias_update_rate=0.01)
    if dice.often(0.35):
        keys |= {"moe_shared_ffn_hidden_size": 24, "moe_shared_gate": dice.one(False, True)}
    return keys | dice.maybe(0.3, moe_first_dense_layers=dice.one(1, num_layers - 1))


def _latent_attention(dice: _Dice) -> Keys:
    keys = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    keys |= {"v_head_dim": dice.one(6, 8), "qk_layernorm": dice.one(False, True)}
    keys |= dice.maybe(0.6, q_lora_rank=24) | dice.maybe(0.2, latent_norm_epsilon=1e-6)
    keys |= dice.maybe(0.3, rope_scaling=_rope("yarn"))
    if dice.careless or ("q_lora_rank" in keys and keys["qk_layernorm"]):
        indexer = {"indexer_top_k": 6, "indexer_num_heads": 12, "indexer_head_dim": 8}
        keys |= dice.maybe(0.5, **indexer, indexer_loss_coef=dice.one(0.0, 1.0))
    return keys


def _attention(dice: _Dice, model: Keys) -> Keys:
    keys: Keys = {"num_query_groups": dice.one(1, 2, 2, 4)}
    keys |= dice.maybe(0.2, kv_channels=12)
    keys |= dice.maybe(0.2, qkv_bias=True) | dice.maybe(0.25, linear_bias=True)
    if dice.often(0.4):
        plain = model["normalization"] == "RMSNorm" and "layernorm_zero_centered_gamma" not in model
        kinds: list[Keys] = [{}, {"qk_layernorm_after_rotation": True}]
        kinds += [{"qk_layernorm_over_heads": True}] if plain or dice.careless else []
        keys |= {"qk_layernorm": True, **dice.one(*kinds)}
    keys |= dice.one({}, {}, {"rotary_percent": 0.5}, {"rotary_interleaved": True})
    keys |= dice.maybe(0.15, attention_scale=0.4)
    keys |= dice.maybe(0.3, attention_window=dice.one(4, 9, 16), attention_window_pattern="LG")
    keys |= dice.one({}, {}, {}, {"attention_sinks": True}, {"attention_score_cap": 3.0})
    if "num_experts" not in model or dice.careless:
        keys |= dice.maybe(0.2, norm_placement=dice.one("post", "sandwich"))
    if not keys.get("rotary_interleaved"):
        local = {"local_rotary_base": 100, "rotary_pattern": "LG"}
        keys |= dice.one({}, {}, {}, local, {"rope_scaling": _rope("llama3")})
    return keys


def _rope(kind: str) -> Keys:
    return {"kind": kind, "factor": 4.0, "original_max_position_embeddings": 16}


def _objective(dice: _Dice, keys: Keys) -> Keys:
    kinds = ["sft", "ppo", "grpo", "grpo", "gspo", "distill", "dpo", "reward"]
    if keys.get("model.mtp_num_layers") and not dice.careless:
        kinds.remove("reward")
    kind = dice.one(*kinds)
    found: Keys = {"kind": kind}
    if kind in ("ppo", "grpo", "gspo"):
        found |= _policy_loss(dice, kind)
    if kind == "distill":
        found |= {"distill_tail": dice.one("lump", "ignore", "renormalize")}
        found |= dice.maybe(0.5, distill_reverse_weight=0.3) | dice.maybe(0.3, distill_sft_coef=0.2)
    if kind == "dpo":
        found |= dice.maybe(0.4, dpo_label_smoothing=0.1)
    weightings = ["token-mean", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
    weightings += ["seq-mean-token-sum-norm", "rollout-mean"]
    needs_mean = kind in ("dpo", "reward") and not dice.careless
    found["loss_weighting"] = "seq-mean-token-mean" if needs_mean else dice.one(*weightings)
    if found["loss_weighting"] == "seq-mean-token-sum-norm":
        found["norm_constant"] = 20.0
    found |= dice.maybe(0.5, logprob_chunk_tokens=16)
    named = {f"objective.{name}": value for name, value in found.items()}
    if kind == "ppo":
        named |= dice.maybe(0.8, **{"critic.enabled": True, "objective.gae_lambda": 0.9})
    if kind in ("ppo", "grpo", "gspo"):
        named |= dice.maybe(0.2, **{"train.routing_replay": "old_logprobs"} if _moe(keys) else {})
    if _moe(keys) and kind not in ("dpo", "reward") and "train.routing_replay" not in named:
        named |= dice.maybe(0.1, **{"train.routing_replay": "rollout"})
    return named


def _policy_loss(dice: _Dice, kind: str) -> Keys:
    keys: Keys = {"clip_low": dice.one(0.02, 0.2), "clip_high": dice.one(0.02, 0.28)}
    keys |= dice.maybe(0.3, dual_clip=1.5) | dice.maybe(0.25, entropy_coef=0.05)
    if kind != "ppo":
        norms = ("group", "group-std", "rloo", "reinforce++", "reinforce++-baseline", "none")
        keys["advantage_norm"] = dice.one(*norms)
        keys |= dice.maybe(0.4, kl_coef=0.3, kl_kind=dice.one("k1", "k2", "k3"))
    if kind == "gspo":
        keys["kl_level"] = dice.one("token", "sequence")
    if dice.often(0.3):
        keys |= {"correction": "truncate", "correction_high": 1.5}
        keys["correction_level"] = dice.one("token", "sequence", "geometric")
        if dice.often(0.4):
            keys |= {"correction": "mask", "correction_low": 0.5}
    return keys | dice.maybe(0.2, teacher_kl_coef=0.2)


def _training(dice: _Dice) -> Keys:
    """Updates of Adam with an eps of 1 follow the gradient, so rounding errors stay small."""
    steps = dice.one({}, {"plan.global_batch_size": 4}, {"plan.global_batch_size": 5})
    keys: Keys = {
        "data.prompts_per_batch": dice.one(2, 2, 4) if not steps else dice.one(2, 3),
        "optim.adam_eps": 1.0,
        "optim.weight_decay": dice.one(0.0, 0.1),
        "optim.clip_grad": dice.one(0.05, 0.2, 100.0, 0.0),
        "train.entropy_interval": dice.one(0, 1),
        "model.attention": "sdpa",
    }
    # Sums over tokens have gradients of a norm of 100.
    keys["optim.lr"] = 0.1 if 0.0 < keys["optim.clip_grad"] < 1.0 else 0.01
    return keys | steps


def _samples(dice: _Dice, keys: Keys) -> list[dict[str, Any]]:
    """Four prompt groups, whose responses may have tokens in common."""
    lines = []
    most = dice.one(12, 30, 60)
    for group in range(4):
        prompt, trunk = dice.ids(dice.one(0, 1, 6, 20)), dice.ids(most)
        for rollout in range(dice.one(2, 2, 3)):
            sample: dict[str, Any] = {"prompt_ids": prompt, "group": group, "rollout": rollout}
            responses = [_response(dice, trunk, most) for _ in range(2)]
            if _has_pairs(keys):
                sample |= {"chosen_ids": responses[0], "rejected_ids": responses[1]}
                lines.append(sample)
                continue
            # Two samples of one rollout, now and then.
            for response in responses[: dice.one(1, 1, 1, 2)]:
                known = _columns(dice, keys, len(prompt), response)
                lines.append(sample | {"response_ids": response} | known)
    return lines


def _response(dice: _Dice, trunk: list[int], most: int) -> list[int]:
    return trunk[: dice.one(0, 0, 3, most // 2)] + dice.ids(dice.random.randint(2, most))


def _columns(dice: _Dice, keys: Keys, num_prompt: int, response: list[int]) -> dict[str, Any]:
    """A sample's reward, its mask, and what an engine, a teacher and routers said of it."""
    count = len(response)
    columns: dict[str, Any] = {"reward": dice.one(0.0, 1.0, dice.random.gauss(0, 1))}
    if dice.often(0.3):
        columns["response_mask"] = [1, *(int(dice.often(0.7)) for _ in response[1:])]
    engine = [dice.random.gauss(-math.log(_VOCAB_SIZE), 0.4) for _ in response]
    columns |= {"rollout_logprobs": engine, "teacher_logprobs": engine[::-1]}
    likely = [dice.random.sample(range(_VOCAB_SIZE), 4) for _ in response]
    odds = [math.log(share) for share in (0.5, 0.2, 0.1, 0.05)]
    columns |= {"teacher_topk_ids": likely, "teacher_topk_logprobs": [odds] * count}
    if keys.get("train.routing_replay") == "rollout":
        experts, chosen = keys["model.num_experts"], keys["model.moe_top_k"]
        layers = keys["model.num_layers"] - keys.get("model.moe_first_dense_layers", 0)
        columns["routed_experts"] = [
            [dice.random.sample(range(experts), chosen) for _ in range(layers)]
            for _ in range(num_prompt + count)
        ]
    return columns


def _longest(sample: dict[str, Any]) -> int:
    names = ("response_ids", "chosen_ids", "rejected_ids")
    return len(sample["prompt_ids"]) + max(len(sample.get(name, ())) for name in names)


def _layout(dice: _Dice, world: int, keys: Keys) -> Keys:
    sizes = {"dp": 1, "tp": 1, "pp": 1, "cp": 1}
    groups = keys.get("model.num_query_groups") or _HEADS
    while math.prod(sizes.values()) < world:
        axis = dice.one("dp", "dp", "dp", "tp", "tp", "pp", "pp", "cp")
        limit = {"tp": _HEADS if dice.careless else groups, "cp": 4, "pp": 4, "dp": 8}[axis]
        if sizes[axis] < limit:
            sizes[axis] *= 2
    layout: Keys = dict(sizes)
    tp, pp, layers = sizes["tp"], sizes["pp"], keys["model.num_layers"]
    needs_sequence = _moe(keys) or "model.kv_lora_rank" in keys
    if tp > 1:
        layout["sequence_parallel"] = True if needs_sequence else dice.one(False, True)
    if _moe(keys):
        layout["etp"] = dice.one(1, 1, tp)
        ranks = sizes["dp"] * sizes["cp"] * tp // layout["etp"]
        layout["ep"] = dice.one(*(size for size in (1, 2, 4) if ranks % size == 0))
    if pp > 1 and pp * 2 <= layers + 2 and dice.often(0.5):
        layout["vpp"] = 2
        layout |= dice.maybe(0.2, microbatch_group_size=pp + 1)
    chunks = pp * layout.get("vpp", 1)
    if pp > 1 and (layers % chunks or dice.often(0.4)):
        depths = keys.get("model.mtp_num_layers", 0)
        layout["pipeline_model_parallel_layout"] = _chunks(dice, layers, chunks, depths)
    return {f"layout.{name}": value for name, value in layout.items()}


def _chunks(dice: _Dice, layers: int, chunks: int, depths: int) -> str:
    """A random division of the layers, in which the first and the last chunk may have none."""
    counts = [0, *[1] * (chunks - 2), 0]
    for _ in range(layers - sum(counts)):
        counts[dice.random.randrange(chunks)] += 1
    return "E" + "|".join("t" * count for count in counts) + "m" * depths + "L"


def _plan(dice: _Dice, keys: Keys, own: Keys, longest: int) -> Keys:
    plan: Keys = {"search": dice.one(0, 64, 2048)}
    cp = own["layout.cp"]
    whole = -(-2 * longest * (2 if _has_pairs(keys) else 1) // cp) + 8
    row_shapes = dice.often(0.2)
    if not row_shapes and dice.often(0.15):
        plan["micro_batch_size"] = dice.one(2, 4) if _has_pairs(keys) else dice.one(1, 2, 3)
        plan |= dice.maybe(0.3, row_shape="uniform")
    else:
        least = 8 if not row_shapes and not dice.careless else whole
        plan["max_tokens_per_gpu"] = dice.one(whole, max(least, longest // cp), max(least, 16))
        is_wide = own["layout.dp"] > 1 and dice.often(0.3)
        is_cut = not keys.get("model.mtp_num_layers") and dice.often(0.3)
        plan |= {"context_parallel": "dynamic"} if is_wide else {}
        plan |= {"split_samples": "auto"} if is_cut else {}
        plan |= {"row_shapes": dice.one(1, 2, 3)} if row_shapes else {}
        if dice.careless or not (is_wide or is_cut):
            plan |= dice.maybe(0.2, row_shape="uniform")
        if is_wide and not is_cut:
            plan["max_tokens_per_gpu"] = max(plan["max_tokens_per_gpu"], whole)
        if keys.get("train.routing_replay") != "old_logprobs" or dice.careless:
            plan |= dice.maybe(0.2, forward_max_tokens_per_gpu=plan["max_tokens_per_gpu"] * 2)
    plan |= dice.maybe(0.2, round_row_tokens=dice.one(7, 16))
    plan |= dice.maybe(0.3, backward="split") | dice.maybe(0.2, share_prefixes="off")
    plan |= dice.maybe(0.2, count_rule="multiple")
    plan |= dice.maybe(0.05, unreachable="error")
    plan |= dice.maybe(0.15, calibrate="online", calibrate_interval=1)
    return {f"plan.{name}": value for name, value in plan.items()}


def _execution(dice: _Dice, keys: Keys, own: Keys) -> Keys:
    """What should change no number: recomputation, executor, the optimizer's layout."""
    found: Keys = {}
    modules = ["core_attn", "mlp", *(["moe"] if _moe(keys) else [])]
    some = dice.random.sample(modules, dice.random.randint(1, len(modules)))
    selective = {"model.recompute": "selective", "model.recompute_modules": some}
    full = {} if keys.get("model.mtp_num_layers") else {"model.recompute": "full"}
    found |= dice.one({}, {}, {}, full, selective, selective)
    has_orders = {own.get("plan.backward"), own.get("plan.split_samples")} & {"split", "auto"}
    executors = ["auto", "auto", "operations"]
    executors += ["megatron"] if not has_orders or dice.careless else []
    found["train.executor"] = dice.one(*executors)
    if dice.often(0.35):
        found["optim.distributed_optimizer"] = True
    if dice.often(0.3):
        found |= {"optim.overlap_grad_reduce": True, "optim.bucket_size": 5000}
        if "optim.distributed_optimizer" in found:
            found |= dice.maybe(0.6, **{"optim.overlap_param_gather": True})
    return found


def _moe(keys: Keys) -> bool:
    return "model.num_experts" in keys


def _has_pairs(keys: Keys) -> bool:
    return keys["objective.kind"] in ("dpo", "reward")

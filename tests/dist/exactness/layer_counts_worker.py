"""Bytes that autograd keeps of a real GPT, and its operations; what the memory and cost models say.

torchrun --nproc-per-node 1 -m tests.dist.exactness.layer_counts_worker OUT CASE...
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megapack import Layout, launch
from megapack.cost.assumed import ATTENTION_TOKENS, GpuSpeed, cost_from_sizes
from megapack.cost.memory import MemoryModel
from megapack.cost.weights import matches_any
from megapack.job.config.model import ModelConfig
from megapack.job.gpt import build, initialize_parallel
from megapack.model.attention import varlen
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.rotary import gather_rotary_tables
from megapack.model.attention.row import RowView, with_view
from megapack.model.head import deferred_head, unwrapped
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from megapack.model.parameters import global_parameters
from tests.dist.groups import end_model_parallel

LENGTHS = [128, 64, 48, 16]
TOKENS = sum(LENGTHS)
VOCAB_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its layout, and the kernel that the memory model counts."""

    model: dict[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)
    kernel: Literal["sdpa", "varlen", "te"] = "sdpa"

    @property
    def config(self) -> ModelConfig:
        sizes = {
            "num_layers": 3,
            "hidden_size": 128,
            "num_attention_heads": 8,
            "kv_channels": 32,
            "ffn_hidden_size": 352,
            "attention": "sdpa",
        }
        return ModelConfig(**{**sizes, **self.model})

    def memory_model(self) -> MemoryModel:
        config = self.config
        return MemoryModel(
            sizes=dataclasses.replace(config, vocab_size=VOCAB_SIZE),
            attention=self.kernel,
            fused_swiglu=config.bias_activation_fusion is True,
            composite_norms=config.normalization == "RMSNorm",
        )


BF16 = {"dtype": "bf16"}
FUSED = {"bias_activation_fusion": True}
GQA = {"num_query_groups": 2, "qk_layernorm": True}
LAYER_NORM = {"normalization": "LayerNorm"}
EXPERTS = {"num_experts": 8, "moe_top_k": 2, "moe_ffn_hidden_size": 192}
SHARED = EXPERTS | {"moe_shared_ffn_hidden_size": 96}
# Without a gate, whose activations would hide the projections'.
LATENT = SHARED | {"moe_latent_size": 64, "gated_linear_unit": False}
MLA = {
    "kv_channels": None,
    "kv_lora_rank": 48,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "qk_layernorm": True,
}
NARROW_VALUES = {"v_head_dim": 20}
DEEPSEEK = {
    **MLA,
    **SHARED,
    "moe_first_dense_layers": 1,
    "moe_score_function": "sigmoid",
    "moe_num_groups": 4,
    "moe_group_top_k": 1,
    "moe_expert_bias": True,
}
GEMMA4 = {
    **GQA,
    "norm_placement": "sandwich",
    "value_layernorm": True,
    "layer_scalars": True,
    "local_rotary_base": 1000,
    "rotary_pattern": "LLG",
    "global_kv_channels": 64,
    "global_query_groups": 1,
    "global_keys_as_values": True,
}
GEMMA4_EXPERTS = GEMMA4 | SHARED | {"moe_inner_norms": True}
SP = Layout(tp=2, sequence_parallel=True)
CASES: dict[int, dict[str, Case]] = {
    1: {
        "dense": Case(),
        "dense_gelu": Case(model={"gated_linear_unit": False}),
        "dense_layer_norm": Case(model={**LAYER_NORM, **BF16}),
        "gqa": Case(model=GQA),
        "gqa_fused_bf16": Case(model=GQA | BF16 | FUSED),
        "experts": Case(model=EXPERTS),
        "selective": Case(model=GQA | {"recompute": "selective"}),
        "selective_mlp": Case(
            model=GQA | {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}
        ),
        "selective_moe": Case(
            model=EXPERTS | BF16 | {"recompute": "selective", "recompute_modules": ("moe",)}
        ),
        "qkv_bias": Case(model=GQA | {"qkv_bias": True}),
        "gated_shared_experts_bf16": Case(model=SHARED | BF16 | {"moe_shared_gate": True}),
        "mla": Case(model=MLA),
        "mla_narrow_values": Case(model=MLA | NARROW_VALUES),
        # Without norms: Megatron-Core's main then wants one of the queries, too.
        "mla_direct_queries": Case(model=MLA | {"q_lora_rank": None, "qk_layernorm": False}),
        "deepseek": Case(model=DEEPSEEK),
        "latent_experts": Case(model=LATENT),
        "latent_experts_selective": Case(
            model=LATENT | BF16 | {"recompute": "selective", "recompute_modules": ("moe",)}
        ),
        "gemma4_wide_bf16": Case(model=GEMMA4 | BF16 | {"global_kv_channels": 264}),
        "gemma4_experts": Case(model=GEMMA4_EXPERTS),
        "full": Case(model=GQA | {"recompute": "full"}),
        "varlen": Case(model=GQA | BF16 | LAYER_NORM, kernel="varlen"),
        "te": Case(model={"num_query_groups": 2, **BF16, **LAYER_NORM}, kernel="te"),
    },
    2: {
        "tp2_sp": Case(model=GQA | BF16, layout=SP),
        "tp2_sp_fused": Case(model=LAYER_NORM | FUSED, layout=SP),
        "tp2_sp_deepseek": Case(model=DEEPSEEK | BF16, layout=SP),
        "tp2_sp_latent_experts": Case(model=LATENT | BF16, layout=SP),
        "dp2_ep2_experts": Case(model=EXPERTS | BF16, layout=Layout(dp=2, ep=2)),
        "cp2_varlen": Case(model=GQA | BF16 | LAYER_NORM, layout=Layout(cp=2), kernel="varlen"),
        "cp2_mla": Case(model=MLA | BF16 | LAYER_NORM, layout=Layout(cp=2), kernel="varlen"),
        "cp2_sdpa": Case(layout=Layout(cp=2)),
    },
}


OPERATIONS = [
    *("dense", "dense_gelu", "gqa", "experts", "full", "selective_mlp", "selective_moe"),
    *("qkv_bias", "mla", "mla_narrow_values", "mla_direct_queries", "deepseek", "gemma4_experts"),
    "latent_experts",
]
"""Cases whose operations are counted."""


FREEZES: tuple[tuple[str, ...], ...] = (
    (),
    ("embedding.*", "output_layer.*"),
    ("decoder.layers.[01].*",),
    ("*.self_attention.*",),
    ("*.linear_*",),
    ("*.mlp.*",),
    ("*.experts.*", "*.router.*"),
    ("*layernorm.weight", "*norm.weight"),
    ("*.local_experts.3.*",),
)
"""Globs of parameters that are not trained, for counts of the others."""


KEEPS_SCORES = ["mla_narrow_values"]
"""Cases of which a CPU keeps all scores: torch's flash attention there needs equal widths."""


class SavedTensors:
    """Bytes of the storages that autograd keeps; parameters and their gradients do not count."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self.num_bytes = 0
        self._kept: dict[int, Tensor] = {}
        self._excluded = set()
        for parameter in chunk.parameters():
            self._excluded.add(parameter.untyped_storage().data_ptr())
            self._excluded.add(parameter.main_grad.untyped_storage().data_ptr())

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._excluded and storage.data_ptr() not in self._kept:
            # The tensor stays alive here, so that no other one gets its address.
            self._kept[storage.data_ptr()] = tensor
            self.num_bytes += storage.nbytes()
        return tensor


class FlashKernel(torch.autograd.Function):
    """Keeps what `torch.nn.attention.varlen` keeps; its numbers have no meaning."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.clone()
        softmax_lse = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, softmax_lse)
        return out


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    scale: float = 1.0,
    window_size: tuple[int, int] = (-1, 0),
    enable_gqa: bool = False,
) -> Tensor:
    return FlashKernel.apply(query, key, value)  # type: ignore[no-any-return]


class CopiesValues(torch.nn.Module):
    """Transformer Engine's attention: `get_qkv_layout` copies values that are a strided view."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return flash_varlen(query, key, value.contiguous()).flatten(1)


def build_chunk(case: Case) -> Any:
    """The model of a case in Megatron's DDP."""
    (chunk,) = build.build_model(
        case.config, case.layout, vocab_size=VOCAB_SIZE, seed=1, distributed_optimizer=False
    )
    for layer in unwrapped(chunk).decoder.layers:
        if case.kernel == "varlen":
            layer.self_attention.core_attention = varlen.PackedVarlen(
                layer.config, layer.layer_number, AttnMaskType.causal, "self"
            )
        elif case.kernel == "te":
            layer.self_attention.core_attention = CopiesValues()
    if case.config.rotary_pattern is not None:
        gather_rotary_tables([chunk])
    return chunk


def head_sum(case: Case, hidden: Tensor, weight_VH: Tensor) -> Tensor:
    """The sum of log-probs of all positions, as `LastStage` computes them."""
    hidden_TH = hidden.flatten(0, -2)
    group = parallel_state.get_tensor_model_parallel_group()
    if case.layout.sequence_parallel:
        hidden_TH = gather_from_sequence_parallel_region(
            hidden_TH, tensor_parallel_output_grad=False, group=group
        )
    hidden_RH = hidden_TH[torch.arange(TOKENS)].to(weight_VH.dtype)
    head = VocabHead(weight_VH=weight_VH, tp_group=group)
    return vocab_parallel_logprobs(hidden_RH, torch.arange(TOKENS), head)[0].sum()


def forward(case: Case, chunk: Any) -> Tensor:
    """The sum of log-probs of a row."""
    generator = torch.Generator().manual_seed(dist.get_rank() // case.layout.tp)
    ids = torch.randint(0, VOCAB_SIZE, (1, TOKENS), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    cp = case.layout.cp
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int() * cp
    params = packed_seq_params(ends, max(LENGTHS) * cp, TOKENS * cp)
    if case.config.rotary_pattern is not None:
        view = RowView(ends, params.max_seqlen_q, lengths=LENGTHS, positions_T=positions[0])
        with_view(params, view)
    with deferred_head(chunk) as head:
        hidden = chunk(ids, positions, None, packed_seq_params=params)
    return head_sum(case, hidden, head.weight_VH)


def measure(case: Case) -> dict[str, float]:
    """Bytes kept by a forward, and by the layers that the backward runs again."""
    initialize_parallel(case.layout, 1)
    chunk = build_chunk(case)
    saved = SavedTensors(chunk)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = forward(case, chunk)
        forward_bytes = saved.num_bytes
        if case.config.recompute == "full":
            loss.backward()
    end_model_parallel()
    return {"forward": forward_bytes, "backward": saved.num_bytes - forward_bytes}


def count_trained(case: Case) -> list[int]:
    """Parameters of this rank that each of `FREEZES` leaves trained."""
    initialize_parallel(case.layout, 1)
    named = list(global_parameters(build_chunk(case)))
    end_model_parallel()
    return [
        sum(param.numel() for name, param in named if not matches_any(name, freeze))
        for freeze in FREEZES
    ]


def predict_trained(case: Case) -> list[int]:
    """The same from the memory model's bytes of gradients."""
    memory = case.memory_model()
    sizes = (dataclasses.replace(memory.sizes, freeze=freeze) for freeze in FREEZES)
    models = (dataclasses.replace(memory, sizes=one) for one in sizes)
    stages = (model.stage(case.layout, 0, live_tokens=0, row_tokens=0) for model in models)
    return [stage.gradients // 4 for stage in stages]


def count_operations(case: Case) -> dict[str, float]:
    """Operations of matrix products in forward and backward, and of the forward's attention."""
    initialize_parallel(case.layout, 1)
    chunk = build_chunk(case)
    # The counter does not know the CPU's flash attention; this one consists of batched products.
    # Nor the product that the head adds to the weight's gradient in place.
    counter = FlopCounterMode(display=False)
    counter.flop_registry[torch.ops.aten.addmm_] = counter.flop_registry[torch.ops.aten.addmm]
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss = forward(case, chunk)
        forward_counts = dict(counter.get_flop_counts()["Global"])
        loss.backward()
    end_model_parallel()
    both = counter.get_flop_counts()["Global"]
    return {
        "matrices": sum(both.values()) - both[torch.ops.aten.bmm],
        # Scores and values of whole squares, half of which are masked.
        "attention": forward_counts[torch.ops.aten.bmm] / 2,
    }


def predict_operations(case: Case) -> dict[str, float]:
    """The same from the cost model, on a GPU that makes 1e12 operations per second."""
    sizes = case.memory_model().sizes
    cost = cost_from_sizes(
        sizes,
        case.layout,
        GpuSpeed(
            peak_tflops=1.0,
            utilisation=1.0,
            attention_utilisation=1.0,
            head_utilisation=1.0,
            layer_overhead_us=0.0,
        ),
        mean_length=1.0,
    )
    tokens_sq = sum(n * n for n in LENGTHS)
    # Seconds that attention's kernels take for short samples are no operations.
    kernels = sum(n * k.layer_attention_tokens(ATTENTION_TOKENS) for k, n in sizes.layer_kinds())
    return {
        "matrices": (cost.per_token - kernels / 1e12) * TOKENS * (1 + cost.backward_ratio) * 1e12,
        "attention": cost.per_token_sq * tokens_sq * 1e12,
    }


def predict(case: Case) -> dict[str, float]:
    """The bytes of `measure` from the memory model."""
    model = case.memory_model()
    stage = model.stage(case.layout, 0, live_tokens=TOKENS, row_tokens=TOKENS)
    # The stage's activations include one layer that is in its backward; the backward runs three.
    layer = TOKENS * model.saved(case.layout).recomputed_layer
    full = case.config.recompute == "full"
    return {"forward": stage.activations - layer, "backward": 3 * layer if full else 0}


def main(out: str, *names: str) -> None:
    """Measure cases of this world size; every rank writes its own file."""
    launch.start("cpu")
    varlen.varlen_kernel = lambda: flash_varlen
    cases = {name: CASES[dist.get_world_size()][name] for name in names}
    results: dict[str, Any] = {
        name: {"measured": measure(case), "predicted": predict(case)}
        for name, case in cases.items()
    }
    for name, case in cases.items():
        results[name]["trained"] = count_trained(case)
        results[name]["predicted_trained"] = predict_trained(case)
    for name in OPERATIONS if dist.get_world_size() == 1 else ():
        if name not in cases:
            continue
        results[name]["counted_operations"] = count_operations(cases[name])
        results[name]["predicted_operations"] = predict_operations(cases[name])
    with open(f"{out}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(results, file)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

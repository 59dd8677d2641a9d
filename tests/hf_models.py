"""Tiny random Hugging Face models made on the spot, and their results by transformers.

`make_folder` writes what a published model's folder has: config.json, generation_config.json,
sharded safetensors and a tokenizer. `logprobs_and_entropies` and `sft_gradients` are transformers'
own results, one unpadded sample at a time in fp32: the second, independent reference.

transformers is imported inside of functions, so that a module that only needs `FAMILIES` starts
quickly. It must be imported before `cpu.enable`, which replaces names that it subclasses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 320
"""Megatron pads to a multiple of 128, to 384: 64 rows must not count."""

INIT_STD = 0.12
"""Large enough for log-probs that differ by more than rounding where a model differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model class of transformers and the settings of its tiny config."""

    name: str
    """Its classes are `NAMEConfig` and `NAMEHEAD`, in the latter without a last Text."""
    settings: Mapping[str, Any]
    head: str = "ForCausalLM"
    published: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of config.json that published folders have and transformers' class does not write."""
    mtp: tuple[str, int] | None = None
    """If folders have a depth of multi-token prediction: the kind of its names in `hf_mtp`, and the
    number of the layer that its layer is like."""
    stacks_experts: bool = False
    """Whether published folders hold the experts of a layer in one tensor."""


_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": INIT_STD,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {
    **_DENSE,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
}
_DEEPSEEK: dict[str, Any] = {
    **_DENSE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
}
# Key widths of 16 and mild decays (`_randomize`): others make transformers' own chunks inexact.
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}
_GATED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
_NEMOTRON: dict[str, Any] = {
    **{
        name: value
        for name, value in _DENSE.items()
        if name not in ("num_hidden_layers", "rms_norm_eps")
    },
    "layers_block_type": [
        *("linear_attention", "moe", "full_attention", "mlp"),
        *("linear_attention", "moe", "linear_attention", "mlp"),
    ],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    # transformers takes it for a lower limit, which Megatron's kernels do not have.
    "time_step_min": 1e-30,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LAYERED: dict[str, Any] = {
    **_DENSE,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
}
_GEMMA: dict[str, Any] = {
    **_LAYERED,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GPT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, Family] = {
    "llama": Family(name="Llama", settings={**_DENSE, "rope_theta": 5e5}),
    "llama3_rope": Family(
        name="Llama",
        settings={
            **_DENSE,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rope_scaling": _LLAMA3_ROPE,
        },
    ),
    "mistral": Family(
        name="Mistral",
        settings={**_DENSE, "head_dim": 12, "sliding_window": None, "rope_theta": 1e6},
    ),
    "mistral_window": Family(
        name="Mistral",
        settings={**_DENSE, "head_dim": 12, "sliding_window": 20, "rope_theta": 1e6},
    ),
    "mixtral": Family(
        name="Mixtral",
        settings={
            **_DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "output_router_logits": False,
            "rope_theta": 1e6,
        },
    ),
    "qwen2": Family(name="Qwen2", settings={**_DENSE, "rope_theta": 1e6}),
    "qwen2_window": Family(
        name="Qwen2",
        settings={
            **_DENSE,
            "rope_theta": 1e6,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "qwen2_moe": Family(
        name="Qwen2Moe",
        settings={
            **_MOE,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 48,
            "rope_theta": 1e6,
        },
    ),
    "qwen3": Family(name="Qwen3", settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6}),
    "qwen3_tied": Family(
        name="Qwen3",
        settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    # Published without a beginning of names, as the model without its output layer is saved.
    "qwen3_embedding": Family(
        name="Qwen3",
        head="Model",
        settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True},
        published={"architectures": ["Qwen3ForCausalLM"]},
    ),
    # A reward model, smaller than the others.
    "qwen3_score": Family(
        name="Qwen3",
        head="ForSequenceClassification",
        settings={
            **_DENSE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_labels": 1,
            "rope_theta": 1e6,
        },
    ),
    "qwen3_yarn": Family(
        name="Qwen3",
        settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6, "rope_scaling": _GPT_YARN},
    ),
    "qwen3_moe": Family(name="Qwen3Moe", settings={**_MOE, "head_dim": 16, "rope_theta": 1e6}),
    "deepseek_v3": Family(
        name="DeepseekV3",
        settings={
            **_DEEPSEEK,
            "max_position_embeddings": 2560,
            "rope_theta": 1e4,
            "rope_scaling": _YARN,
        },
        published={"scoring_func": "sigmoid"},
    ),
    "moonlight": Family(
        name="DeepseekV3",
        settings={
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            # Large, so that norms of compressed keys, which have 1e-6, would show it.
            "rms_norm_eps": 1e-2,
            "rope_theta": 5e4,
        },
        published={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True},
    ),
    "deepseek_v2": Family(
        name="DeepseekV2",
        settings={
            **{key: value for key, value in _DEEPSEEK.items() if not key.startswith("num_nextn")},
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "max_position_embeddings": 2560,
            "rope_theta": 1e4,
            "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        published={"scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    "glm4_moe_lite": Family(
        name="Glm4MoeLite",
        settings={
            **{name: value for name, value in _DEEPSEEK.items() if name != "first_k_dense_replace"},
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-2,
            "rope_theta": 1e6,
            "num_nextn_predict_layers": 1,
        },
        published={"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
        mtp=("layer", 3),
    ),
    "glm4": Family(
        name="Glm4",
        settings={
            **_DENSE,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "minimax_m2": Family(
        name="MiniMaxM2",
        settings={
            **_DENSE,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        },
        published={"attn_type_list": [1] * 4, "rotary_dim": 8, "scoring_func": "sigmoid"},
    ),
    "seed_oss": Family(
        name="SeedOss",
        settings={**_DENSE, "head_dim": 16, "attention_bias": True, "rope_theta": 1e7},
    ),
    "ernie4_5": Family(
        name="Ernie4_5",
        settings={**_DENSE, "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 5e5},
    ),
    # Published as remote code; its layers are those of Qwen2.
    "mimo": Family(
        name="Qwen2",
        settings={**_DENSE, "rope_theta": 640000.0},
        published={
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "head_dim": 8,
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
        },
        mtp=("mimo", 3),
    ),
    "deepseek_v32": Family(
        name="DeepseekV32",
        settings={
            **_DEEPSEEK,
            "max_position_embeddings": 2560,
            "rope_theta": 1e4,
            "rope_scaling": _YARN,
            "index_topk": 8,
            # With few heads, scores of keys are often equal, as all of them give 0.
            "index_n_heads": 16,
            "index_head_dim": 24,
        },
        published={"scoring_func": "sigmoid"},
    ),
    "glm_moe_dsa": Family(
        name="GlmMoeDsa",
        settings={
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-2,
            "rope_theta": 1e6,
            "v_head_dim": 44,
            "index_topk": 8,
            "index_n_heads": 16,
            "index_head_dim": 24,
        },
        published={"scoring_func": "sigmoid", "indexer_rope_interleave": True},
    ),
    "glm4_moe": Family(
        name="Glm4Moe",
        settings={
            **{
                name: value
                for name, value in _DEEPSEEK.items()
                if not name.endswith(("_head_dim", "_lora_rank"))
            },
            "num_key_value_heads": 2,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_theta": 1e6,
        },
    ),
    "olmo2": Family(name="Olmo2", settings={**_DENSE, "rope_theta": 5e5}),
    "olmo3": Family(
        name="Olmo3",
        settings={
            **_LAYERED,
            "rope_parameters": {
                "full_attention": {**_GPT_YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "phi3": Family(
        name="Phi3",
        settings={
            **_DENSE,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1],
                "long_factor": [1.3, 4.0],
            },
        },
    ),
    "gemma3_text": Family(name="Gemma3Text", settings=_GEMMA),
    "gemma3": Family(
        name="Gemma3",
        head="ForConditionalGeneration",
        settings={
            "text_config": _GEMMA,
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": Family(
        name="GptOss",
        settings={
            **_DENSE,
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.8,
            "rope_parameters": {**_GPT_YARN, "truncate": False, "rope_theta": 150000.0},
        },
        stacks_experts=True,
    ),
    "qwen3_next": Family(
        name="Qwen3Next",
        settings={**_MOE, **_GATED_DELTA, **_GATED_EXPERTS, "mlp_only_layers": [1]},
        mtp=("qwen", 2),
    ),
    "qwen3_5": Family(
        name="Qwen3_5",
        head="ForConditionalGeneration",
        settings={
            "text_config": {**_DENSE, **_GATED_DELTA, "tie_word_embeddings": True},
            "vision_config": _VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": Family(
        name="Qwen3_5Moe",
        head="ForConditionalGeneration",
        settings={
            "text_config": {
                **{name: value for name, value in _DENSE.items() if name != "intermediate_size"},
                **_GATED_DELTA,
                **_GATED_EXPERTS,
            },
            "vision_config": _VISION,
        },
        stacks_experts=True,
    ),
    "nemotron_h": Family(name="NemotronH", settings=_NEMOTRON),
}
"""By a name that says what is special; in those of DeepSeek and GLM the first layer is dense."""


# --- folders ---------------------------------------------------------------------------------


def make_folder(
    folder: Path,
    family: str,
    *,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int | None = None,
    shard_size: str = "200KB",
    generation_marks: bool = True,
    published_keys: bool = True,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a random model of a family and a tokenizer; returns the folder.

    Args:
        shard_size: largest safetensors file; the default gives several and an index.
        generation_marks: whether the chat template marks what the assistant generated.
        published_keys: config.json with `rope_theta`, `rope_scaling` and `torch_dtype`, as nearly
            all published folders have it; else as the installed transformers writes it.
        settings: other keys of the config.
    """
    sizes = {"vocab_size": vocab_size, **settings}
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    model = new_model(family, seed=seed, **sizes)
    with _quiet():
        model.save_pretrained(
            folder,
            max_shard_size=shard_size,
            # As modules hold them, or as folders of older models have them.
            save_original_format=not FAMILIES[family].stacks_experts,
        )
    _edit_config(folder / "config.json", FAMILIES[family], published_keys)
    if FAMILIES[family].mtp is not None:
        from tests import hf_mtp

        hf_mtp.add_to_folder(folder, model, family, **sizes)
    generation = {"bos_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    make_tokenizer(folder, vocab_size=min(vocab_size, VOCAB_SIZE), marks=generation_marks)
    return folder


@functools.cache
def _session_folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="megapack-hf-models-")


@functools.cache
def cached_folder(family: str, vocab_size: int = VOCAB_SIZE) -> Path:
    """A folder of a family that is made once per process; it must not be changed."""
    return make_folder(
        Path(_session_folders().name) / f"{family}_{vocab_size}", family, vocab_size=vocab_size
    )


def new_model(family: str, *, seed: int = 0, **settings: Any) -> Any:
    """A random model in fp32 and evaluation mode, by transformers."""
    import transformers

    kind = FAMILIES[family]
    # transformers changes nested settings.
    values = copy.deepcopy(dict(kind.settings))
    values.get("text_config", values).update(settings)
    with _quiet():
        config = getattr(transformers, f"{kind.name}Config")(**values)
        config._attn_implementation = "eager"
        config.dtype = torch.float32
        model_class = getattr(transformers, f"{kind.name.removesuffix('Text')}{kind.head}")
        model = model_class(config).float().eval()
    _randomize(model, seed)
    return model


def _randomize(model: Any, seed: int) -> None:
    """Draw all weights; norms, biases and expert biases get values that are not trivial.

    Decays of recurrent layers are mild: states forget within tens of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name in sorted(tensors):
            tensor = tensors[name]
            noise = torch.randn(tensor.shape, generator=generator)
            if "e_score_correction_bias" in name:
                tensor.copy_(0.1 * noise)
            elif name.endswith("A_log"):
                tensor.copy_(0.5 * noise - 2.5)
            elif "norm" in name or name.endswith(".D"):
                # Around ones, or around zeros where the norm adds 1.
                tensor.add_(0.2 * noise)
            elif name.endswith("conv1d.weight"):
                tensor.copy_(0.4 * noise)
            elif name.endswith(("bias", "sinks")):
                tensor.copy_(0.2 * noise)
            elif name.endswith("weight") or tensor.dim() > 1:
                tensor.copy_(INIT_STD * noise)


def _edit_config(path: Path, family: Family, published_keys: bool) -> None:
    config = json.loads(path.read_text())
    config |= family.published
    rope = config.pop("rope_parameters", None) if published_keys else None
    if rope is not None and "full_attention" in rope:
        # Of local layers there was only a base, which OLMo-3 has once.
        local_base = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        if local_base != rope["rope_theta"]:
            config["rope_local_base_freq"] = local_base
    if rope is not None:
        # transformers 5 keeps all of it in one dictionary.
        config["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta"))
        rotary_factor = rope.pop("partial_rotary_factor", None)
        if rotary_factor is not None:
            config["partial_rotary_factor"] = rotary_factor
        config["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    if published_keys:
        config["torch_dtype"] = config.pop("dtype", config.get("torch_dtype"))
    if published_keys and "num_experts" in family.settings and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with generation marks."""

PLAIN_TEMPLATE = TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
"""ChatML without them, as Qwen's folders have it."""


def make_tokenizer(folder: Path, *, vocab_size: int = VOCAB_SIZE, marks: bool = True) -> Any:
    """Write a byte-level BPE tokenizer of at most `vocab_size` ids, 259 or more; returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the user asks the assistant a question and the assistant answers it in a sentence"
    bpe.train_from_iterator([text] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE if marks else PLAIN_TEMPLATE
    with _quiet():
        tokenizer.save_pretrained(folder)
    return tokenizer


# --- the reference ---------------------------------------------------------------------------


def load(folder: Path, family: str) -> Any:
    """The folder's model by transformers, in fp32 and evaluation mode."""
    import transformers

    kind = FAMILIES[family]
    is_remote = "auto_map" in kind.published
    name = f"{kind.name}ForCausalLM" if is_remote else "AutoModelForCausalLM"
    with _quiet():
        model = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    return model.float().eval()


def logprobs_and_entropies(
    model: Any, samples: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-prob of each token given those before it, and the entropy of that choice, in nats.

    Args:
        samples: token ids, [length] each; one forward per sample.

    Returns:
        Both per sample, fp32 [length]; 0 for the first token.
    """
    logprobs = []
    entropies = []
    with torch.no_grad():
        for tokens_T in samples:
            log_p_TV = _log_softmax(model, tokens_T)
            labels = tokens_T[1:, None].long()
            first = torch.zeros(1)
            logprobs.append(torch.cat([first, log_p_TV[:-1].gather(1, labels)[:, 0]]))
            entropy = -(log_p_TV.exp() * log_p_TV).sum(1)[:-1]
            entropies.append(torch.cat([first, entropy]))
    return logprobs, entropies


def sft_gradients(
    model: Any, samples: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The loss sum over tokens of -weight * log-prob, and its gradient by Hugging Face names.

    Args:
        samples: token ids, [length] each; one forward and backward per sample.
        weights: of each token, [length] each; that of the first token has no effect.

    Returns:
        The loss; the gradients in fp32, named and shaped like the tensors of a folder, whatever
        modules transformers keeps them in. Tied weights are there once.
    """
    model.zero_grad()
    total = 0.0
    for tokens_T, weights_T in zip(samples, weights, strict=True):
        if len(tokens_T) < 2:
            continue
        log_p_TV = _log_softmax(model, tokens_T)
        logprobs = log_p_TV[:-1].gather(1, tokens_T[1:, None].long())[:, 0]
        loss = -(weights_T[1:] * logprobs).sum()
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


def _log_softmax(model: Any, tokens_T: Tensor) -> Tensor:
    logits_TV = model(input_ids=tokens_T[None].long(), use_cache=False).logits[0]
    return logits_TV.float().log_softmax(-1)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """The tensors of a folder that transformers writes.

    transformers 5 keeps all experts of a layer in one parameter, and writes a tensor per expert.
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder, _quiet():
        model.save_pretrained(folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        return {name: value for file in files for name, value in load_file(file).items()}


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Gradients under the names that transformers writes weights with: it saves them as weights."""
    twin = copy.deepcopy(model)
    # A folder's names may begin otherwise than the modules'.
    buffers = tuple(name.partition(".")[2] for name, _ in twin.named_buffers())
    with torch.no_grad():
        for (_, own), (name, param) in zip(
            model.named_parameters(), twin.named_parameters(), strict=True
        ):
            # transformers 4 leaves out experts that no token chose.
            may_have_none = ".experts." in name or ".indexer." in name
            assert own.grad is not None or may_have_none, f"{name} has no gradient"
            param.copy_(torch.zeros_like(own) if own.grad is None else own.grad)
            param.grad = None
    # transformers does not train indexers.
    left_out = (*buffers, "e_score_correction_bias")
    return {
        name: value
        for name, value in tensors_of(twin).items()
        if not name.endswith(left_out) and ".indexer." not in name
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the block transformers neither logs nor draws progress bars."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)

"""Tiny random Hugging Face models made on the spot, and their results by transformers.

`make_folder` writes what a published model's folder has: config.json, generation_config.json,
sharded safetensors and a tokenizer, of a family of `hf_families`. `logprobs_and_entropies` and
`sft_gradients` are transformers' own results, one unpadded sample at a time in fp32: the second,
independent reference.

transformers is imported inside of functions: it must be imported before `cpu.enable`, which
replaces names that it subclasses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.hf_families import FAMILIES, INIT_STD, VOCAB_SIZE, Family

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


_AROUND_ONE = (".D", "router.scale", "per_expert_scale", "layer_scalar")


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
            elif "norm" in name or name.endswith(_AROUND_ONE):
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
    if published_keys and config.pop("per_layer_config", None):
        config |= {name: family.settings[name] for name in family.settings if "global" in name}
        published_keys = False
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
    # Not in its table of language models.
    has_class = "auto_map" in kind.published or "VL" in kind.name
    name = f"{kind.name}{kind.head}" if has_class else "AutoModelForCausalLM"
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
            untrained = (".experts.", ".indexer.", "e_score_correction_bias", ".visual.")
            may_have_none = any(part in name for part in untrained)
            assert own.grad is not None or may_have_none, f"{name} has no gradient"
            param.copy_(torch.zeros_like(own) if own.grad is None else own.grad)
            param.grad = None
    # transformers does not train indexers.
    left_out = (*buffers, "e_score_correction_bias")
    return {
        name: value
        for name, value in tensors_of(twin).items()
        if not name.endswith(left_out) and ".indexer." not in name and "visual." not in name
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

"""The peft package's results, in the names and shapes of Megatron-Bridge's adapters.

    python -m tests.hosts.lora.reference FOLDER FAMILY ...

Bridge adapts fused projections: one matrix A for queries, keys and values, one for gate and up;
B is fused as the projection's weight is. So peft's matrices A of these are made equal here, and the
gradient of Bridge's A is the sum of theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import hf_models
from tests.dist.hf.hf_cases import samples
from tests.hosts.lora import packages
from tests.hosts.lora.cases import ALPHA, NUM_ADAPTERS, RANK

_QUERIES = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")


def write(folder: Path, family: str) -> None:
    """A model's folder, and beside it weights, gradients and results of its adapters."""
    import peft

    hf_models.make_folder(folder / family, family)
    base = hf_models.load(folder / family, family)
    experts = [name for name, _ in base.named_parameters() if ".experts." in name]
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        # peft would take those of an MLP for a mixture's experts.
        target_modules=[*_QUERIES, "o_proj", *(() if experts else (*_GATED, "down_proj"))],
        target_parameters=experts or None,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(base, config)
    _draw(model)
    prompts, responses = samples()
    tokens = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    total = sum(map(len, responses))
    loss = 0.0
    logprobs = []
    with model.disable_adapter():
        base_logprobs, _ = hf_models.logprobs_and_entropies(model, tokens)
    for ids_T, prompt, response in zip(tokens, prompts, responses, strict=True):
        log_p_TV = model(input_ids=ids_T[None].long(), use_cache=False).logits[0].log_softmax(-1)
        own_T = log_p_TV[:-1].gather(1, ids_T[1:, None].long())[:, 0]
        of_response = own_T[len(prompt) - 1 :]
        assert len(of_response) == len(response)
        part = -of_response.sum() / total
        part.backward()
        loss += float(part.detach())
        logprobs.append(of_response.detach())
    params = {
        name.removeprefix("base_model.model.model."): param
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    weights = {name: param.detach() for name, param in params.items()}
    gradients = {name: param.grad for name, param in params.items()}
    results = {
        "weights": dict(_of_bridge(weights, base.config, adds=False)),
        "gradients": dict(_of_bridge(gradients, base.config, adds=True)),
        "loss": loss,
        "logprobs": logprobs,
        "base_logprobs": [own[len(p) :] for own, p in zip(base_logprobs, prompts, strict=True)],
    }
    torch.save(results, folder / f"{family}.pt")
    model.save_pretrained(folder / f"{family}_peft")
    if family == "qwen3":
        torch.save(_several(model, tokens, responses, total), folder / "several.pt")
    if family == "qwen3":
        model.base_model.model.model.layers[0].self_attn.k_proj.lora_A.default.weight.data.neg_()
        model.save_pretrained(folder / "other_peft")


def _several(
    model: Any, tokens: Sequence[Tensor], responses: Sequence[Tensor], total: int
) -> dict[str, dict[str, Tensor]]:
    """Weights and gradients of several adapters, each of which the model has alone, on its samples
    only. In names stand their numbers: `linear_qkv.adapter.1.linear_in.weight`."""
    found: dict[str, dict[str, Tensor]] = {"weights": {}, "gradients": {}}
    for number in range(NUM_ADAPTERS):
        _draw(model, seed=20 + number)
        model.zero_grad()
        for i, (ids_T, response) in enumerate(zip(tokens, responses, strict=True)):
            if i % NUM_ADAPTERS == number:
                log_p_TV = model(input_ids=ids_T[None].long()).logits[0].log_softmax(-1)
                own_T = log_p_TV[:-1].gather(1, ids_T[1:, None].long())[:, 0]
                (-own_T[-len(response) :].sum() / total).backward()
        params = {
            name.removeprefix("base_model.model.model."): param
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        for what, values in found.items():
            own = {
                name: param.grad if what == "gradients" else param.detach().clone()
                for name, param in params.items()
            }
            for name, value in _of_bridge(own, model.config, adds=what == "gradients"):
                values[name.replace(".adapter.", f".adapter.{number}.")] = value.clone()
    return found


def _draw(model: Any, seed: int = 11) -> None:
    """Draw the adapters; those that Bridge fuses get one A."""
    generator = torch.Generator().manual_seed(seed)
    first: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
            layer, _, projection = name.partition(".lora_A")[0].rpartition(".")
            fused = next((kind for kind in (_QUERIES, _GATED) if projection in kind), None)
            if fused and ".lora_A." in name:
                param.copy_(first.setdefault(f"{layer} {fused}", param.detach().clone()))


def _of_bridge(
    tensors: Mapping[str, Tensor], config: Any, *, adds: bool
) -> Iterator[tuple[str, Tensor]]:
    """Names in the whole model, and whole tensors.

    Args:
        tensors: peft's, by their names below `model.`.
        adds: whether the As of a fused projection are added, as gradients are.
    """

    def parts(module: str, names: tuple[str, ...]) -> tuple[Tensor, list[Tensor]]:
        a, b = (
            [tensors[f"{module}.{name}.lora_{kind}.default.weight"] for name in names]
            for kind in "AB"
        )
        return torch.stack(a).sum(0) if adds else a[0], b

    for i in range(config.num_hidden_layers):
        module, name = f"layers.{i}", f"decoder.layers.{i}"
        a, qkv = parts(f"{module}.self_attn", _QUERIES)
        groups = [b.unflatten(0, (config.num_key_value_heads, -1)) for b in qkv]
        yield from _adapter(
            f"{name}.self_attention.linear_qkv", a, torch.cat(groups, 1).flatten(0, 1)
        )
        a, (b,) = parts(f"{module}.self_attn", ("o_proj",))
        yield from _adapter(f"{name}.self_attention.linear_proj", a, b)
        if f"{module}.mlp.up_proj.lora_A.default.weight" in tensors:
            a, gated = parts(f"{module}.mlp", _GATED)
            yield from _adapter(f"{name}.mlp.linear_fc1", a, torch.cat(gated))
            a, (b,) = parts(f"{module}.mlp", ("down_proj",))
            yield from _adapter(f"{name}.mlp.linear_fc2", a, b)
            continue
        # The wrapper of one parameter is in that of the other; fc1's is inside.
        for layer, wrapper in (("linear_fc2", "experts"), ("linear_fc1", "experts.base_layer")):
            a, b = (tensors[f"{module}.mlp.{wrapper}.lora_{kind}.default.weight"] for kind in "AB")
            for e in range(config.num_experts):
                yield from _adapter(
                    f"{name}.mlp.experts.local_experts.{e}.{layer}",
                    a.unflatten(0, (config.num_experts, RANK))[e],
                    b.unflatten(1, (RANK, config.num_experts))[:, :, e],
                )


def _adapter(name: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.adapter.linear_in.weight", a
    yield f"{name}.adapter.linear_out.weight", b


def main(folder: str, *families: str) -> None:
    """Write the results of some families."""
    packages.add_peft()
    for family in families:
        write(Path(folder), family)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A depth of multi-token prediction of a Hugging Face folder, in plain torch.

transformers leaves out these tensors. Here they are made beside a tiny model's folder, under the
names of published ones, and computed from the model's hidden states: the layers in them are
transformers' own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import hf_models

FILE = "mtp.safetensors"
"""The file of a folder that has the depth."""

# By kind of folder: names of a layer's tensors begin so, and names of the other tensors.
_LAYER = "model.layers.{layers}."
_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "layer": (
        _LAYER,
        {
            "enorm": f"{_LAYER}enorm.weight",
            "hnorm": f"{_LAYER}hnorm.weight",
            "projection": f"{_LAYER}eh_proj.weight",
            "last_norm": f"{_LAYER}shared_head.norm.weight",
        },
    ),
    "mimo": (
        "model.mtp_layers.0.",
        {
            "enorm": "model.mtp_layers.0.token_layernorm.weight",
            "hnorm": "model.mtp_layers.0.hidden_layernorm.weight",
            "projection": "model.mtp_layers.0.input_proj.weight",
            "last_norm": "model.mtp_layers.0.final_layernorm.weight",
        },
    ),
    "qwen": (
        "mtp.layers.0.",
        {
            "enorm": "mtp.pre_fc_norm_embedding.weight",
            "hnorm": "mtp.pre_fc_norm_hidden.weight",
            "projection": "mtp.fc.weight",
            "last_norm": "mtp.norm.weight",
        },
    ),
    "nemotron": (
        "mtp.layers.{own}.",
        {
            "enorm": "mtp.layers.0.enorm.weight",
            "hnorm": "mtp.layers.0.hnorm.weight",
            "projection": "mtp.layers.0.eh_proj.weight",
            "last_norm": "mtp.layers.1.final_layernorm.weight",
        },
    ),
}
_COPIES = {
    "model.embed_tokens.weight": f"{_LAYER}embed_tokens.weight",
    "lm_head.weight": f"{_LAYER}shared_head.head.weight",
}


class Depth(torch.nn.Module):
    """The first depth, whose layers are those of these numbers in a model of another seed.

    Args:
        settings: see `hf_models.new_model`.
    """

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        self.kind, self.layers = hf_models.FAMILIES[family].mtp or ("", ())
        self.twin = hf_models.new_model(family, seed=1, **settings)
        self.num_layers = self.twin.config.num_hidden_layers
        generator = torch.Generator().manual_seed(2)
        norm = self.twin.model.norm_f if self.kind == "nemotron" else self.twin.model.norm
        norms = [copy.deepcopy(norm) for _ in range(3)]
        with torch.no_grad():
            for norm in norms:
                norm.weight.add_(0.2 * torch.randn(norm.weight.shape, generator=generator))
        self.enorm, self.hnorm, self.last_norm = norms
        hidden = self.twin.config.hidden_size
        self.projection = torch.nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            weight = torch.randn(self.projection.weight.shape, generator=generator)
            self.projection.weight.copy_(hf_models.INIT_STD * weight)

    def log_softmax(self, model: Any, tokens_T: Tensor) -> Tensor:
        """Log-probs [length - 1, vocabulary] of the token after the next, at each token but the
        last."""
        tokens_1T = tokens_T[None].long()
        inner = model.model
        hidden = inner(input_ids=tokens_1T, use_cache=False).last_hidden_state[:, :-1]
        embedded = self.enorm(inner.get_input_embeddings()(tokens_1T[:, 1:]))
        states = [embedded, self.hnorm(hidden)]
        if self.kind == "mimo":
            states.reverse()
        positions = torch.arange(hidden.shape[1])[None]
        kwargs: dict[str, Any] = {
            "attention_mask": torch.full((hidden.shape[1],) * 2, float("-inf")).triu(1)[None, None],
            "position_ids": positions,
        }
        if self.kind != "nemotron":
            kwargs["position_embeddings"] = inner.rotary_emb(hidden, positions)
        hidden = self.projection(torch.cat(states, -1))
        for layer in self.layers:
            hidden = self.twin.model.layers[layer](hidden, **kwargs)
        logits: Tensor = model.lm_head(self.last_norm(hidden))
        return logits[0].float().log_softmax(-1)

    def tensors(self, model_tensors: dict[str, Tensor], *, gradients: bool) -> dict[str, Tensor]:
        """The folder's tensors, or their gradients.

        Args:
            model_tensors: the model's, of which some are here again.
        """
        prefix, names = _NAMES[self.kind]
        if gradients:
            for param in self.twin.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            saved = hf_models.gradients_of(self.twin)
        else:
            saved = hf_models.tensors_of(self.twin)
        found = {
            prefix.replace("{own}", str(own)) + name.partition(f".layers.{layer}.")[2]: tensor
            for own, layer in enumerate(self.layers)
            for name, tensor in saved.items()
            if f".layers.{layer}." in name
        }
        for part, name in names.items():
            weight = getattr(self, part).weight
            found[name] = (weight.grad if gradients else weight).detach().clone()
        if self.kind == "layer":
            found |= {copied: model_tensors[name].clone() for name, copied in _COPIES.items()}
        return {name.format(layers=self.num_layers): value for name, value in found.items()}


def add_to_folder(folder: Path, model: Any, family: str, **settings: Any) -> None:
    """Write the depth beside the model's tensors; the folder has an index."""
    from safetensors.torch import save_file

    tensors = Depth(family, **settings).tensors(hf_models.tensors_of(model), gradients=False)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / FILE)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, FILE)
    path.write_text(json.dumps(index))


def add_gradients(
    model: Any, depth: Depth, samples: Sequence[Tensor], weights: Sequence[Tensor], coef: float
) -> float:
    """Add those of `coef` times the depth's loss to the model's and the depth's; returns the loss.

    Args:
        weights: of each token as what is predicted, [length] each.
    """
    total = 0.0
    for tokens_T, weights_T in zip(samples, weights, strict=True):
        if len(tokens_T) < 3:
            continue
        log_p_TV = depth.log_softmax(model, tokens_T)
        logprobs = log_p_TV[:-1].gather(1, tokens_T[2:, None].long())[:, 0]
        loss = -(weights_T[2:] * logprobs).sum()
        (coef * loss).backward()
        total += float(loss.detach())
    return total

"""Hosts' own recurrent layers: a shared row against its samples, one at a time."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megapack import Layout, launch
from megapack.errors import ConfigError
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.row import RowView, with_view
from megapack.model.recurrent.driven import driving
from megapack.prefixes import Branch
from megapack.schedule.row_rules import check_rows
from tests import stock_mixers
from tools.hosting import import_stubs
from tools.hosting.sources import source

HIDDEN = 32
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
WIDTHS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _branch(start: int, end: int, offset: int, parent: int, *samples: int, last: int = 0) -> Branch:
    return Branch(
        start=start,
        tokens=end - start,
        offset=offset,
        parent=parent,
        samples=samples,
        end=last or end,
    )


# A prompt of 6 tokens, of which two samples go on 2 tokens together; two samples share nothing.
BRANCHES = (
    _branch(0, 6, 0, -1, 0, 1, 2, last=17),
    _branch(6, 8, 6, 0, 0, 1, last=12),
    _branch(8, 11, 8, 1, 0),
    _branch(11, 12, 8, 1, 1),
    _branch(12, 17, 6, 0, 2),
    _branch(17, 24, 0, -1, 3),
)
PATHS = ((0, 1, 2), (0, 1, 3), (0, 4), (5,))


def compare(host: str) -> dict[str, Any]:
    """By class: the tokens of the samples and of the row, and relative errors."""
    from megapack.job.gpt import initialize_parallel

    launch.start("cpu")
    initialize_parallel(Layout(), 1)
    stock_mixers.install()
    stock_mixers.install_fla()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    found = {type(mixer).__name__: _compared(owner) for owner, mixer in LAYERS[host]()}
    launch.stop()
    return found


def _compared(owner: torch.nn.Module) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    for weight in owner.parameters():
        torch.nn.init.uniform_(weight, -0.3, 0.3, generator=generator)
    chunk: Any = torch.nn.ModuleDict({"self_attention": owner})
    chunk.position_embedding_type = "none"
    spans = [branch.tokens for branch in BRANCHES]
    hidden_T1H = torch.randn(sum(spans), 1, HIDDEN, generator=generator)
    starts = [branch.start for branch in BRANCHES]
    indices = [
        torch.cat([torch.arange(starts[k], starts[k] + spans[k]) for k in path]) for path in PATHS
    ]

    def alone() -> list[Tensor]:
        return [_run(chunk, hidden_T1H[own], [len(own)]) for own in indices]

    def shared() -> list[Tensor]:
        out = _run(chunk, hidden_T1H, spans, BRANCHES)
        return [out[own] for own in indices]

    expected = _outcome(chunk, alone)
    undriven = _outcome(chunk, shared)
    config = SimpleNamespace(mtp_num_layers=None, attention_dropout=0.0, hidden_dropout=0.0)
    check_rows([chunk], config, ["prefixes"], is_training=True)
    with driving([chunk]):
        driven = _outcome(chunk, shared)
    try:
        check_rows([chunk], config, ["pieces"], is_training=True)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return {
        "tokens": [sum(map(len, indices)), sum(spans)],
        "outputs": _error(driven[0], expected[0]),
        "gradients": _error(driven[1], expected[1]),
        "undriven": _error(undriven[0], expected[0]),
        "after": _error(_outcome(chunk, alone)[0], expected[0]),
        "pieces": refused.partition(":")[0],
    }


def _run(chunk: Any, hidden: Tensor, spans: Sequence[int], branches: Sequence[Branch] = ()) -> Any:
    ends = torch.tensor([0, *spans]).cumsum(0).int()
    params = packed_seq_params(ends, max(spans), sum(spans))
    if branches:
        with_view(params, RowView(ends, max(spans), lengths=spans, branches=tuple(branches)))
    out = chunk["self_attention"](hidden, attention_mask=None, packed_seq_params=params)
    return out[0]


def _outcome(chunk: Any, run: Callable[[], list[Tensor]]) -> tuple[Tensor, Tensor]:
    chunk.zero_grad()
    outputs = torch.cat(run())
    outputs.square().sum().backward()
    return outputs.detach(), torch.cat([weight.grad.flatten() for weight in chunk.parameters()])


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _config(**settings: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        **HEADS,
        **WIDTHS,
    )
    vars(config).update(settings)
    return config


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def folder_of(kind: str, hidden_size: int, folder: Path) -> Path:
    """A folder whose config.json describes such a model."""
    text = {
        "model_type": kind,
        "hidden_size": hidden_size,
        "num_hidden_layers": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "dtype": "float32",
        **HEADS,
        **WIDTHS,
    }
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    return folder


def _rollout_layers(host: str) -> list[tuple[Any, Any]]:
    """Layers of slime and miles, inside of the module that is told the row."""
    sys.path.insert(0, str(source(host)))
    import_stubs.install("ray", "sglang", "torch_memory_saver", "wandb", "httpx", "tensorboard")
    args = SimpleNamespace(sequence_parallel=False)
    owners = [_rollout_layer(host, name, args, _config(), 1) for name in ("qwen3_next", "qwen3_5")]
    return [(owner, owner.linear_attn) for owner in owners]


def _rollout_layer(host: str, name: str, args: Any, config: Any, number: int) -> Any:
    module = importlib.import_module(f"{host}_plugins.models.{name}")
    if hasattr(module, "accelerator"):
        module.accelerator.current_device = lambda: torch.device("cpu")
    kind = "qwen3_5_text" if name == "qwen3_5" else name
    folder = folder_of(kind, config.hidden_size, Path(tempfile.mkdtemp()))
    args.hf_checkpoint = str(folder)
    return module.Attention(args, config, number)


def use(host: str, args: Any, chunks: Sequence[Any]) -> None:
    """Put the host's gated delta net into every second layer of chunks of the toy GPT.

    Args:
        args: the host's.
    """
    stock_mixers.install_fla()
    backends = dict.fromkeys(("qwen_gdn_backend", "linear_attention_backend"), "fla")
    vars(args).update(sequence_parallel=False, **backends)
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    for layer in (layer for layer in layers if layer.layer_number % 2):
        own = _rollout_layer(host, "qwen3_next", args, chunks[0].config, layer.layer_number)
        generator = torch.Generator().manual_seed(layer.layer_number)
        for name, weight in own.named_parameters():
            torch.nn.init.normal_(weight, -2.0 if "A_log" in name else 0, 0.2, generator=generator)
        layer.self_attention = own


def _module(host: str, name: str) -> ModuleType:
    """A module of a host without the packages around it."""
    path = source(host).joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _bridge_layer() -> list[tuple[Any, Any]]:
    """mcore-bridge's, which ms-swift trains."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megapack.job.gpt.specs import packed_norm

    import_stubs.install("mcore_bridge", "transformer_engine")
    package = _module("mcore_bridge", "mcore_bridge.model.modules.gated_delta_net")
    config = _config(linear_decoupled_in_proj=False)
    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=packed_norm(config), out_proj=RowParallelLinear
    )
    layer = package.GatedDeltaNet(config, parts, layer_number=1, pg_collection=_groups())
    return [(layer, layer)]


class Duplicated(torch.nn.Linear):
    """Transformer Engine's linear layer that all tensor-parallel ranks have."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def _kimi_layers() -> list[tuple[Any, Any]]:
    """SkyRL's, with and without a bound of its gate."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    package = _module("skyrl", "skyrl.backends.skyrl_train.patches.megatron.mcore_ext.kda")
    own = {"f_a_proj": Duplicated, "g_a_proj": Duplicated, "o_proj": RowParallelLinear}
    names = ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj", "b_proj")
    parts = package.KimiDeltaAttentionSubmodules(
        **own, **dict.fromkeys(names, ColumnParallelLinear)
    )
    layers = []
    for bound in (-5.0, None):
        config = _config(linear_num_key_heads=4, kda_gate_lower_bound=bound)
        layer = package.KimiDeltaAttention(config, parts, 1, _groups())
        layer.__class__ = type(f"KimiDeltaAttention{bound}", (package.KimiDeltaAttention,), {})
        layers.append((layer, layer))
    return layers


LAYERS: dict[str, Callable[[], list[tuple[Any, Any]]]] = {
    "slime": lambda: _rollout_layers("slime"),
    "miles": lambda: _rollout_layers("miles"),
    "mcore_bridge": _bridge_layer,
    "skyrl": _kimi_layers,
}

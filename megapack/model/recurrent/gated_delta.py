"""Megatron's gated delta net over packed rows (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from megapack.model.attention.row import layer_row
from megapack.model.carried import earlier, leave
from megapack.model.fp32 import mark_fp32
from megapack.model.recurrent.choice import delta_rule_kernels
from megapack.model.recurrent.convolution import convolve_row
from megapack.model.recurrent.heads import HeadExchange, Section, sizes
from megapack.model.recurrent.scan import at_least_fp32, scan_row
from megapack.model.replaced import replaced


class PackedGatedDeltaNet(GatedDeltaNet):
    """A gated delta net in which samples of a row do not see each other.

    Replaces `GatedDeltaNet` in the spec of a layer; parameters, projections and checkpoints are
    Megatron's. Runs shared prefixes, samples in pieces and rows over several ranks. `prepare` and
    `forward` also run on Megatron's own layer, see `driven`.
    """

    runs_packed_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Megatron builds the layer without flash-linear-attention, too; 0.18 has one module.
        with replaced(getattr(gated_delta_net, "common", gated_delta_net), HAVE_FLA=True):
            super().__init__(*args, **kwargs)
        self.prepare()
        projected = (*self.convolved, self.values, self.heads, self.heads)
        # See `gpt.init.local_slice`.
        self.in_proj.weight.partition_sizes = sizes(projected)
        self.conv1d.weight.partition_sizes = sizes(self.convolved)
        # Folders have them in fp32, and the decay of a long sample needs it.
        mark_fp32(self.A_log, self.dt_bias)
        if self.tp_size > 1 and not self.config.sequence_parallel:
            # Each rank has the whole norm and sees its own heads. Megatron adds up its gradients
            # only under sequence parallelism.
            self.out_norm.weight.register_hook(self._added_over_tp)

    def prepare(self: Any) -> None:
        """Note what `forward` reads besides what Megatron's constructor sets."""
        self.kernels = delta_rule_kernels()
        keys = Section(self.num_key_heads // self.tp_size, self.key_head_dim)
        self.values = Section(self.num_value_heads // self.tp_size, self.value_head_dim)
        self.heads = Section(self.values.heads)
        self.convolved = (keys, keys, self.values)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, 1, hidden] -> the same, and the bias of the last projection."""
        row = layer_row(self, packed_seq_params, self.pg_collection.cp)
        exchange = HeadExchange(row)
        projected = self.in_proj(hidden_states)[0][:, 0]
        widths = [sum(sizes(self.convolved)), self.values.size, self.heads.size, self.heads.size]
        qkv, gate, beta, step = projected.split(widths, dim=-1)
        qkv, beta, step = exchange.whole_row(
            (qkv, beta, step), (self.convolved, (self.heads,), (self.heads,))
        )
        state, tail = [(None, None), *earlier(row.link, self)][-1]
        weight = exchange.part(self.conv1d.weight, self.convolved).squeeze(1)
        qkv, tail = convolve_row(self.kernels.convolve, qkv, weight, None, row.segments, tail)
        query, key, value = exchange.by_head(qkv, self.convolved)
        rate = at_least_fp32(exchange.part(self.A_log, (self.heads,))).exp()
        bias = exchange.part(self.dt_bias, (self.heads,))
        decay = -rate * F.softplus(at_least_fp32(step) + bias)
        inputs = (query, key, value, decay, at_least_fp32(beta).sigmoid())
        out, state = scan_row(self.kernels.scan, inputs, row.segments, state)
        out = leave(row.link, self, out, (state, tail))
        out = exchange.own_slice(out.flatten(1)).unflatten(-1, self.values)
        # Not Megatron's `_apply_gated_norm`, on which torch.compile fails on a CPU.
        out = self.out_norm(out) * F.silu(at_least_fp32(gate)).view_as(out)
        return self.out_proj(out.to(projected.dtype).flatten(1)[:, None])

    def _setup_variant_attrs(self) -> None:
        """Megatron-Core since 0.19 checks in its constructor that there is a kernel."""
        super()._setup_variant_attrs()
        self.gated_delta_rule = delta_rule_kernels().scan

    def _added_over_tp(self, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=self.pg_collection.tp)
        return total

"""The planned communicator: pipeline stages read row lengths from the plan.

With `variable_seq_lengths` Megatron-Core exchanges the shape of every tensor before the tensor
itself: a batched send and receive, a wait, a device synchronize and a read on the host. Each rank
has the same plan and so already knows the shapes; `PlannedP2PCommunicator` returns them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megapack.errors import ConfigError, ScheduleError
from megapack.ranks.place import Place


class RecordingP2PCommunicator(P2PCommunicator):
    """Megatron's communicator, which also records each exchange before it begins.

    Attributes:
        place: gets the text of the exchange; None records nothing.
    """

    place: Place | None = None

    def check_received(self) -> None:
        """Raise ScheduleError if a planned receive did not happen."""

    def _communicate(self, **exchange: Any) -> Any:
        if self.place is not None:
            self.place.exchange = exchange_text(exchange, self.prev_rank, self.next_rank)
        return super()._communicate(**exchange)


class PlannedP2PCommunicator(RecordingP2PCommunicator):
    """Returns shapes from the plan instead of exchanging them.

    Args:
        pp_group: the pipeline-parallel process group.
        config: the model's `ModelParallelConfig`, with `variable_seq_lengths=True` while it runs.
        row_shapes: (tokens, batch size) of each micro-batch's hidden states on this GPU, in
            execution order, after context and sequence parallel slicing. A packed row has batch
            size 1.
        vpp: model chunks per pipeline rank.
        group_size: `microbatch_group_size_per_vp_stage`; None without interleaving.
        forward_only: no gradients will be received.

    The number of earlier receives determines the micro-batch of a receive: both of Megatron's
    schedules receive activations in the order of the schedule table, and gradients in the same
    order with the chunks reversed.
    """

    def __init__(
        self,
        pp_group: Any,
        config: Any,
        *,
        row_shapes: Sequence[tuple[int, int]],
        vpp: int = 1,
        group_size: int | None = None,
        forward_only: bool = False,
    ) -> None:
        super().__init__(pp_group, config)
        stage = pp_group.rank()
        last = pp_group.size() - 1
        order = receive_order(len(row_shapes), vpp, group_size)
        # The first stage receives no activations for its chunk 0, and the last stage no gradients
        # for its last chunk. Gradients run through the chunks in reverse, so in both directions
        # this is chunk 0 of the order.
        self._forward = deque(m for m, chunk in order if stage > 0 or chunk > 0)
        self._backward = deque(m for m, chunk in order if stage < last or chunk > 0)
        if forward_only:
            self._backward.clear()
        self._row_shapes = tuple(row_shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return (
            self._next_shape(self._forward, "activation") if recv_prev else [0, 0, 0],
            self._next_shape(self._backward, "gradient") if recv_next else [0, 0, 0],
        )

    def _next_shape(self, pending: deque[int], kind: str) -> list[int]:
        if not pending:
            raise ScheduleError(
                f"Megatron asks for one more {kind} than the plan's {len(self._row_shapes)} "
                "micro-batches have; the schedule's settings changed under the adapter"
            )
        return [*self._row_shapes[pending.popleft()], width_between_stages(self.config)]

    def check_received(self) -> None:
        """As in the base class."""
        if self.num_pending:
            raise ScheduleError(
                f"{self.num_pending} planned receives did not happen; the schedule is not "
                "Megatron's own: set lengths='exchange'"
            )

    @property
    def num_pending(self) -> int:
        """Planned receives that have not happened yet; 0 after a whole step."""
        return len(self._forward) + len(self._backward)


def width_between_stages(config: Any) -> int:
    """Channels of a token's hidden states between stages: with hyper-connections of all streams.

    Main and the dev branch of Megatron have other names for the same settings.
    """
    width: int = config.hidden_size
    if getattr(config, "enable_mhc_connections", False):
        return width * int(config.mhc_num_residual_streams)
    if getattr(config, "enable_hyper_connections", False):
        return width * int(config.num_residual_streams)
    return width


def exchange_text(exchange: Mapping[str, Any], prev_rank: int, next_rank: int) -> str:
    """An exchange as a text, with the global ranks of the other stages.

    >>> sent = {"tensor_send_next": object(), "recv_prev": True}
    >>> exchange_text(sent, 0, 2)
    'sends activations to rank 2, receives activations from rank 0'
    """
    is_part = {
        f"sends activations to rank {next_rank}": exchange.get("tensor_send_next") is not None,
        f"sends gradients to rank {prev_rank}": exchange.get("tensor_send_prev") is not None,
        f"receives activations from rank {prev_rank}": exchange.get("recv_prev"),
        f"receives gradients from rank {next_rank}": exchange.get("recv_next"),
    }
    return ", ".join(text for text, happens in is_part.items() if happens)


def receive_order(num_microbatches: int, vpp: int, group_size: int | None) -> list[tuple[int, int]]:
    """(micro-batch, chunk) pairs in the order in which a stage runs them.

    >>> receive_order(3, 1, None)
    [(0, 0), (1, 0), (2, 0)]
    >>> receive_order(5, 2, 3)[:6]
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    """
    if vpp == 1:
        return [(m, 0) for m in range(num_microbatches)]
    if group_size is None:
        raise ConfigError(f"vpp={vpp} needs a group size; set Layout.microbatch_group_size")
    return list(get_schedule_table(num_microbatches, vpp, group_size))

"""One call of Megatron's schedule, of the adapter or of a framework's own step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapack.model.overlap import dropping_reductions, sync_functions
from megapack.model.replaced import replaced
from megapack.ranks.place import Place
from megapack.schedule.faults import FiniteFlags, checking_finalize
from megapack.schedule.p2p import PlannedP2PCommunicator, RecordingP2PCommunicator


@dataclass(frozen=True, kw_only=True)
class MegatronCall:
    """What surrounds a pass over a step's rows, by Megatron's schedule or a list of operations."""

    chunks: Sequence[Any]
    config: Any
    """The model's; it has other settings while the pass runs."""
    pp_group: Any
    place: Place
    flags: FiniteFlags
    is_training: bool
    group_size: int | None
    """G; None without interleaving."""

    def run(
        self,
        schedule: Callable[..., Any],
        row_shapes: Sequence[tuple[int, int]] | None,
        groups: Any,
        planned: type[PlannedP2PCommunicator] = PlannedP2PCommunicator,
        **arguments: Any,
    ) -> Any:
        """Call Megatron's schedule, within `running`.

        Args:
            row_shapes: (tokens, batch size) of each row's hidden states on this GPU; None lets the
                stages tell each other.
            groups: Megatron's.
            planned: exchanges rows of known shapes.
            arguments: the schedule's.
        """
        if self.pp_group.size() == 1:
            return schedule(**arguments)
        if row_shapes is None:
            communicator = RecordingP2PCommunicator(self.pp_group, self.config)
        else:
            communicator = planned(
                self.pp_group,
                self.config,
                row_shapes=row_shapes,
                vpp=len(self.chunks),
                group_size=self.group_size,
                forward_only=not self.is_training,
            )
        communicator.place = self.place
        arguments |= {"p2p_communicator": communicator, "pg_collection": groups}
        result = schedule(**arguments)
        communicator.check_received()
        return result

    @contextlib.contextmanager
    def running(
        self, *, variable: bool, keeps_outputs: bool, finalize: Callable[..., None] | None
    ) -> Iterator[None]:
        """Within the block the config has the pass's settings: stages exchange the right tensors,
        DDP reduces when the schedule says so, and gradients are checked.

        Args:
            variable: rows may differ in length.
            keeps_outputs: interleaved stages keep their outputs' memory, whatever the config says.
                Sends overlap with the next forward: Megatron-Core before 0.18 frees an output while
                its send still reads it; later versions wait for the send, which ends the overlap.
                Without interleaving each send is waited for, and the setting is the user's.
            finalize: reduces gradients at the end; None if nothing does.
        """
        settings: dict[str, Any] = {
            "variable_seq_lengths": variable and self.pp_group.size() > 1,
            # After an exchange Megatron also synchronizes the device, against a race in old
            # versions of torch. Waiting for the requests already orders the streams.
            "batch_p2p_sync": False,
        }
        if len(self.chunks) > 1:
            settings["microbatch_group_size_per_vp_stage"] = self.group_size
            # Else interleaved stages take one tensor for another, see docs/maintainers/patching.md.
            settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
            if keeps_outputs:
                settings["deallocate_pipeline_outputs"] = False
        if self.is_training:
            settings |= sync_functions(self.chunks, self.config)
        if finalize is not None:
            settings["finalize_model_grads_func"] = checking_finalize(
                finalize, self.flags, self.chunks, self.place
            )
        with dropping_reductions(self.chunks), replaced(self.config, **settings):
            yield

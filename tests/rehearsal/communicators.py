"""Which communicator, and so which queue, torch gives an operation.

Read in torch's `ProcessGroupNCCL::pointToPoint` and `::collective`, and in `batch_isend_irecv` of
torch 2.13's distributed_c10d.py. Collectives of a group share the group's communicator and its
stream. So do the operations of `batch_isend_irecv`, which are one launch between ncclGroupStart and
ncclGroupEnd. A lone send or receive of a group made without `device_id` has a communicator of its
two ranks, with a stream of its own, by the key "low rank:high rank" for both directions
(`getKeySendRecv`). With `device_id` the group's communicator serves it too (`eagerInit_`).
"""

from __future__ import annotations

from typing import NamedTuple

from tests.rehearsal.notes import Group, Op


class Communicator(NamedTuple):
    """A communicator of NCCL."""

    group: str
    pair: tuple[int, int] | None = None
    """Its ranks, if it has only two of the group's."""

    def ranks(self, group: Group) -> tuple[int, ...]:
        """The global ranks that make it together."""
        return self.pair or group.ranks


class P2PModel(NamedTuple):
    """How torch's groups are made."""

    text: str
    has_device_id: bool

    def communicator(self, rank: int, op: Op) -> Communicator:
        """The communicator that a rank's operation runs on."""
        if self.has_device_id or op.is_batched or not op.is_p2p:
            return Communicator(op.group)
        return Communicator(op.group, (min(rank, op.peer), max(rank, op.peer)))


P2P_MODELS = (
    P2PModel("init_process_group without device_id", has_device_id=False),
    P2PModel("init_process_group with device_id", has_device_id=True),
)

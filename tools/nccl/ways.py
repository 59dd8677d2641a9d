"""How the ranks of a job may use NCCL on this machine's GPUs, and how many GPUs there are.

With a GPU for each rank nothing has to be set. Ranks that share a GPU are refused by NCCL unless
one of two ways is open. From 2.30 a variable allows it. Before, NCCL compares GPUs only within a
host, and takes a rank with a host id of its own for another host; ranks then talk over sockets of
the loopback interface. In both, the kernels of several ranks have to fit on one GPU while each
spins, so few thread blocks and small buffers are asked for (NVIDIA/nccl: src/init.cc,
src/misc/utils.cc, the page on environment variables).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Also what recipes of Megatron-LM set. RAS would ask each "host" for the same port.
_ALWAYS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_RAS_ENABLE": "0"}
_FEW_BLOCKS = {
    "NCCL_MAX_CTAS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MAX_P2P_NCHANNELS": "1",
    "NCCL_BUFFSIZE": str(1 << 20),
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
}
_LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


class Way(NamedTuple):
    """Variables with which ranks can use NCCL together."""

    name: str
    says: str
    shared: Mapping[str, str]
    """Of all ranks."""
    host_ids: bool = False
    """Whether each rank has a host id of its own."""

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of a rank."""
        own = {"NCCL_HOSTID": f"megapack-rank{rank}"} if self.host_ids else {}
        return {**_ALWAYS, **self.shared, **own}


OWN_GPUS = Way("own GPUs", "each rank has a GPU", {})
MULTI_RANK = Way(
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "ranks share a GPU by NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later)",
    {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **_FEW_BLOCKS},
)
HOST_ID = Way(
    "NCCL_HOSTID",
    "ranks share a GPU as if each were a host of its own (NCCL_HOSTID), over sockets",
    {**_FEW_BLOCKS, **_LOOPBACK},
    host_ids=True,
)


def ways(ranks: int, num_gpus: int) -> tuple[Way, ...]:
    """The ways to try, in their order."""
    return (OWN_GPUS,) if ranks <= num_gpus else (MULTI_RANK, HOST_ID)

"""Latency and bandwidth of the exchanges of a step, beside what cost models assume."""

from __future__ import annotations

import time

from megapack.cost.assumed import GpuSpeed
from megapack.cost.model import CostModel
from tools.nccl.found import NOT_RUN, PASSED, Found
from tools.nccl.measured import read_results, write_task
from tools.nccl.session import Session

MODULE = "tools.nccl.on_ranks.p2p"
KINDS = {
    "batched": "a batch: each rank sends to the next one and receives from the one before",
    "lone": "lone sends of every other rank to the next one, in groups of the executor's channels",
    "all_reduce": "a sum over all ranks",
    "all_to_all": "an exchange of equal parts between all ranks",
}
_KIB = 1 << 10
SIZES = tuple(16 * _KIB * 4**k for k in range(7))
_NUM_REHEARSED = 3
# Seconds before the part's end in which the ranks end by themselves.
_END_S = 6.0


def run(session: Session) -> Found:
    """Measure each kind in each size."""
    sizes = SIZES[:_NUM_REHEARSED] if session.rehearsed else SIZES
    out = session.out / "ranks" / "p2p_found.json"
    out.unlink(missing_ok=True)
    end = time.monotonic() + max(1.0, session.left_s - _END_S)
    repeats = 2 if session.rehearsed else 200
    task = write_task(session, "job", end, sizes=sizes, kinds=list(KINDS), repeats=repeats)
    ended = session.job("job", MODULE, task, out).ended
    done = read_results(out)
    found = Found()
    for kind in KINDS:
        for size in sizes:
            name = f"{kind} {size // _KIB} KiB"
            found.cases[name] = {
                **done.get(name, {}),
                "status": PASSED if name in done else NOT_RUN,
            }
        rates = [done[name]["gb_s"] for name in done if name.startswith(f"{kind} ")]
        found.figures[f"{kind}_peak_gb_s"] = max(rates, default=None)
    first = f"batched {sizes[0] // _KIB} KiB"
    found.figures["batched_us"] = done.get(first, {}).get("us")
    speed = GpuSpeed()
    found.figures |= {
        "assumed_gb_s": speed.cp_gbs,
        "assumed_us_per_layer": speed.cp_latency_us,
        "assumed_send_us": 1e6 * CostModel.p2p,
    }
    if not ended.is_good:
        found.failures.append(ended.reason)
    if not done:
        return found
    peaks = ", ".join(
        f"{kind} {found.figures[f'{kind}_peak_gb_s']:.3g}"
        for kind in KINDS
        if found.figures[f"{kind}_peak_gb_s"]
    )
    found.line = (
        f"{first}: {done[first]['us']:.0f} us; peak GB/s: {peaks}; cost models assume "
        f"{speed.cp_gbs:g} GB/s, {speed.cp_latency_us:g} us for a layer's exchange of keys and "
        f"values, and {1e6 * CostModel.p2p:g} us for a send between stages"
    )
    return found

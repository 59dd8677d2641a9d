"""Metrics of packings, under NeMo-RL's names."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megapack.hosts.rank_rows import Rows


class PackingMetrics:
    """Sums over packings, under NeMo-RL's names."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._packings: list[dict[str, float]] = []

    def update(
        self, sequence_lengths: Sequence[int], bins: Rows, bin_capacity: int
    ) -> dict[str, float]:
        """Add one packing; returns its own metrics."""
        stats = packing_stats(sequence_lengths, bins, bin_capacity)
        self._packings.append(stats)
        return stats

    def get_aggregated_stats(self) -> dict[str, float]:
        """Totals, and the mean, least and largest utilization; {} before the first packing."""
        if not self._packings:
            return {}
        names = self._packings[0]
        total = {name: sum(stats[name] for stats in self._packings) for name in names}
        used = [stats["average_utilization"] for stats in self._packings]
        wasted = [stats["waste_ratio"] for stats in self._packings]
        capacity, bins = total["total_bin_capacity"], total["num_bins"]
        # The fewest bins of all sequences together, at the mean capacity.
        fewest = -(-total["total_sequence_length"] * bins // capacity) if capacity else 0
        return {
            "total_sequences": total["num_sequences"],
            "total_bins": bins,
            "average_utilization": total["total_sequence_length"] / capacity if capacity else 0.0,
            "min_utilization": min(used),
            "max_utilization": max(used),
            "average_waste_ratio": total["total_waste"] / capacity if capacity else 0.0,
            "min_waste_ratio": min(wasted),
            "max_waste_ratio": max(wasted),
            "average_bin_count": bins / len(self._packings),
            "bin_efficiency": fewest / bins if bins else 0.0,
        }


def packing_stats(
    sequence_lengths: Sequence[int], bins: Rows, bin_capacity: int
) -> dict[str, float]:
    """Metrics of one packing; all 0 without bins.

    `bin_balance` is 1 less the standard deviation (n - 1) of the bins' tokens over their mean.
    """
    loads = [sum(int(sequence_lengths[i]) for i in row) for row in bins]
    total, capacity = sum(loads), len(bins) * bin_capacity
    fewest = -(-total // bin_capacity)
    spread = statistics.stdev(loads) / statistics.fmean(loads) if len(bins) > 1 else 0.0
    return {
        "num_sequences": sum(map(len, bins)),
        "num_bins": len(bins),
        "total_sequence_length": total,
        "total_bin_capacity": capacity,
        "total_waste": capacity - total,
        "average_utilization": total / capacity if bins else 0.0,
        "waste_ratio": (capacity - total) / capacity if bins else 0.0,
        "bin_balance": 1.0 - spread if bins else 0.0,
        "theoretical_min_bins": fewest,
        "bin_efficiency": fewest / len(bins) if bins else 0.0,
    }

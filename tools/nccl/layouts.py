"""Layouts of a number of ranks, and their names."""

from __future__ import annotations

from megapack import Layout


def busy_layout(ranks: int) -> Layout:
    """The layout with the most kinds of exchanges on so many ranks."""
    return Layout(dp=ranks // 2, pp=2, vpp=2)


def layout_name(layout: Layout) -> str:
    """A name such as dp2_tp2_sp_pp2_vpp2; sizes of 1 are left out, but for dp."""
    parts = []
    for name in ("dp", "tp", "pp", "vpp", "cp", "ep"):
        size = getattr(layout, name)
        if size > 1 or name == "dp":
            parts.append(f"{name}{size}")
        if name == "tp" and layout.sequence_parallel:
            parts.append("sp")
    return "_".join(parts)

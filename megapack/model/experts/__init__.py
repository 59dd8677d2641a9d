"""Mixtures of experts on packed rows.

Modules:
    model: all routers of a rank: checks, rows and metrics
    router: PackedRouter: losses per sample without padding, and routing replay
    inner_norms: experts beside a dense MLP, each with norms of their own
    chains: load balance of samples in pieces
    rows: a packed row as routers see it; auxiliary losses; recorded choices
"""

"""Predictions without a GPU: for a plan, a config, or a choice of layouts.

Modules:
    stats: all numbers about planned steps: counts, simulated seconds, lower bounds
    dry_run: the main job without a GPU: plan, seconds and memory of its first batch
    tune: layouts, budgets and policies ranked by predicted speed
    tune_space: Space: the layouts, budgets and rules that it tries
    baselines: simple packing strategies to compare a plan with
"""

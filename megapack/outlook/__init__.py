"""Predictions without a GPU: what a plan, a config or a layout would give.

stats      the numbers of a planned step, in one place
dry_run    the whole main job without a GPU
tune       which layout and policy
baselines  how other frameworks would pack
"""

"""Mixtures of experts in packed rows.

model    checks, auxiliary losses and metrics of the whole model
router   the router that knows padding and replays routes
rows     routes of a packed row
"""

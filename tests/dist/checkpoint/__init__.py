"""Checkpoints, the optimizer's state and resumed jobs."""

"""Experts, heads and weights that ranks share; Transformer Engine's layers."""

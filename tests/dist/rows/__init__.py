"""Rows with shared prefixes, over several ranks, with pieces of samples, with tensors."""

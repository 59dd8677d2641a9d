"""Losses of whole samples, objectives and critics."""

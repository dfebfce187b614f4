"""Metrics: the one list of them, their store, and who reads it."""

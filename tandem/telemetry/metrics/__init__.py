"""Metrics: their only list, their store, and its readers."""

"""Watches running services through their metrics."""

"""Checks, at the start, that a back end computes a model's own rows: what is fed, and how exactly
rows have to agree."""

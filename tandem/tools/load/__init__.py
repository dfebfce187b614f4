"""Clients of an orchestrator: one text, many at once, and when their tokens arrived."""

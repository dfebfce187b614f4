"""Replicas, rounds and texts, simulated."""

"""Heads: scorers that read hidden states of a target's passes, one file a family."""

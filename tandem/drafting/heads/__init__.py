"""Drafts by heads, which read hidden states of the target; one file a family."""

"""Drafts that a target makes itself, in its own process."""

"""Heads that learn: from hidden states of the target, and its rows at the places after them."""

"""Drafts that are prepared behind the likeliest outcomes of a round that is being verified."""

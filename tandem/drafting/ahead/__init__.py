"""Drafts that are prepared after the likeliest outcomes of a round that is being verified."""

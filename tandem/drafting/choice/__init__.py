"""Which recipe drafts: a built-in one from settings, or a file."""

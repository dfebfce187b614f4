"""How much is drafted next: a fixed size, or one that follows what drafts earn."""

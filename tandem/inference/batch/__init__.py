"""A batch of sequences packed into one row, and attention over it."""

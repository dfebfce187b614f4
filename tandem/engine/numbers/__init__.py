"""What is computed between two passes, for many sequences at once."""

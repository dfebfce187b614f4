"""A decoder-only transformer with a rewindable KV cache for many sequences at once."""

"""The KV pool: sequences' extents in it, their branch rows, and its size."""

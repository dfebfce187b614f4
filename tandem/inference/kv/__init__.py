"""The KV pool: sequences' parts of it, their branch rows, shared prefixes, and its size."""

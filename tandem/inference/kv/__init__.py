"""The KV pool: a sequence's extent in it, branch rows behind it, and its size."""

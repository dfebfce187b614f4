"""Which replicas there are, which belong together, and which one serves a text."""

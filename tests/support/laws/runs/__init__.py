"""The law of texts that a target makes by itself."""

"""Models that draft with the weights and keys of others: parts, and few keys of long texts."""

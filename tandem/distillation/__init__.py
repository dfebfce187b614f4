"""Training a drafter on what its target says of texts: DistillSpec (arXiv 2310.08461)."""

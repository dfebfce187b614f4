"""A drafter that learns from what its target rejects, while it serves: online speculative decoding
(Liu et al., arXiv 2310.07177). It changes how often drafts are accepted, and the law of no text."""

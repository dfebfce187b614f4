"""vLLM as what computes a target's passes."""

"""Drafters and targets as their clients see them: what the orchestrator and vLLM's plugin share."""

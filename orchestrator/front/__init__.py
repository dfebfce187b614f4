"""Where a client meets the orchestrator: messages, validation, the queue, the making of a text."""

"""The orchestrator: the public service, and the loop over drafter and target."""

"""Texts of an orchestrator, from Python: `tandem.Client` and `tandem.AsyncClient`."""

"""Chooses the pass that serves a model: candidates, their speeds, records of earlier starts."""

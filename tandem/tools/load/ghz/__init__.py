"""Loads by ghz: what to run, the tool itself, what it saw, and whether that is good."""

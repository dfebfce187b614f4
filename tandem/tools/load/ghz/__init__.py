"""Loads by ghz: what to run, the tool itself, its measurements, and their judgement."""

"""Heads of the embedded target, a script each."""

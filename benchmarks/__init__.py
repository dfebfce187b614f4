"""Figures that anyone can measure again: each run prints a table and writes JSON."""

"""Drafting methods, one file each: who guesses what comes next."""

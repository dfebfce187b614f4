"""The basis of a plan: measurements from traces or from a bench."""

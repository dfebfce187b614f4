"""What a plan is made of: measurements from traces or from a bench."""

"""The replicas that are there: which one serves a text, and how much room they have."""

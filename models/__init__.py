"""The embedded pair: a small target and its drafter, and the scripts that trained them."""

"""Models beside the embedded pair, one script each."""

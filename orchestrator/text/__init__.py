"""One text from its first token to its end: the loop over drafter and target, without gRPC."""

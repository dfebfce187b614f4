"""A text's values, records, and drafter with its replacement; without gRPC."""

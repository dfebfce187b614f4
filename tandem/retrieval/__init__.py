"""Where text was seen before: stores of token ids, and what followed a match. No torch."""

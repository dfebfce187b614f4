"""How long sequences may be where no setting says it."""

# Longer than any sequence.
ANY_LENGTH = 2**31 - 1
# Tokens of each sequence that a KV cache has.
TOKENS_EACH = 4096

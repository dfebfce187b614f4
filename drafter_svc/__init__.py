"""The drafter service: guesses the next tokens, with their exact distributions."""

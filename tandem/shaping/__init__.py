"""Logits that a request shapes: by the text so far, at each place of a draft."""

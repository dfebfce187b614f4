"""Rules that change the law of the text. None is a default, and requests name them."""

"""The HTTP front: the calls of OpenAI's API over the same texts."""

"""Bodies of requests, as OpenAI's API and its other servers have them."""

"""What recorded traces say: where the time of requests went, and what a change would be worth."""

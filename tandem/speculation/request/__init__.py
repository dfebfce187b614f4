"""What a request asks of the target's distribution."""

"""Spans of requests and steps, and where they go."""

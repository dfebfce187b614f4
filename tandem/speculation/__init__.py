"""Speculative decoding as mathematics: no gRPC, no clock, no environment."""

"""The front of gRPC."""

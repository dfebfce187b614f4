"""The Python client over real sockets."""

"""Many sequences over shared gRPC streams, on the service's side and on the caller's."""

"""The `tandem` command: starts the three services, and talks gRPC to an orchestrator."""

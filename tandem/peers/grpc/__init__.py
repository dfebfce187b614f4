"""Drafters and targets over gRPC: clients, connections, the calls of a text, deadlines."""

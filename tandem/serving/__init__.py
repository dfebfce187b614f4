"""What the services with an engine share: loading, readiness, and what they say of themselves."""

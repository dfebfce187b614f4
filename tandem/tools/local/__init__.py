"""The three services as processes on this machine: settings, start, readiness, stop."""

"""Running services, watched by their metrics."""

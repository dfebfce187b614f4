"""Reading traces: spans from files or a query API, their clocks, their requests."""

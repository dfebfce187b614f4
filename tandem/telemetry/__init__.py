"""Traces, stage times and logs."""

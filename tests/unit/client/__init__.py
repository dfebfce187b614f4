"""Tests of tandem/client."""

"""Tests of tandem/shaping."""

"""Predicts from recorded rounds what other settings would have given."""

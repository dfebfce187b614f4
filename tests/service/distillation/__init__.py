"""Distillation from a target that is served."""

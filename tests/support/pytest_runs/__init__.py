"""What a run of pytest does and says beside its tests."""

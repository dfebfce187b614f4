"""Methods that look up how texts went on; no model."""

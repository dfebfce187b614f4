"""Trees and several drafts by exact expectation on recorded rounds of the embedded pair."""

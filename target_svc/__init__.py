"""The target service: scores drafts with the large model and emits exactly its law."""

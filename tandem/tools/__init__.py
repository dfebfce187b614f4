"""The `tandem` command and what it is made of; no service needs it."""

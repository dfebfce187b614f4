"""Who may call: certificates, tokens, and the files that they are read from."""

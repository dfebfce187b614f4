"""Who may call whom: certificates, tokens, and the files that they are read from."""

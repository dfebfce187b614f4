"""What another setting would have given, from recorded rounds."""

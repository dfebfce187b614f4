"""Reading a checkpoint, and changing its weights before they are laid out."""

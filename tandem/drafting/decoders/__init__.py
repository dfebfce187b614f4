"""Methods that draft with one small decoder: chains and trees of its tokens."""

"""Tool calls: how each family of models writes them, forced by a grammar, read back from text."""

"""Our own forward of the standard decoder."""

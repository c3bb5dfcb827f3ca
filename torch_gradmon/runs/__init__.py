"""The run directory: write it, read it, export it."""

"""A run on a terminal: what its tables and its live view are made of, and how they are drawn."""

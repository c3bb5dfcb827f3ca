"""The rules of the diagnosis."""

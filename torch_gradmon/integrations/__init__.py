"""Adapters, one file per trainer; each trainer is imported only in its own file."""

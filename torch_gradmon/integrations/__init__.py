"""Adapters, one file for each trainer; a trainer is imported in its own file only."""

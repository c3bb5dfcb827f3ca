"""Optional behaviour."""

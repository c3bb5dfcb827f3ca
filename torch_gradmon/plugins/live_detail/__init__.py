"""Changes of what is measured, requested during a run."""

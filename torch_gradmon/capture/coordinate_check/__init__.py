"""The coordinate check of a training."""

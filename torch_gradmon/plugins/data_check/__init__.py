"""Checks of batches and of the loss, from what goes into the model and what comes back to its output."""

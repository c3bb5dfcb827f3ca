"""Clipping by a limit that follows the gradients."""

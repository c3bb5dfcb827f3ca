"""Outputs, inputs and gradients of modules."""

"""Compares what must be equal on all ranks: parameters, gradients, the state of optimizers, learning rates."""

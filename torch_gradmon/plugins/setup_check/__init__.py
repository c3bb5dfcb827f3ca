"""Checks of how a model, its optimizers and its data are put together."""

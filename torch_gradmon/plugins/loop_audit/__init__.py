"""Watch the training loop itself: mistakes that no statistics tell, such as gradients that are never cleared.

All of it follows from hooks on one small parameter for each optimizer, on every step, monitored or not. No device is synchronised
but to confirm a suspicion, a few times in a training.
"""

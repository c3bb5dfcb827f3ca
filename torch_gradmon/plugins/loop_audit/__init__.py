"""Audit of the training loop: mistakes that no statistic reveals, such as gradients that are never cleared.

Hooks on one small parameter for each optimizer suffice, in every step, monitored or not. The audit synchronises a device only
to confirm a suspicion, a few times in a training.
"""

"""Hooks on the loop: forward, backward, optimizer, scaler."""

"""Attention, head by head."""

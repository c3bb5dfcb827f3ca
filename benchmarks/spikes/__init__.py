"""Spike rules side by side: on labelled curves of real runs, on made-up ones whose truth is known, and on what must always hold."""

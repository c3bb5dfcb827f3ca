"""Comparison of spike rules: on labelled curves of real runs, on synthetic ones with known spikes, and on invariants."""

"""The report on one step: its spikes, the signals around it, the parameters that moved, and the recovery."""

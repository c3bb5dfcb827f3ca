"""The comparison of two runs: which values are compared, in which order, and where the runs diverge."""

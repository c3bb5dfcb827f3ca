"""What two runs have in common: which of their values are compared, in which order, and where they part."""

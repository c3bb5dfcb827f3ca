"""Changes to the cadence and preset, requested during a run."""

"""Several runs beside each other: one row for each."""

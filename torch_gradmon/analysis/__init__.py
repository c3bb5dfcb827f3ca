"""What is computed from a run, finished or not: diagnosis, comparison, plots, reports."""

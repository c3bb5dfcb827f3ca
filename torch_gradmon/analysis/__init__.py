"""What is made of a run when it is over, or between two steps: diagnosis, comparison, plots, reports."""

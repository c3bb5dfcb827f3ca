"""Pages of the documentation about faulty and healthy runs, made from real trainings: ``make gallery``."""

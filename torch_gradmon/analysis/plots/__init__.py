"""Pictures of a run: the same figures in notebooks, on dashboards, in the report and on paper."""

"""Figures of a run, for notebooks, dashboards, the report and papers."""

"""A run as tables for other programs: Parquet, CSV, JSON lines, Arrow and pandas."""

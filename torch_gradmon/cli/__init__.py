"""The command ``gradmon``."""

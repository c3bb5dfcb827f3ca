"""The monitor, and the loop that it follows."""

"""A run on a terminal: the content of its tables and of its live view, and their drawing."""

"""What the methods of the facade do."""

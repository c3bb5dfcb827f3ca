"""What takes records."""

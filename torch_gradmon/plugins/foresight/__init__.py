"""Signs of a divergence before the loss shows it."""

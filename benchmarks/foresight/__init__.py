"""How early signals tell of a divergence: small trainings that are driven over the edge, and sound ones beside them."""

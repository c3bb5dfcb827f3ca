"""Acting on a spike: what may be done about one, who decides it, and how a step is made as if its batch had never come."""

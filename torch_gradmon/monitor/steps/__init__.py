"""What carries out the actions of the step machine: steps that open, measure and close."""

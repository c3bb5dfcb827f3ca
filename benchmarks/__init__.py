"""What torch_gradmon costs, measured beside what else there is."""

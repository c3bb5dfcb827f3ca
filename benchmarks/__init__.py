"""The cost of torch_gradmon, measured beside alternatives."""

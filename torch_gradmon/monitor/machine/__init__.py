"""The step machine: from events and the phase of a step to actions. No tensors, no torch."""

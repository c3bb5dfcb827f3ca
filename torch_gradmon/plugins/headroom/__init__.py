"""How far the learning rate is from the one at which the loss rises."""

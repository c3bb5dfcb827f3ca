"""A page on this machine that follows runs while they are written. Reads run directories only; the training does not know of it."""

#: Where the page is, unless another one is asked for.
PORT = 8642

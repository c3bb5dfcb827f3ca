"""A page on this machine that follows runs while they are written. Reads run directories only; the training does not know of it."""

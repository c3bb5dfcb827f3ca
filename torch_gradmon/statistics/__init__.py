"""One-pass statistics of tensors: the columns, their algebra, and the kernels that fill them."""

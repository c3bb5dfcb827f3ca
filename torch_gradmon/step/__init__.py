"""The values of one step: what is planned, buffered, exchanged, read back, and made into a record."""

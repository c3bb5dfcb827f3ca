"""A change of what is measured, asked for while a run goes on."""

"""Where values come from: hooks on parameters, optimizers and modules, and what is measured when they fire."""

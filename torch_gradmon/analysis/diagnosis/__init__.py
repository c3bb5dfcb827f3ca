"""What is wrong with a training, where, and what to do: rules over the records of a run."""

from .findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding"]

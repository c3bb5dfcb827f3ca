"""Rules over the records of a run: what is wrong with a training, where, and what to do."""

from .findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding"]

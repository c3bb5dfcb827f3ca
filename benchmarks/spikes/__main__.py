"""``python -m benchmarks.spikes``."""

from .run import main

main()

"""``python -m torch_gradmon`` is the command ``gradmon``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m flaxformer_min` is the command `flaxformer-min`."""

import sys

from flaxformer_min.cli import main

if __name__ == "__main__":
    sys.exit(main())

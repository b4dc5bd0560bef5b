"""Train a translation model: python train.py [CONFIG] [--workdir RUN] [--model.d-ff 512 ...].

The same program as `flaxformer-min train`; `--help` lists every setting.
"""

import sys

from flaxformer_min.cli import train_command

if __name__ == "__main__":
    sys.exit(train_command(prog="train.py"))

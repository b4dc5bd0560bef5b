"""The paper's big model on WMT 2014 English-German (table 3 "big"; sections 5.1-5.4 and 6.1).

As `wmt14_base.py`, with the sizes, the dropout and the 300,000 steps of "big"; the paper took 3.5
days on 8 P100 GPUs and averages the last 20 checkpoints.

FLOPs of a step: 75.6 M parameters in the encoder, 100.8 M in the decoder and 37.9 M in the output
projection: 6 · 214 M · 25,000 = 32 TFLOP and a few per cent for attention; 300,000 steps are 9.6
EFLOP: at 100 TFLOP/s sustained 27 hours.
"""

import dataclasses
import runpy
from pathlib import Path

base = runpy.run_path(str(Path(__file__).with_name("wmt14_base.py")))["config"]
config = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
    training=dataclasses.replace(base.training, steps=300_000, keep_checkpoints=20),
)

"""The paper's big model on WMT 2014 English-German (table 3 "big", sections 5.1-5.4 and 6.1).

As `wmt14_base.py`, with the sizes, the dropout and the 300,000 steps of "big". At its 1.0 s a step
10 minutes are 600 steps; the last 20 checkpoints, of 2.6 GB each, are averaged.

    python train.py configs/wmt14_big.py --data.download

A step, at 6 FLOP for each parameter and token that meet:

    encoder         75.6 M    11.3 TFLOP
    decoder        100.8 M    15.1 TFLOP
    output          37.9 M     5.7 TFLOP
    together       214.2 M    32.1 TFLOP

and 0.71 TFLOP for the scores and sums of attention. So 300,000 steps are 9.9 EFLOP: 27 hours at 100
TFLOP/s sustained, 270 hours at 10. The paper took 3.5 days on 8 P100 GPUs.
"""

import dataclasses
import runpy
from pathlib import Path

base = runpy.run_path(str(Path(__file__).with_name("wmt14_base.py")))["config"]
config = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
    training=dataclasses.replace(
        base.training,
        steps=300_000,
        save_every=600,
        keep_checkpoints=20,
        average_checkpoints=20,
    ),
)

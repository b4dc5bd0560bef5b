"""The paper's base model on WMT 2014 English-German (sections 5.1-5.4 and 6.1, table 3 "base").

Needs accelerators, and 4.5 M pairs that tfds downloads and prepares:

    python train.py configs/wmt14_base.py --data.download

Every number is the paper's. What differs: the 37,000 shared pieces are of a unigram model, not of
byte-pair encoding; and a batch is packed rows, not sentences of about one length. 200 rows of 128
places, full to a few per cent, are the paper's 25,000 source and 25,000 target tokens, and divide
among 2, 4, 5 or 8 devices. A pair that needs more than 128 places is left out, and counted.

The paper averages the last 5 checkpoints, written at 10-minute intervals, which are 1,500 steps at
its 0.4 s a step. Each takes 0.76 GB. `train.py` translates with the mean if that is better than the
best of them alone on newstest2013, the validation split. The test split is newstest2014.

A step, at 6 FLOP for each parameter and token that meet:

    encoder         18.9 M     2.8 TFLOP
    decoder         25.2 M     3.8 TFLOP
    output          18.9 M     2.8 TFLOP
    together        63.1 M     9.5 TFLOP

and 0.35 TFLOP for the scores and sums of attention. So 100,000 steps are 0.98 EFLOP: 2.7 hours at
100 TFLOP/s sustained, 27 hours at 10. The paper took 12 hours on 8 P100 GPUs.
"""

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="tfds:wmt14_translate/de-en",
        languages="en-de",
        source_row_length=128,
        target_row_length=128,
        rows_per_batch=200,
        tokenizer_sample=2_000_000,
    ),
    model=ModelConfig(
        vocab_size=37_000,
        num_layers=6,
        d_model=512,
        d_ff=2048,
        num_heads=8,
        dropout=0.1,
        norm="post",
        positional_encoding="interleaved",
        embeddings="shared",
    ),
    training=TrainingConfig(
        steps=100_000,
        warmup_steps=4_000,
        learning_rate_scale=1.0,
        adam_b1=0.9,
        adam_b2=0.98,
        adam_epsilon=1e-9,
        label_smoothing=0.1,
        log_every=100,
        validate_every=6_000,
        validation_sentences=3_000,  # all of newstest2013
        save_every=1_500,
        keep_checkpoints=5,
        average_checkpoints=5,
    ),
    decoding=SearchConfig(beam_size=4, length_penalty=0.6, max_extra_tokens=50),
)

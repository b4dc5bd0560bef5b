"""The paper's base model on WMT 2014 English-German (sections 5.1-5.4 and 6.1, table 3 "base").

Needs the prepared tfds set and accelerators; the paper took 12 hours on 8 P100 GPUs for 100,000
steps. 4.5 M pairs, 37,000 shared pieces, about 25,000 source and 25,000 target tokens a batch: 196
rows of 128 places, nearly full because rows are packed (rows must divide by the devices; 200 do by
2, 4, 5 and 8, and hold 25,600 places a side).

    python train.py configs/wmt14_base.py --data.download     # prepares the set first
    python train.py configs/wmt14_base.py --model.dtype bfloat16

FLOPs of a step: 6 for each parameter that multiplies a token. Without the embedding lookup that is
18.9 M in the encoder for each source token, and 25.2 M in the decoder and 18.9 M in the output
projection for each target token: 6 · (18.9 M + 44.1 M) · 25,000 = 9.5 TFLOP, and a few per cent
more for attention. So 100,000 steps are 0.95 EFLOP: at 100 TFLOP/s sustained 2.6 hours, at 10
TFLOP/s 26 hours.

The paper averages the last 5 checkpoints, written at 10-minute intervals (section 6.1).
"""

from flaxformer_min.config import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig

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
        validate_every=5_000,
        save_every=1_000,
        keep_checkpoints=5,
    ),
    decoding=DecodingConfig(beam_size=4, length_penalty=0.6, max_extra_tokens=50),
)

"""Image captions, English into German (Multi30k): 29,000 pairs, a small model, a CPU is enough.

Needs a folder with train.en, train.de, val.en, val.de and test2016.en, test2016.de (also .gz):

    python train.py configs/multi30k_en_de.py --data.corpus text:DIR

`--data.languages de-en` turns it round.
"""

from flaxformer_min.config import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="text:data/multi30k",
        languages="en-de",
        source_row_length=64,
        target_row_length=68,  # German has 6 % more pieces: 0.4 % of the places are padding
        rows_per_batch=64,
    ),
    model=ModelConfig(
        vocab_size=6_000,
        num_layers=4,
        d_model=128,
        d_ff=256,
        num_heads=4,
        dropout=0.3,
        norm="pre",
    ),
    training=TrainingConfig(
        steps=10_000,
        warmup_steps=1_000,
        learning_rate_scale=1.0,
        validate_every=500,
        save_every=500,
    ),
    decoding=DecodingConfig(beam_size=5, length_penalty=1.0),
)

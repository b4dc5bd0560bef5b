"""Image captions, English into German (Multi30k): 29,000 pairs, a small model, a CPU is enough.

Needs a folder with train.en, train.de, val.en, val.de and test2016.en, test2016.de (also .gz):

    python train.py configs/multi30k_en_de.py --data.corpus text:DIR

`--data.languages de-en` turns it round. At 1.3 steps a second on one core of a 2.5 GHz Xeon it
takes about an hour, and reaches 39.06 BLEU on the validation split and 38.60 on test2016, cased
(docs/results.md).
"""

from flaxformer_min.config import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="text:data/multi30k",
        languages="en-de",
        source_row_length=64,
        target_row_length=68,  # German has 6 % more pieces: 0.4 % of the places are padding
        rows_per_batch=32,
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
        steps=5_000,
        warmup_steps=1_000,
        cooldown_steps=2_500,
        learning_rate_scale=1.5,
        validate_every=500,
        validation_sentences=1_014,
        save_every=500,
        best_by="bleu",
    ),
    decoding=DecodingConfig(beam_size=5, length_penalty=1.0),
)

"""Image captions, English into German (Multi30k): 29,000 pairs, a small model, a CPU is enough.

Needs a folder with train.en, train.de, val.en, val.de and test2016.en, test2016.de (also .gz):

    python train.py configs/multi30k_en_de.py --data.corpus text:DIR

`--data.languages de-en --workdir runs/multi30k_de_en` trains the reverse direction. At 3 steps a
second on one core of a 2.45 GHz EPYC it takes about two hours, and reaches 41.21 BLEU on the
validation split and 39.54 on test2016, cased, by an exact search. With its own translations as more
text, `flaxformer-min distill`, it reaches 41.2 on test2016, the mean of three seeds
(docs/results.md).
"""

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="text:data/multi30k",
        languages="en-de",
        source_row_length=64,
        target_row_length=68,  # German has 6 % more pieces: 0.6 % of the places are padding
        rows_per_batch=16,
        subword_sampling=0.3,
    ),
    model=ModelConfig(
        vocab_size=6_000,
        num_layers=4,
        d_model=128,
        d_ff=256,
        num_heads=4,
        dropout=0.2,
        norm="pre",
    ),
    training=TrainingConfig(
        steps=20_000,
        warmup_steps=2_000,
        cooldown_steps=12_000,
        learning_rate_scale=1.518,  # at its highest 0.003
        validate_every=2_000,
        validation_sentences=1_014,
        save_every=1_000,
        best_by="bleu",
    ),
    decoding=SearchConfig(beam_size=5, length_penalty=1.0),
)

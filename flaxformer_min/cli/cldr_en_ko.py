"""The default config: English phrases into Korean, from the embedded CLDR corpus, on a CPU.

50,000 phrases for training, and 1,000 each for validation and test. A small pre-norm model without
dropout and label smoothing, because the translations are deterministic. Duration and results are in
docs/results.md.
"""

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="cldr:en-ko",
        source_row_length=40,
        target_row_length=44,
        rows_per_batch=24,
    ),
    model=ModelConfig(
        vocab_size=1_500,
        num_layers=2,
        d_model=128,
        d_ff=512,
        num_heads=4,
        dropout=0.0,
        norm="pre",
    ),
    training=TrainingConfig(
        steps=1_300,
        warmup_steps=150,
        cooldown_steps=650,
        label_smoothing=0.0,
        log_every=100,
        validate_every=650,
        save_every=650,
        validation_sentences=100,
    ),
    decoding=SearchConfig(beam_size=4, length_penalty=0.6),
)

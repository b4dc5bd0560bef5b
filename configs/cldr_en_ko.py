"""English phrases into Korean, from the embedded CLDR corpus: the default, for a laptop."""

from flaxformer_min.config import Config, DataConfig, ModelConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="cldr:en-ko", source_row_length=64, target_row_length=64, rows_per_batch=32
    ),
    model=ModelConfig(
        vocab_size=2000, num_layers=3, d_model=128, d_ff=512, num_heads=4, dropout=0.0, norm="pre"
    ),
    training=TrainingConfig(
        steps=1500,
        warmup_steps=150,
        learning_rate_scale=1.0,
        cooldown_steps=500,
        label_smoothing=0.0,
        validate_every=500,
        save_every=500,
        validation_sentences=100,
    ),
)

"""Software documentation, English into Korean (LibreOffice's help): 16,000 pairs, a CPU is enough.

benchmarks/libreoffice.py makes the text of two packages, also for other languages:

    python benchmarks/libreoffice.py help-en-us help-ko data/libreoffice_en_ko
    python train.py configs/libreoffice_en_ko.py

`--data.languages ko-en --workdir runs/libreoffice_ko_en` trains the reverse direction. All 6,000
steps (17 epochs) take 49 minutes of one core of an EPYC (Zen 4), and reach 39.7 BLEU of characters
and 34.9 chrF2 on the test split (docs/results.md).
"""

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="text:data/libreoffice_en_ko",
        languages="en-ko",
        source_row_length=96,
        target_row_length=96,
        rows_per_batch=8,
    ),
    model=ModelConfig(
        vocab_size=8_000,
        num_layers=3,
        d_model=192,
        d_ff=512,
        num_heads=4,
        dropout=0.3,
        norm="pre",
    ),
    training=TrainingConfig(
        optimizer="muon",
        steps=6_000,
        warmup_steps=400,
        cooldown_steps=4_000,
        learning_rate_scale=0.831,  # at its highest 0.003
        validate_every=1_000,
        validation_sentences=1_000,  # all of them
        save_every=1_000,
        best_by="bleu",
    ),
    decoding=SearchConfig(beam_size=4, length_penalty=1.0),
)

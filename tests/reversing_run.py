"""A run that has learned, in a minute, to reverse the order and the letters of color words."""

import random
from pathlib import Path

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig
from flaxformer_min.experiment.run import train

WORDS = "red green blue house door window tree river stone cloud bird fish".split()


def reversed_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return texts of two to six words, and the same letters backwards."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) for _ in range(count)]
    return [(text, " ".join(word[::-1] for word in reversed(text.split()))) for text in texts]


def train_reversing_run(folder: str | Path, steps: int = 800, **settings) -> Path:
    """Train the run and return its folder. `settings` are those of the model."""
    small = {"vocab_size": 300, "num_layers": 2, "d_model": 64, "d_ff": 128, "num_heads": 4}
    pairs = reversed_pairs(1100)
    config = Config(
        data=DataConfig(
            source_row_length=32, target_row_length=32, rows_per_batch=16, languages="en-xx"
        ),
        model=ModelConfig(**{**small, **settings}),
        training=TrainingConfig(
            optimizer="muon",
            steps=steps,
            warmup_steps=100,
            learning_rate_scale=1.5,
            validation_sentences=0,
            validate_every=steps,
            save_every=steps,
        ),
        decoding=SearchConfig(max_extra_tokens=20),
    )
    train(config, folder, pairs={"train": pairs[:1000], "validation": pairs[1000:]})
    return Path(folder)

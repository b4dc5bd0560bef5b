"""Make tests/data/golden_run and its expected translations: python tests/make_golden_run.py

Run it once for each version of the format, and never again: the folder shows that runs of older
versions can still be read.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig
from flaxformer_min.data.corpora import read_pairs
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.experiment.run import train

GOLDEN = ROOT / "tests" / "data" / "golden_run"
EXPECTED = GOLDEN.with_name("golden_run_expected.json")

CONFIG = Config(
    data=DataConfig(
        corpus="cldr:en-de", source_row_length=40, target_row_length=40, rows_per_batch=16
    ),
    model=ModelConfig(vocab_size=360, num_layers=1, d_model=10, d_ff=20, num_heads=2, dropout=0.0),
    training=TrainingConfig(
        steps=5_000,
        warmup_steps=200,
        cooldown_steps=2_500,
        label_smoothing=0.0,
        log_every=1_000,
        validate_every=5_000,
        save_every=5_000,
        validation_sentences=0,
        keep_checkpoints=1,
    ),
    decoding=SearchConfig(beam_size=4, length_penalty=1.0, max_extra_tokens=20),
)


def main() -> None:
    """Train, keep what is needed to translate and to continue, and record the translations."""
    with tempfile.TemporaryDirectory() as scratch:  # checkpoints name the folder they were made in
        run = train(CONFIG, Path(scratch, "golden_run")).run
        others = shutil.ignore_patterns("lock", "tensorboard")
        shutil.copytree(run.path, GOLDEN, ignore=others)
    translator = Translator.load(GOLDEN)
    pairs = read_pairs(CONFIG.data.corpus, "test")[::100]
    best = translator.hypotheses([source for source, _ in pairs])
    scored = translator.score(pairs)
    records = [
        {
            "source": source,
            "translation": found.text,
            "log_prob": round(found.log_prob, 6),
            "reference": reference,
            "log_prob_of_reference": round(of_reference.log_prob, 6),
        }
        for (source, reference), (found, *_), of_reference in zip(pairs, best, scored, strict=True)
    ]
    EXPECTED.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

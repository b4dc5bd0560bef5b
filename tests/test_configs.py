"""The config files: each loads, and the paper's are the paper's, number by number."""

import csv
import runpy
from pathlib import Path

import pytest

from flaxformer_min.config import Config

CONFIGS = Path(__file__).parents[1] / "configs"


def load(name):
    return runpy.run_path(str(CONFIGS / f"{name}.py"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_file_is_a_recipe_with_a_config(path):
    module = runpy.run_path(str(path))
    assert isinstance(module["config"], Config)
    assert len(module["__doc__"].splitlines()) > 2


BOTH = {
    "model.vocab_size": (37_000, "5.1"),
    "model.embeddings": ("shared", "3.4"),
    "model.num_layers": (6, "3.1"),
    "model.norm": ("post", "3.1"),
    "model.positional_encoding": ("interleaved", "3.5"),
    "model.attention_dropout": (0.0, "5.4"),
    "training.adam_b1": (0.9, "5.3"),
    "training.adam_b2": (0.98, "5.3"),
    "training.adam_epsilon": (1e-9, "5.3"),
    "training.warmup_steps": (4_000, "5.3"),
    "training.learning_rate_scale": (1.0, "5.3"),
    "training.cooldown_steps": (0, "5.3"),
    "training.clip_norm": (None, "5.3"),
    "training.label_smoothing": (0.1, "5.4"),
    "decoding.beam_size": (4, "6.1"),
    "decoding.length_penalty": (0.6, "6.1"),
    "decoding.max_extra_tokens": (50, "6.1"),
}
BASE = {
    "model.d_model": (512, "table 3"),
    "model.d_ff": (2048, "table 3"),
    "model.num_heads": (8, "table 3"),
    "model.dropout": (0.1, "5.4"),
    "training.steps": (100_000, "5.2"),
    "training.keep_checkpoints": (5, "6.1"),
}
BIG = {
    "model.d_model": (1024, "table 3"),
    "model.d_ff": (4096, "table 3"),
    "model.num_heads": (16, "table 3"),
    "model.dropout": (0.3, "table 3"),
    "training.steps": (300_000, "5.2"),
    "training.keep_checkpoints": (20, "6.1"),
}


@pytest.mark.parametrize("name, numbers", [("wmt14_base", BOTH | BASE), ("wmt14_big", BOTH | BIG)])
def test_the_papers_recipes_follow_the_paper(name, numbers):
    config = load(name)["config"]
    for path, (expected, section) in numbers.items():
        group, field = path.split(".")
        assert getattr(getattr(config, group), field) == expected, f"{path}, section {section}"


@pytest.mark.parametrize("name", ["wmt14_base", "wmt14_big"])
def test_a_batch_of_the_papers_recipes_has_about_25000_tokens_a_side(name):
    """Section 5.1. Packed rows are full to a few per cent."""
    data = load(name)["config"].data
    for length in (data.source_row_length, data.target_row_length):
        assert data.rows_per_batch * length == pytest.approx(25_000, rel=0.05)
    assert data.corpus == "tfds:wmt14_translate/de-en"


def test_the_chatbot_table_becomes_files_without_a_question_in_two_splits(tmp_path):
    table = tmp_path / "table.csv"
    with open(table, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Q", "A", "label"])
        for number in range(400):
            writer.writerow([f"질문 {number % 150}, 뭐야?", f"대답 {number}", 0])
    load("korean_chatbot")["prepare"](table, tmp_path / "out")
    questions, pairs = {}, 0
    for split in ("train", "val", "test"):
        lines = [
            (tmp_path / "out" / f"{split}.{side}").read_text(encoding="utf-8").splitlines()
            for side in ("question", "answer")
        ]
        assert len(lines[0]) == len(lines[1]) > 0
        questions[split], pairs = set(lines[0]), pairs + len(lines[0])
    assert pairs == 400
    assert not questions["train"] & (questions["val"] | questions["test"])
    assert not questions["val"] & questions["test"]

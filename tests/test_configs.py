"""The config files: each loads, and the paper's are the paper's, number by number."""

import csv
import dataclasses
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flaxformer_min.cli.train import DEFAULT_CONFIG
from flaxformer_min.config import Config
from flaxformer_min.data.corpora import read_pairs
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
SPLITS = ("train", "val", "test")
SYLLABLES = "ba de fi go hu ka le mi no pu ra se ti vo zu".split()


def load(name):
    return runpy.run_path(str(CONFIGS / f"{name}.py"))


@pytest.mark.parametrize(
    "path", [*sorted(CONFIGS.glob("*.py")), DEFAULT_CONFIG], ids=lambda path: path.stem
)
def test_every_config_file_is_a_recipe_with_a_config(path):
    module = runpy.run_path(str(path))
    assert isinstance(module["config"], Config)
    assert len(module["__doc__"].splitlines()) > 2


BOTH = {
    "data.corpus": ("tfds:wmt14_translate/de-en", "5.1"),
    "data.languages": ("en-de", "5.1"),
    "data.subword_sampling": (0.0, "5.1"),
    "model.vocab_size": (37_000, "5.1"),
    "model.source_vocab_size": (None, "5.1: shared"),
    "model.embeddings": ("shared", "3.4"),
    "model.num_layers": (6, "3.1"),
    "model.norm": ("post", "3.1"),
    "model.positional_encoding": ("interleaved", "3.5"),
    "model.attention_dropout": (0.0, "5.4"),
    "model.feed_forward_dropout": (0.0, "5.4"),
    "training.gradient_accumulation": (1, "5.2"),
    "training.adam_b1": (0.9, "5.3"),
    "training.adam_b2": (0.98, "5.3"),
    "training.adam_epsilon": (1e-9, "5.3"),
    "training.warmup_steps": (4_000, "5.3"),
    "training.learning_rate_scale": (1.0, "5.3, equation 3"),
    "training.cooldown_steps": (0, "5.3, equation 3"),
    "training.clip_norm": (None, "5.3"),
    "training.label_smoothing": (0.1, "5.4"),
    "training.r_drop": (0.0, "5.4"),
    "training.simcut": (0.0, "5.4"),
    "training.ema_decay": (0.0, "6.1"),
    "training.patience": (None, "5.2"),
    "decoding.beam_size": (4, "6.1"),
    "decoding.length_penalty": (0.6, "6.1"),
    "decoding.max_extra_tokens": (50, "6.1"),
}
BASE = {
    "model.d_model": (512, "3.1"),
    "model.d_ff": (2048, "3.3"),
    "model.num_heads": (8, "3.2.2"),
    "model.dropout": (0.1, "5.4"),
    "training.steps": (100_000, "5.2"),
    "training.average_checkpoints": (5, "6.1"),
    "training.keep_checkpoints": (5, "6.1"),
}
BIG = {
    "model.d_model": (1024, "table 3"),
    "model.d_ff": (4096, "table 3"),
    "model.num_heads": (16, "table 3"),
    "model.dropout": (0.3, "table 3"),
    "training.steps": (300_000, "5.2"),
    "training.average_checkpoints": (20, "6.1"),
    "training.keep_checkpoints": (20, "6.1"),
}
SECONDS_A_STEP = {"wmt14_base": 0.4, "wmt14_big": 1.0}
"""Section 5.2."""

MILLIONS = {"wmt14_base": 65, "wmt14_big": 213}
"""Parameters, as table 3 has them, rounded; ours lack biases in attention."""


@pytest.mark.parametrize("name, numbers", [("wmt14_base", BOTH | BASE), ("wmt14_big", BOTH | BIG)])
def test_the_papers_recipes_follow_the_paper(name, numbers):
    config = load(name)["config"]
    for path, (expected, section) in numbers.items():
        group, field = path.split(".")
        assert getattr(getattr(config, group), field) == expected, f"{path}, section {section}"


@pytest.mark.parametrize("name", SECONDS_A_STEP)
def test_the_papers_recipes_have_the_papers_other_numbers(name):
    """Tokens a batch (5.1), d_k = d_v (table 3), checkpoints every 10 minutes (6.1).

    Packed rows are full to a few per cent.
    """
    config = load(name)["config"]
    data, training = config.data, config.training
    for length in (data.source_row_length, data.target_row_length):
        assert data.rows_per_batch * length == pytest.approx(25_000, rel=0.05)
    assert config.model.d_model / config.model.num_heads == 64
    assert training.save_every * SECONDS_A_STEP[name] == 600
    assert training.validate_every % training.save_every == 0, "only what is saved can be the best"


@pytest.mark.parametrize("name", SECONDS_A_STEP)
def test_the_docstrings_of_the_papers_recipes_count_right(name):
    """From the parameters that the model has, and 25,000 tokens a side.

    Reading a token takes 2 FLOP for each parameter, learning from it 4 more. An attention of
    n keys takes as much for scores and sums as 2 · n · d_model parameters would.
    """
    module = load(name)
    config, text, tokens = module["config"], module["__doc__"], 25_000
    token = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    batch = Batch(Tokens(token, token, token), Tokens(token, token, token))
    shapes = jax.eval_shape(Transformer(config.model).init, jax.random.key(0), batch)["params"]
    counts = {
        row: sum(leaf.size for leaf in jax.tree.leaves(shapes[part]))
        for row, part in {"encoder": "encoder", "decoder": "decoder", "output": "embedding"}.items()
    }
    counts["together"] = sum(counts.values())
    assert counts["together"] / 1e6 == pytest.approx(MILLIONS[name], rel=0.04)
    for row, count in counts.items():
        line = f"    {row:13}{count / 1e6:7.1f} M {6 * count * tokens / 1e12:7.1f} TFLOP\n"
        assert line in text

    sums = 3 * config.model.num_layers * 2 * config.data.target_row_length * config.model.d_model
    assert f"and {6 * sums * tokens / 1e12:.2f} TFLOP for the scores" in text
    flop = 6 * (counts["together"] + sums) * tokens * config.training.steps
    words = " ".join(text.split())
    assert f"{config.training.steps:,} steps are {flop / 1e18:.2g} EFLOP" in words
    fast, slow = (f"{float(f'{flop / rate / 3600:.2g}'):g} hours" for rate in (1e14, 1e13))
    assert f"{fast} at 100 TFLOP/s sustained, {slow} at 10." in words
    gigabytes = 3 * 4 * counts["together"] / 1e9  # parameters and Adam's two moments, float32
    assert re.search(r"([\d.]+) GB", words)[1] in (f"{gigabytes:.1f}", f"{gigabytes:.2f}")


@pytest.fixture
def small_wmt14(tmp_path, monkeypatch):
    """A folder of tfds where wmt14_translate is prepared by its own class, but for its content."""
    from tensorflow_datasets.translate.wmt14 import Wmt14Translate

    subsets = {}

    def split_generators(builder, _):
        subsets.update(builder.subsets)
        counts = {"train": 300, "validation": 3, "test": 1}
        return {split: builder._generate_examples(split, counts[split]) for split in subsets}

    def generate_examples(_, split, count):
        rng = random.Random(split)
        for number in range(count):
            words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(6)]
            yield number, {"en": " ".join(words), "de": " ".join(words[::-1]).title()}

    monkeypatch.setattr(Wmt14Translate, "_split_generators", split_generators)
    monkeypatch.setattr(Wmt14Translate, "_generate_examples", generate_examples)
    name, languages = "tfds:wmt14_translate/de-en", "en-de"
    read_pairs(name, "train", languages, str(tmp_path), download=True)
    assert (subsets["validation"], subsets["test"]) == (["newstest2013"], ["newstest2014"])
    return tmp_path


@pytest.mark.slow
def test_the_papers_base_model_is_trained_and_scored_on_a_small_set_of_the_same_features(
    small_wmt14,
):
    """Tokenizer on a bounded sample, a step, a save; then the restored model translates.

    One layer of six, in a process of its own, so that memory and time suffice.
    """
    run = small_wmt14 / "run"
    command = [sys.executable, "train.py", "configs/wmt14_base.py", "--workdir", str(run)]
    command += ["--data.cache-dir", str(small_wmt14), "--data.tokenizer-sample", "100"]
    command += ["--data.rows-per-batch", "1", "--data.source-row-length", "32"]
    command += ["--data.target-row-length", "32", "--training.steps", "1"]
    command += ["--model.num-layers", "1"]
    command += ["--training.validation-sentences", "0", "--decoding.max-extra-tokens", "3"]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Training the tokenizer on 100 pairs." in done.stdout
    assert "train: 300 pairs read, 0 with an empty side and 0 longer" in done.stdout
    assert "The mean of the checkpoints of steps 1:" in done.stdout
    assert "exact match = 0.0 % of 1 sentences" in done.stdout
    model, paper = RunFolder(run).model_config(), load("wmt14_base")["config"].model
    assert model.dtype == "float32"  # "auto" on a CPU
    assert dataclasses.replace(model, vocab_size=37_000, dtype="auto", num_layers=6) == paper
    assert 300 < model.vocab_size < 37_000, "what the sample carries"
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1]


def test_the_chatbot_table_becomes_a_corpus_without_a_question_in_two_splits(tmp_path):
    """Nor one that differs in spaces and punctuation only; the text is what is in the table."""
    table, folder = tmp_path / "table.csv", tmp_path / "out"
    rows = [
        (f"질문 {n % 150},{' ' * (n // 150)}뭐야{'?!…'[n // 150]}", f'"대답" {n}ㅋㅋ…')
        for n in range(400)
    ]
    with open(table, "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([("Q", "A", "label"), *((q, f" {a}\n", 0) for q, a in rows)])
    load("korean_chatbot")["prepare"](table, folder)
    languages = load("korean_chatbot")["config"].data.languages
    found = {name: list(read_pairs(f"text:{folder}", name, languages)) for name in SPLITS}
    expected = [(" ".join(question.split()), answer) for question, answer in rows]
    assert sorted(pair for split in found.values() for pair in split) == sorted(expected)
    asked = [{re.sub(r"\W", "", question) for question, _ in found[name]} for name in SPLITS]
    assert all(asked) and sum(map(len, asked)) == 150
    rule = load("korean_chatbot")["config"].data.normalization
    texts = [text for pair in expected for text in pair]
    tokenizer = train_tokenizer(texts, 300, tmp_path / "t", normalization=rule)
    for text in [*expected[0], "훨씬 좋아요", "ㅠㅠ 뷁"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text

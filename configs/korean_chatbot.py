"""Korean questions into answers (Song 2018, Chatbot_data_for_Korean): 11,800 pairs.

The data is a CSV file with the columns Q, A and label. This file turns it into text files, and is
the config that trains on them:

    python configs/korean_chatbot.py ChatbotData.csv data/korean_chatbot
    python train.py configs/korean_chatbot.py
    echo '배고파' | flaxformer-min translate runs/korean_chatbot

With another folder: `--data.corpus text:FOLDER`. A question stands in one split only, whatever its
answers, spaces and punctuation: 90 % train, 5 % validation, 5 % test. Many answers fit a question
and one is given, so scores are low and only compare two runs. Loss is lowest while the model gives
answers that fit any question, and BLEU peaks later: the best checkpoint is chosen by BLEU, which
for Korean counts characters, or morphemes where MeCab is installed.
"""

import csv
import hashlib
import sys
from pathlib import Path

from flaxformer_min.config import Config, DataConfig, ModelConfig, TrainingConfig

config = Config(
    data=DataConfig(
        corpus="text:data/korean_chatbot",
        languages="ko_question-ko_answer",
        source_row_length=48,
        target_row_length=64,
        rows_per_batch=32,
        normalization="identity",  # NFKC would take letters that stand alone, as in ㅋㅋ, apart
    ),
    model=ModelConfig(
        vocab_size=4_000,
        num_layers=3,
        d_model=128,
        d_ff=256,
        num_heads=4,
        dropout=0.3,
        norm="pre",
    ),
    training=TrainingConfig(
        steps=3_000,
        warmup_steps=500,
        cooldown_steps=1_000,
        validate_every=250,
        validation_sentences=1_000,  # all of them
        save_every=250,
        best_by="bleu",
    ),
)


def split_of(question: str) -> str:
    """The split of a question, the same for ever, by its letters and digits alone."""
    letters = "".join(filter(str.isalnum, question))
    draw = hashlib.sha256(letters.encode()).digest()[0]
    return "val" if draw < 13 else "test" if draw < 26 else "train"


def prepare(table: Path, folder: Path) -> None:
    """Write train, val and test files, one question or answer a line."""
    with open(table, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restval="")  # empty sides are left out by training
        if not {"Q", "A"} <= set(reader.fieldnames or ()):
            raise ValueError(f"{table} must have the columns Q and A; it has {reader.fieldnames}.")
        pairs = [(" ".join(row["Q"].split()), " ".join(row["A"].split())) for row in reader]
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        chosen = [pair for pair in pairs if split_of(pair[0]) == split]
        for side, ending in enumerate(("ko_question", "ko_answer")):
            lines = "".join(pair[side] + "\n" for pair in chosen)
            (folder / f"{split}.{ending}").write_text(lines, encoding="utf-8", newline="\n")
        print(f"{split}: {len(chosen):,} pairs")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python configs/korean_chatbot.py ChatbotData.csv FOLDER")
    try:
        prepare(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, csv.Error) as error:  # ValueError: also what is not UTF-8
        sys.exit(f"error: {error}")

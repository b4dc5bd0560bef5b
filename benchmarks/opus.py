"""Translate with an imported OPUS-MT model, beside `generate` of Hugging Face.

    python benchmarks/opus.py --corpus text:DIR --languages en-de [--model FOLDER]

FOLDER is a Marian model of Hugging Face. Without one, `transformers` writes one of the size of
OPUS-MT's (6 + 6 layers, d_model 512, swish, vocabulary 58,101) with random weights: each next token
is far likelier than most others, and one in some twenty is the end. The import becomes a run; both
translate the same lines from text to text by beam search without a length penalty, where both mean
the same by a score. Generation is in sorted, padded batches, in whichever number of threads it is
fastest. Needs the extra `marian`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    Contender,
    Run,
    alternate,
    arguments,
    cores,
    fastest,
    heaps_of_ours,
    machine,
    ratio,
    read_split,
    report,
)

OPUS_VOCABULARY = 58_101
"""Pieces of opus-mt-en-de and its like."""

EXTRA = 50
"""Tokens that a translation may have beyond those of its source: ours of its own, `generate`'s of
the longest in its batch."""


def main() -> None:
    """Measure and print one table."""
    parser = arguments(__doc__, "test")
    parser.add_argument("--model", type=Path, help="a Marian model; default: a random one")
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--beam-sizes", type=int, nargs="+", default=[4])
    args = parser.parse_args()
    lines = [source for source, _ in read_split(args, "test")[: args.sentences]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_random_model(args, Path(scratch))
        run = Path(scratch) / "run"
        import_seconds = import_run(folder, run)
        rows = [row for beam in args.beam_sizes for row in measure(args, folder, run, lines, beam)]
        config = json.loads((folder / "config.json").read_text())
    title = (
        f"{len(lines):,} lines of {args.corpus}; {config['encoder_layers']} + "
        f"{config['decoder_layers']} layers, d_model {config['d_model']}, vocabulary "
        f"{config['vocab_size']:,}, imported in {import_seconds:.1f} s; "
        f"{machine('jax', 'torch', 'transformers')}"
    )
    report(title, rows, args.json)


def write_random_model(args: argparse.Namespace, scratch: Path) -> Path:
    """Return the folder of a model of OPUS-MT's size, tokenizers and vocabulary included."""
    import sentencepiece
    import torch
    from transformers import MarianConfig, MarianMTModel

    texts = (text for pair in read_split(args, "train")[:30_000] for text in pair)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_prefix=str(scratch / "pieces"),
        vocab_size=8_000,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(str(scratch / "pieces.model"))
    pieces = [spm.id_to_piece(number) for number in range(spm.vocab_size())]
    pieces = [piece for piece in pieces if piece not in ("<unk>", "<s>", "</s>")]
    rest = OPUS_VOCABULARY - len(pieces) - 3
    vocabulary = ["</s>", "<unk>", *pieces, *(f"▁rare{i}" for i in range(rest)), "<pad>"]
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 6), ("ffn_dim", 2048), ("attention_heads", 8))
    }
    config = MarianConfig(
        **sides,
        vocab_size=OPUS_VOCABULARY,
        d_model=512,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=OPUS_VOCABULARY - 1,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=OPUS_VOCABULARY - 1,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = MarianMTModel(config)
    with torch.no_grad():
        # Logits have a standard deviation of about 7, so the likeliest of 58,101 is near 29.
        model.model.shared.weight.normal_(0, 0.3)
        model.model.shared.weight[-1] = 0
        model.final_logits_bias[0, 0] = 18
    model.generation_config.bad_words_ids = [[OPUS_VOCABULARY - 1]]
    model.save_pretrained(scratch / "model")
    folder = scratch / "model"
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(spm.serialized_model_proto())
    languages = {"source_lang": "eng", "target_lang": "deu"}
    (folder / "tokenizer_config.json").write_text(json.dumps(languages))
    return folder


def import_run(folder: Path, run: Path) -> float:
    """Import the model; return the seconds that took."""
    from flaxformer_min import import_model

    since = time.perf_counter()
    import_model(folder, run)
    return time.perf_counter() - since


def measure(
    args: argparse.Namespace, folder: Path, run: Path, lines: Sequence[str], beam: int
) -> list[dict[str, Any]]:
    """Return the rows of one beam size: ours and Hugging Face's."""
    mine = Contender("flaxformer_min", ours, run, lines, beam, heaps=heaps_of_ours(beam))
    tried = [
        Contender(f"generate, {size} a batch, {n} threads", generate, folder, lines, beam, size, n)
        for size in (16, 64)
        for n in sorted({1, cores()})
    ]
    peer = fastest(tried)
    alternate([mine, peer], args.rounds)
    equal = [
        one == other
        for one, other in zip(mine.runs[-1]["found"], peer.runs[-1]["found"], strict=True)
    ]
    rows = []
    for contender in (mine, peer):
        rows.append(
            {
                "who": contender.name,
                "beam": beam,
                "seconds": contender.median("seconds"),
                "lines/s": len(lines) / contender.median("seconds"),
                "ours : it": ratio(contender, mine),
                "start and first run, s": contender.first_seconds,
                "words a line": statistics.mean(
                    len(text.split()) for text in contender.runs[-1]["found"]
                ),
                "equal texts": sum(equal),
            }
        )
        contender.close()
    return rows


def ours(run: Path, lines: Sequence[str], beam: int) -> Run:
    """`Translator.translate`, as the command line calls it."""
    from flaxformer_min.system.devices import configure_cpu_devices

    configure_cpu_devices()

    from flaxformer_min.decoding.translator import Translator

    translator = Translator.load(run)
    options = {"beam_size": beam, "length_penalty": 0.0, "max_extra_tokens": EXTRA}

    def timed() -> dict[str, Any]:
        since = time.perf_counter()
        found = translator.translate(lines, **options)
        return {"seconds": time.perf_counter() - since, "found": [text.strip() for text in found]}

    return timed


def generate(folder: Path, lines: Sequence[str], beam: int, batch_size: int, threads: int) -> Run:
    """`MarianTokenizer` and `generate`, in batches of lines sorted by length."""
    import torch
    from transformers import MarianMTModel, MarianTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = MarianMTModel.from_pretrained(folder).eval()
    tokenizer = MarianTokenizer.from_pretrained(folder)
    unknown = tokenizer.convert_tokens_to_ids("<unk>")

    def timed() -> dict[str, Any]:
        since = time.perf_counter()
        lengths = [len(ids) for ids in tokenizer(list(lines)).input_ids]
        order = sorted(range(len(lines)), key=lambda number: -lengths[number])
        found = [""] * len(lines)
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            texts = [lines[number] for number in numbers]
            with torch.inference_mode():
                ids = model.generate(
                    **tokenizer(texts, return_tensors="pt", padding=True),
                    num_beams=beam,
                    length_penalty=0.0,
                    max_new_tokens=lengths[numbers[0]] + EXTRA,
                    max_length=None,
                    bad_words_ids=[[model.config.pad_token_id], [unknown]],
                )
            for number, text in zip(
                numbers, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
            ):
                found[number] = text.strip()
        return {"seconds": time.perf_counter() - since, "found": found}

    return timed


if __name__ == "__main__":
    main()

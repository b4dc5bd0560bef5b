"""Vocabularies as Marian allows them: .spm, YAML or JSON, and plain text with a piece a line."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_min.data.tokenizer import read_processor
from flaxformer_min.interop.files import read_file, read_json
from flaxformer_min.interop.vocabulary import (
    Specials,
    Vocabulary,
    make_vocabulary,
    pieces_by_id,
)
from flaxformer_min.interop.yaml import MOST_ENTRIES, read_mapping

LOGGER = logging.getLogger("flaxformer_min")

OLD_NAMES = {"eos": "</s>", "UNK": "<unk>"}
"""How Nematus names the pieces 0 and 1, and what Marian calls them."""


def read_vocabulary(path: Path, size: int) -> Vocabulary:
    """Return the vocabulary of `size` embeddings, whose special tokens it names itself.

    As in Marian, pieces of YAML or text behind the last embedding are dropped. The decoder starts
    with an embedding of zeros.
    """
    if path.suffix == ".spm":
        return _of_sentencepiece(path, size)
    if path.suffix in (".yml", ".yaml"):
        content = _with_new_names(_numbers(read_mapping(read_file(path), path), path))
    elif path.suffix == ".json":
        content = _with_new_names(read_json(path))
    else:
        content = _of_lines(read_file(path), path)
    kept = {
        piece: number
        for piece, number in content.items()
        if not isinstance(number, int) or number < size
    }
    for name in ("</s>", "<unk>"):
        if name not in kept:
            raise ValueError(f"{path} must have the piece {name!r}; it is missing.")
    if len(kept) < len(content):
        LOGGER.warning(
            "%s: its pieces from %s on have no embedding, and are read as unknown.",
            path,
            f"{size:,}",
        )
    specials = Specials(kept.get("<pad>"), kept["<unk>"], None, kept["</s>"])
    return make_vocabulary(pieces_by_id(kept, path, size), specials)


def _of_sentencepiece(path: Path, size: int) -> Vocabulary:
    processor = read_processor(read_file(path), path)
    if len(processor) != size:
        raise ValueError(
            f"{path} must have a piece for each of the model's {size:,} embeddings; it has "
            f"{len(processor):,}."
        )
    if processor.eos_id() < 0:
        raise ValueError(f"{path} must have a piece for the end of a text; it has none.")
    content = {processor.id_to_piece(number): number for number in range(size)}
    pad = processor.pad_id() if processor.pad_id() >= 0 else content.get("<pad>")
    specials = Specials(pad, processor.unk_id(), None, processor.eos_id())
    return make_vocabulary(pieces_by_id(content, path, size), specials)


def _numbers(content: Mapping[str, Any], path: Path) -> dict[str, int]:
    for piece, value in content.items():
        if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,9}", value):
            raise ValueError(f"{path}: {piece!r} must have a whole number; got {value!r:.80}.")
    return {piece: int(value) for piece, value in content.items()}


def _with_new_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pieces with Marian's names for 0 and 1, if they have none or those of Nematus."""
    named = {number: piece for piece, number in content.items() if isinstance(number, int)}
    renamed = dict(content)
    for number, (old, new) in enumerate(OLD_NAMES.items()):
        if new not in content and named.get(number, old) == old:
            renamed.pop(old, None)
            renamed[new] = number
    return renamed


def _of_lines(content: bytes, path: Path) -> dict[str, int]:
    try:
        lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text, a piece a line; {error}.") from error
    if len(lines) > MOST_ENTRIES:
        raise ValueError(f"{path} must have at most {MOST_ENTRIES:,} pieces; it has {len(lines):,}")
    pieces: dict[str, int] = {}
    for number, line in enumerate(lines):
        piece = line.removesuffix("\r")
        if not piece:
            raise ValueError(f"{path}, line {number + 1} must have a piece; it is empty.")
        if piece in pieces:
            raise ValueError(f"{path}, line {number + 1}: {piece!r} comes twice.")
        pieces[piece] = number
    return pieces

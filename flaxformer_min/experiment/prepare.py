"""From settings to encoded text: open the corpus, train the tokenizers, encode the splits."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_min.config import Config
from flaxformer_min.data.corpora import GIVEN, languages_of, read_pairs
from flaxformer_min.data.corpora.pairs import Pairs, as_pairs
from flaxformer_min.data.encoding import SEGMENTATIONS, EncodedPairs, encode_pairs
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.languages import join_languages
from flaxformer_min.storage.run_folder import RunFolder, Tokenizers
from flaxformer_min.system.distributed import gather, is_main_process, main_process_first
from flaxformer_min.system.files import cache_folder, write_atomically

LOGGER = logging.getLogger("flaxformer_min")

SPLITS = ("train", "validation", "test")

PAIRS_RULE = (
    'pairs must map "train" and "validation", and "test" if there is one, to sentence pairs'
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What training and validation read.

    config:     the settings, with the languages that the corpus names.
    pairs:      "train" and "validation", and "test" if it was given.
    encoded:    "train" and "validation" as token ids.
    """

    config: Config
    pairs: Mapping[str, Pairs]
    tokenizers: Tokenizers
    encoded: Mapping[str, EncodedPairs]


def prepare(
    run: RunFolder, config: Config, pairs: Mapping[str, Sequence[tuple[str, str]]] | None = None
) -> Prepared:
    """Open the text, begin the run with its tokenizers, and encode the text.

    `pairs` are the splits, instead of `config.data.corpus`. Raises ValueError for text that cannot
    be read or encoded, and for a run folder that holds something else.
    """
    with main_process_first("corpus"):
        config, splits = open_text(config, pairs)
    with main_process_first("tokenizer"):
        if is_main_process():
            tokenizers = run.begin(
                config, lambda paths: make_tokenizers(config, splits["train"], paths)
            )
        else:
            tokenizers = run.tokenizers()
    with main_process_first("encoded"):
        encoded = {
            name: encode(config, name, splits[name], tokenizers) for name in ("train", "validation")
        }
    check_agreement(config, encoded)
    return Prepared(config, splits, tokenizers, encoded)


def _with_languages(config: Config, languages: str) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, languages=languages))


def open_text(
    config: Config, pairs: Mapping[str, Sequence[tuple[str, str]]] | None
) -> tuple[Config, dict[str, Pairs]]:
    """Return the settings with the text's languages, and its splits."""
    if pairs is not None:
        splits = _given_splits(pairs)
        named = splits["train"].languages
        languages = config.data.languages or (join_languages(*named) if all(named) else "")
        data = dataclasses.replace(config.data, corpus=GIVEN)
        return _with_languages(dataclasses.replace(config, data=data), languages), splits
    languages = languages_of(config.data.corpus, config.data.languages, **corpus_options(config))
    config = _with_languages(config, join_languages(*languages))
    return config, {name: open_split(config, name) for name in ("train", "validation")}


def _given_splits(pairs: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, Pairs]:
    if not isinstance(pairs, Mapping):
        raise ValueError(f"{PAIRS_RULE}; got {type(pairs).__name__}.")
    unknown = [name for name in pairs if name not in SPLITS]
    missing = [name for name in ("train", "validation") if name not in pairs]
    if unknown or missing:
        got = ", ".join(map(repr, [*pairs][:5])) or "nothing"
        raise ValueError(f"{PAIRS_RULE}; got {got}.")
    return {name: as_pairs(split, f"pairs[{name!r}]") for name, split in pairs.items()}


def corpus_options(config: Config) -> dict[str, Any]:
    """Return where corpora are kept, and whether they may be downloaded."""
    return {"cache_dir": config.data.cache_dir, "download": config.data.download}


def open_split(config: Config, split: str) -> Pairs:
    """Return the sentence pairs of a split of the corpus."""
    return read_pairs(config.data.corpus, split, config.data.languages, **corpus_options(config))


def make_tokenizers(config: Config, pairs: Pairs, paths: tuple[Path, Path]) -> None:
    """Write the tokenizers: one of both languages, or one of each, from an even sample of pairs.

    They come from the cache if they were trained before, and from another run if this one begins
    with its parameters.
    """
    if config.training.init_from:
        _copy_tokenizers(config, RunFolder(config.training.init_from), paths)
        return
    if config.data.tokenizers == "imported":
        raise ValueError(
            "data.tokenizers='imported' needs the run that has these tokenizers. Name it with "
            "training.init_from, or choose data.tokenizers='trained'."
        )
    data, model = config.data, config.model
    stride = -(-len(pairs) // data.tokenizer_sample)

    @functools.cache
    def sample() -> list[tuple[str, str]]:
        chosen = pairs[::stride]
        LOGGER.info("Training the tokenizer on %s pairs.", f"{len(chosen):,}")
        return chosen

    def train_one(path: Path, vocab_size: int, sides: tuple[int, ...]) -> None:
        def lines() -> Iterator[str]:
            yield from (pair[side] for pair in sample() for side in sides)

        train_tokenizer(
            lines(),
            vocab_size,
            path,
            normalization=data.normalization,
            symbols=data.symbols,
            cache=cache_folder(data.cache_dir),
            fingerprint=f"{pairs.fingerprint()} {stride} {sides}",
        )

    if paths[0] == paths[1]:
        train_one(paths[0], model.vocab_size, (0, 1))
        return
    for side, vocab_size in enumerate((model.source_vocab_size, model.vocab_size)):
        train_one(paths[side], vocab_size, (side,))


def _copy_tokenizers(config: Config, former: RunFolder, paths: tuple[Path, Path]) -> None:
    former.check_model(config.model)
    _check_tokenizers(config, former)
    for tokenizer, path in zip(former.tokenizers(), paths, strict=True):
        write_atomically(path, tokenizer.model)


def _check_tokenizers(config: Config, former: RunFolder) -> None:
    for name in ("tokenizers", "normalization", "symbols"):
        needed, found = (getattr(each.data, name) for each in (former.config(), config))
        if found != needed:
            raise ValueError(
                f"data.{name} must be {needed!r}, as those of {former.path}, whose tokenizers "
                f"training.init_from takes; got {found!r}. Begin with the config.json of that run."
            )
    if config.data.subword_sampling:
        try:
            for tokenizer in former.tokenizers():
                tokenizer.encode_segmentations("a b", 2)
        except RuntimeError as error:  # of SentencePiece, for all kinds of models but one
            raise ValueError(
                "data.subword_sampling needs tokenizers that know the probability of each piece, "
                f"SentencePiece's unigram models; those of {former.path} are of another kind, such "
                "as BPE. Leave it at 0."
            ) from error


def encode(config: Config, split: str, pairs: Pairs, tokenizers: Tokenizers) -> EncodedPairs:
    """Return a split as token ids, from the cache if it was encoded before."""
    data = config.data
    lengths = data.source_row_length, data.target_row_length
    sampled = split == "train" and data.subword_sampling
    cache = cache_folder(data.cache_dir)
    try:
        encoded = encode_pairs(
            pairs,
            tokenizers,
            lengths,
            cache,
            pairs.fingerprint(),
            SEGMENTATIONS if sampled else 1,
            f"the {split} split",
        )
    except OSError as error:
        raise OSError(
            f"encoded text must be written to a cache, {cache}; {error}. Choose another folder "
            "with --data.cache-dir."
        ) from error
    LOGGER.info("%s: %s.", split, encoded.counts)
    return encoded


def check_agreement(config: Config, encoded: Mapping[str, EncodedPairs]) -> None:
    """Raise ValueError unless all processes were given the same settings and the same text.

    Otherwise they would take different steps, and wait for each other forever.
    """
    # Where and how each process reads the text may differ.
    own = {"corpus": "", "cache_dir": "", "workers": 0, "download": False}
    common = dataclasses.replace(config, data=dataclasses.replace(config.data, **own))
    mine = {"settings": common.to_json()} | {
        f"{name} pairs": split.digest for name, split in encoded.items()
    }
    for process, other in enumerate(gather("agreement", mine)):
        differing = [name for name in mine if mine[name] != other[name]]
        if differing:
            raise ValueError(
                "all processes must be given the same settings and the same text; the "
                f"{' and the '.join(differing)} of process {process} differ from this one's."
            )

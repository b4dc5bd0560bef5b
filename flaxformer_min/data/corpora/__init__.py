"""Corpora of sentence pairs with random access: `read_pairs(corpus, split)[i]`.

| corpus                       | content                                                        |
|------------------------------|----------------------------------------------------------------|
| `cldr:en-ko`                 | embedded phrases in any two CLDR locales, made on first use    |
| `text:DIR`                   | `DIR/train.en`, `DIR/train.de`, ..., or `DIR/train.tsv`        |
| `tfds:wmt14_translate/de-en` | any translation dataset of tensorflow_datasets                 |
| `text:DIR,text:OTHER*3`      | all of these; the pairs of the second count three times        |

Pairs are read on access, so a corpus may be larger than memory (except for compressed files),
and a pickled `Pairs` has the names of files, not their content. Pairs with an empty side are
included (see `is_empty`); the caller has to skip them.
"""

from pathlib import Path
from typing import Any

from flaxformer_min.data.corpora.joined import KINDS, JoinedCorpora, split_corpora
from flaxformer_min.data.corpora.pairs import Pairs

GIVEN = "given"
"""The corpus of a run that was trained with `train(pairs=...)`, whose text is stored nowhere."""


def read_pairs(
    corpus: str, split: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> Pairs:
    """Return the sentence pairs of a split.

    corpus:    `cldr:SOURCE-TARGET`, `text:DIR` or `tfds:NAME/CONFIG`, or several, see above.
    split:     any name of `splits(corpus)`. `validation` also finds val, valid or dev, and `test`
               the only split whose name begins with it, such as test2016.
    languages: such as `en-de` or `en-zh-CN` (see `parse_languages`), the source first. Empty: the
               corpus's own; text files require it.
    cache_dir: folder of prepared datasets, in tfds' layout NAME/CONFIG/VERSION. Empty: the folder
               of tfds (TFDS_DATA_DIR or ~/tensorflow_datasets), and `cache_folder()` for the
               embedded phrases.
    download:  let tfds download and prepare a dataset that is not prepared.

    Raises ValueError if the corpus or split cannot be read, and lists the alternatives. A line that
    is not UTF-8, or does not have two columns in a .tsv file, raises only when it is read.
    """
    return open_corpus(corpus, languages, cache_dir, download).pairs(split)


def splits(
    corpus: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> list[str]:
    """Return the names of the splits, sorted. Arguments and errors are those of `read_pairs`."""
    return open_corpus(corpus, languages, cache_dir, download).splits()


def languages_of(
    corpus: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> tuple[str, str]:
    """Return source and target language. Arguments and errors are those of `read_pairs`.

    >>> languages_of("cldr:en-ko")
    ('en', 'ko')
    """
    return open_corpus(corpus, languages, cache_dir, download).languages


def open_corpus(corpus: str, languages: str, cache_dir: str, download: bool) -> Any:
    """Return the corpus of a kind: an object with `languages`, `splits()` and `pairs(split)`."""
    if corpus == GIVEN:
        raise ValueError(
            "the folder of this run does not name its text: it was trained with "
            "train(pairs=...), or its model was imported. Pass pairs, or name text with "
            "--data.corpus."
        )
    parts = dict(split_corpora(corpus))
    options = (languages, cache_dir, download)
    corpora = {name: _open_corpus(name, *options) for name in parts}
    if parts == {corpus: 1}:
        return corpora[corpus]
    return JoinedCorpora(corpora, [*parts.values()], languages)


def _open_corpus(corpus: str, languages: str, cache_dir: str, download: bool) -> Any:
    kind, _, name = corpus.partition(":")
    if kind not in KINDS or not name:
        is_folder = bool(corpus) and Path(corpus).expanduser().is_dir()
        raise ValueError(
            "A corpus must be cldr:SOURCE-TARGET (as cldr:en-ko), text:DIR or tfds:NAME/CONFIG (as "
            f"tfds:wmt14_translate/de-en); got {corpus!r}."
            + (f" Did you mean text:{corpus}?" if is_folder else "")
        )
    if kind == "text":
        from flaxformer_min.data.corpora.text import TextCorpus

        return TextCorpus(Path(name).expanduser(), languages)
    if kind == "cldr":
        from flaxformer_min.data.corpora.cldr import CldrCorpus

        return CldrCorpus(name, languages, cache_dir)
    from flaxformer_min.data.corpora.tfds import open_tfds

    return open_tfds(name, languages, cache_dir, download)

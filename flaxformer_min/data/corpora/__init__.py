"""Sentence pairs by number, wherever they lie: `read_pairs(corpus, split)[i] -> (source, target)`.

A corpus is named by a kind and a place:

| corpus                       | is                                                             |
|------------------------------|----------------------------------------------------------------|
| `cldr:en-ko`                 | embedded phrases in any two CLDR locales, made on first use    |
| `text:DIR`                   | `DIR/train.en`, `DIR/train.de`, ..., or `DIR/train.tsv`; `.gz` |
| `tfds:wmt14_translate/de-en` | any translation set of tensorflow_datasets                     |

Pairs are read where they lie, so a corpus may be larger than memory (gzip files excepted), and a
pickled `Pairs` holds names of files, not their content. What comes out is what is in the corpus:
empty sides too (see `is_empty`), for the caller to skip and count.
"""

from pathlib import Path
from typing import Any

from flaxformer_min.data.corpora.pairs import Pairs
from flaxformer_min.languages import parse_languages


def read_pairs(
    corpus: str, split: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> "Pairs":
    """The sentence pairs of one split.

    corpus:    `cldr:SOURCE-TARGET`, `text:DIR` or `tfds:NAME/CONFIG`, see above.
    split:     `train`, `validation` (also found as val, valid or dev) or `test` (also the only one
               whose name begins so, such as test2016), or any other name of `splits(corpus)`.
    languages: `en-de`, source first. Empty: as the corpus names them; text files have to be told.
    cache_dir: where prepared sets are kept, laid out as tfds does: NAME/CONFIG/VERSION. Empty: sets
               of tfds in its own folder (TFDS_DATA_DIR or ~/tensorflow_datasets), the embedded
               phrases in `cache_folder()`.
    download:  let tfds download and prepare a set that is not prepared.

    Raises ValueError, saying what there is instead, for whatever cannot be read. A line that is not
    UTF-8, or of a .tsv not two columns, is found when it is read.
    """
    return _open(corpus, languages, cache_dir, download).pairs(split)


def splits(
    corpus: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> list[str]:
    """The names of the splits there are, sorted. Arguments and errors as for `read_pairs`."""
    return _open(corpus, languages, cache_dir, download).splits()


def languages_of(
    corpus: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> tuple[str, str]:
    """Source and target language. Arguments and errors as for `read_pairs`.

    >>> languages_of("cldr:en-ko")
    ('en', 'ko')
    """
    return _open(corpus, languages, cache_dir, download).languages


def _open(corpus: str, languages: str, cache_dir: str, download: bool) -> Any:
    kind, colon, place = corpus.partition(":")
    if kind not in ("cldr", "text", "tfds") or not place:
        raise ValueError(
            "A corpus must be cldr:SOURCE-TARGET (as cldr:en-ko), text:DIR or tfds:NAME/CONFIG (as "
            f"tfds:wmt14_translate/de-en); got {corpus!r}."
        )
    wanted = parse_languages(languages) if languages else None
    if kind == "text":
        from flaxformer_min.data.corpora.text import TextCorpus

        return TextCorpus(Path(place).expanduser(), wanted)
    if kind == "cldr":
        from flaxformer_min.data.corpora.cldr import CldrCorpus

        return CldrCorpus(place, wanted, cache_dir)
    from flaxformer_min.data.corpora.tfds import open_tfds

    return open_tfds(place, wanted, cache_dir, download)

"""Translation datasets of tensorflow_datasets, read without TensorFlow."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxformer_min.data.corpora.pairs import Pair, Pairs, find_split, list_names
from flaxformer_min.languages import join_languages, parse_languages

OWN_FEATURES = "tensorflow_datasets."
"""Where the classes of a dataset's features must be defined."""

FEATURES = "features.json"
"""In a prepared dataset, below NAME/CONFIG/VERSION: the classes of its features."""


class TfdsCorpus:
    """A prepared dataset of tensorflow_datasets, read in one direction."""

    def __init__(self, builder: Any, languages: tuple[str, str]):
        """Take the builder of a prepared dataset, and source and target language."""
        self.builder, self.languages = builder, languages

    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""
        return sorted(self.builder.info.splits)

    def pairs(self, split: str) -> Pairs:
        """Return the sentence pairs of a split."""
        name = find_split(split, self.splits(), self.builder.info.full_name)
        return RecordPairs(self.builder, name, self.languages)


class RecordPairs(Pairs):
    """Pairs of an array_record file whose records are tf.train.Example, one text per language.

    Records are parsed here, at 80,000 per second, because tfds decodes only 20,000.
    """

    def __init__(self, builder: Any, split: str, languages: tuple[str, str]):
        """Open the records of a split."""
        import tensorflow_datasets as tfds

        self.languages = languages
        info = builder.info
        self._where = f"{info.full_name} in {builder.data_dir}"
        self._identity = [info.full_name, split, info.splits[split].num_examples, list(languages)]
        try:
            source = builder.as_data_source(
                split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
            )
            len(source.data_source)
        except Exception as error:  # array_record raises whatever its readers raise
            raise self._damaged(error) from error
        self.records = source.data_source  # without the builder, which is slow to pickle

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.records)

    def identity(self) -> list:
        """Return name, version, split and languages."""
        return self._identity

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"a prepared dataset must be intact; {self._where}: {_first_line(error)}. Remove that "
            "folder, and prepare it again."
        )

    def _read(self, indices: range) -> list[Pair]:
        try:
            return self._parsed(indices)
        except Exception as error:  # of array_record, of protobuf, or of text that is not UTF-8
            raise self._damaged(error) from error

    def _parsed(self, indices: range) -> list[Pair]:
        from tensorflow_datasets.proto.tf_example_generated_pb2 import Example

        if len(indices) == 1:
            records = [self.records[indices[0]]]  # a list of one index takes four times as long
        else:
            records = self.records.__getitems__(list(indices)) if indices else []
        pairs = []
        for record in records:
            features = Example.FromString(record).features.feature
            source, target = (features[name].bytes_list.value[0] for name in self.languages)
            pairs.append((source.decode(), target.decode()))
        return pairs


def open_tfds(name: str, wanted: str, cache_dir: str, download: bool) -> TfdsCorpus:
    """Return the dataset `name`, prepared if `download` allows it.

    Raises ValueError if it cannot be opened, prepared, or read in these languages.
    """
    builder = _tfds_builder(name, cache_dir)
    known = _translation_languages(builder, name)
    languages = parse_languages(wanted, known) if wanted else _order(builder, known)
    missing = [language for language in languages if language not in known]
    if missing:
        raise ValueError(f"tfds:{name} has no language {missing[0]!r}; it has {list_names(known)}.")
    if not builder.is_prepared():
        if not download:
            raise ValueError(_how_to_prepare(name, languages, cache_dir, builder))
        _download(builder, name)
    return TfdsCorpus(builder, languages)


def _tfds_builder(name: str, cache_dir: str) -> Any:
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate  # noqa: F401 (registers the WMT datasets)
    from tensorflow_datasets.core.utils import file_utils

    data_dir = str(Path(cache_dir).expanduser()) if cache_dir else None
    _check_name(name)
    for folder in file_utils.list_data_dirs(data_dir):
        _check_features(Path(folder) / re.split("[/:]", name)[0])
    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.registered.DatasetNotFoundError as error:
        raise ValueError(
            "tfds:NAME must be a dataset of tensorflow_datasets, or one prepared in "
            f"data.cache_dir; there is no {name!r}."
        ) from error
    except Exception as error:  # also of protobuf, for a damaged description
        if "file format" in str(error).lower():
            raise ValueError(
                f"tfds:{name} must be prepared as array_record, the format that tfds reads without "
                f"TensorFlow; {data_dir or 'the folder of tfds'} has it in another format. Choose "
                "another data.cache_dir, and prepare it there with data.download."
            ) from error
        # Usually an unknown config or version.
        raise ValueError(f"tfds:{name} cannot be opened; {_first_line(error)}.") from error


def _check_name(name: str) -> None:
    """Refuse a namespace, whose datasets are code, and arguments, such as another data_dir."""
    if not re.fullmatch(r"[a-z0-9_]+(/[\w.+-]+)?(:[\d*][\w.*]*)?", name):
        raise ValueError(
            "tfds:NAME must be a dataset of tensorflow_datasets, as NAME, NAME/CONFIG or "
            f"NAME/CONFIG:VERSION, with NAME in lower case; got {name!r}."
        )


def _check_features(dataset: Path) -> None:
    """Raise ValueError if a prepared dataset names classes that tfds would import from elsewhere.

    tfds imports the module of each class in features.json, so a dataset could run any code.
    """
    for file in (file for level in range(4) for file in dataset.glob("*/" * level + FEATURES)):
        try:
            classes = list(_class_names(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} must be JSON; {error}.") from error
        foreign = [name for name in classes if not name.startswith(OWN_FEATURES)]
        if foreign:
            raise ValueError(
                f"the features of a dataset must be classes of {OWN_FEATURES}*, because others are "
                f"code that would be executed; {file} names {foreign[0]!r}. Prepare the dataset "
                "again with a released tensorflow_datasets, or use its text as text:DIR."
            )


def _class_names(content: Any) -> Iterator[str]:
    """Yield every name of a class, however deep."""
    if isinstance(content, dict):
        named = (content.get(key) for key in ("type", "pythonClassName"))
        yield from (name for name in named if isinstance(name, str))
        content = list(content.values())
    for value in content if isinstance(content, list) else ():
        yield from _class_names(value)


def _translation_languages(builder: Any, name: str) -> tuple[str, ...]:
    import tensorflow_datasets as tfds

    features = builder.info.features
    if not isinstance(features, tfds.features.Translation):
        raise ValueError(
            "A tfds corpus must have the features of a translation, one text per language; "
            f"tfds:{name} has {type(features).__name__}({list_names(features or ())}). Write its "
            "text into files, and use them as text:DIR."
        )
    return tuple(features.languages)


def _order(builder: Any, languages: tuple[str, ...]) -> tuple[str, str]:
    """Return source and target as the dataset declares them: de is the source of de-en."""
    supervised = builder.info.supervised_keys
    if supervised and len(supervised) == 2 and set(supervised) <= set(languages):
        return supervised
    if len(languages) == 2:
        return languages[0], languages[1]
    raise ValueError(
        f"{builder.info.full_name} has {list_names(languages)}: set data.languages to two of them, "
        "the source first, joined by one hyphen."
    )


def _how_to_prepare(name: str, languages: tuple[str, str], cache_dir: str, builder: Any) -> str:
    arguments = f"'tfds:{name}', 'train', '{join_languages(*languages)}', '{cache_dir}', True"
    return (
        f"tfds:{name} must be prepared before it is read; it is not in {builder.data_dir}. "
        "Download and prepare it by setting data.download (flaxformer-min train "
        "--data.download), or with\n"
        f'python -c "from flaxformer_min.data.corpora import read_pairs; read_pairs({arguments})"'
    )


def _download(builder: Any, name: str) -> None:
    try:
        builder.download_and_prepare()
    except Exception as error:
        # Network, checksums, disks, the dataset's own code: tfds may raise anything.
        raise ValueError(
            f"tfds:{name} could not be downloaded and prepared in {builder.data_dir}; "
            f"{type(error).__name__}: {_first_line(error)}. Check the network and the disk, and "
            "try again; completed downloads are kept."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0].removesuffix(".")

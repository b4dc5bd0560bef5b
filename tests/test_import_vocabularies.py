"""Vocabularies of imported models: special ids as each side has them, in every form of Marian's."""

import json
import time

import numpy as np
import pytest
import yaml
from marian_models import (
    WORDS,
    assert_not_imported,
    assert_values_of_ctranslate2,
    pieces_of,
    random_arrays,
    train_spm,
    write_model,
    write_yml,
)

import flaxformer_min
from flaxformer_min.interop.yaml import read_mapping, read_yaml
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.tokens import PAD

BOTH = f"{WORDS['source']} {WORDS['target']}"
EOS_FIRST = {"eos_id": 0, "unk_id": 1, "bos_id": -1}
WITH_PAD = {"pad_id": 3, "unk_id": 2, "bos_id": 1, "eos_id": 0}


def assert_same_values(folder, run, vocabularies, spms):
    """What CTranslate2 reads from the same files is the independent expectation."""
    flaxformer_min.import_model(folder, run)
    assert_values_of_ctranslate2(run, folder, vocabularies, spms)


@pytest.mark.parametrize("specials", [EOS_FIRST, WITH_PAD, {}], ids=["marian", "pad", "usual"])
def test_sides_may_differ_in_size_and_in_special_ids(tmp_path, specials):
    """Each .spm says where its own </s> and <unk> are; the sides have 37 to 62 pieces."""
    sizes = [
        len(train_spm(tmp_path / "source.vocab.spm", WORDS["source"], **specials)),
        len(train_spm(tmp_path / "target.vocab.spm", BOTH, vocab_size=90, **EOS_FIRST)),
    ]
    assert sizes[0] != sizes[1]
    names = ["source.vocab.spm", "target.vocab.spm"]
    write_model(tmp_path, names)
    assert_same_values(tmp_path, tmp_path / "run", names, names)
    run = RunFolder(tmp_path / "run")
    config = run.model_config()
    # Three of the four special tokens are new where Marian has two, and <pad> if it lacks it.
    assert (config.source_vocab_size, config.vocab_size) == (
        sizes[0] + (1 if "pad_id" in specials else 2),
        sizes[1] + 2,
    )
    assert run.params().params["output_bias"][PAD] == -100, "no probability for what Marian lacks"


@pytest.mark.parametrize("name", ["opus.vocab.yml", "vocab.json", "words.txt"])
def test_a_sorted_vocabulary_has_its_special_tokens_anywhere(tmp_path, name):
    """As OPUS-MT's recipe writes it: </s> is not 0, and <s> is a piece like any other."""
    pieces = set()
    for side in ("source", "target"):
        pieces.update(pieces_of(train_spm(tmp_path / f"{side}.spm", WORDS[side])))
    ordered = sorted(pieces | {"!", "."})
    assert ordered.index("</s>") > 0 and "<s>" in ordered
    write_yml(tmp_path / "listed.yml", ordered)
    if name.endswith(".yml"):
        write_yml(tmp_path / name, ordered)
    elif name.endswith(".json"):
        (tmp_path / name).write_text(json.dumps({p: n for n, p in enumerate(ordered)}))
    else:
        (tmp_path / name).write_text("\r\n".join(ordered) + "\r\n", newline="")
    write_model(tmp_path, ["listed.yml"], shared=True)
    description = tmp_path / "decoder.yml"
    description.write_text(description.read_text().replace("listed.yml", name))
    spms = ["source.spm", "target.spm"]
    assert_same_values(tmp_path, tmp_path / "run", ["listed.yml"], spms)
    source, target = RunFolder(tmp_path / "run").tokenizers()
    assert "<s>" in target.pieces(range(4, target.vocab_size))
    assert target.pieces(range(4))[2] == "<s2>"
    assert target.decode([2, target.pieces(range(target.vocab_size)).index("<s>"), 3]) == ""


def test_bpe_models_may_share_a_vocabulary(tmp_path):
    """Each segments as if it were alone, and knows the pieces of the other by their names."""
    own = {
        side: train_spm(tmp_path / f"{side}.spm", WORDS[side], model_type="bpe")
        for side in ("source", "target")
    }
    joint = sorted({piece for each in own.values() for piece in pieces_of(each)} | {"</s>"})
    write_yml(tmp_path / "vocab.yml", joint)
    write_model(tmp_path, ["vocab.yml"], shared=True)
    assert_same_values(tmp_path, tmp_path / "run", ["vocab.yml"], ["source.spm", "target.spm"])
    tokenizers = RunFolder(tmp_path / "run").tokenizers()
    texts = [*WORDS.values(), BOTH, "f\u00fcnf r\u00f6te xyz", "zz zum", *BOTH.split()]
    for side, tokenizer in zip(own, tokenizers, strict=True):
        names = [tokenizer.pieces(ids[:-1]) for ids in tokenizer.encode_batch(texts)]
        assert names == [
            [piece if piece in joint else "<unk>" for piece in own[side].encode(text, out_type=str)]
            for text in texts
        ]
    target = tokenizers[1]
    ids = tokenizers[0].encode(WORDS["source"])
    assert target.decode(ids) == WORDS["source"]


def test_embeddings_without_a_piece_are_never_produced(tmp_path, caplog):
    """Marian has as many embeddings as dim-vocabs says, whatever the vocabulary has."""
    pieces = pieces_of(train_spm(tmp_path / "source.spm", BOTH, **EOS_FIRST))
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    write_yml(tmp_path / "vocab.yml", pieces)
    write_model(tmp_path, ["vocab.yml"], shared=True)
    size = len(pieces) + 5
    np.savez(tmp_path / "model.npz", **random_arrays((size, size), shared=True))
    flaxformer_min.import_model(tmp_path, tmp_path / "larger")
    assert f"the last 5 of the model's {size} embeddings have no piece" in caplog.text
    run = RunFolder(tmp_path / "larger").config()
    assert run.decoding.suppressed == tuple(range(size + 2 - 5, size + 2))
    size = len(pieces) - 5
    np.savez(tmp_path / "model.npz", **random_arrays((size, size), shared=True))
    flaxformer_min.import_model(tmp_path, tmp_path / "smaller")
    assert f"its pieces from {size} on have no embedding" in caplog.text
    assert RunFolder(tmp_path / "smaller").model_config().vocab_size == size + 2


def test_old_names_of_special_tokens_are_read(tmp_path):
    """Nematus calls 0 `eos` and 1 `UNK`, or leaves them out."""
    pieces = pieces_of(train_spm(tmp_path / "source.spm", BOTH, **EOS_FIRST))
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    write_yml(tmp_path / "vocab.yml", pieces)
    write_model(tmp_path, ["vocab.yml"], shared=True)
    params = []
    for old in (["</s>", "<unk>"], ["eos", "UNK"]):
        write_yml(tmp_path / "vocab.yml", [*old, *pieces[2:]])
        flaxformer_min.import_model(tmp_path, tmp_path / old[0].strip("</>"))
        folder = RunFolder(tmp_path / old[0].strip("</>"))
        assert folder.tokenizers()[1].pieces([1, 3]) == ["<unk>", "</s>"]
        params.append(folder.params().params["embedding"]["table"])
    np.testing.assert_array_equal(*params)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("v.txt", "<unk>\n</s>\n\na\n", "line 3 must have a piece; it is empty"),
        ("v.txt", "<unk>\n</s>\na\na\n", "line 4: 'a' comes twice"),
        ("v.txt", "<unk>\na\nb\n", "must have the piece '</s>'"),
        ("v.txt", b"\xff\n", "must be UTF-8 text"),
        ("v.yml", "a: &x 1\nb: *x\n", "line 1: an anchor or alias is not understood"),
        ("v.yml", "a: !!python/object/apply:os.system [x]\n", "line 1: the tag .* not understood"),
        ("v.yml", "a: 1\na: 1\n", "'a' comes twice"),
        ("v.yml", "a: [1]\n", "'a' must have a whole number"),
        ("v.yml", "a: -1\n", "'a' must have a whole number"),
        ("v.yml", "- a\n- b\n", "must hold names with values"),
        ("v.yml", '"\\0": 1\n</s>: 0\n<unk>: 2\n', r"must be text without NUL; got '\\x00'"),
        ("v.yml", "<unk>: 0\n</s>: 99999\n", "must have the piece '</s>'"),
        ("v.yml", "[" * 100_000, "(a list or mapping in 10 others is|must be YAML)"),
        ("v.json", "[" * 100_000, "must hold complete JSON"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused_in_a_sentence(tmp_path, name, content, message):
    train_spm(tmp_path / "source.spm", BOTH)
    write_yml(tmp_path / "vocab.yml", ["</s>", "<unk>", "a", "b"])
    write_model(tmp_path, ["vocab.yml"], shared=True)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    description = tmp_path / "decoder.yml"
    description.write_text(description.read_text().replace("vocab.yml", name))
    assert_not_imported(tmp_path, f"{name}.*{message}")


KEYS = ["yes", "~", "null", "<<", "=", "...", "1", '"', "it's", ":", "#", "? a", "a: b", "\t", " "]
KEYS += ["\x85", "\xa0", "▁\u2028", "\u2029", "\ufeff", "\x7f", "\U0001f600", "\\x41", "é"]


def test_every_text_may_be_a_key_of_a_vocabulary(tmp_path):
    """In quotes, as PyYAML writes it, or plain; what YAML reads as other things stays a text."""
    numbered = {key: number for number, key in enumerate(KEYS)}
    expected = {key: str(number) for key, number in numbered.items()}
    quoted = "".join(f"{json.dumps(key, ensure_ascii=False)}: {n}\n" for key, n in numbered.items())
    escaped = "".join(f"{json.dumps(key)}: {n}\n" for key, n in numbered.items() if key < "\ud800")
    assert read_mapping(quoted.encode(), tmp_path) == expected
    assert read_mapping(escaped.encode(), tmp_path) == {
        key: number for key, number in expected.items() if key < "\ud800"
    }
    for unicode in (False, True):
        dumped = yaml.safe_dump(numbered, allow_unicode=unicode)
        assert read_mapping(dumped.encode(), tmp_path) == expected
    plain = "yes: 0\n\xa0: 1\n\u2028▁: 2\n? long\n: 3\n::: 4\n\x85x: 5\n"
    assert list(read_mapping(plain.encode(), tmp_path)) == [
        *("yes", "\xa0", "\u2028▁", "long", "::", "\x85x")
    ]


def test_yaml_is_read_in_linear_time_or_refused(tmp_path):
    """Ten times the text takes less than thirty times as long, where a square would take 100."""

    def seconds(text):
        start = time.perf_counter()
        read_yaml(text.encode(), tmp_path)
        return time.perf_counter() - start

    for make in (lambda n: "a:\n" + "- 1\n" * n, lambda n: "a: b" + " " * n + "c\n"):
        assert seconds(make(20_000)) < 30 * max(seconds(make(2_000)), 1e-3)
    with pytest.raises(ValueError, match="must have at most 500,000 entries"):
        read_yaml(b"a: 1\n" * 10_000_000, tmp_path)

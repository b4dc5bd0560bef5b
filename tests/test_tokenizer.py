"""Text to pieces and back: nothing is lost, nothing a user writes becomes a control token."""

import logging
import os
import pickle
import tempfile
import unicodedata

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flaxformer_min.data.tokenizer import Tokenizer, train_tokenizer
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

LINES = [
    f"{greeting}, {name}! Come on {day} at {hour}:{hour + 17}."
    for greeting in ("Hello", "Good morning", "안녕하세요", "좋은 아침입니다")
    for name in ("world", "세계", "friend", "친구")
    for day in ("Monday", "Tuesday", "수요일", "금요일")
    for hour in range(1, 24, 3)
]


ANY_CHARACTER = st.characters(exclude_categories=["Cs"])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(LINES, 400, path, normalization="identity")
    return path


@pytest.fixture(scope="module")
def normalizing(tmp_path_factory):
    return train_tokenizer(LINES, 400, tmp_path_factory.mktemp("nmt_nfkc") / "tokenizer.model")


@pytest.fixture(scope="module")
def tokenizer(path):
    return Tokenizer.load(path)


@pytest.mark.parametrize(
    "text",
    [
        " Hello,  world at 3: 9. ",
        "Hello,\u00a0world\u202fat\u20093:\u30009.",
        "\u200bHello, world\tat 3:\u00a0 9.\ufeff",
        "Hel\u00adlo,\u2028world\u0085at 3: 9.\u200e",
        "\u2066Hello\u2069, wor\u2060ld\vat 3: 9.".replace("\v", "▁"),
        "\uff28ello, world at \uff13: 9.\x1b\x07",
    ],
)
def test_text_as_other_programs_write_it_is_read_as_the_plain_text(normalizing, text):
    plain = normalizing.encode("Hello, world at 3: 9.")
    assert normalizing.decode(plain) == "Hello, world at 3: 9."
    assert normalizing.encode(text) == plain
    assert normalizing.encode_segmentations(text, 3)[0] == plain


def test_decomposed_letters_are_read_as_composed_ones(normalizing, tmp_path):
    """The 11,172 syllables of Hangul as macOS names its files; identity keeps them apart."""
    for text in ("안녕하세요", "Côte d’Ivoire"):
        decomposed = unicodedata.normalize("NFD", text)
        assert decomposed != text
        assert normalizing.encode(decomposed) == normalizing.encode(text)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_symbols_are_never_split(tmp_path, rule):
    symbols = [">>deu<<", "__PH1__", "\uff13\uff13", "⟦0⟧"]
    path = tmp_path / "model"
    lines = [*LINES, *(f"{symbols[1]} {line}" for line in LINES)]
    tokenizer = train_tokenizer(lines, 400, path, normalization=rule, symbols=symbols)
    for symbol in symbols:
        for text in (symbol, f"{symbol} Hello", f"Hello{symbol}!", f"{symbol}{symbol}"):
            pieces = tokenizer.pieces(tokenizer.encode(text))
            assert pieces.count(symbol) == text.count(symbol)
            assert tokenizer.decode(tokenizer.encode(text)) == text
            for ids in tokenizer.encode_segmentations(text, 5):
                assert tokenizer.pieces(ids).count(symbol) == text.count(symbol)


def test_nfkc_keeps_line_breaks_and_zero_width_characters(tmp_path):
    nfkc = train_tokenizer(LINES, 400, tmp_path / "model", normalization="nfkc")
    assert nfkc.decode(nfkc.encode("\uff13\u00a0a\u200cb▁\nc")) == "3 a\u200cb▁\nc"


@settings(max_examples=100, deadline=None)
@given(st.text(ANY_CHARACTER, max_size=30))
def test_what_is_normalized_stays_as_it_is(normalizing, text):
    ids = normalizing.encode(text)
    assert UNK not in ids
    once = normalizing.decode(ids)
    assert normalizing.decode(normalizing.encode(once)) == once


@settings(max_examples=150, deadline=None)
@given(st.text(ANY_CHARACTER | st.sampled_from("▁ \n</s>1"), max_size=30))
@example("▁\0▁")
@example("")
@example("  two before, two  between, two after  ")
@example("e\u0301 stays two code points, \u00e9 one, \u1100\u1161 two")
@example("🙂 👨\u200d👩\u200d👧 🇰🇷 ᚠᚢᚦ 𐍈")
@example("\0 NUL, \t tab, \n line, \r return, \x85, \u2028, \ufeff, \ufffd, \uffff, \U0010ffff")
@example("<s> </s> <unk> <pad> <0x41> <0xEC>")
@example("▁▁ a▁b ▁c d▁ \n▁\n▁ \n")
def test_any_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert UNK not in ids


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_ends_the_reading_of_lines_ends_training(tmp_path, error):
    """SentencePiece makes a RuntimeError of it, as of a text that it cannot learn from."""

    def lines():
        yield from ["one", "two"]
        raise error("while reading")

    with pytest.raises(error, match="while reading"):
        train_tokenizer(lines(), 300, tmp_path / "tokenizer.model")


@pytest.mark.parametrize("text", ["a</s>b", "<s>", "<unk>", "<pad>", "▁</s>▁"])
def test_nothing_a_user_writes_becomes_a_control_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[-1] == EOS
    assert not {PAD, UNK, BOS, EOS} & set(ids[:-1])


def test_the_special_ids_are_those_of_tokens_py(tokenizer):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    found = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
    assert found == (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)


def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    texts = ["Hello", "", "▁", "안녕", " a▁b"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_every_digit_is_a_piece_so_that_numbers_are_copied(tokenizer):
    pieces = tokenizer.pieces(tokenizer.encode("1234"))
    assert [piece for piece in pieces if piece not in ("▁", "</s>")] == list("1234")


def test_decoding_stops_at_the_end_and_passes_over_padding(tokenizer):
    ids = tokenizer.encode("Hello")
    rubbish = tokenizer.encode("friend")
    assert tokenizer.decode([BOS, PAD, *ids, *rubbish, PAD]) == "Hello"
    assert tokenizer.decode([EOS, *ids]) == tokenizer.decode([]) == ""


def test_half_a_character_of_a_model_decodes_to_the_replacement_character(tokenizer):
    korean = tokenizer.encode("뷁")  # in no training line, hence three bytes
    spelled = [i for i, piece in enumerate(tokenizer.pieces(korean)) if piece.startswith("<0x")]
    assert len(spelled) == 3
    assert "\ufffd" in tokenizer.decode(korean[: spelled[-1]])


def test_pieces_show_spaces_and_bytes(tokenizer):
    assert "".join(tokenizer.pieces(tokenizer.encode("Hello Hello"))) == "▁Hello▁Hello</s>"
    assert tokenizer.pieces(tokenizer.encode("뷁")) == ["▁", "<0xEB>", "<0xB7>", "<0x81>", "</s>"]


def test_segmentations_of_a_text_decode_to_it_and_the_likeliest_is_first(tokenizer):
    """Kudo 2018: the log-probability of a segmentation is the sum of those of its pieces."""
    text = "안녕하세요, Monday"
    found = tokenizer.encode_segmentations(text, 20)
    assert found[0] == tokenizer.encode(text)
    assert len(set(map(tuple, found))) == len(found) > 2
    assert {tokenizer.decode(ids) for ids in found} == {text}
    assert all(ids[-1] == EOS for ids in found)
    totals = [tokenizer.log_probs()[ids].sum() for ids in found]
    assert totals == sorted(totals, reverse=True)
    assert tokenizer.encode_segmentations(text, 1) == [tokenizer.encode(text)]
    assert tokenizer.encode_segmentations("a▁b", 5) == [tokenizer.encode("a▁b")]


def test_half_a_surrogate_pair_is_an_error(tokenizer, tmp_path):
    for call in (
        tokenizer.encode,
        lambda text: tokenizer.encode_segmentations(text, 3),
        lambda text: tokenizer.encode_batch([text]),
        lambda text: train_tokenizer([text], 300, tmp_path / "tokenizer.model"),
    ):
        with pytest.raises(ValueError, match="text 0 has a lone surrogate at character 2"):
            call("ab\ud800")


def test_the_same_lines_give_the_same_bytes_and_training_prints_nothing(tokenizer, tmp_path, capfd):
    again = train_tokenizer(iter(LINES), 400, tmp_path / "again", normalization="identity")
    other = train_tokenizer(LINES[:300], 400, tmp_path / "other")
    assert again.model == tokenizer.model == (tmp_path / "again").read_bytes()
    assert again == tokenizer and again.fingerprint == tokenizer.fingerprint
    assert other != tokenizer and other.fingerprint != tokenizer.fingerprint
    assert capfd.readouterr() == ("", "")


def test_a_cached_tokenizer_is_used_and_no_line_is_read(tmp_path, caplog):
    def unread():
        raise AssertionError("a line was read")
        yield

    kept = {"cache": tmp_path / "cache", "fingerprint": "these lines"}
    small = ["hello world"] * 5
    first = train_tokenizer(small, 5_000, tmp_path / "first", **kept)
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        again = train_tokenizer(unread(), 5_000, tmp_path / "again", **kept)
    assert again == first and (tmp_path / "again").read_bytes() == first.model
    assert "The corpus supports a vocabulary" in caplog.messages[0], "also from the cache"
    for vocab_size, changed in ((4_000, {}), (5_000, {"fingerprint": "others"})):
        with pytest.raises(AssertionError, match="a line was read"):
            train_tokenizer(unread(), vocab_size, tmp_path / "other", **{**kept, **changed})


def test_a_damaged_tokenizer_in_the_cache_is_made_again(tmp_path):
    kept = {"cache": tmp_path / "cache", "fingerprint": "these lines"}
    first = train_tokenizer(LINES, 400, tmp_path / "first", **kept)
    (file,) = (tmp_path / "cache").rglob("*.model")
    for damaged in (first.model[:100], b""):
        file.write_bytes(damaged)
        assert train_tokenizer(LINES, 400, tmp_path / "again", **kept) == first
        assert file.read_bytes() == first.model


def test_a_cache_without_the_name_of_the_lines_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="needs a fingerprint that identifies its lines; got none"):
        train_tokenizer(LINES, 400, tmp_path / "model", cache=tmp_path)


def test_a_tokenizer_is_pickled(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy == tokenizer and hash(copy) == hash(tokenizer)
    assert copy.encode("Hello 세계") == tokenizer.encode("Hello 세계")


def test_training_lines_may_be_empty_or_hold_breaks_and_nul(tmp_path):
    lines = [*LINES, "", " ", *(f"{letter}\nb\nc\0" for letter in "abc" * 500), "</s> <s>", "▁"]
    tokenizer = train_tokenizer(lines, 400, tmp_path / "model", normalization="identity")
    assert tokenizer.decode(tokenizer.encode("a\nb\0▁")) == "a\nb\0▁"
    assert tokenizer.pieces(tokenizer.encode("\n"))[:-1] == ["▁", "<0x0A>"]


def test_a_small_corpus_gets_the_largest_vocabulary_it_carries_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        tokenizer = train_tokenizer(["hello world"] * 5, 5_000, tmp_path / "small")
    assert 260 < tokenizer.vocab_size < 5_000
    assert caplog.messages == [
        f"The corpus supports a vocabulary of only {tokenizer.vocab_size} pieces; 5000 were "
        "requested."
    ]


def test_training_needs_no_folder_for_temporary_files(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    again = train_tokenizer(LINES, 400, tmp_path / "model", normalization="identity")
    assert again == tokenizer
    assert os.listdir(tmp_path) == ["model"]


def test_a_vocabulary_without_room_for_the_characters_is_an_error(tmp_path):
    """256 bytes, 4 special pieces, and the letters of "ab", with a space: 263."""
    with pytest.raises(ValueError, match="vocab_size must be enough .* 263 in total; got 200"):
        train_tokenizer(["ab"], 200, tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("lines", [[], ["", "\n"]])
def test_no_text_is_an_error_that_leaves_the_old_file(tokenizer, tmp_path, lines):
    path = tmp_path / "model"
    path.write_bytes(tokenizer.model)
    with pytest.raises(ValueError, match="needs at least one line of text"):
        train_tokenizer(lines, 300, path)
    assert path.read_bytes() == tokenizer.model and os.listdir(tmp_path) == ["model"]

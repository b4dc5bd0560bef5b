"""Two thousand random texts over all of Unicode, through everything that reads text."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import make_tiny_run

from flaxformer_min import cli
from flaxformer_min.config import DataConfig, SearchConfig
from flaxformer_min.data.batches import single_pass
from flaxformer_min.data.corpora.pairs import is_empty
from flaxformer_min.data.encoding import encode_pairs
from flaxformer_min.decoding.translator import Translator

COUNT, ROW = 2_000, 24


def drawn_texts():
    """The same texts each time, used in batches: one by one would take minutes."""
    texts = []

    @settings(max_examples=COUNT, database=None, derandomize=True, deadline=None)
    @given(st.text(max_size=15))
    def draw(text):
        texts.append(text)

    draw()
    return texts


@pytest.fixture(scope="module")
def texts():
    texts = drawn_texts()
    assert len(texts) >= COUNT
    letters = set("".join(texts))
    assert len(letters) > 1_000 and max(letters) > "\U000f0000" and {"\0", "\n"} < letters
    return texts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    decoding = SearchConfig(beam_size=1, max_extra_tokens=2, batch_size=8)
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "tiny", decoding=decoding)


@pytest.fixture(scope="module")
def translator(run):
    """It pads all texts to one length, so that few programs are compiled."""
    translator = Translator.load(run)
    translator.runner.widths = (64,)
    return translator


def test_every_usable_pair_is_in_the_rows_once(texts, translator, tmp_path):
    """A side that is empty or longer than a row is counted; nothing else is lost or changed."""
    tokenizer = translator.source_tokenizer
    pairs = list(zip(texts, reversed(texts), strict=True))
    encoded = encode_pairs(pairs, (tokenizer, tokenizer), (ROW, ROW), tmp_path, "drawn texts")
    usable = [pair for pair in pairs if not is_empty(pair)]
    fitting = [pair for pair in usable if max(map(len, tokenizer.encode_batch(pair))) <= ROW]
    assert encoded.counts.read == len(pairs)
    assert encoded.counts.empty == len(pairs) - len(usable)
    assert encoded.counts.too_long == len(usable) - len(fitting)
    assert 0 < len(fitting) < len(usable) < len(pairs)
    found = Counter()
    batches = single_pass(encoded, (ROW, ROW), rows=64)
    for batch in map(batches.__getitem__, range(len(batches))):
        for row in range(64):
            for segment in range(1, batch.source.segments[row].max() + 1):
                sides = [side.ids[row][side.segments[row] == segment] for side in batch]
                found[tuple(map(tokenizer.decode, sides))] += 1
    assert found == Counter(fitting)


@pytest.mark.slow
def test_every_text_has_its_own_translation(texts, translator):
    """As many as there are texts, and the same ones in the other order."""
    found = translator.translate(texts)
    assert len(found) == len(texts)
    assert translator.translate(texts[::-1])[::-1] == found
    assert {text for text, line in zip(found, texts, strict=True) if not line.strip()} == {""}
    assert len(set(found)) > 20


def test_every_line_of_a_file_has_its_line_in_the_output(
    texts, run, translator, tmp_path, capsys, monkeypatch
):
    """A line can contain everything but a line break."""
    monkeypatch.setattr(Translator, "load", lambda *runs, **_: translator)
    lines = [text.replace("\n", "") for text in texts[::5]]
    given = tmp_path / "given"
    given.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    assert cli.main(["translate", str(run), "--input", str(given), "--output", f"{given}.out"]) == 0
    assert given.with_suffix(".out").read_bytes().count(b"\n") == len(lines)
    assert cli.main(["score", str(run), str(given), str(given)]) == 0
    assert capsys.readouterr().out.count("\n") == len(lines)


def test_a_line_that_normalizes_to_nothing_has_an_empty_translation(tmp_path, capsys):
    """At its place, and with any number of hypotheses; the lines around it keep theirs."""
    data = DataConfig(languages="en-ko")
    decoding = SearchConfig(beam_size=2, max_extra_tokens=2)
    run = make_tiny_run(tmp_path / "run", data=data, decoding=decoding)
    nothing = ["\u200b", "\u00ad\u2060", "\ufeff\u200e", "\u00a0\u3000"]
    lines = ["the red house", *nothing, "nine doors"]
    (tmp_path / "given").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found = {}
    for n_best in ("1", "2"):
        command = ["translate", str(run), "--input", str(tmp_path / "given"), "--n-best", n_best]
        assert cli.main(command) == 0
        output, errors = capsys.readouterr()
        assert errors == ""
        found[n_best] = output.removesuffix("\n").split("\n")
    assert len(found["1"]) == 6 and found["1"][1:5] == [""] * 4
    assert len(found["2"]) == 12 and found["2"][2:10] == [""] * 8
    assert found["1"][0] and found["1"][5]

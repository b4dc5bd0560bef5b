"""Symbols of a run, which are never split: in exports, and tags in a text that are none."""

import logging

import pytest
from tiny_run import TAGGED, make_imported_run, make_tiny_run

import flaxformer_min
from flaxformer_min.cli import main
from flaxformer_min.config import DataConfig, SearchConfig
from flaxformer_min.decoding.translator import MOST_WARNINGS, Translator
from flaxformer_min.interop.run_model import read_run, segmentation_code

SYMBOLS = (">>deu<<", "__PH1__", "<ph>")
LINES = [
    *(">>deu<< the red house", "the __PH1__ house", "nine<ph>doors", ">>deu<<>>deu<<", "a>>deu<<b"),
    *(" >>deu<< the", "doors", "__PH1__", "__PH12__ >>fra<< the"),
]


def make_run(folder, rule, separate=False):
    """A run whose tokenizers have symbols."""
    sizes = {"vocab_size": 289, **({"source_vocab_size": 289} if separate else {})}
    data = DataConfig(languages="en-de", normalization=rule, symbols=SYMBOLS)
    decoding = SearchConfig(beam_size=1, max_extra_tokens=4)
    return make_tiny_run(folder, data=data, decoding=decoding, separate=separate, **sizes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("symbols") / "run", "nmt_nfkc")


def test_a_tag_that_is_no_symbol_is_named_once_with_its_line(run, tmp_path, capsys):
    lines = ["the >>deu<< house", "__PH1__ >>fra<<", "", ">>fra<< <b>x</b> >> a <<", "__PH2__"]
    (tmp_path / "in").write_text("\n".join([*lines, ""]))
    assert main(["translate", str(run), "--input", str(tmp_path / "in")]) == 0
    output = capsys.readouterr()
    warnings = [line for line in output.err.splitlines() if "symbol" in line]
    assert warnings == [
        "flaxformer-min: warning: line 2 has >>fra<<, which is no symbol of this model; it is read "
        "as other text.",
        "flaxformer-min: warning: line 5 has __PH2__, which is no symbol of this model; it is read "
        "as other text.",
    ]
    assert len(output.out.splitlines()) == 5


def warned(translator, caplog, lines, **options):
    """The warnings while lines are read, without a search; scores and maps read them alike."""
    caplog.clear()
    translator.runner.search = lambda *arguments: []
    with caplog.at_level(logging.WARNING):
        translator.hypotheses(lines, **options)
    return caplog.messages


def test_only_models_with_symbols_have_tags(run, tmp_path, caplog):
    plain = Translator.load(make_tiny_run(tmp_path / "plain"))
    assert warned(plain, caplog, [">>fra<< __PH7__"]) == []
    many = [f"__PH{number + 2}__" for number in range(2 * MOST_WARNINGS)]
    assert len(warned(Translator.load(run), caplog, many)) == MOST_WARNINGS


def test_an_imported_model_knows_the_tags_of_its_vocabulary(tmp_path, caplog):
    translator = Translator.load(make_imported_run(tmp_path))
    (message,) = warned(translator, caplog, TAGGED, first_line=8)
    assert message.startswith("line 9 has >>fra<<, which is no symbol of this model")


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_the_recipes_of_exports_read_symbols_as_the_run_does(tmp_path, rule):
    model = read_run(make_run(tmp_path / "run", rule))
    tokenizer = model.tokenizers[0]
    names = {"source_spm": tokenizer._processor, "lines": LINES}
    exec(segmentation_code(model), names)
    assert names["pieces"] == [tokenizer.pieces(tokenizer.encode(line)[:-1]) for line in LINES]
    assert sum(piece in SYMBOLS for pieces in names["pieces"] for piece in pieces) == 8


@pytest.mark.filterwarnings(
    "ignore:Recommended. pip install sacremoses", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_hugging_face_reads_symbols_as_the_run_does(tmp_path, rule, separate):
    """By the recipe of the export, for MarianTokenizer alone splits off a tag at the beginning."""
    library = pytest.importorskip("transformers")
    run = make_run(tmp_path / "run", rule, separate)
    flaxformer_min.export(run, tmp_path / "out", format="marian")
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1]
    names = {"FOLDER": str(tmp_path / "out"), "MarianTokenizer": library.MarianTokenizer}
    exec("\n".join(line for line in code.split("\n") if "tokenizer" in line.split("=")[0]), names)
    tokenizer = flaxformer_min.RunFolder(run).tokenizers()[0]
    for line in LINES:
        assert names["tokenizer"](line)["input_ids"] == tokenizer.encode(line)

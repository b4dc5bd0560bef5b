"""Documents: cut into sentences and put together again, text and HTML."""

import html
import random
import time

import pytest

pytest.importorskip("sentencex", reason="no extra `server`: pip install 'flaxformer_min[server]'")

from flaxformer_min.decoding.results import Translation
from flaxformer_min.server.documents import split_html, split_text


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One sentence", ["One sentence"]),
        ("A line; with, signs - one sentence", ["A line; with, signs - one sentence"]),
        ("Hello Mr. Smith.  How are you?", ["Hello Mr. Smith.", "How are you?"]),
        ("\n\n  One.\r\n\tTwo \n", ["One.", "Two"]),
        ("One.\u2028Two.\x0bThree", ["One.", "Two.", "Three"]),
        ("First. ... 😀! Second.", ["First.", "Second."]),
        ("", []),
        (" \n\t", []),
        ("—", []),
    ],
)
def test_text_is_cut_and_put_together_again(text, sentences):
    document = split_text(text, "en", "de")
    assert document.sentences == sentences
    assert document.join(sentences) == text


def test_every_language_has_its_own_sentence_ends():
    assert split_text("你好。再见！好", "zh-Hans").sentences == ["你好。", "再见！", "好"]
    assert split_text("안녕하세요. 잘 가요.", "ko").sentences == ["안녕하세요.", "잘 가요."]
    assert split_text("One. Two.", "xx").sentences == ["One.", "Two."]


def test_touching_sentences_get_a_space_where_the_target_has_spaces():
    assert split_text("你好。再见。", "zh", "en").join(["Hello.", "Bye."]) == "Hello. Bye."
    assert split_text("你好。再见。", "zh_CN", "ja").join(["A。", "B。"]) == "A。B。"


def test_a_line_break_in_a_translation_is_a_space():
    """A model may spell one in bytes, and lines would no longer be aligned."""
    assert split_text("One\nTwo", "en").join(["A\nb", "C\r\nd"]) == "A b\nC d"


def test_alternatives_join_the_best_then_the_second_best():
    document = split_text("One. Two.", "en")
    first = [Translation("A", -1.0, -0.5), Translation("B", -2.0, -1.0)]
    found = document.join_hypotheses([first, [Translation("X", -4.0, -3.0)]])
    assert found == [Translation("A X", -5.0, -3.5), Translation("B X", -6.0, -4.0)]


@pytest.mark.parametrize(
    "markup, sentences, joined",
    [
        ("<p>A <b>cat</b> sat.<br>Here", ["A", "cat", "sat.", "Here"], None),
        ('<a title="Tom &amp; I" href=x>Hi</a>', ["Hi"], None),
        ("Tom &amp; Jerry &lt;3", ["Tom & Jerry <3"], None),
        ("caf&eacute; &#8211; <i>x</i>", ["café – ", "x"], "CAFÉ – <i>X</i>"),
        ("<p>A&nbsp;</p>&nbsp;|&nbsp;", ["A"], None),
        ("<script>if (a<b) f()</script><style>b{}</style>x", ["x"], None),
        ("<code>a b</code> and <pre>c <b>d</b></pre> e", ["and", "e"], None),
        ('<p translate="no">Name <i>here</i></p> y', ["y"], None),
        ("<!-- no --><!doctype html><?php no ?>z", ["z"], None),
        ("two\n lines of one sentence", ["two lines of one sentence"], "TWO LINES OF ONE SENTENCE"),
        ("One. Two.", ["One.", "Two."], None),
        ("a < b", ["a < b"], "A &lt; B"),
        ("plain </b> and <a href='", ["plain", "and <a href='"], "PLAIN </b> AND &lt;A HREF='"),
    ],
)
def test_only_the_text_of_html_is_translated(markup, sentences, joined):
    document = split_html(markup, "en", "de")
    assert document.sentences == [each.strip() for each in sentences]
    if joined is None:
        assert document.join(sentences_as_html(markup, document)) == markup
    else:
        assert document.join([each.upper() for each in document.sentences]) == joined


def sentences_as_html(markup, document):
    """The sentences themselves, which escaping makes the source again."""
    assert all(html.escape(each, quote=False) in markup for each in document.sentences)
    return document.sentences


def test_nothing_of_any_markup_is_lost():
    """Whatever a parser makes of it: removing the sentences leaves the rest in order."""
    rng = random.Random(0)
    pieces = ["<p>", "</p>", "<b a='1'>", "x", "&amp;", "&#12;", "<", "&", ">", "<!--", "-->", '"']
    pieces += ["<script>", "</script>", "\n", " ", "<![CDATA[", "]]>", "<?x", "<code>", "</code>"]
    for _ in range(2_000):
        markup = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        document = split_html(markup, "en", "de")
        joined = document.join(document.sentences)
        assert "".join(html.unescape(joined).split()) == "".join(html.unescape(markup).split())


@pytest.mark.parametrize("piece", ["<a ", "<!--", "<a b='", "&#", "<![CDATA[", "</", "<?", "<p a="])
def test_the_time_for_hostile_markup_is_bounded(piece):
    """Python's parser tries each unfinished tag up to the end of the text."""
    since = time.perf_counter()
    split_html(piece * (20_000 // len(piece)), "en", "de")
    split_html(piece * (20_000 // len(piece)) + ">", "en", "de")
    assert time.perf_counter() - since < 2

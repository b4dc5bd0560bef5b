"""Documents: text or HTML is split into sentences, and put together again from translations.

White space, markup and everything without a letter or digit stay as they are.
"""

import html
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

from sentencex import segment

from flaxformer_min.decoding.results import Translation

LINE_BREAKS = re.compile("([\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+)")
"""What ends a line: the breaks of `str.splitlines`."""

WITHOUT_SPACES = {"zh", "ja", "th", "lo", "km", "my", "bo", "yue"}
"""Languages that put no space between words, nor between sentences."""

KEPT = {"code", "kbd", "pre", "samp", "script", "style", "var"}
"""HTML elements whose text is not translated, besides elements with translate="no"."""

VOID = set("area base br col embed hr img input link meta param source track wbr".split())
"""HTML elements without content or end tag."""


class Document:
    """Sentences to translate, and what stands between them.

    >>> document = split_text("Hello.  How are you?\\n\\n- Fine!", "en")
    >>> document.sentences
    ['Hello.', 'How are you?', '- Fine!']
    >>> document.join(["Hallo.", "Wie geht's?", "- Gut!"])
    "Hallo.  Wie geht's?\\n\\n- Gut!"
    """

    def __init__(self, is_html: bool = False):
        """Begin an empty document."""
        self.is_html = is_html
        self._parts: list[str] = []
        self._places: list[int] = []

    @property
    def sentences(self) -> list[str]:
        """The texts to translate, in order."""
        return [self._parts[place] for place in self._places]

    def join(self, translations: Sequence[str]) -> str:
        """Return the document with a translation in place of each sentence."""
        parts = list(self._parts)
        for place, text in zip(self._places, translations, strict=True):
            text = LINE_BREAKS.sub(" ", text)  # which a model may spell in bytes
            parts[place] = html.escape(text, quote=False) if self.is_html else text
        return "".join(parts)

    def join_hypotheses(self, found: Sequence[Sequence[Translation]]) -> list[Translation]:
        """Return translations of the document, whose numbers are sums over its sentences.

        The first one joins the best translation of each sentence, the second one the second best,
        and so on; a sentence with fewer keeps its last.
        """
        ranks = range(max(map(len, found), default=1))
        rows = [[each[min(rank, len(each) - 1)] for each in found] for rank in ranks]
        return [
            Translation(
                self.join([each.text for each in row]),
                sum(each.log_prob for each in row),
                sum(each.score for each in row),
            )
            for row in rows
        ]

    def add(self, part: str, is_sentence: bool = False) -> None:
        """Append a part; an empty one is left out."""
        if is_sentence:
            self._places.append(len(self._parts))
        if part:
            self._parts.append(part)


def split_text(text: str, source: str, target: str = "") -> Document:
    """Split text into lines, and lines into sentences, by the rules of the source language.

    Where sentences touch, as in Chinese, those of a target language with spaces get one.
    """
    document = Document()
    for number, line in enumerate(LINE_BREAKS.split(text)):
        if number % 2:
            document.add(line)
        else:
            _add_sentences(document, line, source, target)
    return document


def split_html(markup: str, source: str, target: str = "") -> Document:
    """Split the text between the tags of HTML; a line break there is a space like any other.

    >>> split_html("<p>A <b>cat</b> &amp; dog<br>too</p>", "en").sentences
    ['A', 'cat', '& dog', 'too']
    """
    document = Document(is_html=True)
    for is_text, raw in _Nodes(markup).nodes():
        text = html.unescape(raw)
        if is_text and _has_words(text):
            _add_sentences(document, text, source, target)
        else:
            document.add(raw)
    return document


def deal(documents: Sequence[Document], items: Sequence[Any]) -> Iterator[tuple[Document, list]]:
    """Yield each document with its items, one for each of its sentences."""
    rest = iter(items)
    for document in documents:
        yield document, [next(rest) for _ in document.sentences]


def _add_sentences(document: Document, text: str, source: str, target: str) -> None:
    """Append the sentences of a line or text node, and the white space around them."""

    def keep(part: str) -> None:
        escaped = html.escape(part, quote=False).replace("\xa0", "&nbsp;")
        document.add(escaped if document.is_html else part)

    touches = False
    for sentence in segment(plain_language(source), text):
        core = sentence.strip()
        if not _has_words(core):
            keep(sentence)
            touches = False
            continue
        before, _, after = sentence.partition(core)
        spaced = plain_language(target) not in WITHOUT_SPACES
        keep(" " if touches and not before and spaced else before)
        document.add(" ".join(core.split()) if document.is_html else core, is_sentence=True)
        keep(after)
        touches = not after


def plain_language(code: str) -> str:
    """Return a language code without script and region.

    >>> plain_language("zh-Hans"), plain_language("pt_BR")
    ('zh', 'pt')
    """
    return re.split("[-_]", code)[0].lower()


def _has_words(text: str) -> bool:
    return any(map(str.isalnum, text))


class _Nodes(HTMLParser):
    """Where the text and the markup of a document begin."""

    def __init__(self, markup: str):
        super().__init__(convert_charrefs=False)
        self._markup = markup
        self._lines = [0, *(found.end() for found in re.finditer("\n", markup))]
        self._starts: list[tuple[int, bool]] = [(0, False)]
        self._kept: list[str] = []
        # An unfinished tag is text. Left in, each `<` of it would be tried up to the end.
        end = markup.rfind(">") + 1
        self.feed(markup[:end])
        self.close()
        self._kept.clear()
        self._begin(is_text=True)

    def nodes(self) -> list[tuple[bool, str]]:
        """Return whether it is text to translate, and the source of it, of each node."""
        starts = [*(start for start, _ in self._starts), len(self._markup)]
        kinds = [is_text for _, is_text in self._starts]
        return [
            (is_text, self._markup[start:end])
            for is_text, start, end in zip(kinds, starts, starts[1:], strict=False)
        ]

    def _begin(self, is_text: bool) -> None:
        """Note that a node begins here, unless it continues text."""
        is_text = is_text and not self._kept
        line, column = self.getpos()
        start = self._lines[line - 1] + column
        if not (is_text and self._starts and self._starts[-1][1]):
            self._starts.append((start, is_text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a start tag, and whether its content is kept."""
        self._begin(False)
        if tag not in VOID and (self._kept or tag in KEPT or ("translate", "no") in attrs):
            self._kept.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Note an end tag."""
        self._begin(False)
        while tag in self._kept and self._kept.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Note text."""
        self._begin(True)

    def handle_entityref(self, name: str) -> None:
        """Note an entity, which is text."""
        self._begin(True)

    def handle_charref(self, name: str) -> None:
        """Note a character reference, which is text."""
        self._begin(True)

    def handle_comment(self, data: str) -> None:
        """Note a comment."""
        self._begin(False)

    def handle_decl(self, decl: str) -> None:
        """Note a declaration."""
        self._begin(False)

    def handle_pi(self, data: str) -> None:
        """Note a processing instruction."""
        self._begin(False)

    def unknown_decl(self, data: str) -> None:
        """Note a marked section."""
        self._begin(False)

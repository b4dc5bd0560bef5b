"""The tutorial runs from top to end, and the site has a page for every public name."""

import base64
import doctest
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import flaxformer_min

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"
NOTEBOOK_BYTES = 1_500_000
LIBRARIES = ("ipykernel", "latex2mathml", "material", "matplotlib", "mkdocstrings", "nbclient")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
needs_docs = pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install 'flaxformer_min[docs]'"
)


# The tutorial


@pytest.fixture(scope="module")
def stored():
    """The cells of the tutorial as JSON, which needs no library to read."""
    return json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]


def text_of(cell):
    return "".join(cell["source"])


def kinds_of(cell):
    """What a cell shows: {"stdout", "image/png", ...}."""
    kinds = set()
    for output in cell.get("outputs", []):
        kinds |= {output["name"]} if "name" in output else set(output.get("data", {}))
    return kinds


def test_the_tutorial_has_the_sections_of_the_paper_in_order(stored):
    text = "\n".join(text_of(cell) for cell in stored if cell["cell_type"] == "markdown")
    numbers = [tuple(map(int, n.split("."))) for n in re.findall(r"^## ([\d.]+) ", text, re.M)]
    assert numbers == sorted(numbers)
    assert {(3, 2, 1), (3, 2, 2), (3, 2, 3), (3, 3), (3, 4), (3, 5), (5, 3), (5, 4)} <= {*numbers}
    assert re.findall(r"\\qquad \((\d)\)", text) == ["1", "2", "3"]  # the numbered equations


def test_the_tutorial_keeps_what_it_printed_and_drew(stored):
    """Executed in one go from top to end, and narrow and small enough to be read on the web."""
    assert max(len(line) for cell in stored for line in text_of(cell).splitlines()) <= 120
    code = [cell for cell in stored if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    pictures = [cell for cell in code if "image/png" in kinds_of(cell)]
    assert len(pictures) >= 10
    for cell in code:
        assert "stderr" not in kinds_of(cell), text_of(cell)
    assert TUTORIAL.stat().st_size < NOTEBOOK_BYTES


def shown(cells, kind):
    """Everything of a kind that cells show."""
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return ["".join(data[kind]) for data in outputs if kind in data]


def test_the_tutorial_shows_the_code_as_it_is(stored):
    text = "\n".join(shown(stored, "text/markdown"))
    listings = re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.M | re.S)
    assert len(listings) >= 10
    for file, code in listings:
        lines = {line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()}
        assert {line.strip() for line in code.splitlines()} <= lines, file


@needs_docs
@pytest.mark.slow
def test_the_tutorial_runs_from_top_to_end_and_shows_what_it_has_stored(tmp_path, stored):
    """Its own checks are assertions; a model of its size gets most dates right."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(TUTORIAL, as_version=4)
    environment = {**os.environ, "XLA_FLAGS": "", "TMPDIR": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    executed = client.execute(env=environment).cells
    for new, old in zip(executed, stored, strict=True):
        assert kinds_of(new) - {"stderr"} == kinds_of(old), text_of(old)
    printed = "".join(
        output.get("text", "") for cell in executed for output in cell.get("outputs", [])
    )
    exact, total = re.search(r"(\d+) of (\d+) are exact", printed).groups()
    assert int(exact) >= 0.6 * int(total)


# The site


class Page(HTMLParser):
    """What a built page refers to, and where one can refer to in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.loads = set(), {""}, set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given["id"]} if given.get("id") else set()
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        elif tag in ("img", "script") and given.get("src"):
            self.loads.add(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loads.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: {path: page}."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def page_of(site, name):
    (page,) = (page for path, page in site.items() if path.as_posix().endswith(f"/{name}"))
    return page


def words_of(text):
    """The words of a docstring or page, without markup."""
    text = re.sub(r"<[^>]*>", "", text).replace("&lt;", "<").replace("&gt;", ">")
    return re.findall(r"\w+", text.replace("&amp;", "&").replace("&#39;", "'"))


@needs_docs
@pytest.mark.slow
def test_every_public_name_has_its_page_from_its_docstring(site):
    """No doctest or parameter is lost: Markdown takes `>>>` for a quotation, and joins lines."""
    for name in flaxformer_min.__all__:
        page = page_of(site, f"api/{name}.html")
        assert f"from flaxformer_min import {name}" in page.text
        described = getattr(flaxformer_min, name)
        first = words_of(inspect.getdoc(described).split("\n\n")[0])
        assert " ".join(first) in " ".join(words_of(page.text))
        assert "<blockquote>" not in page.text, name
    assert "<code>pairs</code></strong>: sentence pairs" in page_of(site, "api/train.html").text


@needs_docs
def test_docstrings_become_markdown_as_their_example_says():
    path = ROOT / "docs" / "theme" / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docstrings", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module)[:2] == (0, 1)


@needs_docs
@pytest.mark.slow
def test_the_site_is_whole_without_a_network(site):
    """Every link and picture is there, and no page loads anything from elsewhere."""
    for path, page in site.items():
        for link in page.links | page.loads:
            if re.match(r"https?:", link):
                assert link not in page.loads, (path.name, link)
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), (path.name, link)
            if anchor and target in site and not anchor.startswith("__"):
                assert anchor in site[target].anchors, (path.name, link)


@needs_docs
@pytest.mark.slow
def test_the_page_of_the_tutorial_has_its_formulas_and_pictures(site, stored):
    """Formulas are MathML, which needs no script."""
    page = page_of(site, "tutorial.html")
    formulas = sum(text_of(cell).count("$$") for cell in stored) // 2
    assert page.text.count('display="block"') == formulas > 5
    assert "FORMULA" not in page.text and "$$" not in page.text
    pictures = [base64.b64decode(png) for png in shown(stored, "image/png")]
    folder = next(path for path in site if path.name == "tutorial.html").parent / "tutorial"
    assert sorted(path.read_bytes() for path in folder.iterdir()) == sorted(pictures)

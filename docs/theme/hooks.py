"""Pages of the site that are not in docs/: README and its kin, the tutorial, the public names."""

import base64
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import flaxformer_min

ROOT = Path(__file__).parents[2]

MOVED = {
    "README.md": "index.md",
    "README.ko.md": "ko.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "LICENSE": "license.md",
    "CITATION.cff": "citation.cff",
    "docs/index.md": "contents.md",
    "docs/tutorial.ipynb": "tutorial.md",
}
"""The page of each file whose name differs on the site; any other is `docs/` and its name."""

API = {
    "Train": "train TrainResult RunFolder",
    "One step": "TrainState init_state make_train_step make_eval_step shard_batch cross_entropy",
    "Settings": "Config DataConfig ModelConfig TrainingConfig SearchConfig",
    "Translate": "Translator search Hypotheses",
    "Tokens": "Tokens Batch one_sentence_per_row shift_right",
    "Model": "Transformer Encoder EncoderLayer Decoder DecoderLayer MultiHeadAttention FeedForward",
    "Functions": "attention_weights scaled_dot_product_attention padding_mask look_ahead_mask "
    "segment_mask sinusoidal_encoding",
    "Other formats": "export import_model",
}
"""The public names by subject, in the order of the navigation."""

BENEATH = {
    "A loop of your own": "training.schedule.learning_rate training.optimizer.make_optimizer",
    "Search and scores": "decoding.results.Translation "
    "decoding.results.PairScore decoding.results.Attention evaluation.Evaluation",
    "Figures": "plots.figures.attention_figure plots.figures.curves_figure "
    "plots.figures.positions_figure plots.figures.save training.metrics.read_metrics",
    "Text and machine": "data.corpora.read_pairs system.devices.configure_cpu_devices "
    "system.memory.tune_malloc system.compilation.enable_compilation_cache",
}
"""Names below the top level that the documents mention, by subject."""


def public_names() -> dict[str, str]:
    """Return the path of each name that has a page. Raises PluginError if a public one has none."""
    names = [name for group in API.values() for name in group.split()]
    if differing := set(names) ^ set(flaxformer_min.__all__):
        raise PluginError(
            "API in docs/theme/hooks.py must have each name of flaxformer_min.__all__ once; "
            f"these differ: {', '.join(sorted(differing))}."
        )
    objects = [getattr(flaxformer_min, name) for name in names]
    modules = [inspect.getmodule(each).__name__.partition(".")[2] for each in objects]
    paths = [f"{module}.{name}" for module, name in zip(modules, names, strict=True)]
    paths += [path for group in BENEATH.values() for path in group.split()]
    return {path.rsplit(".")[-1]: f"flaxformer_min.{path}" for path in paths}


def on_config(config: Any) -> None:
    """Fill the section API of the navigation."""
    groups = [{"All names": "api/index.md"}]
    for title, names in (API | BENEATH).items():
        leaves = [path.rsplit(".")[-1] for path in names.split()]
        groups.append({title: [{leaf: f"api/{leaf}.md"} for leaf in leaves]})
    next(entry for entry in config.nav if "API" in entry)["API"] = groups


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""

    def add(name: str, content: str | bytes) -> None:
        if name in files.src_uris:
            files.remove(files.src_uris[name])
        files.append(File.generated(config, name, content=content))

    for source, page in MOVED.items():
        if source.endswith((".md", ".cff")):
            add(page, (ROOT / source).read_text(encoding="utf-8"))
    add("license.md", f"# Licence\n\n```text\n{(ROOT / 'LICENSE').read_text()}```\n")
    add("tutorial.md", "\n\n".join(tutorial(add)))
    for name, path in public_names().items():
        module = path.rpartition(".")[0]
        origin = "flaxformer_min" if name in flaxformer_min.__all__ else module
        add(f"api/{name}.md", f"---\nimport: from {origin} import {name}\n---\n\n::: {path}\n")
    add("api/index.md", "\n".join(index_of_names()))
    return files


def index_of_names() -> Iterator[str]:
    """Yield the lines of the page of all names."""
    yield "# All names\n\nThe names that `import flaxformer_min` offers, by subject."
    for title, names in (API | BENEATH).items():
        if title == next(iter(BENEATH)):
            yield "\nBeneath the top level, and mentioned in the documents:"
        yield f"\n## {title}\n"
        for path in names.split():
            leaf = path.rsplit(".")[-1]
            yield f"- [`{path}`]({leaf}.md)"


def tutorial(add: Any) -> Iterator[str]:
    """Yield the cells of the tutorial in Markdown, with their outputs."""
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            yield cell.source
            continue
        yield f"```python\n{cell.source}\n```"
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if printed:
            yield f"``` {{.text .output .no-copy}}\n{printed.rstrip()}\n```"
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"tutorial/{number}.png"
                add(picture, base64.b64decode(data["image/png"]))
                yield f'<p class="output"><img src="{picture}" alt="Output of this cell"></p>'
            elif "text/markdown" in data:
                head = r"```python\n# (\S+)\n\n"
                yield re.sub(head, r'```python title="\1"\n', data["text/markdown"])


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Make links lead to pages of the site, and set formulas aside."""
    here = page.file.src_uri
    source = next((old for old, new in MOVED.items() if new == here), f"docs/{here}")

    def to_page(found: re.Match) -> str:
        before, link = found.groups()
        if re.match(r"https?:|#|mailto:", link) or here.startswith(("api/", "license")):
            return found[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), link))
        name = MOVED.get(target, target.removeprefix("docs/"))
        if here == "tutorial.md" and link.startswith("tutorial/"):
            name = link
        return before + os.path.relpath(name, os.path.dirname(here) or ".")

    markdown = re.sub(r'(\]\(|src=")([^)\s"#]+)', to_page, markdown)
    if here != "tutorial.md":
        return markdown
    page.formulas = []

    def set_aside(found: re.Match) -> str:
        block, inline, code = found.groups()
        if code:
            return code
        tex = (block or inline).replace("\n", " ")
        page.formulas.append(convert(tex, display="block" if block else "inline"))
        return f"FORMULA{len(page.formulas) - 1:04}"

    return re.sub(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|(```.*?```)", set_aside, markdown, flags=re.DOTALL)


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Put the formulas back as MathML, which browsers draw without a script, and add imports."""
    if "import" in page.meta:
        html = html.replace("</h1>", f"</h1>\n<p><code>{page.meta['import']}</code></p>", 1)
    formulas = getattr(page, "formulas", ())
    return re.sub(r"FORMULA(\d{4})", lambda found: formulas[int(found[1])], html)

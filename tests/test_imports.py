"""Imports run one way, and files and functions stay short enough to read."""

import ast
import sys
from pathlib import Path

import pytest

import flaxformer_min

PACKAGE = Path(flaxformer_min.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = [
    {"__main__"},
    {"cli"},
    {"experiment", "interop"},
    {"training", "decoding"},
    {"runs"},
    {"model", "data", "plots", "evaluation"},
    {"runtime"},
    {"config"},
    {"config_fields", "tokens"},
]
"""The parts of the package, the highest first: each imports of itself and of the floors below."""

MAY_NOT_IMPORT = {
    "model": {"runtime"},
    "data": {"config"},
    "plots": {"config", "tokens"},
    "runtime": {"config", "tokens"},
}
"""Figure 1 does not know of machines, data not of a run's settings, a picture not of a model."""


def may_import(part):
    """The parts below, and the part itself."""
    if part == "__init__":
        return set().union(*FLOORS[2:])
    floor = next(number for number, parts in enumerate(FLOORS) if part in parts)
    below = set().union(*FLOORS[floor + 1 :])
    return below - MAY_NOT_IMPORT.get(part, set()) | {part}


MODEL_MAY_IMPORT = {"flaxformer_min", "jax", "flax", "jaxtyping"} | sys.stdlib_module_names
MODEL_LINES, FUNCTION_LINES = 190, 40


def name_of(path):
    """`flaxformer_min/model/masks.py` is flaxformer_min.model.masks."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imported_modules(source, name):
    """Every module that `source` imports, anywhere in it, as absolute names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*above, *(node.module or "").split(".")]).rstrip(".")
            if module == "flaxformer_min":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def part_of(name):
    """The part for flaxformer_min.model.masks is model; flaxformer_min itself is __init__."""
    return (name.split(".") + ["__init__"])[1]


def strangers(source, name):
    """What a module of the package imports and must not."""
    part = part_of(name)
    for module in imported_modules(source, name):
        top = module.split(".")[0]
        if top == "flaxformer_min":
            if part_of(module) not in may_import(part):
                yield module
        elif top in {"tensorflow", "torch", "train", "tests"}:
            yield module
        elif part == "model" and top not in MODEL_MAY_IMPORT:
            yield module


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_stands_before_it(path):
    """Figure 1 is a library of its own; data, training and decoding do not know one another."""
    assert list(strangers(path.read_text(), name_of(path))) == []


def test_every_folder_of_the_package_has_its_place_in_the_order():
    """A new folder has to be thought about: what may it import, and who may import it?"""
    folders = {path.relative_to(PACKAGE).parts[0] for path in MODULES if path.parent != PACKAGE}
    assert folders <= set().union(*FLOORS)


@pytest.mark.parametrize(
    "name, source, found",
    [
        ("data.batches", "from flaxformer_min.model.masks import padding_mask", "model.masks"),
        ("data.batches", "import flaxformer_min.training.loss", "training.loss"),
        ("training.loop", "from flaxformer_min import decoding", "decoding"),
        ("training.loop", "def f():\n    from ..experiment import run", "experiment"),
        ("decoding.search", "from ..training.loss import loss", "training.loss"),
        ("plots.figures", "from ..tokens import PAD", "tokens"),
        ("evaluation", "from flaxformer_min.model.masks import padding_mask", "model.masks"),
        ("data.batches", "from flaxformer_min import Config", "Config"),
        ("data.batches", "from .. import translate", "translate"),
        ("model.masks", "from flaxformer_min import cli", "cli"),
        ("model.masks", "from flaxformer_min.runs.checkpoint import restore", "runs.checkpoint"),
        ("runtime.files", "from flaxformer_min.config import Config", "config"),
        ("runs.folder", "from flaxformer_min.decoding.search import search", "decoding.search"),
        ("runs.folder", "import flaxformer_min.cli", "cli"),
        ("experiment.run", "from flaxformer_min.cli import main", "cli"),
    ],
)
def test_an_import_against_the_order_is_found(name, source, found):
    """However it is written: absolute, relative, from the package or inside a function."""
    assert list(strangers(source, f"flaxformer_min.{name}")) == [f"flaxformer_min.{found}"]


@pytest.mark.parametrize(
    "source", ["import numpy", "import optax as o", "from tensorflow import nn", "import train"]
)
def test_the_model_needs_nothing_but_jax_and_flax(source):
    """Figure 1 can be lifted out of the package."""
    assert len(list(strangers(source, "flaxformer_min.model.masks"))) == 1


def own_lines(function, source_lines):
    """The numbers of a function's lines of code: no signature, docstring, blank or comment."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    numbers = {n for node in body for n in range(node.lineno, node.end_lineno + 1)}
    lines = {n: source_lines[n - 1].strip() for n in numbers}
    return {n for n, line in lines.items() if line and not line.startswith("#")}


def too_long_functions(source):
    """Functions of more than forty lines; a function inside another counts for itself alone."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, functions):
            own = own_lines(node, lines)
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, functions):
                    own -= set(range(inner.lineno, inner.end_lineno + 1))
            if len(own) > FUNCTION_LINES:
                yield f"{node.name}: {len(own)} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_function_is_longer_than_forty_lines(path):
    """What is longer has more than one idea; its explanation may be as long as it needs."""
    assert list(too_long_functions(path.read_text())) == []


def test_a_function_of_forty_one_lines_is_found():
    """Forty pass; docstring, comments and inner functions do not count for the outer one."""
    head = 'def f(\n    x,\n):\n    """One\n    two."""\n    # why\n\n'
    inner = "    def g():\n" + "        pass\n" * 40
    assert list(too_long_functions(head + inner + "    pass\n" * 40)) == []
    assert list(too_long_functions(head + inner + "    pass\n" * 41)) == ["f: 41 lines"]
    assert list(too_long_functions(head + inner + "        pass\n")) == ["g: 41 lines"]


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=name_of)
def test_a_box_of_figure_1_is_read_in_two_screens(path):
    """The module's docstring is not counted: the largest of them draws the figure."""
    source = path.read_text()
    tree, lines = ast.parse(source), len(source.splitlines())
    if ast.get_docstring(tree) is not None:
        lines -= tree.body[0].end_lineno
    assert lines <= MODEL_LINES

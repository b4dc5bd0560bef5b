"""Imports run downwards, and files and functions stay short enough to read."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flaxformer_min

PACKAGE = Path(flaxformer_min.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = [
    {"__main__"},
    {"cli"},
    {"server"},
    {"experiment", "interop"},
    {"training", "decoding"},
    {"storage"},
    {"model", "data", "plots", "evaluation"},
    {"kernels", "system"},
    {"config"},
    {"config_checks", "config_fields", "languages", "tokens"},
]
"""The parts of the package, the highest first: each imports from itself and the floors below."""

MAY_NOT_IMPORT = {
    "model": {"system"},
    "data": {"config", "kernels"},
    "plots": {"config", "kernels", "tokens", "languages"},
    "kernels": {"config", "tokens", "languages"},
    "system": {"config", "tokens", "languages"},
}
"""The model is independent of machines, data of the settings of a run, plots of a model."""


def may_import(part):
    """The parts below, and the part itself."""
    if part == "__init__":
        return set().union(*FLOORS[3:])
    floor = next(number for number, parts in enumerate(FLOORS) if part in parts)
    below = set().union(*FLOORS[floor + 1 :])
    return below - MAY_NOT_IMPORT.get(part, set()) | {part}


MODEL_MAY_IMPORT = {"flaxformer_min", "jax", "flax", "jaxtyping"} | sys.stdlib_module_names
FILE_LINES, MODEL_LINES, FUNCTION_LINES, SCRIPT_LINES = 400, 190, 40, 40
TABLES = {PACKAGE / "data" / "corpora" / "cldr_kinds.py"}
"""Files that list data; they may be long."""


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
    """The part of flaxformer_min.model.masks is model; flaxformer_min itself is __init__."""
    return (name.split(".") + ["__init__"])[1]


def forbidden_imports(source, name):
    """The modules that a module of the package imports and must not."""
    part = part_of(name)
    for module in imported_modules(source, name):
        top = module.split(".")[0]
        if top == "flaxformer_min":
            if part_of(module) not in may_import(part):
                yield module
        elif top in {"tensorflow", "torch", "train", "tests"}:
            yield module
        elif part in ("model", "kernels") and top not in MODEL_MAY_IMPORT:
            yield module


def test_a_module_imports_only_from_the_floors_below():
    """Figure 1 is a library of its own; training and decoding are independent of one another."""
    found = {path: list(forbidden_imports(path.read_text(), name_of(path))) for path in MODULES}
    assert not {path: imports for path, imports in found.items() if imports}


def test_every_part_of_the_package_has_its_floor():
    parts = {part_of(name_of(path)) for path in MODULES}
    assert parts - {"__init__"} <= set().union(*FLOORS)


def test_contributing_shows_the_floors():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d \| (.*?) \|", text, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == FLOORS[1:]


@pytest.mark.parametrize(
    "name, source, found",
    [
        ("data.batches", "from flaxformer_min.model.masks import padding_mask", "model.masks"),
        ("data.batches", "import flaxformer_min.training.loss", "training.loss"),
        ("training.loop", "from flaxformer_min import decoding", "decoding"),
        ("training.loop", "def f():\n    from ..experiment import run", "experiment"),
        ("plots.figures", "from ..tokens import PAD", "tokens"),
        ("data.batches", "from flaxformer_min import Config", "Config"),
        ("data.batches", "from .. import translate", "translate"),
    ],
)
def test_an_upward_import_is_found(name, source, found):
    assert list(forbidden_imports(source, f"flaxformer_min.{name}")) == [f"flaxformer_min.{found}"]


@pytest.mark.parametrize("source", ["import numpy", "from tensorflow import nn", "import train"])
def test_an_import_that_the_model_does_not_need_is_found(source):
    """The model needs jax and flax alone, and can be copied out of the package."""
    assert len(list(forbidden_imports(source, "flaxformer_min.model.masks"))) == 1


def code_lines(function, source_lines):
    """The number of lines of a body, without docstrings, blank lines and comments."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    numbers = {n for node in function.body for n in range(node.lineno, node.end_lineno + 1)}
    for node in ast.walk(function):
        if isinstance(node, functions) and ast.get_docstring(node) is not None:
            numbers -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = [source_lines[n - 1].strip() for n in numbers]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def too_long_functions(source):
    """Functions of more than forty lines, closures included."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            count = code_lines(node, lines)
            if count > FUNCTION_LINES:
                yield f"{node.name}: {count} lines"


def test_no_function_is_longer_than_forty_lines():
    found = {path: list(too_long_functions(path.read_text())) for path in MODULES}
    assert not {path: functions for path, functions in found.items() if functions}


def test_a_function_of_forty_one_lines_is_found():
    """Closures count for the outer function; signatures, docstrings and comments for none."""
    head = 'def f(\n    x,\n):\n    """One\n    two."""\n    # why\n\n'
    inner = '    def g():\n        """One\n        two."""\n' + "        pass\n" * 9
    assert list(too_long_functions(head + inner + "    pass\n" * 30)) == []
    assert list(too_long_functions(head + inner + "    pass\n" * 31)) == ["f: 41 lines"]
    inner += "        pass\n" * 32
    assert list(too_long_functions(head + inner)) == ["f: 42 lines", "g: 41 lines"]


def test_no_file_is_longer_than_four_hundred_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES if path not in TABLES}
    assert not {path: lines for path, lines in lengths.items() if lines > FILE_LINES}
    assert len((PACKAGE.parent / "train.py").read_text().splitlines()) <= SCRIPT_LINES


def test_a_box_of_figure_1_is_read_in_two_screens():
    """Without its docstring: the longest of them draws the figure."""
    for path in (PACKAGE / "model").glob("*.py"):
        source = path.read_text()
        tree, lines = ast.parse(source), len(source.splitlines())
        if ast.get_docstring(tree) is not None:
            lines -= tree.body[0].end_lineno
        assert lines <= MODEL_LINES, path


PROGRAM = """
import sys

class Missing:
    names = {"tensorflow_datasets", "babel", "matplotlib", "torch", "tensorflow", "orbax"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ImportError(f"{name} is imported")

def printed(*arguments):
    try:
        main(list(arguments))
    except SystemExit as end:
        assert not end.code, end.code

sys.meta_path.insert(0, Missing())
import flaxformer_min
from flaxformer_min.cli import main
printed("translate", "--help")
printed("--version")
assert not {"jax", "flax", "numpy", "sentencepiece"} & set(sys.modules)
from flaxformer_min import *
from flaxformer_min.data.corpora import read_pairs
assert len(read_pairs("text:" + sys.argv[1], "train", "en-de")) == 1
Missing.names.remove("orbax")
printed("train", "--help")
"""


def test_only_what_is_used_is_imported(tmp_path):
    """Help takes no second: no jax, no numpy. No other command, class or text needs corpora or
    plots, and nothing ever TensorFlow or torch.
    """
    for language in ("en", "de"):
        (tmp_path / f"train.{language}").write_text("one\n")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^flaxformer-min [0-9.]+, jax [0-9.]+\S*, Python [0-9.]+\S*$", done.stdout, re.M
    )
    for option in ("--beam-size", "--training.steps", "--workdir"):
        assert option in done.stdout

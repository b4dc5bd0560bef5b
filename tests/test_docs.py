"""The documents are true: options and defaults, code, commands, links, quoted messages."""

import argparse
import ast
import dataclasses
import fnmatch
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_run import make_tiny_run

import flaxformer_min
from flaxformer_min.cli.arguments import make_parser
from flaxformer_min.cli.train import Arguments, read_arguments
from flaxformer_min.config import Config
from flaxformer_min.system.distributed import Distributed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "README.ko.md", *sorted(DOCS.glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("C*.md"))]
REFERENCE = (DOCS / "command_line.md").read_text(encoding="utf-8")
RUN_ELSEWHERE = {"README.md": "test_readme.py", "extending.md": "test_extending.py"}
COMMAND_NAMES = set(make_parser()._subparsers._group_actions[0].choices)
LONGEST_LINE, README_LINES, PICTURE_BYTES = 120, 160, 300_000
MOST_WORDS = {"performance.md": 1_200, "accelerators.md": 2_500}


def read(page):
    return page.read_text(encoding="utf-8")


def name_of(page):
    return str(page.relative_to(ROOT))


def prose_of(page):
    """A page without its fenced code."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


# The reference of the command line


def options_of(parser, command="flaxformer-min"):
    """(command, option) of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options_of(inner, f"{command} {name}")
        elif action.option_strings and not {"--help", "--version"} & {*action.option_strings}:
            yield command, action


def section_of(command):
    """The section of a command in the reference."""
    return re.split("\n## ", REFERENCE.split(f"\n## `{command}`\n")[1])[0]


def settings_of_training():
    """{"--data.corpus": its default, ...}, with the options of `Distributed`."""
    groups = {field.name: field.type for field in dataclasses.fields(Config)}
    return {
        f"--{group}.{field.name.replace('_', '-')}": field.default
        for group, kind in {**groups, "distributed": Distributed}.items()
        for field in dataclasses.fields(kind)
    }


def test_the_reference_is_generated_from_the_program():
    """If this fails, run `python docs/theme/reference.py` and read what it changes."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "theme" / "reference.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.written(REFERENCE) == REFERENCE


@pytest.mark.parametrize(
    "command, option",
    list(options_of(make_parser())),
    ids=lambda each: getattr(each, "dest", each),
)
def test_the_section_of_a_command_has_its_options_and_help_their_default(command, option):
    assert f"`{option.option_strings[0]}" in section_of(command.split()[1])
    assert len(re.findall(r"\((?:default: |no default).*?\)", option.help)) == 1, option.help


def test_the_reference_has_every_setting_of_training_with_its_default():
    shown = dict(
        re.findall(r"^- `(--[\w.-]+)[^`]*` \(`?([^`,)]*)", section_of("train"), re.MULTILINE)
    )
    words = {None: "none", (): "none", "": "empty", True: "on", False: "off"}
    expected = {"--workdir": "runs/", "--profile": "0"}
    for option, default in settings_of_training().items():
        number = type(default) in (int, float)  # 1 == True
        expected[option] = str(default) if number else words.get(default, str(default))
    assert shown == expected


def test_every_command_has_a_section_and_every_section_a_command():
    assert set(re.findall(r"^## `(\w+)`$", REFERENCE, re.MULTILINE)) == COMMAND_NAMES
    assert len(COMMANDS) > 30, "found in the pages, which the test below parses"


# Code and commands


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_of_a_page_runs_unless_its_fence_says_notest(page, tmp_path):
    """From top to bottom, where the default job has left its run."""
    fences = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", read(page), re.MULTILINE)
    assert {fence for fence, _ in fences} <= {"python", "python notest", "text", "bibtex"}
    blocks = [block for fence, block in fences if fence == "python"]
    if page.name in RUN_ELSEWHERE:
        assert name_of(page) in read(ROOT / "tests" / RUN_ELSEWHERE[page.name])
    elif page.name == "README.ko.md":  # comments are translated, code is not
        original = re.findall(r"```python\n(.*?)```", read(ROOT / "README.md"), re.DOTALL)
        assert [ast.dump(ast.parse(each)) for each in blocks] == [
            ast.dump(ast.parse(each)) for each in original
        ]
    elif blocks:
        make_tiny_run(tmp_path / "runs" / "cldr_en_ko")
        code = [sys.executable, "-c", "\n".join(blocks)]
        done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def commands_of(page):
    """(page, command, arguments) of the indented blocks and of the code in the prose."""
    text = re.sub(r"\\\n\s*", " ", prose_of(page))
    lines = re.findall(r"^    (.*)$", text, re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    for line in lines:
        typed = re.search(r"(flaxformer-min|python train\.py)( .*|$)", line)
        if typed and not re.search(r"COMMAND|\[| \| ", typed[0]):  # those are patterns of usage
            words = shlex.split(typed[2], comments=True)
            if typed[1] == "python train.py":
                words = ["train", *words]
            if words and words != ["--version"]:  # which ends the process: see test_cli.py
                yield page, words[0], words[1:]


COMMANDS = [each for page in PAGES for each in commands_of(page)]


@pytest.mark.parametrize(
    "page, command, arguments", COMMANDS, ids=lambda each: getattr(each, "name", str(each))
)
def test_every_command_of_a_page_can_be_typed(page, command, arguments, tmp_path, monkeypatch):
    """It is parsed, not run. A command without arguments is only named."""
    monkeypatch.chdir(ROOT)
    assert command in COMMAND_NAMES
    if command == "train":
        arguments = [existing_config(each, tmp_path) for each in arguments]
        assert isinstance(read_arguments(arguments, "train.py"), Arguments)
    elif arguments:
        make_parser().parse_args([command, *arguments])


def existing_config(argument, folder):
    """A file in place of one that the reader has."""
    if argument.endswith("/config.json"):
        (folder / "config.json").write_text(Config().to_json())
        return str(folder / "config.json")
    if argument == "configs/mine.py":
        return "configs/multi30k_en_de.py"
    return argument


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_option_that_a_page_mentions_exists(page):
    """Of these commands, of the benchmarks, or one of XLA's flags."""
    known = {option for _, action in options_of(make_parser()) for option in action.option_strings}
    known |= {*settings_of_training(), "--workdir", "--profile", "--help", "--version"}
    for program in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', read(program)))
    for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", read(page)):
        assert option.replace(".no-", ".") in known or option.startswith("--xla_"), option


# Messages


def texts_of_the_package():
    """All string literals, adjacent ones joined and values in braces left out."""
    for path in Path(flaxformer_min.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "..." for part in node.values
                )


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_package():
    page = read(DOCS / "troubleshooting.md")
    quoted = [" ".join(each.split()) for each in re.findall(r"“(.*?)”", page, re.DOTALL)]
    known = "\n".join(" ".join(text.split()) for text in texts_of_the_package())
    assert len(quoted) > 10
    for message in quoted:
        for part in message.split("..."):
            assert part.strip(" .") in known, message


# Functions and promises


def test_every_stop_of_the_contents_is_a_function_of_its_file():
    """The ways of a batch and of a line; each has the numbers 1 to 20."""
    numbers, file = [], ""
    for row in re.findall(r"^\| \d.*\|$", read(DOCS / "index.md").split("### The way")[1], re.M):
        stops, functions, where = row.split("|")[1:4]
        ends = [int(number) for number in re.findall(r"\d+", stops)]
        numbers += range(ends[0], ends[-1] + 1)
        file = where.strip(" `") or file
        source = read(Path(flaxformer_min.__file__).parent / file)
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", functions):
            assert re.search(rf"^ *def {name}\b", source, re.M), (name, file)
    assert numbers == [*range(1, 21)] * 2


def test_every_promise_of_reliability_names_its_test():
    """Each row of the first table names one test, by the beginning of its name, and its file."""
    rows = read(DOCS / "reliability.md").split("\n## ")[0].split("|---|\n")[1].splitlines()
    assert len(rows) > 40
    for row in rows:
        name, file = re.search(r"\| `(\w+)` \| `(\w+)` \|$", row).groups()
        tests = re.findall(r"^def test_(\w+)", read(ROOT / "tests" / f"test_{file}.py"), re.M)
        assert sum(test.startswith(name) for test in tests) == 1, row


# Form


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_no_line_of_a_page_is_longer_than_a_screen_is_wide(page):
    lines = enumerate(read(page).splitlines(), start=1)
    wide = [number for number, line in lines if len(line) > LONGEST_LINE]
    assert not wide


def test_the_readme_is_read_in_five_minutes_and_the_pages_on_speed_stay_short():
    for name in ("README.md", "README.ko.md"):
        assert len(read(ROOT / name).splitlines()) <= README_LINES
    for name, words in MOST_WORDS.items():
        assert len(read(DOCS / name).split()) <= words


def anchors_of(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    links += re.findall(r'(?:src|href)="([^"]+)"', prose_of(page))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_pictures_are_small_and_each_is_shown():
    shown_somewhere = "".join(read(page) for page in ALL_PAGES)
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < PICTURE_BYTES
        assert picture.name in shown_somewhere


def results_of(page):
    """The rows of the table of results of a README: (row, linked pages)."""
    table = [line for line in read(page).splitlines() if line.startswith("|") and "docs/" in line]
    for line in table:
        links = re.findall(r"\]\((docs/(?:results|performance)\.md)[^)]*\)", line)
        if links:
            yield re.sub(r"\]\(.*?\)", "", line), links


def test_every_figure_among_the_results_of_the_readme_is_in_the_page_it_links_to():
    """Both languages report the same."""
    rows = list(results_of(ROOT / "README.md"))
    assert len(rows) >= 4
    for row, links in rows:
        linked = "".join(read(ROOT / link) for link in links)
        for figure in re.findall(r"\d[\d,]*\.?\d*", row):
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}", linked), (figure, row)
    figures, of_korean = (
        [re.findall(r"\d[\d,]*\.\d+", row) for row, _ in results_of(ROOT / name)]
        for name in ("README.md", "README.ko.md")
    )
    assert figures == of_korean


def test_contributing_names_every_benchmark():
    table = read(ROOT / "CONTRIBUTING.md").split("## Benchmarks")[1]
    names = {path.name for path in (ROOT / "benchmarks").iterdir() if path.is_file()}
    patterns = re.findall(r"`([\w*]+\.(?:py|sh))`", table)
    assert {name for each in patterns for name in fnmatch.filter(names, each)} == names


def test_the_citation_names_this_version_and_licence():
    citation = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == flaxformer_min.__version__
    assert citation["license"] in read(ROOT / "pyproject.toml")
    assert citation["authors"] and citation["title"]

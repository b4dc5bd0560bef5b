"""Feed the commands what a hostile or unlucky user would: python benchmarks/fuzz.py [--cases 2000].

Mutated settings, metrics, tokenizers, caches, models to import and command lines; text in any
encoding, YAML and JSON of another structure, pipes and devices in place of files; all against a run
of random parameters.
Every case must end with status 0 or 2 and without a traceback, within 30 CPU seconds; it must
import nothing that the folder names, and write nothing outside the folders that the command names.
The same seed draws the same cases. The last line has the counts; the status is 1 if a case failed.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hostile_files
from hostile_files import mutate_bytes, mutate_files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

LONGEST_SECONDS = 30
"""CPU seconds after which a case counts as hanging. One that waits is ended after 300 seconds."""

NUMBERS = [0, -1, 1, 2, 3, 1.5, -0.0, 1e308, 10**30, 2**31, 2**63, True, None]
NUMBERS += [float("nan"), float("inf")]
TEXTS = ["", " ", "-", "--", "nan", "1e999", "9" * 30, "-1", "0", "1", "2.0", "None", "[]", "{}"]
TEXTS += ["../x", "/dev/null", "/dev/full", ".", "a" * 5_000, "\udcff", "\x00", "\n", "é\u202e한"]
TEXTS += ["tfds:planted_set", "tfds:planted:set", "text:", "cldr:en-en", "text:/proc/self/mem"]
KINDS = ("settings", "metrics", "tokenizer", "cache", "model", "model of Marian's own")
KINDS += ("command", "training command", "text", "training text", "yaml", "structure", "no file")


@dataclasses.dataclass(frozen=True)
class Place:
    """Folders of the fuzzer: the untouched run, where commands run, and what must stay as it is."""

    scratch: Path

    @property
    def run(self) -> Path:
        """Return the folder of the untouched run."""
        return self.scratch / "run"

    @property
    def model(self) -> Path:
        """Return the folder of the run's model as Marian's, to be imported."""
        return self.scratch / "marian"

    @property
    def marians_own(self) -> Path:
        """Return the folder of a model in Marian's own files."""
        return self.scratch / "marians_own"

    @property
    def work(self) -> Path:
        """Return the folder of one case, which is new for each."""
        return self.scratch / "work"

    @property
    def outside(self) -> Path:
        """Return the folder that no command names."""
        return self.scratch / "outside"


def prepare(place: Place) -> None:
    """Make the run, its text, its cache, its export, and what must not be imported by Python."""
    from tiny_run import LINES, make_tiny_run

    from flaxformer_min.config import DataConfig
    from flaxformer_min.interop import export

    text, data = place.scratch / "text", place.outside / "data" / "planted_set" / "1.0.0"
    for folder in (text, data):
        folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        for language in ("en", "ko"):
            (text / f"{split}.{language}").write_text("\n".join(LINES))
    settings = DataConfig(f"text:{text}", languages="en-ko")
    make_tiny_run(place.run, continues=True, data=settings)
    metrics = [json.dumps({"step": n, "loss": 3 / n, "validation_loss": 2.5}) for n in (1, 2, 3)]
    (place.run / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    (place.outside / "planted.py").write_text("open('IMPORTED', 'w')\nclass Feature: ...\n")
    (data / "features.json").write_text('{"type": "planted.Feature"}')
    (data / "dataset_info.json").write_text('{"name": "planted_set", "version": "1.0.0"}')
    encode(place)
    export(place.run, place.model, format="marian")
    make_marians_own(place.marians_own)


def make_marians_own(folder: Path) -> None:
    """Write a tiny model as Marian leaves it after training, with a vocabulary in YAML and text."""
    from marian_models import WORDS, pieces_of, train_spm, write_model, write_yml

    folder.mkdir()
    pieces = set()
    for side in ("source", "target"):
        pieces.update(pieces_of(train_spm(folder / f"{side}.spm", WORDS[side])))
    write_yml(folder / "vocab.yml", sorted(pieces))
    (folder / "vocab.txt").write_text("\n".join(sorted(pieces)))
    write_model(folder, ["vocab.yml", "vocab.txt"], norm="pre")
    (folder / "decoder.yml").rename(folder / "model.npz.decoder.yml")
    for name in ("model.npz.best-bleu.npz", "model.npz.optimizer.npz"):
        shutil.copy(folder / "model.npz", folder / name)


def encode(place: Place) -> None:
    """Encode the text of the run, from its cache where that is whole."""
    from flaxformer_min.experiment.prepare import prepare as prepare_text
    from flaxformer_min.storage.run_folder import RunFolder

    run = RunFolder(place.run)
    config = run.config()
    data = dataclasses.replace(config.data, cache_dir=str(place.scratch / "cache" / "text"))
    prepare_text(run, dataclasses.replace(config, data=data))


def mutate_settings(text: str, rng: random.Random, place: Place) -> bytes:
    """Return config.json with some settings of another value, type or name."""
    if rng.random() < 0.3:
        return mutate_bytes(text.encode(), rng)
    content = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        group = content[rng.choice([name for name in content if isinstance(content[name], dict)])]
        name = rng.choice([*group, "unknown"])
        group[name] = rng.choice([*NUMBERS, *TEXTS, [], {}, str(place.outside / "data")])
    if rng.random() < 0.1:
        content["data"] |= {"corpus": "tfds:planted_set", "cache_dir": str(place.outside / "data")}
    return json.dumps(content).encode("utf-8", "surrogatepass")


def commands(rng: random.Random, place: Place) -> list[str]:
    """Return a command that reads a run and needs no other setting."""
    run, lines, out = (str(place.work / name) for name in ("run", "lines", "out"))
    training = ["train", f"{run}/config.json", "--data.corpus", f"text:{place.work}/none"]
    return rng.choice(
        [
            ["translate", run, "--input", lines, "--output", out],
            ["score", run, lines, lines],
            ["evaluate", run, "--source", lines, "--reference", lines, "--output", out],
            ["evaluate", run, "--corpus", f"text:{place.scratch}/text", "--json"],
            ["evaluate", run, "--json"],
            ["plot", "curves", run, "--output", f"{out}.svg"],
            ["plot", "attention", run, "the red house", "--output", f"{out}.html"],
            training,
            training,
        ]
    )


def options_of_commands() -> dict[str, list[str]]:
    """Return the options of each command that reads a run."""
    from flaxformer_min.cli.arguments import make_parser

    def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    yield name, child
                    yield from parsers(child)

    return {
        name: [option for action in parser._actions for option in action.option_strings]
        for name, parser in parsers(make_parser())
    }


def hostile_options(command: list[str], rng: random.Random) -> list[str]:
    """Return the command with options of hostile values; its files stay where they are."""
    known = options_of_commands()[command[1] if command[0] == "plot" else command[0]]
    usable = [name for name in known if name not in ("-h", "--help", "--output")] + ["--none"]
    added = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        value = rng.choice([*TEXTS, *map(str, NUMBERS)])
        added += rng.choice([[rng.choice(usable), value], [rng.choice(usable)], [value]])
    return [*command, *added]


def hostile_training(command: list[str], rng: random.Random) -> list[str]:
    """Return a command to train with settings of hostile values, and no text to train on."""
    from flaxformer_min.config import Config

    names = [
        f"--{group.name}.{field.name}".replace("_", "-")
        for group in dataclasses.fields(Config)
        for field in dataclasses.fields(group.type)
        if field.name not in ("corpus", "cache_dir", "init_from")
    ]
    names += ["--profile", "--distributed.coordinator", "--distributed.process-id", "--none"]
    added = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        added += [rng.choice(names), rng.choice([*TEXTS[:-5], *map(str, NUMBERS)])]
    return [*command, *added]


def run_case(kind: str, rng: random.Random, place: Place) -> list[str]:
    """Run one case and return what it did wrong."""
    shutil.rmtree(place.work, ignore_errors=True)
    shutil.copytree(place.run, place.work / "run")
    (place.work / "lines").write_text("the red house\n\nthe blue house has 3 doors\n")
    command = commands(rng, place)
    if kind == "settings":
        config = place.work / "run" / "config.json"
        config.write_bytes(mutate_settings(config.read_text(), rng, place))
    elif kind == "metrics":
        metrics = place.work / "run" / "metrics.jsonl"
        metrics.write_bytes(mutate_bytes(metrics.read_bytes(), rng))
        command = ["plot", "curves", str(place.work / "run"), "--output", f"{place.work}/out.svg"]
    elif kind == "tokenizer":
        tokenizer = place.work / "run" / "tokenizer.model"
        tokenizer.write_bytes(mutate_bytes(tokenizer.read_bytes(), rng))
    elif kind == "cache":
        mutate_files(place.scratch / "cache" / "text", rng)
        return attempt(lambda: encode(place))
    elif kind.startswith("model"):
        model = place.model if kind == "model" else place.marians_own
        model = shutil.copytree(model, place.work / "model")
        mutate_files(model, rng)
        command = ["import", str(model), str(place.work / "imported")]
    elif kind == "text":
        (place.work / "lines").write_bytes(hostile_files.text(rng))
        command = rng.choice(commands_on_text(place))
    elif kind == "training text":
        return attempt(lambda: prepare_text(place, rng))
    elif kind == "yaml":
        model = shutil.copytree(place.marians_own, place.work / "model")
        hostile_files.rewrite(model, (".yml",), hostile_files.yaml, rng)
        command = ["import", str(model), str(place.work / "imported")]
    elif kind in ("structure", "no file"):
        command = with_damage(kind, rng, place) or command
    elif kind == "command":
        while command[0] == "train":
            command = commands(rng, place)
        command = hostile_options(command, rng)
    else:
        config = str(place.work / "run" / "config.json")
        command = ["train", config, "--data.corpus", f"text:{place.work}/none"]
        command = hostile_training(command, rng)
    return attempt(lambda: call(command), command)


def commands_on_text(place: Place) -> list[list[str]]:
    """Return the commands that read lines."""
    run, lines, out = (str(place.work / name) for name in ("run", "lines", "out"))
    return [
        ["translate", run, "--input", lines, "--output", out],
        ["translate", run, "--input", lines, "--split-sentences"],
        ["score", run, lines, lines],
        ["evaluate", run, "--source", lines, "--reference", lines, "--output", out],
    ]


def prepare_text(place: Place, rng: random.Random) -> None:
    """Prepare a run on hostile text, by itself or joined to good text."""
    from tiny_run import LINES

    from flaxformer_min.config import Config, DataConfig, ModelConfig
    from flaxformer_min.experiment.prepare import prepare as prepare_run
    from flaxformer_min.storage.run_folder import RunFolder

    good = "\n".join(LINES) + "\n"
    hostile_files.corpus(place.work / "text", rng, (good, good[::-1].strip() + "\n"))
    corpus = f"text:{place.work}/text"
    data = DataConfig(
        rng.choice([corpus, corpus, f"text:{place.scratch}/text,{corpus}*2", f"{corpus}*0"]),
        languages=rng.choice(["en-ko", "en-ko", "", "ko-en"]),
        normalization=rng.choice(["nmt_nfkc", "nfkc", "identity"]),
        symbols=rng.choice([(), (">>deu<<",), ("\u0301",), ("the",)]),
        cache_dir=str(place.work / "cache"),
    )
    model = ModelConfig(vocab_size=rng.choice([300, 400]), d_model=16, num_heads=2)
    prepare_run(RunFolder(place.work / "new"), Config(data, model))


def with_damage(kind: str, rng: random.Random, place: Place) -> list[str] | None:
    """Damage a file of the run, or of a model; return the command that imports the model."""
    models = [None, None, place.model, *[place.marians_own] * (kind == "no file")]
    model = rng.choice(models)
    folder = place.work / "run" if model is None else shutil.copytree(model, place.work / "model")
    if kind == "structure":
        endings = (".json", "metadata", "_METADATA", "_sharding") if model is None else (".json",)
        hostile_files.rewrite(folder, endings, hostile_files.structure, rng)
    else:
        hostile_files.make_no_files(folder, rng)
    return None if model is None else ["import", str(folder), str(place.work / "imported")]


def call(command: list[str]) -> None:
    """Run a command, and raise AssertionError unless its status is 0 or 2."""
    from flaxformer_min import cli

    try:
        status = cli.main(command)
    except SystemExit as end:  # how the parser of settings ends
        status = end.code
    if status not in (0, 2):
        raise AssertionError(f"status {status}")


def attempt(work, command: list[str] | None = None) -> list[str]:
    """Return what is wrong with a piece of work: its traceback, or how long it took."""
    since, wrong = time.process_time(), []
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            work()
    except (ValueError, OSError, RuntimeError) as error:
        if command is not None:  # a command reports its errors itself
            wrong.append("".join(traceback.format_exception(error)[-3:]))
    except BaseException as error:
        wrong.append("".join(traceback.format_exception(error)[-3:]))
    err.flush()
    if b"Traceback" in err.buffer.getvalue():
        wrong.append(err.buffer.getvalue().decode()[-2_000:])
    if time.process_time() - since > LONGEST_SECONDS:
        wrong.append(f"took {time.process_time() - since:.0f} CPU seconds")
    return wrong


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder and what it holds."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fuzz(cases: int, seed: int, seconds: float, report=print) -> Counter:
    """Run the cases until `seconds` have passed; return how many of each kind ran and failed."""
    counts: Counter = Counter()
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        place = Place(Path(scratch).resolve())
        prepare(place)
        (place.outside / "cwd").mkdir()
        sys.path.insert(0, str(place.outside))
        before = contents(place.outside)
        call(["plot", "positions", "--output", f"{scratch}/positions.svg"])  # slow imports
        with contextlib.chdir(place.outside):
            for number in range(cases):
                if time.monotonic() > until:
                    break
                rng = random.Random(f"{seed} {number}")
                kind = KINDS[number % len(KINDS)]
                faulthandler.dump_traceback_later(10 * LONGEST_SECONDS, exit=True)
                wrong = run_case(kind, rng, place)
                if contents(place.outside) != before:
                    wrong.append("changed a folder that no command names")
                    changed = set(contents(place.outside)) ^ set(before)
                    wrong.append(str(sorted(changed)))
                    for path in changed - set(before):
                        Path(path).unlink()
                counts["cases"] += 1
                counts["failed"] += bool(wrong)
                for text in wrong:
                    report(f"case {number} ({kind}): {unicodedata.normalize('NFC', text)}")
        faulthandler.cancel_dump_traceback_later()
        sys.path.remove(str(place.outside))
        sys.modules.pop("planted", None)
    return counts


def main() -> int:
    """Run the fuzzer as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    args = parser.parse_args()
    scratch = tempfile.mkdtemp()
    os.environ |= {"XDG_CACHE_HOME": scratch, "JAX_COMPILATION_CACHE_DIR": f"{scratch}/compiled"}
    os.environ |= {"TFDS_DATA_DIR": f"{scratch}/tfds", "JAX_PLATFORMS": "cpu"}
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    since = time.monotonic()
    try:
        counts = fuzz(args.cases, args.seed, args.seconds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    minutes = (time.monotonic() - since) / 60
    print(
        f"{counts['cases']:,} cases, seed {args.seed}, in {minutes:.1f} minutes: "
        f"{counts['failed']:,} failed"
    )
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

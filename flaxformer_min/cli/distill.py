"""`distill`: translate training text with teachers, and train a student on both.

Sequence-level knowledge distillation (Kim and Rush 2016); with teachers of the student's own size,
the forward half of data diversification (Nguyen et al. 2020).

STUDENT/distilled/teacher-N.LANGUAGE  translations of teacher N, line by line, n-best together
STUDENT/distilled/made_from.json      what they were made from; another command is refused
STUDENT/distilled/text/               the corpus of the student: original pairs and translations

Each stage continues after an interruption: translations from their last whole chunk of lines, whose
batches are then the same as without the interruption; training from its newest checkpoint.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_min.cli.arguments import make_parser
from flaxformer_min.cli.lines import CHUNK, append_pairs, on_one_line, progress, read_aligned, write
from flaxformer_min.cli.options import load
from flaxformer_min.cli.train import Arguments, read_arguments, run_command
from flaxformer_min.cli.translate import check_sampling
from flaxformer_min.config import Config, SearchConfig
from flaxformer_min.data.corpora.pairs import Pairs
from flaxformer_min.experiment.prepare import open_split, open_text
from flaxformer_min.languages import parse_languages
from flaxformer_min.storage.run_folder import DISTILLED, RunFolder
from flaxformer_min.system.distributed import Distributed
from flaxformer_min.system.files import folder_atomically, write_atomically

LOGGER = logging.getLogger("flaxformer_min")


def main(argv: Sequence[str], prog: str = "flaxformer-min distill") -> int:
    """Run the command and return its exit status; as `cli.train.main`."""
    return run_command(argv, prog, _read_arguments, partial(_distilled_config, argv))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    return make_parser().parse_args(["distill", *argv])


def _read_arguments(argv: Sequence[str], prog: str) -> Arguments:
    """Return the settings of the student, after checking the other arguments."""
    args = _parse(argv)
    check_sampling(args)
    settings = read_arguments([args.config, "--workdir", args.workdir, *args.settings], prog)
    if settings.distributed != Distributed():
        raise ValueError(
            "distill runs in one process; got options --distributed. Stop it once training begins, "
            f"and continue with `flaxformer-min train {settings.workdir}/config.json`."
        )
    return settings


def _distilled_config(argv: Sequence[str], config: Config) -> Config:
    """Make the text of the student, and return its settings with that text as the corpus."""
    args = _parse(argv)
    config, splits = open_text(config, None)
    job = Distillation(args, config, splits["train"], Path(args.workdir) / DISTILLED)
    with RunFolder(args.workdir).locked():
        job.check_continues()
        files = [job.translations(number) for number in range(len(job.teachers))]
        if not job.text.is_dir():
            job.write_text(files, splits["validation"])
    data = dataclasses.replace(config.data, corpus=f"text:{job.text.absolute()}")
    return dataclasses.replace(config, data=data)


class Distillation:
    """The text of one student: its sources, its teachers, and the folder of their translations."""

    def __init__(self, args: argparse.Namespace, config: Config, pairs: Pairs, folder: Path):
        """Take the arguments, the settings of the student, its pairs and the folder to write."""
        self.args, self.config, self.pairs, self.folder = args, config, pairs, folder
        self.languages = parse_languages(config.data.languages)
        runs = [each for each in args.teachers if not os.path.isfile(each)]
        files = [each for each in args.teachers if os.path.isfile(each)]
        together = [tuple(runs)] if args.ensemble and runs else [(run,) for run in runs]
        self.teachers: list[tuple[str, ...] | str] = [*together, *files]
        self.text = folder / "text"
        for run in runs:
            RunFolder(run).config()  # raises ValueError for what is not a run, before any work
        if args.monolingual and not runs:
            raise ValueError(
                "--monolingual is text for a teacher to translate; got files of translations only. "
                "Name a run, or leave it out."
            )
        for file in files:
            if (lines := sum(1 for _ in read_lines(file))) != len(pairs):
                raise ValueError(
                    "a file of translations must have one line for each training pair; "
                    f"{file} has {lines:,}, {config.data.corpus} has {len(pairs):,} pairs."
                )

    def sources(self) -> Iterator[str]:
        """Yield what runs translate: the sources of all pairs, then the monolingual text."""
        yield from (on_one_line(source) for source, _ in self.pairs)
        for file in self.args.monolingual:
            yield from read_lines(file)

    def check_continues(self) -> None:
        """Raise ValueError if the folder has translations that another command made."""
        record = self.folder / "made_from.json"
        given = self._made_from()
        if not record.exists():
            self.folder.mkdir(exist_ok=True)
            write_atomically(record, json.dumps(given, indent=2) + "\n")
            return
        before = json.loads(record.read_text())
        differing = [name for name in given if before.get(name) != given[name]]
        if differing:
            raise ValueError(
                f"{self.folder} holds translations that were made otherwise:\n  "
                + "\n  ".join(
                    f"{name}: {before.get(name)}, now {given[name]}" for name in differing
                )
                + f"\nGive the same arguments, choose another --workdir, or remove {self.folder}."
            )

    def _made_from(self) -> dict[str, Any]:
        """Return all that the translations depend on, as JSON holds it."""
        names = [field.name for field in dataclasses.fields(SearchConfig)]
        search = {name: getattr(self.args, name, None) for name in (*names, "step", "dtype")}
        return {
            "corpus": self.pairs.fingerprint(),
            "teachers": [_identity(each) for each in self.teachers],
            "monolingual": [_digest(each) for each in self.args.monolingual],
            "search": {name: value for name, value in search.items() if value is not None},
        }

    def translations(self, number: int) -> Path:
        """Return the file with the translations of a teacher, complete."""
        teacher = self.teachers[number]
        if isinstance(teacher, str):
            return Path(teacher)
        file = self.folder / f"teacher-{number + 1}.{self.languages[1]}"
        if file.exists():
            return file
        unfinished = file.with_name(f"{file.name}.unfinished")
        with unfinished.open("ab+") as output:
            done = whole_chunks(output, CHUNK * self.args.n_best)
            if done:
                LOGGER.info("%s: %s lines are translated.", _name(teacher), f"{done * CHUNK:,}")
            self._translate(teacher, output, done)
            os.fsync(output.fileno())
        unfinished.rename(file)
        return file

    def _translate(self, teacher: tuple[str, ...], output: BinaryIO, done: int) -> None:
        """Append the translations of all sources but the first `done` chunks."""
        translator = load(argparse.Namespace(**{**vars(self.args), "runs": teacher}))
        n_best = self.args.n_best
        LOGGER.info("Translating with %s.", _name(teacher))
        with progress(None) as advance:
            sources = self.sources()
            for number in itertools.count():
                lines = list(itertools.islice(sources, CHUNK))
                if not lines:
                    return
                if number < done:
                    continue
                first_line = number * CHUNK + 1
                found = translator.hypotheses(lines, first_line=first_line, scores=False)
                texts = [[on_one_line(each.text) for each in of_line] for of_line in found]
                padded = [each + [""] * (n_best - len(each)) for each in texts]
                write(output, [*itertools.chain.from_iterable(padded)])
                advance(len(lines))

    def write_text(self, files: Sequence[Path], validation: Pairs) -> None:
        """Write the corpus: original pairs with all translations, and the other splits."""
        with folder_atomically(self.text) as folder:
            put = partial(append_pairs, folder, languages=self.languages)
            put("train", pairs=self.pairs)
            put("validation", pairs=validation)
            test = None
            with contextlib.suppress(ValueError):  # there is none, which training reports
                test = open_split(self.config, "test")
            if test is not None:
                put("test", pairs=test)
            LOGGER.info("%s pairs of %s", f"{len(self.pairs):,}", self.config.data.corpus)
            for teacher, file in zip(self.teachers, files, strict=True):
                counts = collections.Counter()
                put("train", pairs=self._with_sources(teacher, file, counts))
                LOGGER.info(
                    "%s translations of %s: %s equal to the original, %s empty ones dropped",
                    *(f"{counts['used']:,}", _name(teacher)),
                    *(f"{counts[name]:,}" for name in ("equal", "empty")),
                )

    def _with_sources(
        self, teacher: tuple[str, ...] | str, file: Path, counts: collections.Counter
    ) -> Iterator[tuple[str, str]]:
        """Yield the sources with each of their translations that has text, and count them."""
        n_best = 1 if isinstance(teacher, str) else self.args.n_best
        originals = itertools.chain((target for _, target in self.pairs), itertools.repeat(None))
        lines = read_lines(str(file))
        for source, original in zip(self.sources(), originals, strict=False):
            for translation in itertools.islice(lines, n_best):
                if source.strip() and translation.strip():
                    counts["used"] += 1
                    counts["equal"] += translation == original
                    yield source, translation
                else:
                    counts["empty"] += 1


def whole_chunks(file: BinaryIO, lines: int) -> int:
    """Cut a file after its last whole chunk of this many lines, and return how many it has."""
    file.seek(0)
    ends = [0]
    for number, line in enumerate(iter(file.readline, b""), start=1):
        if number % lines == 0 and line.endswith(b"\n"):
            ends.append(file.tell())
    file.truncate(ends[-1])
    return len(ends) - 1


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a text file; see `cli.lines.Lines`."""
    for _, (lines,) in read_aligned(path):
        yield from lines


def _name(teacher: tuple[str, ...] | str) -> str:
    return teacher if isinstance(teacher, str) else " and ".join(teacher)


def _identity(teacher: tuple[str, ...] | str) -> list[str]:
    if isinstance(teacher, str):
        return [_digest(teacher)]
    return [f"{os.path.abspath(run)}, step {RunFolder(run).newest_step()}" for run in teacher]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

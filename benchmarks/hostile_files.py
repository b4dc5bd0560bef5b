"""Files as the fuzzer (benchmarks/fuzz.py) writes them: text, YAML, JSON, and what is no file."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

WORDS = ["the red house", "the", "3 doors", "", " ", "C\u00f4te d'Ivoire", "\uff13\uff12"]
WORDS += ["\u8d64\u3044\u5bb6", "\ud55c\uad6d", "\u0e01", "\ufb01", "\U0001f600", "a" * 3_000]
WORDS += ["\u00a0", "\u202f", "\u200b", "\ufeff", "\u00ad", "\u2060", "\u202e", "\u0085", "\u2028"]
WORDS += ["\0", "\x07", "\x0b", "\t", "\x1b[2J", "\u2581", "\ufffd", "\u0301" * 40, "\u0600\u200d"]
WORDS += [">>deu<<", "__PH1__", "</s>", "<unk>", "<0x41>", "\U000e0041"]

ENDS = ["\n", "\n", "\n", "\r\n", "\r", "\u0085", "\u2028", "\n\r", "\n\n"]

ENCODINGS = ["utf-8"] * 8 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
ENCODINGS += ["utf-7", "latin-1", "cp1252", "shift_jis", "gb18030", "cp037"]

YAML = ["a: &a [x]\nb: *a\n", "!!python/object/apply:os.system ['touch IMPORTED']\n"]
YAML += ["? [a]\n: 1\n", "- " * 3_000 + "x\n", "{" * 3_000, "[" * 3_000, "%YAML 9.9\n---\n", "#\n"]
YAML += ["a:" + " " * 100_000 + "1\n", "---\na: 1\n---\nb: 2\n", "a: 1\na: 2\n", "\ta: 1\n", "'a\n"]
YAML += ['"\\ud800": 1\n', '"\\x00": 1\n', "a: |\n  x\n", "<<: {a: 1}\n", "~: 1\n", "a: 0x10\n"]
YAML += ["a: 1_000\n", "\u2028: 1\n", "- x\n" * 20_000, "? a\n" * 5_000, f"a: {'9' * 20}\n"]
YAML += ["a: -1\n", "a: 1.5\n", "\ufeffa: 1\n", "...\n"]

VALUES: list[Any] = [None, True, 0, -1, 1.5, 10**30, 2**29, "", "a", "\0", "\ud800", "../../x"]
VALUES += [[], {}, ["a"], [["a"]], [None], {"a": {"b": []}}, {"": 0}, {"0": "a"}, [0] * 1_000]
VALUES += [float("nan")]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the content with bytes flipped, cut, doubled, or replaced by something else."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 10])):
        at = rng.randrange(len(content) + 1)
        action = rng.randrange(5)
        if action == 0 and content:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        elif action == 1:
            del content[at:]
        elif action == 2:
            content[at:at] = content[: rng.randrange(100)]
        elif action == 3:
            content[at:at] = rng.randbytes(rng.randrange(20))
        else:
            content[at : at + 1] = rng.choice(["-1", "NaN", "[" * 2_000, "1e999", "\0"]).encode()
    return bytes(content)


def mutate_files(folder: Path, rng: random.Random) -> None:
    """Mutate one or two of the files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in rng.sample(files, rng.choice([1, 2])):
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))


def text(rng: random.Random) -> bytes:
    """Return lines in any encoding and form of Unicode, with any ends, perhaps compressed."""
    lines = [
        "".join(rng.choices(WORDS, k=rng.choice([1, 1, 2, 4])))
        for _ in range(rng.choice([0, 3, 9]))
    ]
    end = rng.choice(ENDS)
    content = end.join([*lines, rng.choice(["", "", "x"])])
    if rng.random() < 0.3:
        content = unicodedata.normalize(rng.choice(["NFD", "NFKD", "NFKC"]), content)
    encoded = content.encode(rng.choice(ENCODINGS), errors="replace")
    return compressed(encoded, rng) if rng.random() < 0.3 else encoded


def compressed(content: bytes, rng: random.Random) -> bytes:
    """Return the content as an archive or a table, perhaps a part of one."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("a.txt", content)
    whole = rng.choice(
        [
            *(gzip.compress(content), bz2.compress(content), lzma.compress(content)),
            *(archive.getvalue(), b"PAR1" + content + b"PAR1", b"\x28\xb5\x2f\xfd" + content),
            *(gzip.compress(bytes(10**7)), b"%PDF-1.7\n" + content, b"ARROW1\0\0" + content),
        ]
    )
    return whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.3 else whole


def yaml(content: bytes, rng: random.Random) -> bytes:
    """Return YAML with something in it that a reader may expand, execute or read slowly."""
    lines = content.decode("utf-8", "replace").splitlines(keepends=True)
    at = rng.randrange(len(lines) + 1)
    added = rng.choice(YAML)
    lines[at:at] = [added] if rng.random() < 0.7 else [added] * 100
    return "".join(lines).encode("utf-8", "surrogatepass")


def structure(content: bytes, rng: random.Random) -> bytes:
    """Return JSON in which one value, anywhere, has another type or structure."""
    tree = json.loads(content)
    parents = [(tree, name) for name in _names(tree)]
    for parent, name in parents:  # which grows: each container inside of others comes, too
        parents += [(parent[name], inner) for inner in _names(parent[name])][:200]
    for _ in range(rng.choice([1, 1, 2])):
        if not parents or rng.random() < 0.05:
            tree = rng.choice(VALUES)
            break
        parent, name = rng.choice(parents)
        if rng.random() < 0.2 and isinstance(parent, dict):
            parent.pop(name, None)
        else:
            parent[name] = rng.choice(VALUES)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _names(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [*tree]
    return [*range(len(tree))] if isinstance(tree, list) else []


def put_no_file(path: Path, rng: random.Random) -> None:
    """Replace a file by a pipe, a device, a folder, a link that leads nowhere, or a huge file."""
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/dev/full", "/dev/random"]))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(rng.choice(["nowhere", path.name, "/proc/self/mem", "/"]))
    elif kind == 4:
        path.touch()
        os.truncate(path, rng.choice([2**31, 2**40]))
    elif kind == 5:
        path.touch(0o000)
    # else it is missing


def make_no_files(folder: Path, rng: random.Random) -> None:
    """Do so with one file below a folder, as often among the few at its top as below them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    top = [path for path in files if path.parent == folder]
    put_no_file(rng.choice(top if rng.random() < 0.5 else files), rng)


def rewrite(folder: Path, endings: tuple[str, ...], change, rng: random.Random) -> None:
    """Rewrite one of the files below a folder whose names end so, by `change(content, rng)`."""
    files = sorted(each for each in folder.rglob("*") if each.name.endswith(endings))
    path = rng.choice([each for each in files if each.is_file()])
    path.write_bytes(change(path.read_bytes(), rng))


def corpus(folder: Path, rng: random.Random, pairs: tuple[str, str]) -> None:
    """Write the text of a training, some of it hostile; each text of `pairs` is a good one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    ending = rng.choice(["", "", "", ".gz", ".xz", ".bz2", ".zst"])
    for split in ("train", "val"):
        if rng.random() < 0.2:
            table = "".join(f"{a}\t{b}\n" for a, b in zip(*map(str.splitlines, pairs), strict=True))
            (folder / f"{split}.tsv{ending}").write_bytes(table.encode() + text(rng)[:50])
            continue
        for language, good in zip(("en", "ko"), pairs, strict=True):
            hostile = rng.random() < 0.5
            content = text(rng) if hostile else good.encode()
            if rng.random() < 0.3:  # the same number of lines on both sides
                content = good.replace("\n", rng.choice(ENDS), 3).replace("the", rng.choice(WORDS))
                content = content.encode(rng.choice(ENCODINGS), errors="replace")
            packed = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}.get(ending)
            content = packed(content) if packed and rng.random() < 0.8 else content
            (folder / f"{split}.{language}{ending}").write_bytes(content)

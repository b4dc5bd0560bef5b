"""Stdin, stdout and stderr as shells, pipes, terminals and log files really give them."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(program, *arguments, **settings):
    """Start a program that may import the package."""
    settings.setdefault("env", os.environ | {"PYTHONPATH": str(ROOT)})
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, **settings)


TALKER = """
import sys
from pathlib import Path
from flaxformer_min.system.streams import ignore_broken_pipe
sys.stdin.readline()
for number in range(3):
    with ignore_broken_pipe():
        print(number, file=sys.stdout if number else sys.stderr)
Path(sys.argv[1]).write_text("through")
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_who_reads_may_go(tmp_path, stream):
    """The status is 0: Python's own last flush does not complain either."""
    pipes = {stream: subprocess.PIPE, "stdin": subprocess.PIPE}
    with python(TALKER, str(tmp_path / "end"), **pipes) as talking:
        getattr(talking, stream).close()
        talking.communicate(b"\n")
    assert talking.returncode == 0
    assert (tmp_path / "end").read_text() == "through"


def test_the_terminal_may_go(tmp_path):
    """As after `python train.py &` and logging out."""
    ours, theirs = pty.openpty()
    settings = dict(stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True)
    with python(TALKER, str(tmp_path / "end"), **settings) as talking:
        os.close(theirs)
        os.close(ours)
        talking.communicate(b"\n")
    assert talking.returncode == 0
    assert (tmp_path / "end").read_text() == "through"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_an_error(tmp_path):
    """Unlike a reader, it comes back: what is said must not be lost silently."""
    with open("/dev/full", "w") as full, python(
        TALKER, str(tmp_path / "end"), stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE
    ) as talking:  # fmt: skip
        assert b"No space left on device" in talking.communicate(b"\n")[1]
    assert not (tmp_path / "end").exists()


def test_closed_streams_lead_nowhere_and_their_numbers_are_not_given_away(tmp_path):
    program = (
        "import os, sys; from flaxformer_min.system.streams import open_streams\n"
        "open_streams()\n"
        "file = open(sys.argv[1], 'w')\n"
        "print('lost'); print('lost', file=sys.stderr); os.write(2, b'lost')\n"
        "file.write(f'{file.fileno() > 2} {sys.stdin.read()!r}')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=ROOT).returncode == 0
    assert (tmp_path / "file").read_text() == "True ''"


def test_stdout_is_utf_8_whatever_the_locale_says():
    program = (
        "from flaxformer_min.system.streams import open_streams\n"
        "open_streams()\n"
        "print('2026년', '\\ud800')\n"
    )
    latin = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    with python(program, stdout=subprocess.PIPE, env=latin) as talking:
        assert talking.communicate()[0].decode() == "2026년 ?\n"

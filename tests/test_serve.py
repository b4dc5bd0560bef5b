"""The server with a real model: what it computes, and its command from start to SIGTERM."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from served import Client
from tiny_run import LINES, make_tiny_run

from flaxformer_min.decoding.results import PairScore
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.server.pair import Pair


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("serve") / "run", num_layers=2)


@pytest.fixture(scope="module")
def translator(run):
    return Translator.load(run)


@pytest.fixture(scope="module")
def pair(translator):
    return Pair(translator, "en", "ko")


def test_what_a_pair_computes_in_batches_is_what_the_translator_gives_alone(pair, translator):
    """By log-probabilities: the texts of an untrained model may be ties, which rounding breaks."""
    lines = LINES[:7]  # more than are searched one by one
    alone = [translator.hypotheses([line], n_best=2)[0] for line in lines]
    for found, count in ((pair.best(lines), 1), (pair.several(lines), 2)):
        log_probs, expected = (
            [[each.log_prob for each in of_line[:count]] for of_line in lines_of]
            for lines_of in (found, alone)
        )
        np.testing.assert_allclose(log_probs, expected, rtol=1e-4)
        assert len(set(map(tuple, expected))) == len(lines)


@pytest.mark.slow
def test_attention_at_a_padded_width_is_that_of_the_sentence(pair, translator):
    """The mean of layers and heads, as `Translator.attention` gives them without padding."""
    for source, target in (("the red house", "9 doors"), ("x", "")):
        expected = translator.attention(source, target)
        ((tokens, weights),) = pair.attention([(source, target)])
        assert tokens == expected.source_tokens
        np.testing.assert_allclose(weights, expected.cross.mean((0, 1)), atol=1e-6)


def test_the_first_program_is_the_one_of_a_first_request(pair, translator):
    compiled = translator.runner.compilations
    next(pair.programs())()
    first = translator.runner.compilations
    pair.best(["the red house"])
    assert translator.runner.compilations == first <= compiled + 1


def test_scores_are_of_the_tokens_that_are_counted(pair):
    both = [("the red house", "9 doors"), ("x", "")]
    counts = [len(score.log_probs) for score in pair.score(both)]
    assert counts == [pair.count_tokens(target) for _, target in both]


def test_a_sentence_that_would_be_truncated_is_found(pair):
    assert pair.too_long(["a " * 2_000, "b"]) == "a " * 2_000
    assert pair.too_long(["the red house " * 60, "é" * 400]) is None


@pytest.mark.parametrize(
    "target, text, tokens, words",
    [
        ("ko", "ab c", ["▁a", "b", "▁c", "</s>"], [("ab", -1.5, 0, 2), ("c", -0.25, 2, 3)]),
        ("ko", "é", ["▁", "<0xC3>", "<0xA9>", "</s>"], [("é", -1.75, 0, 3)]),
        ("ja", "ab", ["▁a", "b", "</s>"], [("a", -1.0, 0, 1), ("b", -0.5, 1, 2)]),
        ("ko", "a  b\u3000c", ["▁a", "▁b", "</s>"], [("a", -1.0, 0, 1), ("b", -0.5, 1, 2)]),
        ("ko", "", ["</s>"], []),
    ],
)
def test_words_are_made_of_their_tokens(translator, target, text, tokens, words):
    """The last token is the end of the sentence, and belongs to no word."""
    score = PairScore(tokens, [-1.0, -0.5, -0.25, -9.0][: len(tokens)])
    assert Pair(translator, "en", target).words(text, score) == words


COMMAND = [sys.executable, "-m", "flaxformer_min"]


@pytest.mark.slow
def test_the_command_serves_until_sigterm_and_loses_nothing(run):
    """Under load: each request is answered completely, or its connection was not accepted."""
    command = [*COMMAND, "serve", run, "--port", "0", "--beam-size", "1", "--no-early-stopping"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            answers, expected = answers_until_sigterm(process)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in out + err
    assert len(answers) > 16
    assert all(answer == expected for answer in answers)
    assert out.count("POST /translate 200") == len(answers) + 1


def answers_until_sigterm(process):
    """What 16 clients have got when the server is gone, and what a single one got before."""
    address = ""
    while "Ready" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
        address = (re.findall(r"http://\S+", line) or [address])[0]
    end, q = time.monotonic() + 30, "the red house. it has 3 doors"
    expected = Client(address).translate(q, target="ko")
    assert expected[0] == 200, expected

    def send_until_refused(_):
        answers = []
        while time.monotonic() < end:
            client = Client(address)
            try:
                client.connection.connect()
            except ConnectionError:
                return answers
            try:
                answers.append(client.translate(q, target="ko"))
            except ConnectionError:  # closed before the request was read
                return answers
        raise AssertionError("the server did not stop")

    with ThreadPoolExecutor(16) as pool:
        loads = [pool.submit(send_until_refused, number) for number in range(16)]
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        return [answer for load in loads for answer in load.result()], expected


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["serve", "RUN"], "Servers need starlette, uvicorn, sentencex, python-multipart; install"),
        (["translate", "RUN", "--split-sentences"], "--split-sentences needs sentencex; install"),
    ],
)
def test_without_the_extra_there_is_a_line_with_the_command_that_installs_it(arguments, said):
    program = (
        "import sys\n"
        "class Missing:\n"
        "    names = {'starlette', 'uvicorn', 'sentencex', 'python_multipart'}\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in self.names: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name in Missing.names else find(name)\n"
        "from flaxformer_min.cli import main\n"
        f"sys.exit(main({arguments}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"flaxformer-min: error: {said}")
    assert done.stderr.endswith("pip install 'flaxformer_min[server]'\n")
    assert done.stderr.count("\n") == 1

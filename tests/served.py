"""A server in this process, with a pair that needs no model, and a client that shows everything."""

import contextlib
import http.client
import json
import math
import threading
import time
import urllib.parse

import numpy as np
import pytest

for needed in ("starlette", "uvicorn", "sentencex", "python_multipart"):
    pytest.importorskip(needed, reason="no extra `server`: pip install 'flaxformer_min[server]'")

from flaxformer_min.decoding.results import PairScore, Translation
from flaxformer_min.server.app import Access
from flaxformer_min.server.pair import Pair
from flaxformer_min.server.requests import Limits
from flaxformer_min.server.run import Server


class FakePair(Pair):
    """Translates to upper case. It has three alternatives, and is sure of short words.

    seconds: what each batch takes.
    gate:    a batch waits until it is set.
    begun:   how many batches have.
    """

    def __init__(self, source="en", target="de", most=16, seconds=0.0, prefix=""):
        self.source, self.target, self.most = source, target, most
        self.seconds, self.prefix, self.batches = seconds, prefix, []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = 0

    beam_size = 4

    def best(self, sentences):
        return [each[:1] for each in self.several(sentences)]

    def several(self, sentences):
        self.begun += 1
        assert self.gate.wait(20)
        time.sleep(self.seconds)
        self.batches.append(list(sentences))
        if "fail" in sentences:
            raise RuntimeError("this quotes a secret text")
        return [
            [
                Translation(self.prefix + text.upper() + mark, -float(len(text.split())), -1.0)
                for mark in ("", "!", "", "?")
            ]
            for text in sentences
        ]

    def score(self, pairs):
        found = []
        for _, target in pairs:
            words = target.split()
            log_probs = [math.log(1 / len(word)) for word in words]
            found.append(PairScore([*(f"▁{word}" for word in words), "</s>"], [*log_probs, -0.5]))
        return found

    def attention(self, pairs):
        """Each token attends to the one at its place, the last one to all others beyond."""
        found = []
        for source, target in pairs:
            tokens = [*(f"▁{word}" for word in source.split()), "</s>"]
            places = np.arange(len(target.split()) + 1).clip(max=len(tokens) - 1)
            found.append((tokens, np.eye(len(tokens))[places]))
        return found

    def too_long(self, sentences):
        return next((each for each in sentences if len(each) > 2_000), None)

    def count_tokens(self, translation):
        return 2 * len(translation.split())

    def programs(self):
        yield lambda: self.gate.wait(20)


class Client:
    """One connection, which is opened again if the server has closed it."""

    def __init__(self, address, timeout=30):
        host = urllib.parse.urlsplit(address).netloc
        self.connection = http.client.HTTPConnection(host, timeout=timeout)

    def __del__(self):
        self.connection.close()

    def send(self, method, path, body=None, headers=None):
        """Return status, headers and content."""
        self.connection.request(method, path, body, headers or {})
        response = self.connection.getresponse()
        content = response.read()
        if response.headers.get_content_type() == "application/json":
            content = json.loads(content)
        return response.status, dict(response.headers), content

    def get(self, path):
        status, _, content = self.send("GET", path)
        return status, content

    def post(self, path, **fields):
        body = json.dumps(fields)
        status, _, content = self.send("POST", path, body, {"Content-Type": "application/json"})
        return status, content

    def translate(self, q, source="en", target="de", **fields):
        return self.post("/translate", q=q, source=source, target=target, **fields)

    def form(self, path, body):
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        status, _, content = self.send("POST", path, body, kind)
        return status, content


@contextlib.contextmanager
def serving(*pairs, access=None, limits=None):
    """Yield a running server, which is stopped at the end."""
    server = Server(pairs or [FakePair()], access or Access(), limits or Limits())
    server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        server.stop()

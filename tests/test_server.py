"""The server: LibreTranslate's API, batches, limits, and clients that behave badly."""

import collections
import gc
import json
import logging
import math
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import Access, Client, FakePair, Limits, serving

from flaxformer_min.server import batching

CONFIDENT = {"confidence": True, "attention": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    pairs = [FakePair("en", "de"), FakePair("en", "pt_BR"), FakePair("de", "en")]
    with serving(*pairs) as server:
        yield server


@pytest.fixture
def client(server):
    client = Client(server.address)
    yield client
    client.connection.close()


# LibreTranslate's API


def test_a_text_has_a_text_and_a_list_a_list(client):
    assert client.translate("Hello. Bye") == (200, {"translatedText": "HELLO. BYE"})
    found = {"translatedText": ["HELLO", "", "A B"]}
    assert client.translate(["Hello", "", "a b"]) == (200, found)


@pytest.mark.parametrize(
    "body, translation",
    [
        ("q=Gr%C3%BC%C3%9Fe+dir%0Ahier&source=en&target=de", "GRÜSSE DIR\nHIER"),
        ("source=en&target=de&q=Grüße dir\nhier", "GRÜSSE DIR\nHIER"),
        ("q=a&q=b&source=en&target=de", ["A", "B"]),
    ],
)
def test_a_form_is_utf_8_percent_encoded_or_not(client, body, translation):
    """A repeated field is a list."""
    found = client.form("/translate", body.encode())
    assert found == (200, {"translatedText": translation})


def test_a_form_may_have_several_parts(client):
    parts = {"q": "<b>grün</b>", "source": "en", "target": "de", "format": "html"}
    lines = [
        f'--X\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in parts.items()
    ]
    kind = {"Content-Type": "multipart/form-data; boundary=X"}
    body = ("".join(lines) + "--X--\r\n").encode()
    _, _, content = client.send("POST", "/translate", body, kind)
    assert content == {"translatedText": "<b>GRÜN</b>"}


def test_alternatives_are_other_texts_each_once(client):
    """The fake pair has TEXT, TEXT!, TEXT again, and TEXT? for each sentence."""
    _, content = client.translate("one. two.", alternatives=3)
    assert content == {
        "translatedText": "ONE. TWO.",
        "alternatives": ["ONE.! TWO.!", "ONE.? TWO.?"],
    }
    _, content = client.translate(["one", "two"], alternatives="1")
    assert content["alternatives"] == [["ONE!"], ["TWO!"]]


def test_html_is_translated_between_its_tags(client):
    markup = "<p title='a b'>A <b>cat</b> &amp; dog</p><script>x y</script>"
    _, content = client.translate(markup, format="html")
    assert content["translatedText"] == markup.replace("cat", "CAT").replace("dog", "DOG")


def test_languages_are_listed_with_their_names_and_targets(client):
    """Also where the settings are, whose fields are LibreTranslate's."""
    expected = [
        {"code": "de", "name": "German", "targets": ["en"]},
        {"code": "en", "name": "English", "targets": ["de", "pt_BR"]},
        {"code": "pt_BR", "name": "Portuguese (Brazil)", "targets": []},
    ]
    assert client.get("/languages") == (200, expected)
    assert client.translate("a", target="PT-br")[0] == 200
    content = client.get("/frontend/settings")[1]
    assert content["language"] == {
        "source": {"code": "de", "name": "German"},
        "target": {"code": "en", "name": "English"},
    }
    assert (content["charLimit"], content["keyRequired"]) == (20_000, False)


def test_detected_languages_are_those_served_and_as_sure_as_the_model(client):
    """The fake pair gives each word -1 nat and 2 tokens: exp(-1/2) = 60.7 %."""
    status, content = client.post("/detect", q="hello there")
    expected = round(100 * math.exp(-0.5), 1)
    assert status == 200
    assert content == [{"confidence": expected, "language": code} for code in ("en", "de")]
    _, content = client.translate(["a b", "c"], source="auto")
    assert content["translatedText"] == ["A B", "C"]
    assert content["detectedLanguage"] == [{"confidence": expected, "language": "en"}] * 2
    _, content = client.translate("!", source="auto")
    assert content == {
        "translatedText": "!",
        "detectedLanguage": {"confidence": 0.0, "language": "en"},
    }


def test_confidence_and_attention_belong_to_the_words(client):
    """The fake pair: a word of n letters has probability 1/n, and attends to its own place."""
    _, content = client.translate("a cat. here", **CONFIDENT)
    first, second = content["sentences"]
    assert (first["source"], first["translation"]) == ("a cat.", "A CAT.")
    assert first["words"] == [
        {"text": "A", "start": 0, "end": 1, "logProb": 0.0},
        {"text": "CAT.", "start": 1, "end": 2, "logProb": round(-math.log(4), 4)},
    ]
    assert first["logProbs"] == [0.0, round(-math.log(4), 4), -0.5]
    assert first["tokens"] == ["▁A", "▁CAT.", "</s>"]
    assert second["sourceTokens"] == ["▁here", "</s>"]
    assert second["attention"] == [[1.0, 0.0], [0.0, 1.0]]
    _, content = client.translate(["a", ""], confidence="true")
    assert [len(each) for each in content["sentences"]] == [1, 0]
    assert "attention" not in content["sentences"][0][0]


BAD = [
    ({"q": ""}, 400, "missing q"),
    ({"q": ["a", 3]}, 400, "q parameter must be a text or a list of texts"),
    ({"q": "\ud800"}, 400, "q parameter is not valid Unicode"),
    ({"source": ""}, 400, "missing source"),
    ({"source": ["en"]}, 400, "source parameter must be a text"),
    ({"source": "fr"}, 400, "fr is not supported"),
    ({"target": "x" * 99}, 400, f"{'x' * 40} is not supported"),
    ({"source": "de", "target": "pt-BR"}, 400, "Brazil) (pt-BR) is not available as a target"),
    ({"source": "auto", "target": "fr"}, 400, "fr is not supported"),
    ({"format": "docx"}, 400, "docx format is not supported"),
    ({"alternatives": "many"}, 400, "alternatives parameter is not a number"),
    ({"alternatives": [1]}, 400, "alternatives parameter is not a number"),
    ({"confidence": "yes"}, 400, "confidence parameter must be true or false"),
    ({"attention": 2}, 400, "attention parameter must be true or false"),
    ({"q": "a" * 20_001}, 413, r"request (20001 characters) exceeds text limit (20000)"),
    ({"q": ["a"] * 257}, 413, r"request (257 texts) exceeds text limit (256)"),
    ({"q": "Go. " * 1_100}, 413, "sentences) exceeds text limit (1000)"),
    ({"q": "a" * 3_000}, 413, "a sentence is longer than the model can read"),
    ({"q": "a" * 300_000}, 413, "the body exceeds the limit of 256384 bytes"),
    ({"q": "fail"}, 500, "Cannot translate text"),
]


@pytest.mark.parametrize("fields, status, message", BAD)
def test_an_error_is_json_with_its_status(client, fields, status, message):
    found, content = client.translate(**{"q": "a", **fields})
    assert (found, list(content)) == (status, ["error"])
    assert message in content["error"]


@pytest.mark.parametrize(
    "kind, body",
    [
        ("application/json", b"{"),
        ("application/json", b'"q"'),
        ("application/json", b"\xff"),
        ("application/json", b"[" * 100_000),
        ("application/json", b'{"q":' + b"9" * 5_000 + b"}"),
        ("application/x-www-form-urlencoded", b"q=\xff&source=en&target=de"),
        ("application/x-www-form-urlencoded", b"&".join([b"q=a"] * 1_100)),
        ("multipart/form-data", b"--X"),
        ("multipart/form-data; boundary=X", b"--X\r\nContent-Disposition: form-data\r\n\r\n"),
        ("multipart/form-data; boundary=X", b'--X\r\nContent-Disposition: form-data; name="q"; '
         b'filename="/etc/passwd"\r\n\r\na\r\n--X--\r\n'),
        ("text/plain", b"q=a&source=en&target=de"),
        ("", b""),
    ],
)  # fmt: skip
def test_a_malformed_body_is_refused(client, kind, body):
    status, _, content = client.send("POST", "/translate", body, {"Content-Type": kind})
    assert (status, list(content)) == (400, ["error"])


@pytest.mark.parametrize(
    "method, path, status, error",
    [
        ("GET", "/../../etc/passwd", 404, "Not Found"),
        ("POST", "/translate/", 404, "Not Found"),
        ("GET", "/translate?q=a&source=en&target=de", 405, "Method Not Allowed"),
        ("POST", "/languages", 405, "Method Not Allowed"),
    ],
)
def test_an_unknown_address_or_method_is_an_error_in_json(client, method, path, status, error):
    assert client.send(method, path)[::2] == (status, {"error": error})


def test_the_client_of_libretranslate_works(server):
    """libretranslatepy, which Argos Open Tech publishes."""
    package = pytest.importorskip("libretranslatepy", reason="no libretranslatepy")
    client = package.LibreTranslateAPI(server.address)
    assert client.translate("Good day. Bye", "en", "de") == "GOOD DAY. BYE"
    assert [each["code"] for each in client.languages()] == ["de", "en", "pt_BR"]
    assert client.detect("Good day")[0]["language"] == "en"


# Batches


def test_requests_that_come_within_the_window_are_searched_together(monkeypatch):
    monkeypatch.setattr(batching, "WINDOW", 0.5)
    pair = FakePair()
    with serving(pair) as server, ThreadPoolExecutor(12) as pool:
        texts = [f"text {number}" for number in range(12)]
        found = pool.map(lambda text: Client(server.address).translate(text)[1], texts)
        assert [each["translatedText"] for each in found] == [text.upper() for text in texts]
    assert len(pair.batches) <= 2


def test_a_long_document_does_not_hold_up_a_short_text():
    """It has 100 sentences for 25 batches; the short text is in one of the next."""
    pair = FakePair(most=4, seconds=0.05)
    with serving(pair) as server, ThreadPoolExecutor(1) as pool:
        long = pool.submit(Client(server.address).translate, "\n".join(["long"] * 100))
        wait_until(lambda: pair.begun)
        assert Client(server.address).translate("short")[1] == {"translatedText": "SHORT"}
        assert not long.done()
        assert long.result()[1]["translatedText"] == "\n".join(["LONG"] * 100)
    place = next(number for number, each in enumerate(pair.batches) if "short" in each)
    assert len(pair.batches) - place > 15


def test_a_request_that_fails_does_not_fail_the_others_of_its_batch(caplog):
    caplog.set_level(logging.INFO, "flaxformer_min.server")
    pair = FakePair(seconds=0.1)
    pair.gate.clear()
    with serving(pair) as server, ThreadPoolExecutor(9) as pool:
        texts = ["one", "fail", "two", "fail", "three", "four", "five", "six", "fail"]
        sent = [pool.submit(Client(server.address).translate, text) for text in texts]
        time.sleep(0.3)
        pair.gate.set()
        statuses = [each.result()[0] for each in sent]
    assert statuses == [500 if text == "fail" else 200 for text in texts]
    assert "/translate: RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_a_full_queue_refuses_and_a_late_request_is_given_up():
    pair = FakePair(most=1)
    pair.gate.clear()
    with serving(pair, limits=Limits(waiting=3, deadline=1.5)) as server:
        with ThreadPoolExecutor(3) as pool:
            sent = fill_both_threads(pair, server, pool)
            waiting = pool.submit(Client(server.address).translate, ["b", "c"])
            wait_until(lambda: server.app.service.batcher.waiting == 2)
            body = json.dumps({"q": ["d", "e"], "source": "en", "target": "de"})
            found = Client(server.address).send("POST", "/translate", body, JSON)
            assert found[::2] == (503, {"error": "Too many requests wait"})
            assert found[1]["retry-after"] == "1"
            assert {each.result()[0] for each in [waiting, *sent]} == {504}
            # What was given up makes room, although nothing has been computed.
            assert Client(server.address).translate(["d", "e", "f"])[0] == 504
        pair.gate.set()
        assert Client(server.address).translate(["x", "y", "z"])[0] == 200
    assert ["b"] not in pair.batches


def fill_both_threads(pair, server, pool):
    """Each of the two threads computes one text until the gate opens."""
    sent = [pool.submit(Client(server.address).translate, "a") for _ in range(2)]
    wait_until(lambda: pair.begun == 2)
    return sent


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_work_of_a_client_that_has_gone_is_dropped(caplog):
    caplog.set_level(logging.INFO, "flaxformer_min.server")
    pair = FakePair(most=1)
    pair.gate.clear()
    with serving(pair) as server, ThreadPoolExecutor(2) as pool:
        sent = fill_both_threads(pair, server, pool)
        client = Client(server.address)
        body = json.dumps({"q": "gone", "source": "en", "target": "de"})
        client.connection.request("POST", "/translate", body, JSON)
        wait_until(lambda: server.app.service.batcher.waiting == 1)
        client.connection.close()
        wait_until(lambda: "/translate 499" in caplog.text)
        pair.gate.set()
        assert {each.result()[0] for each in sent} == {200}
    assert pair.batches == [["a"], ["a"]]


# Who may use it, and what is logged


def test_a_key_is_needed_where_there_are_keys():
    with serving(access=Access(keys=("first", "sécond"))) as server:
        client = Client(server.address)
        assert client.translate("a") == (403, {"error": "An API key is needed: api_key"})
        for wrong in ("firs", "first ", ["first"], "\ud800"):
            assert client.translate("a", api_key=wrong) == (403, {"error": "Invalid API key"})
        assert client.translate("a", api_key="sécond")[0] == 200
        assert client.form("/detect", "q=a&api_key=first")[0] == 200
        assert client.get("/frontend/settings")[1]["keyRequired"]


@pytest.mark.parametrize("allowed", [(), ("https://example.org",)])
def test_other_pages_may_use_it_only_if_their_origin_is_allowed(allowed):
    name = "access-control-allow-origin"
    with serving(access=Access(origins=allowed)) as server:
        for origin in ("https://example.org", "https://example.com"):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            for method, headers in (("GET", {"Origin": origin}), ("OPTIONS", asked)):
                found = Client(server.address).send(method, "/languages", None, headers)[1]
                assert found.get(name) == (origin if origin in allowed else None)


@pytest.mark.parametrize("log_text", [False, True])
def test_texts_and_keys_are_not_logged_unless_asked_for(caplog, log_text):
    caplog.set_level(logging.INFO, "flaxformer_min.server")
    with serving(access=Access(keys=("thekey",), log_text=log_text)) as server:
        client = Client(server.address)
        assert client.translate("private\nwords", api_key="thekey")[0] == 200
        assert client.translate("private", source="xx", api_key="thekey")[0] == 400
        client.send("POST", "/translate?q=private")
    lines = [line for line in caplog.messages if line.startswith("POST")]
    assert [line.split(",")[0] for line in lines] == [
        f"POST /translate {status}" for status in (200, 400, 403)
    ]
    assert ("private\\nwords" in caplog.text) == log_text
    assert ("PRIVATE" in caplog.text) == log_text
    assert "thekey" not in caplog.text


def test_the_page_may_load_nothing_but_this_server(client):
    status, headers, page = client.send("GET", "/")
    assert status == 200
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "connect-src 'self'" in policy and "unsafe" not in policy
    for address in (b"http://", b"https://", b"//", b"innerHTML", b"eval("):
        assert address not in page.replace(b'"//', b"").replace(b"; //", b"")


# Clients that behave badly


def test_the_server_is_ready_once_the_first_program_is_compiled():
    pair = FakePair()
    pair.gate.clear()
    with serving(pair) as server:
        client = Client(server.address)
        assert client.get("/health") == (503, {"status": "starting"})
        pair.gate.set()
        wait_until(lambda: client.get("/health") == (200, {"status": "ok"}))


@pytest.fixture
def connect():
    """Open a connection, and send the beginning of a request."""
    opened = []

    def connect(server, sent=b""):
        host, port = server.address.removeprefix("http://").split(":")
        opened.append(socket.create_connection((host, int(port)), timeout=20))
        opened[-1].sendall(sent)
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"


@pytest.mark.parametrize(
    "sent", [b"", b"POST /tr", HEAD, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nG"]
)
def test_a_connection_without_a_complete_header_is_closed(connect, sent):
    with serving(limits=Limits(header_seconds=0.3)) as server:
        connection = connect(server, sent)
        connection.settimeout(0.1)
        end, received, block = time.monotonic() + 5, b"", b"nothing yet"
        while block:
            try:
                if sent:  # what trickles in gives no more time
                    connection.sendall(b"E")
                block = connection.recv(4096)
                received += block
            except TimeoutError:
                assert time.monotonic() < end
            except ConnectionError:
                break
    assert received.count(b"HTTP/1.1") == (1 if sent.startswith(b"GET") else 0)


def test_a_body_that_does_not_arrive_is_given_up(connect):
    with serving(limits=Limits(header_seconds=0.3)) as server:
        connection = connect(server, HEAD + b"\r\nabc")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_slow_clients_do_not_hold_up_others(connect):
    with serving(limits=Limits(header_seconds=3)) as server:
        for sent in [HEAD, HEAD + b"\r\nq="] * 50:
            connect(server, sent)
        since = time.monotonic()
        client = Client(server.address)
        assert [client.translate("a")[0] for _ in range(20)] == [200] * 20
        assert time.monotonic() - since < 2


def test_what_has_come_is_answered_before_the_server_stops():
    pair = FakePair(most=1, seconds=0.05)
    with serving(pair) as server, ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(Client(server.address).translate, "a\nb\nc") for _ in range(8)]
        wait_until(lambda: server.app.service.batcher.waiting > 10)
        server.stop()
        assert [each.result()[1] for each in sent] == [{"translatedText": "A\nB\nC"}] * 8
        with pytest.raises(OSError):
            Client(server.address).get("/health")


def test_stopping_takes_no_longer_than_the_deadline_for_a_client_that_stalls(connect):
    with serving(limits=Limits(header_seconds=0.5, deadline=0.5)) as server:
        connect(server, HEAD + b"\r\nabc")
        connect(server, HEAD)
        time.sleep(0.1)
        since = time.monotonic()
        server.stop()
        assert time.monotonic() - since < 5


def test_all_threads_end_with_the_server():
    before = threading.active_count()
    with serving() as server:
        Client(server.address).translate("a")
    wait_until(lambda: threading.active_count() <= before)


@pytest.mark.slow
def test_further_requests_need_no_further_memory(caplog):
    caplog.set_level(logging.WARNING, "flaxformer_min.server")  # pytest keeps the lines of the log
    pair = FakePair()
    pair.batches = collections.deque(maxlen=1)
    with serving(pair) as server:
        client = Client(server.address)

        def send(count):
            for number in range(count):
                assert client.translate(f"text {number}", **CONFIDENT)[0] == 200
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        first, last = send(300), send(1_500)
        tracemalloc.stop()
    assert last - first < 50 * 1_500

"""`serve`: answer LibreTranslate's API over HTTP, until a signal comes."""

import argparse
import logging
from typing import Any

from flaxformer_min.cli.lines import Stop
from flaxformer_min.cli.options import load


def serve(args: argparse.Namespace, stop: Stop) -> int:
    """Run the command, and return its exit status: 0 once a signal has stopped the server."""
    from flaxformer_min.server import check_installed

    check_installed("Servers need")
    from flaxformer_min.server.app import Access
    from flaxformer_min.server.requests import Limits
    from flaxformer_min.server.run import Server

    access = Access(_read_keys(args.api_key_file), args.cors or (), args.log_text)
    _check_host(args)
    limits = Limits(characters=args.char_limit, waiting=args.queue, deadline=args.deadline)
    pairs = _load_pairs(args)
    logging.getLogger("flaxformer_min.server").setLevel(logging.INFO)
    server = Server(pairs, access, limits)
    try:
        server.start(args.host, args.port)
        server.wait()
    except KeyboardInterrupt:
        print("Stopping after the requests that have come.", flush=True)
    finally:
        server.stop()
    return 0


def _read_keys(path: str | None) -> list[str]:
    if path is None:
        return []
    with open(path, encoding="utf-8") as file:
        keys = [line.strip() for line in file if line.strip()]
    if not keys:
        raise ValueError(f"--api-key-file must hold a key on each line; {path} has none.")
    return keys


def _check_host(args: argparse.Namespace) -> None:
    from flaxformer_min.server.run import is_loopback

    if not (is_loopback(args.host) or args.api_key_file or args.insecure):
        raise ValueError(
            f"a server that other machines can reach needs keys; got --host {args.host} without. "
            "Add --api-key-file FILE, or --insecure to let everybody use it."
        )


def _load_pairs(args: argparse.Namespace) -> list[Any]:
    """Return a language pair for each run."""
    from flaxformer_min.languages import parse_languages
    from flaxformer_min.server.pair import Pair
    from flaxformer_min.storage.run_folder import RunFolder

    runs: dict[tuple[str, ...], str] = {}
    for run in args.runs:
        languages = RunFolder(run).config().data.languages
        if not languages:
            raise ValueError(
                f"a served run must name its languages; {run} does not. Name them in its "
                'config.json, as in "languages": "en-de".'
            )
        pair = tuple(code.replace("_", "-") for code in parse_languages(languages))
        if pair in runs:
            raise ValueError(
                f"each language pair is served once; {runs[pair]} and {run} both translate "
                f"{' to '.join(pair)}. Leave one out."
            )
        runs[pair] = run
    return [
        Pair(load(argparse.Namespace(**{**vars(args), "runs": [run]})), *pair)
        for pair, run in runs.items()
    ]

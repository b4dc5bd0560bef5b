"""A web page to explore the attention weights of a translation."""

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flaxformer_min.plots.weights import check_weights


def attention_page(
    maps: Mapping[str, Any],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    read_tokens: Sequence[str] | None = None,
    source_language: str = "",
    target_language: str = "",
) -> str:
    """Return the HTML of a page to explore the attention weights of a translation.

    maps: any of "encoder", "decoder" and "cross", each [layers heads queries keys]. In "encoder",
          the source attends to the source; in "decoder", the target to the target so far; in
          "cross", the target to the source.
    read_tokens: the keys of "decoder": the target shifted right, which begins with BOS. None: the
          target's own tokens.
    source_language, target_language: such as `ko`, for the browser's fonts and screen readers.

    The page is a single file without external links, so it can be mailed and opened offline. It
    works with mouse, touch, keyboard and screen reader. Weights are rounded to four digits. Raises
    ValueError for an unknown map, or if shapes and tokens disagree.
    """
    known = {
        "cross": ("target", "source"),
        "encoder": ("source", "source"),
        "decoder": ("target", "target so far"),
    }
    if not maps or set(maps) - set(known):
        raise ValueError(f"maps must be some of {', '.join(known)}; got {list(maps)}.")
    tokens = {"source": list(source_tokens), "target": list(target_tokens)}
    tokens["target so far"] = tokens["target"] if read_tokens is None else list(read_tokens)
    languages = {"source": source_language, "target": target_language}
    languages["target so far"] = target_language
    content = {
        "tokens": tokens,
        "languages": languages,
        "maps": {
            name: {
                "queries": queries,
                "keys": keys,
                "weights": _ten_thousandths(name, maps[name], tokens[queries], tokens[keys]),
            }
            for name, (queries, keys) in known.items()
            if name in maps
        },
    }
    return _fill_page(content)


def _ten_thousandths(
    name: str, weights: Any, queries: Sequence[str], keys: Sequence[str]
) -> list[list[list[list[int]]]]:
    """Return weights as integers, because `1234` is shorter than `0.1234`."""
    shape = "[layers heads queries keys]"
    weights = check_weights(f"maps[{name!r}]", weights, shape, len(queries), len(keys), (4,))
    return np.round(weights * 10_000).astype(int).tolist()


def _fill_page(content: dict[str, Any]) -> str:
    page = importlib.resources.files(__package__) / "attention_page.html"
    page = page.read_text(encoding="utf-8")
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # A token may be "</script>" or "<!--", so "<" is escaped, as JSON allows.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("{{script digest}}", digest).replace("{{data}}", data)

"""What a search is asked for: options, sources and prefixes, as its programs take them."""

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
import numpy as np

from flaxformer_min.config_fields import has_type, plain
from flaxformer_min.decoding.pool import Newcomers, Pool, PoolShape
from flaxformer_min.decoding.search import Rules
from flaxformer_min.decoding.shapes import bucket, common_widths, padded
from flaxformer_min.runtime.generator import GENERATOR


@dataclasses.dataclass(frozen=True)
class Options(Rules):
    """How to search, and for how long; the defaults are the paper's (section 6.1)."""

    max_extra_tokens: int = 50
    seed: int = 0

    def __post_init__(self):
        """Raise ValueError for options of another type, out of range, or contradictory."""
        if not isinstance(self.suppressed, Iterable):
            raise ValueError(f"suppressed must be several ids; got {self.suppressed!r}.")
        object.__setattr__(self, "suppressed", tuple(self.suppressed))
        if not has_type(plain(self.suppressed), tuple[int, ...]):
            raise ValueError(f"suppressed must be ids, whole numbers; got {self.suppressed!r}.")
        if not isinstance(self.early_stopping, bool):
            raise ValueError(f"early_stopping must be True or False; got {self.early_stopping!r}.")
        if not isinstance(self.scores, bool):
            raise ValueError(f"scores must be True or False; got {self.scores!r}.")
        if not has_type(plain(self.length_penalty), float):
            raise ValueError(f"length_penalty must be a number; got {self.length_penalty!r}.")
        for name in ("beam_size", "n_best", "min_length", "max_extra_tokens", "seed"):
            value, bits = plain(getattr(self, name)), 32 if name == "seed" else 30
            if not has_type(value, int):
                raise ValueError(f"{name} must be a whole number; got {value!r}.")
            if value >= 1 << bits:
                raise ValueError(f"{name} must be less than 2**{bits}; got {value}.")
        for name, least in (("max_extra_tokens", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Job:
    """What a call of `BatchRunner.search` is asked for.

    prefix: tokens that prefixes are padded to.
    """

    runner: Any
    sources: dict[int, list[int]]
    prefixes: dict[int, list[int]]
    options: Options
    prefix: int

    @cached_property
    def rules(self) -> Rules:
        """What programs are compiled for."""
        fields = dataclasses.fields(Rules)
        rules = Rules(**{field.name: getattr(self.options, field.name) for field in fields})
        # Hypotheses that do not compete go on until each has ended, so both kinds are the same.
        early_stopping = rules.early_stopping or not rules.competing
        return dataclasses.replace(rules, early_stopping=early_stopping, scores=rules.scored)

    def length(self, line: int) -> int:
        """Return the tokens of a source."""
        return len(self.sources[line])

    @cached_property
    def _own_widths(self) -> dict[int, int]:
        return {line: bucket(self.length(line), self.runner.lengths) for line in self.sources}

    @cached_property
    def _widths(self) -> dict[int, int]:
        # Of all lines, so that all cores search in the same few widths.
        common = common_widths([*self._own_widths.values()], self.runner.few())
        return {line: common[width] for line, width in self._own_widths.items()}

    def own_width(self, line: int) -> int:
        """Return the tokens that a source would be padded to if many were as long."""
        return self._own_widths[line]

    def width(self, line: int) -> int:
        """Return the tokens that a source is padded to, unless it joins longer ones."""
        return self._widths[line]

    def order(self, line: int) -> tuple[int, int, int]:
        """Return the key by which lines are sorted.

        Those of the smallest width come first, because programs are compiled for widths. Of one
        width the longest come first: the last, whom nobody follows, are done soon.
        """
        return self.width(line), -self.length(line), line

    def limit(self, line: int) -> int:
        """Return the most tokens of a translation, prefix and EOS included."""
        limit = self.length(line) + self.options.max_extra_tokens
        return min(limit, self.runner.max_positions or limit)

    def pool_arrays(self, shape: PoolShape) -> Pool:
        """Return the shapes and types of the arrays of the devices' pools."""
        nobody: list[list[int]] = [[] for _ in self.runner.devices]
        return self.runner.pool_arrays(self.rules, shape, self.newcomers(nobody, shape))

    def newcomers(self, of_devices: list[list[int]], shape: PoolShape) -> Newcomers:
        """Return the arrays of the lines that join the pool of each device."""
        each = [self._newcomers(lines, shape) for lines in of_devices]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *each)

    def _newcomers(self, lines: list[int], shape: PoolShape) -> Newcomers:
        rows = shape.newcomers
        numbers = [(self.limit(line), line) for line in lines] + [(1, 0)] * (rows - len(lines))
        limits, numbers = np.ascontiguousarray(np.array(numbers, np.int32).T)
        seed = prefix = None
        if self.options.sampling is not None:
            # An argument of the program: as a constant, each seed would need its own compilation.
            key = jax.random.key(self.options.seed, impl=GENERATOR)
            key = np.asarray(jax.random.key_data(key))
            seed = np.broadcast_to(key, (rows, *key.shape))
        if shape.prefix:
            prefix = padded([self.prefixes[line] for line in lines], rows, shape.prefix)
        source = padded([self.sources[line] for line in lines], rows, shape.width)
        return Newcomers(np.int32(len(lines)), source, limits, numbers, seed, prefix)

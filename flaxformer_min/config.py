"""Every number a run depends on, in one place, named as the paper names it.

A `Config` is four frozen dataclasses. It checks itself when it is made, goes to JSON and back, and
knows which of its settings may change when a run is continued.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from flaxformer_min.config_fields import check_fields, check_known, setting
from flaxformer_min.languages import parse_languages

FORMAT_VERSION = 1
"""Of the run folder: config.json, the parameters' names and the files beside them."""


RENAMED = {"training": {"begin_from": "init_from"}}
"""Former names of settings, by group: a config.json of an earlier version has these."""

DROPOUTS = ("dropout", "attention_dropout", "feed_forward_dropout")
"""The settings of a model that only matter while it learns."""


LENGTH_PENALTY_LIMIT = 10
"""A larger one makes of long translations' penalties more than float32 holds."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where sentence pairs come from, and how they become rows of tokens (section 5.1)."""

    corpus: str = setting("cldr:en-ko")
    """`cldr:en-ko` (embedded, any two CLDR locales), `text:DIR` (train.en, train.de, ...; also .gz
    or one .tsv) or `tfds:wmt14_translate/de-en` (any tfds translation set)."""

    languages: str = setting("")
    """Source and target language as `en-de`. Empty: as the corpus names them."""

    tokenizer_sample: int = setting(1_000_000, at_least=1)
    """Train the tokenizer on at most this many pairs, drawn evenly from the training split."""

    source_row_length: int = setting(64, at_least=8)
    """Places in a row of source tokens. A pair that needs more is dropped and counted. Above 128 a
    multiple of it takes less memory: attention then goes block by block."""

    target_row_length: int = setting(64, at_least=8)
    """The same of target tokens."""

    subword_sampling: float = setting(0.0, at_least=0)
    """Above 0: each epoch cuts the training text anew into other pieces of the vocabulary (subword
    regularisation, Kudo 2018). This is Kudo's α; the smaller, the wilder; 0.1 to 0.5 are usual."""

    rows_per_batch: int = setting(32, at_least=1)
    """Rows a training step reads on all devices together, before gradient accumulation."""

    workers: int = setting(0, at_least=0, may_change=True)
    """Processes that assemble batches; 0 uses a thread, which keeps up with a CPU."""

    cache_dir: str = setting("", may_change=True)
    """Where tokenizers, encoded text, embedded phrases and compiled programs are kept, and sets of
    tfds are looked for. Empty: `flaxformer_min` in the user's cache folder, and tfds' own."""

    download: bool = setting(False, may_change=True)
    """Let tfds download a set that is not prepared yet."""

    def __post_init__(self):
        """Check types, ranges and relations."""
        check_fields(self, "data")
        if self.languages:
            parse_languages(self.languages)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of figure 1; the defaults are the row "base" of the paper's table 3."""

    vocab_size: int = setting(37_000, at_least=4)
    """Pieces of the target vocabulary, and of the source's where they share one."""

    source_vocab_size: int | None = setting(None, at_least=4)
    """Pieces of the source's own vocabulary; None: source and target share one."""

    num_layers: int = setting(6, at_least=1)
    """N, layers of the encoder and of the decoder."""

    d_model: int = setting(512, at_least=2)
    """Width of a token's vector."""

    d_ff: int = setting(2048, at_least=1)
    """Width of the feed-forward network's inner layer."""

    num_heads: int = setting(8, at_least=1)
    """h, attention heads; each is d_model / num_heads wide."""

    dropout: float = setting(0.1, at_least=0, less_than=1)
    """P_drop, on embeddings and on the output of every sub-layer (section 5.4)."""

    attention_dropout: float = setting(0.0, at_least=0, less_than=1)
    """Dropout of attention weights; not in the paper."""

    feed_forward_dropout: float = setting(0.0, at_least=0, less_than=1)
    """Dropout after the feed-forward network's ReLU; not in the paper."""

    norm: Literal["post", "pre"] = setting("post")
    """Layer norm after each residual sum (the paper), or before each sub-layer and at the end."""

    positional_encoding: Literal["interleaved", "halves", "learned", "none"] = setting(
        "interleaved"
    )
    """Alternating sines and cosines (the paper), all sines first, a learned vector for each of
    `max_positions` positions (table 3, row E), or none (for ablations)."""

    max_positions: int = setting(0, at_least=0)
    """Positions that positional_encoding="learned" has vectors for: as many as the longer row of
    the data. 0 with the other encodings, which have no limit."""

    embeddings: Literal["shared", "target_tied", "separate"] = setting("shared")
    """One matrix for source, target and output (the paper); one for target and output; or three,
    the output with a bias."""

    dtype: Literal["float32", "bfloat16"] = setting("float32", may_change=True)
    """What the layers compute in. Parameters, softmax, norms and loss are always float32."""

    attention: Literal["explicit", "fused"] = setting("explicit", may_change=True)
    """Training computes attention weights and then sums (the paper's equation 1, step by step), or
    both in one operation, whose weights nobody sees. Fused saves memory on an NVIDIA GPU with
    dtype=bfloat16 (cuDNN's flash attention; heads 8, 16, ... 128 wide, rows of even length; not
    measured yet); elsewhere it gains nothing. Decoding is always explicit."""

    remat: bool = setting(False, may_change=True)
    """Keep only what goes into each layer for the backward pass, and compute the rest again (Chen
    et al. 2016). Takes less memory and more time; what is learned stays the same."""

    architecture: str = setting("")
    """Class name of the model given to `train(model=...)`; empty for this package's Transformer.
    Set by `train`: loading such a run needs the same model."""

    def __post_init__(self):
        """Check types, ranges and relations."""
        check_fields(self, "model")
        if (self.positional_encoding == "learned") != (self.max_positions > 0):
            raise ValueError(
                "model.max_positions must be given for positional_encoding='learned', and only for "
                f"it; got {self.max_positions} with {self.positional_encoding!r}."
            )
        for name in DROPOUTS:
            if 0 < getattr(self, name) <= 1 / 512:
                raise ValueError(
                    f"model.{name} must be 0 or more than 1/512, for one random byte decides about "
                    f"a value, and less would drop nothing; got {getattr(self, name)}."
                )
        if self.d_model % self.num_heads:
            raise ValueError(
                "model.d_model must be a multiple of model.num_heads, so that the heads share it "
                f"evenly; got d_model={self.d_model}, num_heads={self.num_heads}."
            )
        if self.d_model % 2 and self.positional_encoding in ("interleaved", "halves"):
            raise ValueError(
                "model.d_model must be even, because sines and cosines come in pairs; "
                f"got {self.d_model}."
            )
        if self.attention == "fused" and self.attention_dropout:
            raise ValueError(
                "model.attention='fused' has no weights to drop; got attention_dropout="
                f"{self.attention_dropout}. Set it to 0, or choose attention='explicit'."
            )
        if self.embeddings == "shared" and self.source_vocab_size is not None:
            raise ValueError(
                "model.embeddings='shared' needs one vocabulary for both languages; got "
                f"source_vocab_size={self.source_vocab_size}. Leave it out, or choose "
                "embeddings='target_tied' or 'separate'."
            )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, how fast and how carefully to learn (sections 5.2-5.4)."""

    steps: int = setting(100_000, at_least=1, may_change=True)
    """Updates of the parameters."""

    warmup_steps: int = setting(4_000, at_least=1)
    """Steps over which the learning rate rises (equation 3)."""

    learning_rate_scale: float = setting(1.0, more_than=0)
    """Factor on equation 3; 1 is the paper."""

    cooldown_steps: int = setting(0, at_least=0, may_change=True)
    """Over the last steps, or all where there are fewer, equation 3 is multiplied by a factor that
    falls to zero in a line; 0 is the paper."""

    adam_b1: float = setting(0.9, at_least=0, less_than=1)
    """Adam's β₁."""

    adam_b2: float = setting(0.98, at_least=0, less_than=1)
    """Adam's β₂."""

    adam_epsilon: float = setting(1e-9, more_than=0)
    """Adam's ε."""

    label_smoothing: float = setting(0.1, at_least=0, less_than=1)
    """ε_ls, the share of each label that is spread over the vocabulary."""

    r_drop: float = setting(0.0, at_least=0)
    """Above 0: read each batch twice, under two dropout masks, and punish with this weight what the
    two predictions disagree about (R-Drop, Liang et al. 2021, their α). A step costs twice."""

    ema_decay: float = setting(0.0, at_least=0, less_than=1)
    """Above 0: keep an exponential moving average of the parameters, which takes this share of
    itself at each step; it is what is validated and translated with (Polyak and Juditsky 1992)."""

    average_checkpoints: int = setting(1, at_least=1, may_change=True)
    """Above 1: when training ends, validate the mean of the newest so many checkpoints (section
    6.1: 5 or 20), and translate with it if it is better than the best of them alone."""

    gradient_accumulation: int = setting(1, at_least=1)
    """Batches whose gradients are summed into one update."""

    clip_norm: float | None = setting(None, more_than=0)
    """Scale a larger gradient down to this norm; None is the paper."""

    init_from: str = setting("")
    """A run folder: begin with what it translates with, and with its tokenizers, to learn from
    other text (fine-tuning). Empty: begin with random parameters and tokenizers of this text."""

    seed: int = setting(0, at_least=0, less_than=2**32)
    """Of parameters, dropout and the order of rows."""

    log_every: int = setting(50, at_least=1, may_change=True)
    """Steps between two lines of metrics."""

    validate_every: int = setting(1_000, at_least=1, may_change=True)
    """Steps between two validations."""

    validation_sentences: int = setting(200, at_least=0, may_change=True)
    """Validation pairs that are translated for BLEU; the loss is measured on all of them."""

    save_every: int = setting(1_000, at_least=1, may_change=True)
    """Steps between two checkpoints; the best by validation and the last are saved besides."""

    keep_checkpoints: int = setting(3, at_least=1, may_change=True)
    """Newest of these checkpoints kept; the best by validation is kept besides."""

    best_by: Literal["loss", "bleu"] = setting("loss")
    """What makes a checkpoint the best: the lowest validation loss or the highest BLEU."""

    patience: int | None = setting(None, at_least=1, may_change=True)
    """Stop when so many validations in a row found nothing better; None: never before `steps`."""

    max_skipped: int = setting(20, at_least=1, may_change=True)
    """Stop after this many steps in a row whose loss or gradient is not finite."""

    debug_nans: bool = setting(False, may_change=True)
    """Stop at the first such step, and name the operation that made NaN or infinity of numbers."""

    def __post_init__(self):
        """Check types, ranges and relations."""
        check_fields(self, "training")
        if self.best_by == "bleu" and not self.validation_sentences:
            raise ValueError(
                "training.best_by='bleu' needs translations to compare; got "
                "training.validation_sentences=0. Translate some, or choose best_by='loss'."
            )
        if self.average_checkpoints > self.keep_checkpoints:
            raise ValueError(
                "training.average_checkpoints must not exceed training.keep_checkpoints, for the "
                f"mean is that of kept ones; got {self.average_checkpoints} and "
                f"{self.keep_checkpoints}."
            )


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """How a translation is searched for (section 6.1)."""

    beam_size: int = setting(4, at_least=1, may_change=True)
    """Hypotheses a sentence; 1 is greedy."""

    length_penalty: float = setting(0.6, at_least=0, at_most=LENGTH_PENALTY_LIMIT, may_change=True)
    """α of Wu et al. 2016; 0 prefers short translations."""

    max_extra_tokens: int = setting(50, at_least=1, may_change=True)
    """A translation has at most as many tokens as its source and these."""

    batch_size: int = setting(64, at_least=1, may_change=True)
    """Sentences that each device searches for at once."""

    def __post_init__(self):
        """Check types, ranges and relations."""
        check_fields(self, "decoding")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run.

    >>> config = Config(model=ModelConfig(d_model=128, num_heads=4))
    >>> config.model.d_ff, config.training.warmup_steps
    (2048, 4000)
    >>> Config.from_json(config.to_json()) == config
    True
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()

    def __post_init__(self):
        """Check what two groups must agree on."""
        if self.decoding.beam_size > self.model.vocab_size:
            raise ValueError(
                "decoding.beam_size must not exceed model.vocab_size, for there are no more "
                f"continuations; got {self.decoding.beam_size} and {self.model.vocab_size}."
            )
        longest = max(self.data.source_row_length, self.data.target_row_length)
        if self.model.max_positions not in (0, longest):
            raise ValueError(
                "model.max_positions must equal the longer row length, because a sentence may fill "
                "a row and later positions would never be learned; got "
                f"{self.model.max_positions} for rows of {longest}."
            )
        if self.training.r_drop and not any(getattr(self.model, name) for name in DROPOUTS):
            raise ValueError(
                "training.r_drop compares two readings under different dropout, and there is none: "
                f"all of model.{', model.'.join(DROPOUTS)} are 0. Set one of them, or leave it out."
            )

    def to_json(self) -> str:
        """This config and the format's version, as JSON."""
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str | Path = "config.json") -> "Config":
        """The config that `to_json` wrote. Settings that are not there get their default.

        Raises ValueError for broken JSON, a newer format, an unknown setting or a wrong value.
        """
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"{where} must be JSON; {error}. Copy it back from elsewhere."
            ) from error
        if not isinstance(content, dict) or type(content.get("format_version")) is not int:
            raise ValueError(f"{where} must hold a format_version; it is no flaxformer_min config.")
        version = content.pop("format_version")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"{where} has format {version}, and this flaxformer_min reads up to "
                f"{FORMAT_VERSION}. Install a newer flaxformer_min."
            )
        groups = {field.name: field.type for field in dataclasses.fields(cls)}
        check_known(where, content, groups)
        for name, value in content.items():
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {name} must be a group of settings; got {value!r}.")
            for old, new in RENAMED.get(name, {}).items():
                if old in value:
                    value[new] = value.pop(old)
            check_known(f"{where}, {name}", value, groups[name].__dataclass_fields__)
        return cls(**{name: groups[name](**value) for name, value in content.items()})


def differences(old: Config, new: Config) -> list[str]:
    """The settings that a continued run must not change and that differ, one line each.

    >>> longer = Config(training=TrainingConfig(steps=7))
    >>> differences(Config(), longer)
    []
    >>> differences(Config(), Config(model=ModelConfig(d_ff=64)))
    ['model.d_ff: 2048 in the run, 64 now']
    """
    return [
        f"{group.name}.{field.name}: {before!r} in the run, {now!r} now"
        for group in dataclasses.fields(Config)
        for field in dataclasses.fields(group.type)
        if not field.metadata["may_change"]
        for before in [getattr(getattr(old, group.name), field.name)]
        for now in [getattr(getattr(new, group.name), field.name)]
        if before != now
    ]

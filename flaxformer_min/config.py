"""All settings of a run, named as in the paper.

A `Config` holds four frozen dataclasses. It is validated when it is created, converts to JSON and
back, and records which settings may change when a run is continued.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from flaxformer_min.config_checks import check_architecture, check_symbols, check_training
from flaxformer_min.config_fields import check_fields, check_groups, read_groups, setting
from flaxformer_min.languages import check_languages

FORMAT_VERSION = 1
"""Version of the run folder's format: config.json, the names of parameters and the other files."""

DROPOUTS = ("dropout", "attention_dropout", "feed_forward_dropout")
"""The settings of a model that only matter in training."""

LENGTH_PENALTY_LIMIT = 10
"""Largest length penalty; with a larger one, long translations would overflow float32."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus, and how sentence pairs are packed into rows of tokens (section 5.1)."""

    corpus: str = setting("cldr:en-ko")
    """`cldr:en-ko` (embedded; any two CLDR locales), `text:DIR` (train.en, train.de, ..., or
    train.tsv; also compressed) or `tfds:wmt14_translate/de-en` (any dataset of tfds). Or several,
    as `text:DIR,text:OTHER*3`: pairs of the second are read three times in each epoch."""

    languages: str = setting("")
    """Source and target, as in `en-de`, `en-zh-CN` or `en:pt-br`. Empty: the corpus's own."""

    tokenizer_sample: int = setting(1_000_000, at_least=1)
    """Train the tokenizer on at most this many pairs, evenly spaced over the training split."""

    source_row_length: int = setting(64, at_least=8, less_than=2**31)
    """Source tokens per row. Longer pairs are dropped and counted. Above 128, a multiple of 128
    takes less memory, because attention is then computed block by block."""

    target_row_length: int = setting(64, at_least=8, less_than=2**31)
    """Target tokens per row; see `source_row_length`."""

    tokenizers: Literal["trained", "imported"] = setting("trained")
    """Trained on this text, or imported with a model (see docs/interop.md)."""

    normalization: Literal["nmt_nfkc", "nfkc", "identity"] | None = setting("nmt_nfkc")
    """SentencePiece's rule for text, in training and in use: NFKC and plain spaces, NFKC, or none.
    Imported tokenizers have rules of their own, for which None stands."""

    symbols: tuple[str, ...] = setting(())
    """Pieces of a text that are never split or normalized, such as `>>deu<<` or `__PH1__`."""

    subword_sampling: float = setting(0.0, at_least=0)
    """Above 0: draw another segmentation of each training sentence in each epoch (subword
    regularization, Kudo 2018). This is Kudo's α: a smaller one draws more diverse segmentations;
    0.1 to 0.5 is usual."""

    rows_per_batch: int = setting(32, at_least=1, less_than=2**31)
    """Rows per batch, over all devices. A step reads `gradient_accumulation` batches."""

    workers: int = setting(0, at_least=0, less_than=1_000, may_change=True)
    """Worker processes that assemble batches; 0 uses a thread, which is fast enough for a CPU."""

    cache_dir: str = setting("", may_change=True)
    """Folder for cached tokenizers, encoded text, embedded phrases and compiled programs, and for
    datasets of tfds. Empty: `flaxformer_min` in the user's cache folder, and tfds' own folder."""

    download: bool = setting(False, may_change=True)
    """Let tfds download and prepare a dataset that is not prepared yet."""

    def __post_init__(self):
        """Validate types, ranges and combinations."""
        check_fields(self, "data")
        if self.languages:
            check_languages(self.languages)
        check_symbols(self.symbols)
        if (self.normalization is None) != (self.tokenizers == "imported"):
            raise ValueError(
                "data.normalization must be None for imported tokenizers, which keep their rules, "
                f"and only for them; got {self.normalization!r} with data.tokenizers="
                f"{self.tokenizers!r}."
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture; the defaults are the base model (table 3)."""

    vocab_size: int = setting(37_000, at_least=4, less_than=2**31)
    """Size of the target vocabulary, or of the vocabulary shared by source and target."""

    source_vocab_size: int | None = setting(None, at_least=4, less_than=2**31)
    """Size of a separate source vocabulary; None: source and target share one."""

    num_layers: int = setting(6, at_least=1, less_than=1_000)
    """N, the number of layers in the encoder and in the decoder."""

    num_decoder_layers: int | None = setting(None, at_least=1, less_than=1_000)
    """Layers of the decoder, if not N: a shallow one translates faster. None: N."""

    d_model: int = setting(512, at_least=2, less_than=1_000_000)
    """Width of embeddings and hidden states."""

    d_ff: int = setting(2048, at_least=1, less_than=1_000_000)
    """Width of the inner layer of the feed-forward network."""

    num_heads: int = setting(8, at_least=1)
    """h, the number of attention heads; each is d_model / num_heads wide."""

    dropout: float = setting(0.1, at_least=0, less_than=1)
    """P_drop, applied to embeddings and to the output of each sub-layer (section 5.4)."""

    attention_dropout: float = setting(0.0, at_least=0, less_than=1)
    """Dropout of attention weights; not in the paper."""

    feed_forward_dropout: float = setting(0.0, at_least=0, less_than=1)
    """Dropout after the feed-forward network's activation; not in the paper."""

    activation: Literal["relu", "swish", "gelu"] = setting("relu")
    """Of the feed-forward network: max(0, x) (the paper), x · sigmoid(x), or x · Φ(x)."""

    norm: Literal["post", "pre"] = setting("post")
    """Layer norm after each residual sum (the paper), or before each sub-layer and at the end."""

    final_norm: bool = setting(True)
    """Of norm="pre": the norm at the end of each stack, which some imported models lack."""

    norm_epsilon: float = setting(1e-6, more_than=0)
    """Added to the variance in each layer norm."""

    positional_encoding: Literal["interleaved", "halves", "learned", "none"] = setting(
        "interleaved"
    )
    """Alternating sines and cosines (the paper); all sines, then all cosines; a learned embedding
    of each of `max_positions` positions (table 3, row E); or none, for ablations."""

    max_positions: int = setting(0, at_least=0, less_than=2**31)
    """Positions that "learned" has vectors for: the longer row length. 0: no limit, no vectors."""

    embeddings: Literal["shared", "target_tied", "separate"] = setting("shared")
    """One matrix for source, target and output (the paper); one for target and output; or three
    matrices, and a bias of the output."""

    output_bias: bool = setting(False)
    """Add a bias to tied logits, as imported models do. Separate ones always have one."""

    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", may_change=True)
    """Type of the layers' computations. auto: bfloat16 on a TPU and on GPUs that have it, float32
    elsewhere; a run records which. Parameters, softmax, norms and loss are always float32."""

    attention: Literal["explicit", "fused"] = setting("explicit", may_change=True)
    """In training: equation 1 step by step, or as one fused operation, which does not return the
    attention weights. Fused saves memory on an NVIDIA GPU with dtype=bfloat16 (cuDNN's flash
    attention; heads 8, 16, ... 128 wide, rows of even length) and gains nothing elsewhere. Decoding
    is always explicit."""

    remat: Literal["none", "selective", "full"] = setting("none", may_change=True)
    """Values that the backward pass recomputes instead of storing them. full: all but the input of
    each layer (Chen et al. 2016). selective: all but these inputs, the sums of residual connections
    and cuDNN's attention (Korthikanti et al. 2022). Less memory takes more time; the result is the
    same."""

    architecture: str = setting("")
    """Class and parts of the model of `train(model=...)`, set by `train`; empty: this package's."""

    @property
    def decoder_depth(self) -> int:
        """The number of layers in the decoder."""
        return self.num_decoder_layers or self.num_layers

    @property
    def has_final_norm(self) -> bool:
        """Whether a layer norm follows each stack of layers."""
        return self.norm == "pre" and self.final_norm

    def __post_init__(self):
        """Validate types, ranges and combinations."""
        check_fields(self, "model")
        check_architecture(self)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The optimizer, its schedule, regularization and checkpoints (sections 5.2-5.4)."""

    steps: int = setting(100_000, at_least=1, less_than=2**31, may_change=True)
    """Number of updates of the parameters."""

    optimizer: Literal["adam", "muon", "schedule_free"] = setting("adam")
    """Adam (the paper); Muon for the kernels of layers, Adam for the rest (Jordan et al. 2024); or
    schedule-free Adam, which averages the parameters at a constant rate (Defazio et al. 2024)."""

    warmup_steps: int = setting(4_000, at_least=1)
    """Steps over which the learning rate increases (equation 3)."""

    learning_rate_scale: float = setting(1.0, more_than=0)
    """Factor of the learning rate (equation 3); 1 is the paper."""

    cooldown_steps: int = setting(0, at_least=0, may_change=True)
    """Last steps, over which a factor of the learning rate falls linearly to 0; 0 is the paper."""

    adam_b1: float = setting(0.9, at_least=0, less_than=1)
    """Adam's β₁."""

    adam_b2: float = setting(0.98, at_least=0, less_than=1)
    """Adam's β₂."""

    adam_epsilon: float = setting(1e-9, more_than=0)
    """Adam's ε."""

    label_smoothing: float = setting(0.1, at_least=0, less_than=1)
    """ε_ls, the probability of each label that is spread over the vocabulary."""

    r_drop: float = setting(0.0, at_least=0)
    """Above 0: run each batch twice with different dropout, and add the symmetric KL divergence of
    the two predictions to the loss, with this weight (R-Drop, Liang et al. 2021; their α). A step
    takes up to twice as long."""

    simcut: float = setting(0.0, at_least=0)
    """Above 0: also run each batch with a share of its token embeddings zeroed, on both sides, and
    add KL(whole || cut) of the two predictions to the loss, with this weight (SimCut, Gao et al.
    2022; their α, 3 there). A step takes up to twice as long."""

    simcut_share: float = setting(0.05, more_than=0, less_than=1)
    """Of `simcut`: the probability that the embedding of a token is zeroed; their p_cut."""

    ema_decay: float = setting(0.0, at_least=0, less_than=1)
    """Above 0: decay of an exponential moving average of the parameters, which is then used to
    validate and translate (Polyak and Juditsky 1992)."""

    average_checkpoints: int = setting(1, at_least=1, may_change=True)
    """Above 1: when training ends, validate the mean of this many of the newest checkpoints
    (section 6.1: 5 or 20), and translate with it if it is better than the best checkpoint."""

    gradient_accumulation: int = setting(1, at_least=1, less_than=2**31)
    """Batches whose gradients are summed into one update."""

    clip_norm: float | None = setting(None, more_than=0)
    """Scale gradients with a larger norm down to this norm; None is the paper."""

    init_from: str = setting("")
    """Run folder to fine-tune: start from its tokenizers and the parameters it translates with.
    Empty: start from random parameters, with tokenizers trained on this text."""

    seed: int = setting(0, at_least=0, less_than=2**32)
    """Random seed of the parameters, dropout and the order of rows."""

    log_every: int = setting(50, at_least=1, may_change=True)
    """Steps between two lines of metrics."""

    validate_every: int = setting(1_000, at_least=1, may_change=True)
    """Steps between two validations."""

    validation_sentences: int = setting(200, at_least=0, may_change=True)
    """Validation pairs that are translated for BLEU; the loss is measured on all of them."""

    save_every: int = setting(1_000, at_least=1, may_change=True)
    """Steps between two checkpoints; the best by validation and the last are saved as well."""

    keep_checkpoints: int = setting(3, at_least=1, may_change=True)
    """How many of the checkpoints of every `save_every` steps are kept, besides the best one."""

    best_by: Literal["loss", "bleu"] = setting("loss")
    """How the best checkpoint is selected: by the lowest validation loss or the highest BLEU."""

    patience: int | None = setting(None, at_least=1, may_change=True)
    """Stop after this many validations in a row without improvement; None: never stop early."""

    max_skipped: int = setting(20, at_least=1, may_change=True)
    """Stop after this many steps in a row whose loss or gradient is not finite."""

    def __post_init__(self):
        """Validate types, ranges and combinations."""
        check_fields(self, "training")
        check_training(self)


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """The search for a translation (section 6.1): of a run, of `search`, of each command."""

    beam_size: int = setting(4, at_least=1, less_than=2**30, may_change=True)
    """Hypotheses per sentence; 1 is greedy decoding."""

    length_penalty: float = setting(0.6, at_least=0, at_most=LENGTH_PENALTY_LIMIT, may_change=True)
    """α of Wu et al. 2016, equation 14; 0 prefers short translations."""

    max_extra_tokens: int = setting(50, at_least=1, at_most=100_000, may_change=True)
    """Most tokens by which a translation may be longer than its source."""

    min_length: int = setting(0, at_least=0, less_than=2**30, may_change=True)
    """Fewest tokens of a translation, EOS not counted, as far as max_extra_tokens allows."""

    early_stopping: bool = setting(True, may_change=True)
    """Once beam_size hypotheses have finished, continue an unfinished one only if its score exceeds
    the worst of the n_best finished ones. Off: as long as it can exceed it (exact search)."""

    suppressed: tuple[int, ...] = setting((), at_least=4, may_change=True)
    """Ids of target tokens that are never chosen, which some imported models require. PAD, UNK and
    BOS are never chosen either."""

    n_best: int = setting(1, at_least=1, less_than=2**30, may_change=True)
    """Translations of each line, best first."""

    sample: bool = setting(False, may_change=True)
    """Draw beam_size translations of each line at random, instead of searching for the best."""

    temperature: float = setting(1.0, at_least=1e-6, at_most=1e6, may_change=True)
    """Of samples: below 1 for likelier tokens."""

    top_k: int | None = setting(None, at_least=1, may_change=True)
    """Of samples: draw from this many likeliest tokens; None: from all."""

    top_p: float = setting(1.0, more_than=0, at_most=1, may_change=True)
    """Of samples: draw from the fewest likeliest tokens that together have this probability."""

    seed: int = setting(0, at_least=0, less_than=2**32, may_change=True)
    """Random seed of samples; each line draws its own."""

    batch_size: int | None = setting(None, at_least=1, may_change=True)
    """Most sentences at once on each device. None: up to 32 on a CPU, 256 on an accelerator."""

    def __post_init__(self):
        """Validate types, ranges and combinations."""
        check_fields(self, "decoding")
        if self.n_best > self.beam_size:
            raise ValueError(
                "n_best must be at most beam_size, the number of hypotheses; got "
                f"{self.n_best} and {self.beam_size}."
            )
        for name in ("temperature", "top_k", "top_p", "seed"):
            value = getattr(self, name)
            if not self.sample and value != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} is for samples; got {value} without sample=True.")

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError unless the settings fit a target vocabulary of this size."""
        if (largest := max(self.suppressed, default=0)) >= size:
            raise ValueError(f"decoding.suppressed must be ids below {size:,}; got {largest:,}.")
        if not self.sample and self.beam_size > size:
            raise ValueError(
                f"decoding.beam_size must not exceed the vocabulary of {size:,}, the number of "
                f"continuations; got {self.beam_size:,}."
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: SearchConfig = SearchConfig()

    def __post_init__(self):
        """Validate combinations of settings of several groups."""
        check_groups(self)
        self.decoding.check_vocabulary(self.model.vocab_size)
        longest = max(self.data.source_row_length, self.data.target_row_length)
        if self.model.max_positions not in (0, longest):
            raise ValueError(
                "model.max_positions must equal the longer row length, because a sentence may fill "
                "a row and later positions would never be learned; got "
                f"{self.model.max_positions} for rows of {longest}."
            )
        if self.training.r_drop and not any(getattr(self.model, name) for name in DROPOUTS):
            raise ValueError(
                "training.r_drop needs dropout, because it compares two predictions with different "
                f"dropout; got 0 for model.{', model.'.join(DROPOUTS)}. Set one of them, or leave "
                "training.r_drop at 0."
            )

    def to_json(self) -> str:
        """Return the config and the format's version as JSON."""
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str | Path = "config.json") -> "Config":
        """Return the config that `to_json` wrote; `where` names the file in errors."""
        return read_groups(cls, text, where, FORMAT_VERSION)

"""Which settings of one group exclude each other."""

from typing import Any


def check_architecture(model: Any) -> None:
    """Raise ValueError for settings of a model that cannot be combined."""
    if (model.positional_encoding == "learned") != (model.max_positions > 0):
        raise ValueError(
            "model.max_positions must be given for positional_encoding='learned', and only for "
            f"it; got {model.max_positions} with {model.positional_encoding!r}."
        )
    if model.norm == "post" and not model.final_norm:
        raise ValueError(
            "model.final_norm=False is for norm='pre', because 'post' has no norm at the end; got "
            "norm='post'. Leave it out, or choose norm='pre'."
        )
    if model.d_model % model.num_heads:
        raise ValueError(
            "model.d_model must be a multiple of model.num_heads, so that the heads share it "
            f"evenly; got d_model={model.d_model}, num_heads={model.num_heads}."
        )
    if model.d_model % 2 and model.positional_encoding in ("interleaved", "halves"):
        raise ValueError(
            "model.d_model must be even, because sines and cosines come in pairs; "
            f"got {model.d_model}."
        )
    if model.attention == "fused" and model.attention_dropout:
        raise ValueError(
            "model.attention='fused' has no weights to drop; got attention_dropout="
            f"{model.attention_dropout}. Set it to 0, or choose attention='explicit'."
        )
    if model.embeddings == "separate" and model.output_bias:
        raise ValueError("model.output_bias is for tied embeddings; 'separate' has a bias.")
    if model.embeddings == "shared" and model.source_vocab_size is not None:
        raise ValueError(
            "model.embeddings='shared' needs one vocabulary for both languages; got "
            f"source_vocab_size={model.source_vocab_size}. Leave it out, or choose "
            "embeddings='target_tied' or 'separate'."
        )


def check_training(training: Any) -> None:
    """Raise ValueError for settings of training that cannot be combined."""
    averages = not training.cooldown_steps and not training.ema_decay and training.adam_b1
    if training.optimizer == "schedule_free" and not averages:
        raise ValueError(
            "training.optimizer='schedule_free' needs cooldown_steps=0, ema_decay=0 and adam_b1"
            " above 0, because it averages at a constant rate with this weight; got "
            f"{training.cooldown_steps}, {training.ema_decay} and {training.adam_b1}."
        )
    if training.simcut and training.r_drop:
        raise ValueError(
            "training.simcut and training.r_drop each compare two predictions of a batch, and only "
            f"one of them can be above 0; got {training.simcut} and {training.r_drop}. Set one to "
            "0."
        )
    if training.best_by == "bleu" and not training.validation_sentences:
        raise ValueError(
            "training.best_by='bleu' needs translations to compare; got "
            "training.validation_sentences=0. Translate some, or choose best_by='loss'."
        )
    if training.average_checkpoints > training.keep_checkpoints:
        raise ValueError(
            "training.average_checkpoints must not exceed training.keep_checkpoints, because "
            f"only kept checkpoints can be averaged; got {training.average_checkpoints} and "
            f"{training.keep_checkpoints}."
        )


def check_symbols(symbols: tuple[str, ...]) -> None:
    """Raise ValueError for symbols that cannot be pieces of a vocabulary of their own."""
    for symbol in symbols:
        if not symbol.isprintable() or not symbol or set(symbol) & {" ", "\u2581"}:
            raise ValueError(
                "data.symbols must be printable and without spaces or ▁, such as >>deu<<; got "
                f"{symbol!r}."
            )
    if len({*symbols}) < len(symbols):
        raise ValueError(f"data.symbols must differ; got {', '.join(symbols)}.")

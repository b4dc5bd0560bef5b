"""How `generate` of Hugging Face would search with a model, as settings of this package's search.

What this search has is taken, what changes no search is left out, and anything else is an error,
unless the user says that it may be ignored.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_min.interop.run_model import nearest_alpha

LOGGER = logging.getLogger("flaxformer_min")

SPECIAL_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")

READ = {
    *("bad_words_ids", "forced_eos_token_id", "length_penalty", "min_length", "min_new_tokens"),
    *("num_beams", "suppress_tokens", *SPECIAL_IDS),
}
"""Settings that the search has, too."""

CHANGING: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "do_sample": (False,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "prefix": ("",),
    "repetition_penalty": (1,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "watermarking_config": (),
}
"""Settings that would change the search, with the values that do not."""

LIMITS = {
    "early_stopping": (False, True),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "max_length": (20,),
    "max_new_tokens": (),
    "max_time": (),
    "min_p": (),
    "num_return_sequences": (1,),
    "temperature": (1,),
    "top_h": (),
    "top_k": (50,),
    "top_p": (1,),
    "typical_p": (1,),
}
"""Settings of sampling and of limits, of which this package has its own; and their defaults."""

TECHNICAL = {
    *("_from_model_config", "assistant_confidence_threshold", "assistant_early_exit"),
    *("assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id", "cache_config"),
    *("cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
    *("generation_kwargs", "is_assistant", "low_memory", "max_cache_len"),
    *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values"),
    *("renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind"),
    *("transformers_version", "use_cache", "use_mtp"),
}
"""Settings of how `generate` computes, which change no translation."""

IGNORABLE = {"bad_words_ids", "suppress_tokens", *CHANGING, *LIMITS, *TECHNICAL}
"""Settings without which the model is the same."""

NAMES = {*READ, *CHANGING, *LIMITS, *TECHNICAL}
"""All settings of a search that are understood."""


class Search(NamedTuple):
    """Settings of this package's search.

    suppressed: imported ids that the search may not produce, special tokens among them.
    ignored:    settings that were left out because the user said so.
    """

    beam_size: int
    length_penalty: float
    min_length: int
    suppressed: frozenset[int]
    ignored: dict[str, Any]


def read_search(
    search: dict[str, Any], size: int, folder: Path, ignore: Collection[str] = ()
) -> Search:
    """Return the search that settings describe, for a target vocabulary of `size` pieces.

    Raises ValueError for a search that this package does not have.
    """
    ignored = {name: search[name] for name in ignore if name in search and name in IGNORABLE}
    search = {name: value for name, value in search.items() if name not in ignored}
    for name, harmless in CHANGING.items():
        if name in search and search[name] not in harmless:
            raise ValueError(
                f"{folder}: {name} must be left out or have its default, because this package's "
                f"search has no such setting; got {search[name]!r:.80}. To import the model "
                f"without it: --ignore {name}."
            )
    limits = [name for name in LIMITS if name in search and search[name] not in LIMITS[name]]
    if limits:
        LOGGER.warning(
            "%s: without effect here, because this package has its own limits and sampling: %s.",
            folder,
            ", ".join(f"{name}={search[name]!r:.40}" for name in limits),
        )
    shortest = max(_number(search, "min_length", 0, folder) - 1, 0)  # it counts the decoder's start
    return Search(
        beam_size=_number(search, "num_beams", 4, folder),
        length_penalty=nearest_alpha(_number(search, "length_penalty", 1.0, folder)),
        min_length=max(shortest, _number(search, "min_new_tokens", 0, folder)),
        suppressed=_suppressed(search, size, folder),
        ignored=ignored,
    )


def _number(search: dict[str, Any], name: str, default: float, folder: Path) -> Any:
    value = search.get(name, default)
    kinds = (int, float) if isinstance(default, float) else (int,)
    if type(value) not in kinds or not 0 <= value < 1000:
        raise ValueError(f"{folder}: {name} must be a number from 0 to 1000; got {value!r:.80}.")
    return value


def _suppressed(search: dict[str, Any], size: int, folder: Path) -> frozenset[int]:
    """Return the imported ids that the search may not produce."""
    eos = search["eos_token_id"]
    if search.get("forced_eos_token_id", eos) != eos:
        raise ValueError(f"{folder}: forced_eos_token_id must be eos_token_id.")
    bad, tokens = search.get("bad_words_ids", []), search.get("suppress_tokens", [])
    for name, value in (("bad_words_ids", bad), ("suppress_tokens", tokens)):
        if not isinstance(value, list):
            raise ValueError(f"{folder}: {name} must be a list; got {value!r:.80}.")
    words = [*bad, *([number] for number in tokens)]
    for each in words:
        if not isinstance(each, list) or len(each) != 1:
            raise ValueError(
                f"{folder}: bad_words_ids may hold single tokens only; got {each!r:.80}. To import "
                "the model without the list: --ignore bad_words_ids."
            )
        if type(each[0]) is not int or not 0 <= each[0] < size or each[0] == eos:
            raise ValueError(
                f"{folder}: bad_words_ids and suppress_tokens must be ids below {size:,} other "
                f"than the end's; got {each[0]!r:.80}."
            )
    return frozenset(number for (number,) in words)

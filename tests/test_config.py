"""Settings: which are refused and in which words, and the round trip through JSON."""

import ast
import dataclasses
import inspect
import itertools
import json
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from flaxformer_min.config import (
    FORMAT_VERSION,
    Config,
    DataConfig,
    ModelConfig,
    SearchConfig,
    TrainingConfig,
)
from flaxformer_min.config_fields import differences


def test_the_defaults_are_the_papers():
    """Table 3, row "base", and sections 5.3, 5.4 and 6.1."""
    config = Config()
    model, training, decoding = config.model, config.training, config.decoding
    assert (model.num_layers, model.d_model, model.d_ff, model.num_heads) == (6, 512, 2048, 8)
    assert (model.dropout, model.attention_dropout, model.feed_forward_dropout) == (0.1, 0, 0)
    assert (model.norm, model.positional_encoding) == ("post", "interleaved")
    assert model.norm_epsilon == 1e-6  # as in tensor2tensor
    assert (model.vocab_size, model.embeddings, model.dtype) == (37_000, "shared", "auto")
    assert (training.steps, training.warmup_steps) == (100_000, 4_000)
    assert (training.adam_b1, training.adam_b2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert training.label_smoothing == 0.1
    assert (decoding.beam_size, decoding.length_penalty) == (4, 0.6)
    assert decoding.max_extra_tokens == 50


def other(field):
    """A value that a setting may have and that is not its default."""
    named = {"corpus": "text:here", "languages": "en-de", "clip_norm": 1.0}
    named["attention"] = "explicit"  # for fused attention has no dropout: see `FUSED`
    named["output_bias"] = False  # for only tied logits have it: see `BIASED`
    named["optimizer"] = "muon"  # for schedule-free Adam excludes other settings
    named["simcut"] = 0.0  # for it excludes R-Drop: see `CUT`
    named["suppressed"] = (4, 7)
    named["symbols"] = (">>deu<<",)
    named["normalization"] = None  # as imported tokenizers need
    named["max_positions"] = 0  # for only learned positions have a limit: see `LEARNED`
    if field.name in named:
        return named[field.name]
    if get_origin(field.type) is Literal:
        return get_args(field.type)[-1]
    if isinstance(field.default, (bool, str)):
        return "elsewhere" if field.default == "" else not field.default
    if isinstance(field.default, float):
        return field.default / 2 or 0.25
    return 2 * (field.default or 4)


EVERYTHING_OTHERWISE = Config(
    **{
        group.name: group.type(**{f.name: other(f) for f in dataclasses.fields(group.type)})
        for group in dataclasses.fields(Config)
    }
)


FUSED = Config(model=ModelConfig(attention="fused"))
LEARNED = Config(model=ModelConfig(positional_encoding="learned", max_positions=64))
BIASED = Config(model=ModelConfig(output_bias=True))
SPECIAL = {("model", "attention"): FUSED, ("model", "max_positions"): LEARNED}
SPECIAL[("model", "output_bias")] = BIASED
CUT = Config(training=TrainingConfig(simcut=3.0))
SPECIAL[("training", "simcut")] = CUT


@pytest.mark.parametrize(
    "config",
    [Config(), EVERYTHING_OTHERWISE, FUSED, LEARNED, BIASED, CUT],
    ids=["defaults", "others", "fused", "learned", "biased", "cut"],
)
def test_a_config_survives_the_round_trip_through_json(config):
    assert Config.from_json(config.to_json()) == config
    content = json.loads(config.to_json())
    assert content.pop("format_version") == FORMAT_VERSION
    assert content == json.loads(json.dumps(dataclasses.asdict(config)))  # tuples are lists there


def test_the_other_config_differs_in_every_setting():
    for group in dataclasses.fields(Config):
        for field in dataclasses.fields(group.type):
            given = _otherwise(group.name, field.name)
            assert given != field.default, f"{group.name}.{field.name}"


def test_settings_that_a_file_does_not_name_get_their_default():
    text = '{"format_version": 1, "model": {"d_ff": 64}}'
    assert Config.from_json(text) == Config(model=ModelConfig(d_ff=64))


REFUSED = [  # and the table of test_bad_input.py
    # wrong types
    (ModelConfig, dict(num_layers=True), "model.num_layers must be a whole number; got True."),
    (ModelConfig, dict(dropout="0.1"), "model.dropout must be a number; got '0.1'."),
    (ModelConfig, dict(source_vocab_size=1.5),
     "model.source_vocab_size must be a whole number or none; got 1.5."),
    (ModelConfig, dict(norm=None), "model.norm must be one of 'post', 'pre'; got None."),
    (DataConfig, dict(corpus=3), "data.corpus must be text; got 3."),
    (DataConfig, dict(download=1), "data.download must be true or false; got 1."),
    (TrainingConfig, dict(clip_norm="1"), "training.clip_norm must be a number or none; got '1'."),
    (SearchConfig, dict(suppressed=("▁a",)),
     "decoding.suppressed must be a list, each a whole number; got ('▁a',)."),
    # out of range
    (SearchConfig, dict(length_penalty=10.5),
     "decoding.length_penalty must be at most 10; got 10.5."),
    (ModelConfig, dict(vocab_size=3), "model.vocab_size must be at least 4; got 3."),
    (ModelConfig, dict(dropout=float("nan")),
     "model.dropout must be at least 0 and less than 1; got nan."),
    (TrainingConfig, dict(steps=2**31),
     "training.steps must be less than 2147483648; got 2147483648."),
    (TrainingConfig, dict(adam_epsilon=0), "training.adam_epsilon must be more than 0; got 0."),
    (SearchConfig, dict(beam_size=0), "decoding.beam_size must be at least 1; got 0."),
    (SearchConfig, dict(suppressed=(9, 3)), "decoding.suppressed must be at least 4; got (9, 3)."),
    (SearchConfig, dict(sample=True, top_p=1.1), "decoding.top_p must be at most 1; got 1.1."),
    # one by one fine, and not together
    (SearchConfig, dict(n_best=5), "got 5 and 4"),
    (SearchConfig, dict(top_k=3), "top_k is for samples; got 3 without sample=True"),
    (ModelConfig, dict(source_vocab_size=500),
     "model.embeddings='shared' needs one vocabulary for both languages; got "
     "source_vocab_size=500. Leave it out, or choose embeddings='target_tied' or 'separate'."),
    (ModelConfig, dict(attention="fused", attention_dropout=0.2),
     "model.attention='fused' has no weights to drop; got attention_dropout=0.2. Set it to 0, "
     "or choose attention='explicit'."),
    (ModelConfig, dict(max_positions=64),
     "model.max_positions must be given for positional_encoding='learned', and only for it; got "
     "64 with 'interleaved'."),
    (Config, dict(data=DataConfig(source_row_length=40, target_row_length=44),
                  model=ModelConfig(positional_encoding="learned", max_positions=40)),
     "model.max_positions must equal the longer row length, because a sentence may fill a row "
     "and later positions would never be learned; got 40 for rows of 44."),
    (DataConfig, dict(languages="en-en"),
     "languages must be two different languages joined by a hyphen, the source first, as in "
     "en-de; got 'en-en'."),
    (TrainingConfig, dict(optimizer="schedule_free", ema_decay=0.9),
     "training.optimizer='schedule_free' needs cooldown_steps=0, ema_decay=0 and adam_b1 above "
     "0, because it averages at a constant rate with this weight; got 0, 0.9 and 0.9."),
]  # fmt: skip


@pytest.mark.parametrize(
    "group, settings, error", REFUSED, ids=[str(settings) for _, settings, _ in REFUSED]
)
def test_a_wrong_setting_is_refused_with_the_rule_and_what_was_found(group, settings, error):
    with pytest.raises(ValueError) as raised:
        group(**settings)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    "group, settings",
    [
        (ModelConfig, dict(d_model=9, num_heads=3, positional_encoding="none")),
        (ModelConfig, dict(d_model=9, num_heads=3, positional_encoding="learned", max_positions=8)),
        (ModelConfig, dict(source_vocab_size=4, embeddings="separate")),
        (DataConfig, dict(rows_per_batch=1, languages="zh_Hant-ko")),
        (Config, dict(model=ModelConfig(vocab_size=4))),
    ],
)
def test_what_the_rules_allow_is_taken(group, settings):
    config = group(**settings)
    assert all(getattr(config, name) == value for name, value in settings.items())


BROKEN_FILES = [
    ("", "run/config.json must be JSON; Expecting value"),
    ("[]", "run/config.json must have a format_version; it is not a flaxformer_min config."),
    ('{"format_version": "1"}', "run/config.json must have a format_version; it is not a "),

    ('{"format_version": 1, "modle": {}}',
     "run/config.json: there is no setting 'modle', only data, model, training, decoding."),
    ('{"format_version": 1, "decoding": {"beam": 4}}',
     "run/config.json, decoding: there is no setting 'beam', only beam_size, length_penalty, "),
    ('{"format_version": 1, "model": 3}',
     "run/config.json: model must be a group of settings; got 3."),
    ('{"format_version": 1, "model": {"d_ff": null}}',
     "run/config.json: model.d_ff must be a whole number; got None."),
]  # fmt: skip


@pytest.mark.parametrize("text, error", BROKEN_FILES)
def test_a_broken_config_file_is_refused_by_name(text, error):
    with pytest.raises(ValueError) as raised:
        Config.from_json(text, "run/config.json")
    assert str(raised.value).startswith(error)


def test_a_group_of_settings_of_another_class_is_refused():
    for groups in ({"model": {"d_model": 8}}, {"model": DataConfig()}, {"model": None}):
        with pytest.raises(ValueError, match=r"model must be a ModelConfig, as model=Mod.*; got "):
            Config(**groups)


def test_a_config_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.d_ff = 3


def test_differences_name_what_a_continued_run_must_not_change():
    new = Config(
        data=DataConfig(rows_per_batch=128, workers=4),
        model=ModelConfig(d_ff=64, dtype="bfloat16"),
        training=TrainingConfig(steps=7, seed=3),
        decoding=SearchConfig(beam_size=1),
    )
    assert differences(Config(), new) == [
        "data.rows_per_batch: 32 in the run, 128 now",
        "model.d_ff: 2048 in the run, 64 now",
        "training.seed: 0 in the run, 3 now",
    ]
    assert differences(new, new) == []


MAY_CHANGE = """
data.workers data.cache_dir data.download model.dtype model.attention
model.remat
training.steps training.log_every training.validate_every training.save_every
training.cooldown_steps training.average_checkpoints training.validation_sentences
training.keep_checkpoints training.patience training.max_skipped
decoding.beam_size decoding.length_penalty decoding.max_extra_tokens decoding.early_stopping
decoding.suppressed decoding.batch_size decoding.min_length decoding.n_best decoding.sample
decoding.temperature decoding.top_k decoding.top_p decoding.seed
"""
"""What a continued run may change; every other setting must stay what it was."""


def test_only_what_does_not_touch_data_or_learning_may_change():
    settings = {
        f"{group.name}.{field.name}"
        for group in dataclasses.fields(Config)
        for field in dataclasses.fields(group.type)
    }
    assert set(MAY_CHANGE.split()) < settings
    for setting in settings:
        found = differences(Config(), _with_other(*setting.split(".")))
        assert len(found) == (setting not in MAY_CHANGE.split()), setting
        assert all(line.startswith(f"{setting}: ") for line in found)


def _otherwise(group, name):
    """A value of a setting that is not its default."""
    config = SPECIAL.get((group, name), EVERYTHING_OTHERWISE)
    return getattr(getattr(config, group), name)


def _with_other(group, name):
    """The default config with one setting of `EVERYTHING_OTHERWISE`, unchecked."""
    changed = object.__new__(type(getattr(Config(), group)))
    changed.__dict__.update(getattr(Config(), group).__dict__)
    changed.__dict__[name] = _otherwise(group, name)
    config = object.__new__(Config)
    config.__dict__.update({**Config().__dict__, group: changed})
    return config


def test_every_setting_says_what_it_is_for():
    """`--help` shows these texts."""
    module = ast.parse(Path(inspect.getfile(Config)).read_text())
    bodies = {each.name: each.body for each in module.body if isinstance(each, ast.ClassDef)}
    for group in dataclasses.fields(Config):
        documented = {
            statement.target.id
            for statement, after in itertools.pairwise(bodies[group.type.__name__])
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr)
        }
        assert documented == {field.name for field in dataclasses.fields(group.type)}

"""Batches: every pair is delivered once an epoch, across any interruption."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flaxformer_min.data.batches import TrainingBatches, shard_batch, single_pass
from flaxformer_min.data.encoding import EncodedPairs, encode_pairs
from flaxformer_min.data.imported_tokenizer import ImportedTokenizer
from flaxformer_min.data.packing import pack
from flaxformer_min.data.tokenizer import Tokenizer, train_tokenizer
from flaxformer_min.system.files import PARTIAL
from flaxformer_min.tokens import EOS

ROWS = (16, 12)


class Letters:
    """A tokenizer of one piece a letter."""

    fingerprint, vocab_size = "letters", 256

    def encode_batch(self, texts):
        return [[ord(letter) for letter in text] + [EOS] for text in texts]


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    rng = np.random.default_rng(0)
    pairs = [
        ("".join(rng.choice(list("abcdef"), a)), "".join(rng.choice(list("uvwxyz"), b)))
        for a, b in rng.integers(1, 11, (101, 2))
    ]
    pairs += [("", "a"), ("b", "  "), ("c" * 16, "d"), ("e", "f" * 12)]
    return encode(pairs, tmp_path_factory.mktemp("cache")), pairs


def encode(pairs, cache, name="some text"):
    return encode_pairs(pairs, (Letters(), Letters()), ROWS, cache, name)


def sentences(batch, side):
    """The sentences of a batch, read off its segments, as texts."""
    ids, positions, segments = batch[side]
    found = []
    for row in range(len(ids)):
        for segment in range(1, segments[row].max() + 1):
            own = segments[row] == segment
            assert positions[row][own].tolist() == list(range(own.sum()))
            assert ids[row][own][-1] == EOS
            found.append("".join(map(chr, ids[row][own][:-1])))
    return found


def equal(one, other):
    return all(
        np.array_equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_every_usable_pair_is_delivered_exactly_once_an_epoch(encoded):
    split, pairs = encoded
    rows = TrainingBatches(split, ROWS, rows=8, seed=3)
    for epoch in range(2):
        batches = rows.epoch(epoch)
        delivered = [
            pair
            for number in range(len(batches))
            for pair in zip(*(sentences(batches[number], side) for side in (0, 1)), strict=True)
        ]
        assert sorted(delivered) == sorted(pairs[:101])


def test_empty_and_too_long_pairs_are_left_out_and_counted(encoded):
    counts = encoded[0].counts
    assert (counts.read, counts.empty, counts.too_long, counts.kept) == (105, 2, 2, 101)
    assert "105 pairs read, 2 with an empty side and 2 longer" in str(counts)


def test_a_split_without_a_usable_pair_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one usable pair.*2 pairs read"):
        encode([("", "a"), ("b" * 20, "c")], tmp_path)


class Unreadable:
    """Pairs of which only the number is known."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number


def test_encoded_pairs_are_read_back_from_the_cache(encoded, tmp_path):
    first = encode([("ab", "u"), ("c", "vw")], tmp_path)
    again = encode(Unreadable(2), tmp_path)  # the fingerprint is that of the same text
    assert np.array_equal(first.source.ids, again.source.ids)
    assert len(list((tmp_path / "encoded").iterdir())) == 1
    assert len(encode([("abc", "u")], tmp_path, "another text")) == 1


PAIRS = [("a" * (1 + i % 5), "u" * (1 + i % 7)) for i in range(60)]


@pytest.mark.parametrize("name", ["about.json", "source.bin", "target_lengths.npy", "packing"])
@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(file.read_bytes()[:-4]),
                                    lambda file: file.write_bytes(b""), os.unlink])  # fmt: skip
def test_a_damaged_file_in_the_cache_is_made_again(tmp_path, name, damage):
    fresh = encode(PAIRS, tmp_path)
    plan, ids = fresh.packing(ROWS).plan(), np.array(fresh.source.ids)
    (file,) = fresh.folder.glob(f"{name}*")
    damage(file)
    again = encode(PAIRS, tmp_path)
    assert np.array_equal(again.packing(ROWS).plan().pairs, plan.pairs)
    assert np.array_equal(again.source.ids, ids) and again.digest == fresh.digest
    assert encode(Unreadable(len(PAIRS)), tmp_path).digest == fresh.digest, "and kept"


def test_the_cache_has_the_permissions_of_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        folder = encode(PAIRS, tmp_path).folder
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o640}


def test_the_leftovers_of_a_killed_process_are_removed_after_a_day(tmp_path):
    old, new = (tmp_path / "encoded" / f".{name}{PARTIAL}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    encode(PAIRS, tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


def test_the_same_text_has_the_same_digest_in_any_folder(tmp_path):
    one, same, other = (
        encode(pairs, tmp_path / name, name)
        for name, pairs in (("here", PAIRS), ("there", PAIRS), ("other", PAIRS[1:]))
    )
    assert one.digest == same.digest != other.digest
    state = TrainingBatches(one, ROWS, 8, seed=1).get_state()
    found = [TrainingBatches(e, ROWS, 8, seed=1).is_of_other_text(state) for e in (same, other)]
    assert found == [False, True]
    assert not TrainingBatches(other, ROWS, 8, seed=1).is_of_other_text({"epoch": 1, "batch": 2})


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_overfull_and_no_pair_is_lost_in_packing(seed):
    rng = np.random.default_rng(seed)
    source, target = rng.integers(1, 17, 300), rng.integers(1, 13, 300)
    plan = pack(source, target, ROWS).plan(rng)
    assert sorted(plan.pairs) == list(range(300))
    for first, last in zip(plan.starts, plan.starts[1:], strict=False):
        assert last > first
        assert source[plan.pairs[first:last]].sum() <= ROWS[0]
        assert target[plan.pairs[first:last]].sum() <= ROWS[1]


def test_a_packing_is_computed_once_for_each_row_length_and_cached(tmp_path, monkeypatch):
    first = single_pass(encode(PAIRS, tmp_path), ROWS, 8)
    planned = TrainingBatches(encode(PAIRS, tmp_path), ROWS, 8, seed=1).epoch(1)
    other = single_pass(encode(PAIRS, tmp_path), (16, 16), 8)
    assert len(other) < len(first), "wider rows are fewer"

    def no_search(*_):
        raise AssertionError("looked for a packing again")

    monkeypatch.setattr("flaxformer_min.data.packing._pack_shapes", no_search)
    again = encode(PAIRS, tmp_path)
    for kept, fresh in (
        (single_pass(again, ROWS, 8), first),
        (single_pass(again, (16, 16), 8), other),
        (TrainingBatches(again, ROWS, 8, seed=1).epoch(1), planned),
    ):
        assert np.array_equal(kept.plan.pairs, fresh.plan.pairs)
        assert np.array_equal(kept.plan.starts, fresh.plan.starts)
    with pytest.raises(AssertionError, match="again"):
        dataclasses.replace(again, drawn=(0.5, (1, 0))).packing(ROWS)


def test_rows_hold_nearly_only_tokens():
    """Lengths like those of captions; a row fits several of them."""
    rng = np.random.default_rng(0)
    source = np.clip(rng.normal(14, 5, 3000).round(), 4, 40).astype(int)
    target = np.clip(source + rng.integers(-2, 3, 3000), 4, 40)
    rows = len(pack(source, target, (64, 64)).plan().starts) - 1
    assert 1 - (source.sum() + target.sum()) / (rows * 128) < 0.02


def test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same(encoded):
    one, same, other = (TrainingBatches(encoded[0], ROWS, 8, seed) for seed in (1, 1, 2))
    assert equal(one.epoch(0)[0], same.epoch(0)[0])
    assert not equal(one.epoch(0)[0], one.epoch(1)[0])
    assert not equal(one.epoch(0)[0], other.epoch(0)[0])


@pytest.mark.parametrize("position", [0, 1, 4, 9, 23])
def test_an_iterator_continues_exactly_at_the_position_of_another(encoded, position):
    """Also across the end of an epoch: 101 pairs make about 5 batches."""
    uncut, resumed = (TrainingBatches(encoded[0], ROWS, 8, seed=5) for _ in range(2))
    for _ in range(position):
        next(uncut)
    resumed.set_state(json.loads(json.dumps(uncut.get_state())))
    for _ in range(7):
        assert equal(next(uncut), next(resumed))
    uncut.close()
    resumed.close()


def test_processes_share_the_rows_of_each_batch(encoded):
    whole = TrainingBatches(encoded[0], ROWS, 8, seed=5).epoch(1)
    halves = [
        TrainingBatches(encoded[0], ROWS, 8, seed=5, process=i, processes=2).epoch(1)
        for i in (0, 1)
    ]
    assert len(whole) == len(halves[0]) == len(halves[1])
    for number in range(len(whole)):
        for column in range(3):
            joined = np.concatenate([half[number].source[column] for half in halves])
            assert np.array_equal(joined, whole[number].source[column])


@pytest.mark.parametrize("pairs, rows", [(1, 6), (7, 6), (40, 12)])
def test_no_process_runs_out_of_batches_before_another(pairs, rows, tmp_path):
    """Otherwise one would wait for ever in a step. A process without rows has empty ones.

    Long pairs fill a row each, so that the last batch has no rows for some processes.
    """
    long = encode([("abcdefghijk", "vwxyzvwxyz")] * pairs, tmp_path)
    for make in (single_pass, lambda *args: TrainingBatches(*args[:3], 0, 0, *args[3:]).epoch(1)):
        shares = [make(long, ROWS, rows, process, 3) for process in range(3)]
        assert {len(share) for share in shares} == {-(-pairs // rows)}
        last = [share[len(share) - 1].source for share in shares]
        assert all(tokens.ids.shape == (rows // 3, ROWS[0]) for tokens in last)
        assert sum((tokens.segments > 0).any(1).sum() for tokens in last) == (pairs - 1) % rows + 1
    assert not last[2].ids.any()


def test_a_loop_over_the_batches_of_an_epoch_ends(encoded):
    """The last is also the one of number -1, and there is none behind it."""
    batches = single_pass(encoded[0], ROWS, 2)
    assert len(batches) > 1 and sum(1 for _ in itertools.islice(batches, 1_000)) == len(batches)
    assert np.array_equal(batches[-1].source.ids, batches[len(batches) - 1].source.ids)
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_the_cache_knows_tokenizers_with_and_without_the_last_pieces_apart(tmp_path):
    """An imported model may have embeddings for fewer pieces than its tokenizer has."""
    pairs = [("a b c", "x y z")]
    train_tokenizer(["a b c x y z"] * 9, 300, tmp_path / "model")
    whole = Tokenizer.load(tmp_path / "model")
    cut = [ImportedTokenizer(whole.model, whole.vocab_size - less) for less in (0, 8)]
    found = [encode_pairs(pairs, (each,) * 2, ROWS, tmp_path, "text") for each in (whole, *cut)]
    expected = [each.encode(pairs[0][0]) for each in (whole, *cut)]
    assert [each.source.ids.tolist() for each in found] == expected
    assert expected[1] != expected[2]


def test_the_last_batch_of_a_pass_is_filled_up_with_empty_rows(encoded):
    """Padding is the share of positions without a token, also in these."""
    sides = (encoded[0].source, encoded[0].target)
    full_rows = len(pack(*(side.lengths for side in sides), ROWS).plan().starts) - 1
    batches = single_pass(encoded[0], ROWS, full_rows - 1)
    assert len(batches) == 2
    assert batches[1].source.ids.shape == (full_rows - 1, 16)
    assert (batches[1].source.segments[0] == 0).sum() < 16
    assert (batches[1].source.segments[1:] == 0).all()
    ids = [side.ids for batch in (batches[0], batches[1]) for side in batch]
    empty, positions = sum((each == 0).sum() for each in ids), sum(each.size for each in ids)
    assert batches.padding() == pytest.approx(empty / positions)


def test_the_end_of_a_sentence_is_no_piece_of_its_words(tmp_path):
    """And a text without spaces has pieces per character; here one piece is one letter."""
    encoded = encode([("ab cd", "efg"), ("", "h")], tmp_path)
    assert str(encoded.counts).endswith("pieces per word: 2.50 source, 3.00 target")
    encoded = encode([("ab cd", "今日は。"), ("한국어 x", "สวัสดี")], tmp_path, "Asian text")
    counts = encoded.counts
    assert (counts.source_characters, counts.target_characters) == (0, 10)
    assert str(counts).endswith("2.50 source; pieces per character: 1.00 target")


@pytest.mark.parametrize(
    "row_lengths, expected",
    [
        ((30, 20), (30, 44)),
        ((20, 60), (40, 60)),
        ((20, 30), (20, 30)),
        ((21, 31), (21, 32)),
        ((256, 256), (256, 384)),
        ((128, 256), (128, 256)),
    ],
)
def test_even_rows_have_the_proportion_of_the_text_and_are_never_shorter(
    tmp_path, row_lengths, expected
):
    """The text has three target tokens for two source tokens, each sentence with its EOS.

    To the nearest even number, or multiple of 128 where the rows were such.
    """
    pairs = [("a" * 9, "b" * 14), ("c" * 3, "d" * 5)]
    encoded = encode_pairs(pairs, (Letters(), Letters()), row_lengths, tmp_path, "some text")
    assert single_pass(encoded, row_lengths, 1).even_row_lengths() == expected


def test_rows_are_split_over_devices_in_order(encoded):
    """They must divide among devices and processes, or some would be in none."""
    batch = single_pass(encoded[0], ROWS, 8)[0]
    split = shard_batch(batch, devices=2, accumulation=2)
    assert split.target.ids.shape == (2, 2, 2, 12)
    assert np.array_equal(split.target.ids.reshape(8, 12), batch.target.ids)
    with pytest.raises(ValueError, match="8 rows, 3 devices, 1 batches"):
        shard_batch(batch, devices=3)
    with pytest.raises(ValueError, match="8 rows and 3 processes"):
        TrainingBatches(encoded[0], ROWS, 8, seed=0, processes=3)
    with pytest.raises(ValueError, match="3 rows and 2 processes"):
        single_pass(encoded[0], ROWS, 3, processes=2)


WORKERS = """
import os, sys, time
from pathlib import Path
from flaxformer_min.data.batches import TrainingBatches
from flaxformer_min.data.encoding import Counts, EncodedPairs
from flaxformer_min.system.signals import StopRequest
def main():
    rows = TrainingBatches(EncodedPairs.load(Path(sys.argv[1])), (16, 12), 8, seed=0, workers=1)
    with StopRequest() as stop:
        print("starts", flush=True)
        next(rows)
        print("continues", flush=True)
        while not stop():
            next(rows)
            time.sleep(0.05)
    print("status", stop.status, flush=True)
    rows.close()
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def with_workers(encoded, tmp_path):
    """A program whose rows come from a worker process, in a session of its own."""
    (tmp_path / "program.py").write_text(WORKERS)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(encoded[0].folder)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with program:
        try:
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starts", "continues"])
def test_ctrl_c_does_not_end_the_workers(with_workers, moment):
    """A terminal sends it to all processes; the run must finish its step and save."""
    while with_workers.stdout.readline().strip() != moment:
        pass
    time.sleep(0.5)  # a worker that is starting
    os.killpg(with_workers.pid, signal.SIGINT)
    out, err = with_workers.communicate(timeout=120)
    assert out.endswith("status 130\n"), err
    assert "Traceback" not in err


def test_the_workers_of_a_killed_run_end(with_workers):
    while with_workers.stdout.readline().strip() != "continues":
        pass
    with_workers.kill()
    with_workers.communicate(timeout=60)  # they have its stdout, and so it ends when they do


def test_a_worker_maps_the_files_instead_of_copying_them(encoded):
    import pickle

    message = pickle.dumps(encoded[0])
    assert len(message) < 500
    assert isinstance(pickle.loads(message), EncodedPairs)

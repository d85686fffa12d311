"""The contract of a TransferQueue. Passing it, for every backend, is what "supported" means."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from subprocess import PIPE

import numpy as np
import pytest
import torch
from fakes import put

from verl.batch import Ragged
from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.options import Shared
from verl.transfer_queue.rows import queued_samples, read_facts
from verl.transfer_queue.shared import build as build_shared
from verl.types import Facts, Medium, Refs, Sample, Segment, facts_of

SMALL = 64 << 20  # bytes of shared memory


def shared() -> TransferQueue:
    return build_shared(Shared(max_bytes=SMALL, timeout_s=20))


BACKENDS: dict[str, Callable[[], TransferQueue]] = {"memory": MemoryQueue, "shared": shared}
OTHER_PROCESS = "shared, from another process"  # of which this one is
MAKER = f"""
import pickle, sys
from verl.transfer_queue import shared
from verl.transfer_queue.options import Shared
held = []
for line in sys.stdin:
    held = [*held[-1:], shared.build(Shared(max_bytes={SMALL}, timeout_s=20))]
    print(pickle.dumps(held[-1]).hex(), flush=True)
"""


@pytest.fixture(scope="module")
def of_another_process() -> Iterator[Callable[[], TransferQueue]]:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdin=PIPE, stdout=PIPE, text=True) as maker:
        stdin, stdout = maker.stdin, maker.stdout
        assert stdin and stdout

        def make() -> TransferQueue:
            stdin.write("another\n")
            stdin.flush()
            return pickle.loads(bytes.fromhex(stdout.readline()))

        yield make
        stdin.close()


@pytest.fixture(params=[*BACKENDS, OTHER_PROCESS])
def make(request) -> Callable[[], TransferQueue]:
    if request.param == OTHER_PROCESS:
        return request.getfixturevalue("of_another_process")
    return BACKENDS[request.param]


@pytest.fixture
def queue(make) -> TransferQueue:
    return make()


def sample(name: str, tokens: int = 3) -> Sample:
    segments = (
        Segment(ids=np.array([1, 2]), source="prompt"),
        Segment(ids=np.arange(tokens), source="sampled", logprobs=np.full(tokens, -0.5, np.float32), version=4),
    )
    return Sample(sample_id=name, trajectory_id=name, group_id="g", purpose="train", segments=segments, reward=0.25)


def samples(count: int, prefix: str = "s") -> list[Sample]:
    """Return samples of 1, 2, 3, 1, 2, 3, ... trainable tokens."""
    return [sample(f"{prefix}{i}", 1 + i % 3) for i in range(count)]


def ragged(rows: Sequence[torch.Tensor]) -> Ragged:
    return Ragged(torch.cat(list(rows)), np.cumsum([0, *map(len, rows)]))


def pick(refs: Refs, *rows: int) -> Refs:
    return Refs(refs[i] for i in rows)


def test_put_gives_refs_in_order_and_samples_come_back_in_the_order_asked(queue):
    given = samples(5)
    refs = put(queue, given)
    assert refs.ids == ["s0", "s1", "s2", "s3", "s4"] and len(queue) == 5
    assert [(r.loss_tokens, r.prompt_tokens, r.version_min, r.reward) for r in refs[:2]] == [
        (1, 2, 4, 0.25),
        (2, 2, 4, 0.25),
    ]
    back = queued_samples(queue, pick(refs, 3, 0, 3))
    assert [s.sample_id for s in back] == ["s3", "s0", "s3"]
    assert np.array_equal(back[1].segments[1].ids, given[0].segments[1].ids)
    assert put(queue, []) == Refs() and queued_samples(queue, Refs()) == []


def test_columns_are_ragged_typed_and_come_in_the_order_asked(queue):
    refs = put(queue, samples(3))
    flat = [
        torch.tensor([10.0], dtype=torch.float64),
        torch.tensor([20.0, 21.0], dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
    ]
    wide = [torch.arange(n * 8, dtype=torch.int32).view(n, 2, 4) for n in (1, 2, 3)]
    queue.write(refs, {"flat": ragged(flat), "wide": ragged(wide)})
    found = queue.read(pick(refs, 1, 0), ("wide", "flat"))
    assert list(found) == ["wide", "flat"]
    assert found["flat"].values.tolist() == [20.0, 21.0, 10.0] and found["flat"].values.dtype == torch.float64
    assert found["wide"].values.shape == (3, 2, 4) and found["wide"].values.dtype == torch.int32
    assert torch.equal(found["wide"].row(0), wide[1]) and torch.equal(found["wide"].row(1), wide[0])
    assert len(found["wide"]) == 2 and found["wide"].offsets.tolist() == [0, 2, 3]


def test_a_column_written_again_is_replaced_for_these_rows_only(queue):
    refs = put(queue, [sample("a", 2), sample("b", 2)])
    queue.write(refs, {"x": ragged([torch.ones(2), torch.ones(2)])})
    queue.write(pick(refs, 1), {"x": ragged([torch.full((2,), 7.0)])})
    assert queue.read(refs, ("x",))["x"].values.tolist() == [1, 1, 7, 7]


def test_both_sides_own_what_they_hold(queue):
    refs = put(queue, [sample("a", 2)])
    written = torch.ones(2, requires_grad=True)
    values = written * 1.0
    queue.write(refs, {"x": Ragged(values, np.array([0, 2]))})
    with torch.no_grad():
        values.mul_(5)
    read = queue.read(refs, ("x",))["x"].values
    assert read.tolist() == [1, 1] and not read.requires_grad
    queue.write(refs, {"x": Ragged(torch.full((2,), 3.0), np.array([0, 2]))})
    assert read.tolist() == [1, 1] and queue.read(refs, ("x",))["x"].values.tolist() == [3, 3]
    queue.drop(refs)
    for i in range(50):  # what was freed may be used again, but not under a reader
        again = put(queue, [sample(f"b{i}", 2)])
        queue.write(again, {"x": Ragged(torch.full((2,), -1.0), np.array([0, 2]))})
        queue.drop(again)
    assert read.tolist() == [1, 1]


def test_a_doubled_id_is_refused_and_nothing_of_that_put_stays(queue):
    put(queue, [sample("a")])
    with pytest.raises(ValueError, match=r"already in the queue: \['a'\]"):
        put(queue, [sample("b"), sample("a")])
    with pytest.raises(ValueError, match=r"\['c'\]"):
        put(queue, [sample("c"), sample("d"), sample("c")])
    assert len(queue) == 1
    assert put(queue, [sample("b"), sample("c")]).ids == ["b", "c"]


def test_missing_rows_and_columns_are_named(queue):
    refs = put(queue, samples(3))
    queue.write(pick(refs, 0), {"x": ragged([torch.ones(1)])})
    with pytest.raises(ValueError, match=r"column 'x' was not written for 2 of 3 samples, e.g. s1"):
        queue.read(refs, ("x",))
    with pytest.raises(ValueError, match="'nothing'"):
        queue.read(refs, ("nothing",))
    queue.drop(pick(refs, 1))
    for call in (
        lambda: queued_samples(queue, refs),
        lambda: queue.read(refs, ("x",)),
        lambda: queue.having(refs, "x"),
        lambda: queue.drop(refs),
        lambda: queue.write(refs, {"x": ragged([torch.ones(1)] * 3)}),
    ):
        with pytest.raises(ValueError, match=r"1 samples are not in the queue .* s1"):
            call()
    assert len(queue) == 2, "a refused drop drops nothing"


def test_a_write_that_does_not_fit_is_refused_as_a_whole(queue):
    refs = put(queue, samples(3))
    good = ragged([torch.ones(n) for n in (1, 2, 3)])
    with pytest.raises(ValueError, match="'bad' has 2 rows for 3 samples"):
        queue.write(refs, {"good": good, "bad": ragged([torch.ones(1), torch.ones(2)])})
    with pytest.raises(ValueError, match="'long' has 9 values, its rows 6"):
        queue.write(refs, {"good": good, "long": Ragged(torch.ones(9), good.offsets)})
    assert not queue.having(refs, "good")


def test_everything_of_a_sample_is_a_column_and_comes_back(queue):
    """Side channels, media, spans of several versions, components, an adapter: a row is what was put, whatever it
    holds."""
    drawn = {"logprobs": np.array([-0.5, -0.25], np.float32), "version": 4}
    routed = np.arange(8, dtype=np.int16).reshape(2, 2, 2)
    plain = sample("plain")
    rich = replace(
        sample("rich"),
        segments=(
            Segment(
                ids=np.array([7, 7, 1]), source="prompt", media=(Medium("sha256:cat", 0, 1), Medium("sha256:dog", 1, 2))
            ),
            Segment(ids=np.array([3, 4]), source="sampled", side={"routed": routed}, **drawn),
            Segment(ids=np.zeros(0, np.int64), source="env"),
            Segment(ids=np.array([9]), source="env", media=(Medium("sha256:plot", 0, 1),)),
            Segment(ids=np.array([5, 6]), source="sampled", **{**drawn, "version": 5}),
        ),
        components={"acc": 1.0, "format": 0.5},
        temperature=0.75,
        task_id="täsk",
        stop_reason="length",
        adapter="lora",
    )
    first = replace(
        sample("first"), segments=(Segment(ids=np.array([5, 6]), source="sampled", **drawn),), reward=float("nan")
    )
    refs = put(queue, [plain, rich, first])
    found, (facts,) = queue.read(pick(refs, 1), ("ids", "mask", "rollout_logprobs")), read_facts(queue, pick(refs, 1))
    assert found["ids"].values.tolist() == [7, 7, 1, 3, 4, 9, 5, 6]
    assert found["mask"].values.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert len(found["rollout_logprobs"].values) == refs[1].loss_tokens == 4
    assert facts == Facts(**facts_of(rich)) and (facts.temperature, facts.reward, facts.truncated) == (0.75, 0.25, True)
    assert queue.read(pick(refs, 1), ("side/routed",))["side/routed"].values.dtype == torch.int16
    assert {"ids", "facts", "side/routed"} <= set(queue.columns(refs))
    for given, back in zip((first, plain, rich), queued_samples(queue, pick(refs, 2, 0, 1)), strict=True):
        assert replace(back, segments=(), reward=0.0) == replace(given, segments=(), reward=0.0)
        assert back.reward == given.reward or (back.reward != back.reward and given.reward != given.reward)
        assert len(back.segments) == len(given.segments)
        for a, b in zip(given.segments, back.segments):
            assert (a.source, a.version, a.media) == (b.source, b.version, b.media) and np.array_equal(a.ids, b.ids)
            assert a.side.keys() == b.side.keys() and all(np.array_equal(a.side[n], b.side[n]) for n in a.side)
            if a.logprobs is not None:
                skip = given is first  # nothing predicts a row's first token: its log-prob is in no column
                assert np.array_equal(a.logprobs[skip:], b.logprobs[skip:])


def test_has_is_of_every_row(queue):
    refs = put(queue, samples(2))
    assert not queue.having(refs, "x")
    queue.write(pick(refs, 0), {"x": ragged([torch.ones(1)])})
    assert queue.having(pick(refs, 0), "x") == pick(refs, 0) and queue.having(refs, "x") == pick(refs, 0)
    queue.write(pick(refs, 1), {"x": ragged([torch.ones(2)])})
    assert queue.having(refs, "x") == refs


def test_nothing_stays_after_drop(queue):
    refs = put(queue, samples(4))
    column = ragged([torch.ones(n) for n in (1, 2, 3, 1)])
    alive = weakref.ref(column.values)
    queue.write(refs, {"x": column})
    del column
    held = [weakref.ref(s.segments[1].ids) for s in queued_samples(queue, refs)]
    queue.drop(pick(refs, 0, 2, 0))
    assert len(queue) == 2
    queue.drop(pick(refs, 1, 3))
    gc.collect()
    assert len(queue) == 0 and alive() is None and [r() for r in held] == [None] * 4
    assert put(queue, samples(1)).ids == ["s0"], "an id is free again"
    assert not queue.having(pick(refs, 0), "x"), "and its columns are gone"


class CountedId(str):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return str.__eq__(self, other)


def test_the_work_grows_with_the_rows_not_with_their_square(queue, monkeypatch):
    monkeypatch.setattr(CountedId, "compared", 0)
    many = [replace(s, sample_id=CountedId(s.sample_id)) for s in samples(1000)]
    refs = put(queue, many)
    queue.write(refs, {"x": ragged([torch.full((s.loss_tokens,), float(i)) for i, s in enumerate(many)])})
    assert int(queue.read(Refs(reversed(refs)), ("x",))["x"].values[0]) == 999
    queue.drop(refs)
    assert len(queue) == 0
    assert CountedId.compared < 100 * len(many)


def test_threads_put_write_read_and_drop_at_the_same_time(queue):
    """Six threads, each with its own rows and all with one shared row set; every read is of what its writer wrote."""
    shared = put(queue, samples(8, "shared"))
    failures: list[BaseException] = []
    start = threading.Barrier(6)

    def work(me: int) -> None:
        try:
            start.wait(20)
            for turn in range(40):
                refs = put(queue, samples(6, f"t{me}/{turn}/"))
                queue.write(refs, {"x": ragged([torch.full((r.loss_tokens,), float(me)) for r in refs])})
                queue.write(shared, {f"col{me}": ragged([torch.full((r.loss_tokens,), float(turn)) for r in shared])})
                assert set(queue.read(refs, ("x",))["x"].values.tolist()) == {float(me)}
                assert set(queue.read(shared, (f"col{me}",))[f"col{me}"].values.tolist()) == {float(turn)}
                queue.drop(refs)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures and not any(t.is_alive() for t in threads)
    assert len(queue) == 8


def test_each_queue_is_a_partition_of_its_own(queue, make):
    """The same ids in two of them, as two runs of one cluster may have them."""
    other = make()
    refs, theirs = put(queue, samples(3)), put(other, [replace(s, reward=0.5) for s in samples(3)])
    assert refs.ids == theirs.ids
    other.write(theirs, {"x": ragged([torch.ones(n) for n in (1, 2, 3)])})
    assert not queue.having(refs, "x") and other.having(theirs, "x") == theirs
    other.drop(theirs)
    assert (len(queue), len(other)) == (3, 0) and {s.reward for s in queued_samples(queue, refs)} == {0.25}


def test_one_of_many_threads_wins_an_id(queue):
    won: list[int] = []
    start = threading.Barrier(8)

    def work(me: int) -> None:
        start.wait(20)
        try:
            put(queue, [sample(f"own{me}"), sample("same")])
            won.append(me)
        except ValueError:
            pass

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(won) == 1 and len(queue) == 2, "the losers left nothing behind"

"""The packed batch against a reference that looks at one row at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch import (
    Batch,
    Columns,
    concat,
    exactly,
    loss_index,
    make_microbatches,
    pack,
    part_of,
    segment_sum,
    select_rows,
    unshare,
)
from verl.types import Medium, Sample, Segment

VOCAB = 5  # few ids, so that equal segments and duplicated rows are common


@st.composite
def segments(draw, first: bool):
    source = draw(st.sampled_from(["prompt", "prompt", "sampled"] if first else ["sampled", "sampled", "env"]))
    ids = np.array(draw(st.lists(st.integers(0, VOCAB - 1), min_size=first, max_size=4)), np.int64)
    logprobs = None
    if source == "sampled":
        logprobs = np.array(
            draw(st.lists(st.floats(-9, 0, width=32), min_size=len(ids), max_size=len(ids))), np.float32
        )
    return Segment(ids=ids, source=source, logprobs=logprobs, version=draw(st.integers(0, 2)))


@st.composite
def forests(draw):
    """Samples of several groups: shared prompts, several turns, several samples of one trajectory, opaque ids."""
    prompts = draw(st.lists(segments(first=True), min_size=1, max_size=3))
    out: list[Sample] = []
    for i in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(prompts))
        rest = draw(st.lists(segments(first=False), max_size=4))
        trajectory = draw(st.sampled_from([f"t{i}", "t0", "01", "1"]))
        out.append(
            Sample(
                sample_id=f"{i}",
                trajectory_id=trajectory,
                group_id=draw(st.sampled_from(["01", "1", "{a}"])),
                purpose="train",
                segments=(prompt, *rest),
                temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            )
        )
    if draw(st.booleans()):
        out.append(replace(out[0], sample_id="again"))
    return out


def whole(sample: Sample) -> np.ndarray:
    return np.concatenate([s.ids for s in sample.segments])


def expected_targets(sample: Sample) -> list[tuple[int, float]]:
    """(position, behaviour log-prob) of every sampled token that something precedes."""
    out, at = [], 0
    for s in sample.segments:
        for i in range(len(s.ids)):
            if s.source == "sampled" and at > 0:
                out.append((at, float(s.logprobs[i])))
            at += 1
    return out


def seen_by(batch: Batch, token: int) -> list[int]:
    """The ids that the hidden state at `token` sees: its ancestors' and its own segment's, up to itself."""
    segment = int(np.searchsorted(batch.seg_start, token, "right")) - 1
    ids = batch.ids[batch.seg_start[segment] : token + 1].tolist()
    while batch.parent[segment] >= 0:
        segment = int(batch.parent[segment])
        ids = batch.ids[batch.seg_start[segment] : batch.seg_start[segment + 1]].tolist() + ids
    return ids


def assert_rows(batch: Batch, samples: list[Sample]) -> None:
    """Assert by the tensors alone that every row of `batch` is the sample of the same place."""
    assert batch.num_rows == len(samples)
    names: list[str] = []
    for r, sample in enumerate(samples):
        ids, expected = whole(sample), expected_targets(sample)
        span = slice(int(batch.row_start[r]), int(batch.row_start[r + 1]))
        assert span.stop - span.start == len(expected) == sample.loss_tokens
        assert batch.targets[span].tolist() == [int(ids[t]) for t, _ in expected]
        for token, (t, _) in zip(batch.target_from[span].tolist(), expected, strict=True):
            assert seen_by(batch, token) == ids[:t].tolist()
            assert int(batch.positions[token]) == t - 1
        assert batch.columns["rollout_logprobs"][span].tolist() == [lp for _, lp in expected]
        assert float(batch.row_columns["temperature"][r]) == pytest.approx(sample.temperature or 1.0)
        end = int(batch.seg_start[batch.leaf[r] + 1]) - 1
        assert seen_by(batch, end) == ids.tolist(), "the leaf's last token sees the whole row"
        if sample.trajectory_id not in names:
            names.append(sample.trajectory_id)
        same = [i for i in range(r) if samples[i].trajectory_id == sample.trajectory_id]
        assert all(batch.sequence[i] == batch.sequence[r] for i in same)
    assert batch.num_sequences == len(names)
    assert len(np.unique(batch.sequence)) == len(names)


@settings(max_examples=50, deadline=None)
@given(forests(), st.booleans())
def test_pack_against_one_row_at_a_time(samples, share_prefix):
    batch = pack(samples, share_prefix=share_prefix)
    assert_rows(batch, samples)
    assert batch.num_tokens == len(batch.ids) <= sum(len(whole(s)) for s in samples)
    assert (batch.parent < np.arange(len(batch.parent))).all(), "parents come before their children"
    assert batch.row_of.tolist() == [r for r, s in enumerate(samples) for _ in range(s.loss_tokens)]
    if not share_prefix:
        assert batch.num_tokens == sum(len(whole(s)) for s in samples)
    assert_rows(unshare(batch), samples)
    assert (unshare(batch).parent == -1).all() and len(unshare(batch).parent) == len(samples)


@settings(max_examples=30, deadline=None)
@given(forests(), st.randoms(use_true_random=False))
def test_selected_rows_are_those_rows_and_no_other_token(samples, random):
    batch = pack(samples)
    batch = batch.with_columns({"mark": torch.arange(batch.num_loss_tokens)}).with_row_columns(
        {"row": torch.arange(len(samples))}
    )
    order = list(range(len(samples)))
    random.shuffle(order)
    rows = np.array(order[: random.randint(1, len(order))])
    part = select_rows(batch, rows)
    assert_rows(part, [samples[r] for r in rows])
    assert part.row_columns["row"].tolist() == rows.tolist()
    assert part.columns["mark"].tolist() == loss_index(batch, rows).tolist()
    needed = set()
    for leaf in batch.leaf[rows]:
        while leaf >= 0:
            needed.add(int(leaf))
            leaf = batch.parent[leaf]
    assert part.num_tokens == sum(int(np.diff(batch.seg_start)[s]) for s in needed)


@settings(max_examples=30, deadline=None)
@given(forests(), st.integers(1, 40))
def test_micro_batches_keep_the_budget_and_whole_trajectories(samples, budget):
    batch = pack(samples)
    parts = make_microbatches(batch, budget)
    assert sorted(int(r) for rows in parts for r in rows) == list(range(len(samples)))
    where = {}
    for i, rows in enumerate(parts):
        part = select_rows(batch, rows)
        assert part.num_tokens <= budget or part.num_sequences == 1, "only one long trajectory may exceed the budget"
        for r in rows:
            assert where.setdefault(samples[r].trajectory_id, i) == i, "a trajectory is never split"
    index = torch.cat([loss_index(batch, rows) for rows in parts])
    assert sorted(index.tolist()) == list(range(batch.num_loss_tokens))


def test_rows_under_one_prompt_go_together_wherever_they_stand():
    """Prompt tokens are counted, and computed, once a group and micro-batch."""
    heads = [prompt(*range(10 * g, 10 * g + 8)) for g in range(3)]
    batch = pack([sample(f"{g}/{i}", heads[g], sampled([i, i])) for i in range(4) for g in range(3)])
    parts = make_microbatches(batch, 16)
    assert [select_rows(batch, rows).num_tokens for rows in parts] == [16, 16, 16]
    assert [rows.tolist() for rows in parts] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def sampled(ids, logprobs=None):
    return Segment(
        ids=np.array(ids), source="sampled", logprobs=np.array(logprobs or [-1.0] * len(ids), np.float32), version=0
    )


def sample(name, *segments, **fields):
    return Sample(
        sample_id=name,
        trajectory_id=fields.pop("trajectory", name),
        group_id="g",
        purpose="train",
        segments=segments,
        **fields,
    )


def prompt(*ids):
    return Segment(ids=np.array(ids, np.int64), source="prompt")


def test_a_shared_prompt_predicts_the_first_token_of_every_response():
    batch = pack([sample("a", prompt(7, 8), sampled([1, 2])), sample("b", prompt(7, 8), sampled([3]))])
    assert batch.ids.tolist() == [7, 8, 1, 2, 3] and batch.positions.tolist() == [0, 1, 2, 3, 2]
    assert batch.targets.tolist() == [1, 2, 3] and batch.target_from.tolist() == [1, 2, 1]


def test_the_last_position_of_a_sequence_never_predicts_the_next_one():
    """Q11: labels rolled over the flat stream would score the first token of b from the last of a."""
    batch = pack([sample("a", prompt(1), sampled([2])), sample("b", sampled([3, 4]))], share_prefix=False)
    assert batch.targets.tolist() == [2, 4] and batch.target_from.tolist() == [0, 2]


def test_ids_of_another_integer_type_are_the_same_ids():
    narrow = Segment(ids=np.array([1, 0], np.int32), source="prompt")  # the bytes of one int64 1
    batch = pack(
        [
            sample("a", narrow, sampled([2])),
            sample("b", prompt(1), sampled([2])),
            sample("c", prompt(1, 0), sampled([2])),
        ]
    )
    assert [seen_by(batch, int(t)) for t in batch.target_from] == [[1, 0], [1], [1, 0]]
    assert batch.num_tokens == 2 + 1 + 1 + 1


def test_spans_of_several_versions_are_one_run():
    turns = (prompt(1), sampled([2]), sampled([3, 4]), Segment(ids=np.array([9]), source="env"), sampled([5]))
    batch = pack([sample("a", *turns)])
    assert (
        len(batch.parent) == 4 and batch.targets.tolist() == [2, 3, 4, 5] and batch.target_from.tolist() == [0, 1, 2, 4]
    )


def test_equal_ids_with_other_media_or_another_adapter_are_not_one_prompt():
    """Two images are the same placeholder ids: what is shared by ids alone would answer one about the other."""

    def seen(name: str) -> Segment:
        return Segment(ids=np.array([7, 7, 1]), source="prompt", media=(Medium(name, 0, 2),))

    given = (("a", "cat", 2), ("same", "cat", 3), ("b", "dog", 2))
    a, same, b = (sample(name, seen(media), sampled([answer])) for name, media, answer in given)
    batch = pack([a, same, b])
    assert batch.num_tokens == 2 * 3 + 3 and named(batch) == [*CAT, *"...", *DOG, *".."]
    assert named(select_rows(batch, np.array([2]))) == [*DOG, *".."]
    assert named(unshare(batch)) == [*CAT, *"..", *CAT, *"..", *DOG, *".."]
    text = sample("c", prompt(1), sampled([2]))
    joined = concat([pack([b]), pack([text]), batch])
    assert named(joined) == [*DOG, *"....", *named(batch)] and joined.media.references == ("dog", "cat")
    assert pack([a, replace(same, adapter="lora")]).num_tokens == 8 and pack([a, same]).num_tokens == 5
    assert pack([text]).media is select_rows(joined, np.array([1])).media is None


CAT, DOG = ([(name, 0), (name, 1)] for name in ("cat", "dog"))


def named(batch: Batch) -> list[object]:
    """Return for each token (reference, feature) of its medium, or "." for text."""
    media = batch.media
    assert media is not None
    return [(media.references[m], f) if m >= 0 else "." for m, f in zip(media.medium.tolist(), media.feature.tolist())]


def test_rows_of_a_trajectory_are_cut_where_their_media_begin_to_differ():
    """Two images of unlike sizes have equal placeholder ids up to the end of the shorter one."""

    def row(name: str, later: Medium, tokens: int) -> Sample:
        first = Segment(ids=np.array([1, 7, 7, 2]), source="prompt", media=(Medium("cat", 1, 2),))
        seen = Segment(ids=np.array([3, *[7] * tokens, 4]), source="env", media=(later,))
        return replace(sample(name, first, sampled([5]), seen, sampled([6])), trajectory_id="t")

    batch = pack([row("a", Medium("dog", 1, 2), 2), row("b", Medium("fox", 1, 3), 3)])
    fox = [("fox", k) for k in range(3)]
    assert named(batch) == [".", *CAT, *"...", *DOG, *"..", *fox, *".."]
    assert named(unshare(batch)) == [".", *CAT, *"...", *DOG, *"..", ".", *CAT, *"...", *fox, *".."]


@pytest.mark.parametrize("at", [(0, 0), (-1, 1), (1, 3)], ids=str)
def test_media_are_whole_and_never_sampled(at: tuple[int, int]):
    with pytest.raises(ValueError, match="media are in order, apart, and whole within the 3 tokens"):
        Segment(ids=np.arange(3), source="prompt", media=(Medium("cat", *at),))
    with pytest.raises(ValueError, match="in order"):
        Segment(ids=np.arange(3), source="env", media=(Medium("cat", 0, 2), Medium("dog", 1, 1)))
    with pytest.raises(ValueError, match="a sampled segment has media: what is trained is text"):
        replace(sampled([2]), media=(Medium("cat", 0, 1),))


def test_versions_of_spans_and_side_channels_are_columns_of_the_loss_tokens():
    def drawn(ids: list[int], version: int) -> Segment:
        routed = np.arange(len(ids) * 2).reshape(-1, 2) + 100 * version
        lp = np.zeros(len(ids), np.float32)
        return Segment(ids=np.array(ids), source="sampled", logprobs=lp, version=version, side={"routed": routed})

    batch = pack([sample("b", drawn([9, 5], 1)), sample("a", prompt(1), drawn([2, 3], 4), drawn([4], 5))])
    assert batch.columns["versions"].tolist() == [1, 4, 4, 5]
    assert batch.columns["side/routed"].tolist() == [[102, 103], [400, 401], [402, 403], [500, 501]]
    part = select_rows(batch, np.array([1]))
    assert part.columns["versions"].tolist() == [4, 4, 5] and len(part.columns["side/routed"]) == 3
    with pytest.raises(ValueError, match="'routed' is missing in 1 of 2 sampled segments"):
        pack([sample("a", prompt(1), drawn([2], 4)), sample("b", prompt(1), sampled([2]))])


def test_stored_answers_stand_beside_drawn_ones_with_side_channels():
    drawn = replace(sampled([5, 6]), side={"turn": np.array([1, 2]), "state": np.ones((2, 3), np.float32)})
    batch = pack([sample("a", prompt(1), drawn), sample("b", prompt(1), Segment(ids=np.array([7]), source="stored"))])
    assert batch.columns["side/turn"].tolist() == [1, 2, 0]
    assert batch.columns["side/state"].sum(-1).tolist() == [3, 3, 0]
    with pytest.raises(ValueError, match="side channel 'state' is missing in 1 of 2 sampled"):
        pack([sample("a", prompt(1), drawn), sample("b", prompt(1), sampled([7]))])


def test_a_row_without_tokens_is_refused_and_one_without_targets_is_not():
    with pytest.raises(ValueError, match="sample empty has no tokens"):
        pack([sample("empty", prompt())])
    batch = pack([sample("single", sampled([3])), sample("b", prompt(1), sampled([2]))])
    assert batch.row_start.tolist() == [0, 0, 1]
    assert select_rows(batch, np.array([0])).num_loss_tokens == 0


def test_columns_are_length_checked():
    batch = pack([sample("a", prompt(1), sampled([2, 3]))])
    with pytest.raises(AssertionError, match="3 values, 2 loss tokens"):
        batch.with_columns({"x": torch.zeros(3)})
    with pytest.raises(AssertionError, match="2 values for 1 rows"):
        batch.with_row_columns({"x": torch.zeros(2)})


def columns(x, sequence_of, mask, n):
    return Columns(
        token={"x": x}, sequence={}, sequence_of=torch.tensor(sequence_of), num_sequences=n, mask=torch.tensor(mask)
    )


def test_reductions_select_and_do_not_multiply():
    x = torch.tensor([1.0, float("nan"), 3.0, float("inf"), 5.0], dtype=torch.float64, requires_grad=True)
    c = columns(x, [0, 0, 2, 2, 0], [True, False, True, False, True], 4)
    assert (
        c.sum(x).tolist() == [6, 0, 3, 0] and c.mean(x).tolist() == [3, 0, 3, 0] and c.counts().tolist() == [2, 0, 1, 0]
    )
    c.cleaned()["x"].square().sum().backward()
    assert x.grad.tolist() == [2, 0, 6, 0, 10]
    wide = Columns(
        token={"h": torch.full((5, 2), float("nan")), "id": torch.arange(5)},
        sequence={},
        sequence_of=c.sequence_of,
        num_sequences=4,
        mask=c.mask,
    )
    assert not wide.cleaned()["h"][1].any() and wide.cleaned()["id"].tolist() == [0, 1, 2, 3, 4]


def test_segment_reductions():
    x, of = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([1, 1, 3])
    assert segment_sum(x, of, 4).tolist() == [[0, 0], [4, 6], [0, 0], [5, 6]]


def test_a_pass_over_no_row_has_no_weight_of_any_kind():
    """An idle rank computes one row; the weights and masks of every term are 0 there."""
    prompt = Segment(ids=np.arange(2), source="prompt")
    answer = Segment(ids=np.arange(3), source="sampled", logprobs=np.full(3, -1.0, np.float32), version=0)
    rows = [
        Sample(sample_id=n, trajectory_id=n, group_id="g", purpose="train", segments=(prompt, answer)) for n in "ab"
    ]
    ones, mask = torch.ones(6), torch.ones(6, dtype=torch.bool)
    batch = pack(rows).with_columns({"w/pg_loss": ones, "m/pg_loss": mask, "advantages": ones})
    idle = part_of(batch.with_row_columns({"w/loss": torch.ones(2)}), np.zeros(0, np.int64))
    assert idle.num_rows == 1 and idle.columns["advantages"].tolist() == [1.0] * 3
    assert not any(idle.columns[n].any() for n in ("w/pg_loss", "m/pg_loss")) and not idle.row_columns["w/loss"].any()


def test_parts_are_made_as_many_as_all_ranks_have():
    """Empty ones are added; of too many, the two neighbours with the fewest rows are joined."""
    parts = [np.array(p) for p in ([0, 1, 2], [3], [4, 5], [6, 7, 8])]
    assert [p.tolist() for p in exactly(parts, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [p.tolist() for p in exactly(parts, 1)] == [list(range(9))]
    assert [p.tolist() for p in exactly(parts, 6)][4:] == [[], []] and len(exactly(parts, 6)) == 6
    assert [p.tolist() for p in exactly(parts, 0)] == [p.tolist() for p in parts] and len(parts) == 4


def test_what_two_later_answers_share_counts_once_in_a_micro_batch():
    """2 prompt tokens and 3 of the first answer, then 4 + 1 of the second; the third continues its first 4 with 1."""

    def sampled(first, n):
        ids = np.arange(first, first + n)
        return Segment(ids=ids, source="sampled", logprobs=np.zeros(n, np.float32), version=0)

    tool = Segment(ids=np.array([9]), source="env")
    answers = [(sampled(20, 3),), (sampled(30, 4), tool, sampled(40, 1)), (sampled(30, 4), tool, sampled(50, 1))]
    rows = [
        Sample(
            sample_id=str(i),
            trajectory_id=str(i),
            group_id="g",
            purpose="train",
            segments=(Segment(ids=np.arange(2), source="prompt"), *segments),
        )
        for i, segments in enumerate(answers)
    ]
    batch = pack(rows)
    assert batch.num_tokens == 2 + 3 + 6 + 1
    assert [p.tolist() for p in make_microbatches(batch, 12)] == [[0, 1, 2]]
    assert [p.tolist() for p in make_microbatches(batch, 11)] == [[0, 1], [2]]

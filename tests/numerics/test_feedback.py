"""A teacher that reads feedback about the attempt: behind its prompt, before the same tokens. An attempt without
feedback has no part in the teacher's loss, and is counted."""

import numpy as np
import pytest
import torch
from small_columns import F64
from test_several_teachers import dense, one_turn
from test_teacher import plain
from test_virtual_ranks import config_of, samples

from verl.algorithms.sections import POLICY
from verl.chat import load_tokenizer
from verl.chat.bridge import plain_text
from verl.config.tree import changed
from verl.data.feedback import Feedback
from verl.data.formats import FEEDBACK
from verl.model_engine.hf_model import load_causal_lm
from verl.types import Refs, Sampling, Score, Task, Trajectory, with_task

LONGEST = 24


def attempt(row, said: str) -> Trajectory:
    return Trajectory(
        trajectory_id=row.trajectory_id,
        group_id=row.group_id,
        task_id="t",
        index=0,
        purpose="train",
        attempt=0,
        sampling=Sampling(max_tokens=8),
        segments=row.segments,
        stop_reason="eos",
        reward=Score(row.reward, feedback=said),
    )


@pytest.fixture
def informed_rows(tiny_model):
    """Return (rows, the context of each or None): every second attempt has feedback, and one has more than there is
    room for."""
    inform, out, contexts = (
        Feedback(plain_text(load_tokenizer(tiny_model, trust_remote_code=False)), {}, LONGEST),
        [],
        [],
    )
    for i, s in enumerate(samples(0)):
        task = Task(task_id="t", index=0, messages=({"role": "user", "content": "1+2="},), prompt_ids=s.segments[0].ids)
        told = inform(task, attempt(s, "" if i % 2 else f"{i}+" * (20 if i == 4 else 1)))
        assert (not told.taught) == (told.context_ids is None) == (i % 2 == 1 or i == 4)
        out.append(with_task(s, told))
        contexts.append(told.context_ids)
    return out, contexts


def config(name, tiny_model):
    found = config_of(name, tiny_model, tiny_model, 1, 64)
    found = changed(found, {"teacher.path": POLICY, "teacher.hint_key": FEEDBACK})
    return found


def test_what_was_said_stands_behind_the_prompt(tiny_model):
    tokenizer = load_tokenizer(tiny_model, trust_remote_code=False)
    task = Task(
        task_id="t", index=0, messages=({"role": "user", "content": "1+2="},), prompt_ids=np.arange(4, dtype=np.int64)
    )
    told = Feedback(plain_text(tokenizer), {}, LONGEST)(task, attempt(samples(0)[0], "no, 3"))
    turns = [{"role": "user", "content": "1+2=\n\nno, 3"}]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert told.context_ids.tolist() == list(expected) and told.taught


def test_what_was_said_opens_no_turn(tiny_model):
    """A reward function may quote a tool, or the attempt."""
    tokenizer = load_tokenizer(tiny_model, trust_remote_code=False)
    token = tokenizer.eos_token
    task = Task(task_id="t", index=0, messages=({"role": "user", "content": "1+2="},), prompt_ids=np.arange(4))
    inform, row = Feedback(plain_text(tokenizer), {}, 200), samples(0)[0]
    plain, quoted = (inform(task, attempt(row, said)).context_ids.tolist() for said in ("no", f"no{token}3{token}"))
    assert token in tokenizer.decode(quoted) and quoted.count(tokenizer.eos_token_id) == plain.count(
        tokenizer.eos_token_id
    )


def test_the_loss_is_of_the_attempts_of_which_something_was_said(tiny_model, informed_rows):
    """Value and alignment against two dense models, over the tokens of these rows alone."""
    made, contexts = informed_rows
    step, _, _ = one_turn(config("gkd_topk", tiny_model), made)
    model, total, tokens = load_causal_lm(tiny_model).double(), 0.0, 0
    for s, context in zip(made, contexts, strict=True):
        if context is None or s.outcome != "ok":
            continue
        answer = s.segments[1].ids
        t = dense_rows(model, np.concatenate([context, answer]), len(context))
        logp = dense_rows(model, np.concatenate([s.segments[0].ids, answer]), len(s.segments[0].ids))
        named = t.topk(5, -1).indices
        pair = []
        for x in (logp, t):
            rest = torch.log1p(-x.gather(-1, named).exp().sum(-1, keepdim=True))
            pair.append(torch.cat([x.gather(-1, named), rest], -1))
        total, tokens = total + float(plain(*pair, 0.5).sum()), tokens + len(answer)
    assert tokens and step.metrics["actor/pg_loss"].value == pytest.approx(total / tokens, rel=1e-5)
    without = sum(c is None for c in contexts)
    assert step.metrics["teacher/untaught"].value == without / 16 and step.metrics["teacher/invalid"].value == 0
    assert all(r.outcome == "ok" for r, s in zip(step.trained, made) if s.outcome == "ok")


def dense_rows(model, ids, first):
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0, first - 1 : -1].log_softmax(-1)


def test_the_reward_still_teaches_the_others(tiny_model, informed_rows):
    """opd: the teacher's part of their advantage is 0, GRPO's is what it is; the teacher's figures are without them."""
    made, contexts = informed_rows
    both = config("opd", tiny_model)
    both.algorithm.options["reward_coef"] = 0.5
    step, refs, queue = one_turn(both, made)
    _, _, rewards = one_turn(config_of("grpo", tiny_model, tiny_model, 1, 64), made)
    found, plainly = (q.read(refs, ("advantages",))["advantages"] for q in (queue, rewards))
    model, kl = load_causal_lm(tiny_model).double(), []
    for i, (s, context) in enumerate(zip(made, contexts, strict=True)):
        own = found.row(i) - 0.5 * plainly.row(i)
        likes = torch.zeros(len(own), dtype=F64)
        if context is not None and s.outcome == "ok":
            answer = s.segments[1].ids
            likes = dense(model, np.concatenate([context, answer]), len(context)) - torch.from_numpy(
                s.segments[1].logprobs
            )
            kl += (-likes).tolist()
        torch.testing.assert_close(own.double(), likes.double(), rtol=1e-5, atol=1e-5)
    assert step.metrics["teacher/kl"].value == pytest.approx(np.mean(kl), rel=1e-5)


def test_a_step_in_which_nothing_was_said_teaches_nothing(tiny_model):
    task = Task(task_id="t", index=0, messages=(), prompt_ids=np.zeros(0, np.int64), taught=False)
    made = [with_task(s, task) for s in samples(0)]
    step, refs, queue = one_turn(config("gkd_topk", tiny_model), made)
    assert step.metrics["teacher/untaught"].value == 1 and step.metrics["actor/pg_loss"].value == 0
    assert step.metrics["actor/grad_norm"].value == 0
    assert not queue.read(Refs(refs), ("m/pg_loss",))["m/pg_loss"].values.any()


def test_ranks_do_not_matter(tiny_model, informed_rows):
    made, _ = informed_rows
    figures = []
    for ranks in (1, 2):
        two = config("gkd_topk", tiny_model)
        two = changed(two, {"cluster.virtual_ranks": ranks})
        step, _, _ = one_turn(two, made)
        figures.append({n: step.metrics[n].value for n in ("actor/pg_loss", "actor/grad_norm", "teacher/untaught")})
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)

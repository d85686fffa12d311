"""The outputs of an engine with head=lm, computed from the hidden states and the language-model head."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from verl.accel.transfer import to_device
from verl.batch import Batch, loss_index
from verl.config.adapter import WEIGHTS, read_adapter
from verl.errors import Refused
from verl.model_engine.adapter import Adapter
from verl.model_engine.base import TeacherHead
from verl.nn.linear_logprob import Banned, Vocabulary, linear_logprob
from verl.nn.linear_teacher import FIGURES, HeadWeights, divergence, top_k

LM_OUTPUTS = (
    *("logprobs", "entropy", "sum_pi_squared"),
    *("hidden", "topk_ids", "topk_logprobs"),  # outputs of a teacher
    *("logprobs_at", "divergence", *FIGURES),  # outputs of a student, which reads `teacher_ids` and `teacher_hidden`
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_TIED = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")


@dataclass(frozen=True, slots=True)
class Teacher:
    """The head of a teacher that a student's engine has; the fields are as in `TeacherHead`."""

    head: HeadWeights
    beta: float
    temperature: float | None

    def moved_to(self, device: torch.device, dtype: torch.dtype, *, rounds: bool) -> Teacher:
        """Return the head on the student's device and in its precision; rounds: to bfloat16 first, as the student's own
        weights are."""
        weight, bias = self.head.weight, self.head.bias
        weight = (weight.to(torch.bfloat16) if rounds else weight).to(device, dtype)
        return replace(self, head=HeadWeights(weight, None if bias is None else bias.to(device), self.head.cap))


def read_teacher(wanted: TeacherHead) -> Teacher:
    """Read only the head of a folder, in float32. Raise ValueError if the folder has none."""
    names: dict[str, Path] = {}
    for path in sorted(wanted.folder.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            names |= dict.fromkeys(f.keys(), path)
    found = [n for n in names if _HEAD.search(n)] or [n for n in names if _TIED.search(n)]
    if not found:
        raise Refused(f"teacher.path={wanted.folder}: no lm_head.weight, nor embeddings it could be tied to")
    name = found[0]

    def read(name: str) -> Tensor:
        with safe_open(names[name], "pt") as f:
            return f.get_tensor(name).float()

    other = name.removesuffix("weight") + "bias"
    bias = read(other) if other in names else None
    if bias is not None and not bool(torch.isfinite(bias).all()):
        raise Refused(f"teacher.path={wanted.folder}: {other} is not finite: some ids can never be drawn from it")
    config, head = json.loads((wanted.folder / "config.json").read_text()), read(name)
    if wanted.adapter is not None:
        Adapter(wanted.adapter / WEIGHTS, read_adapter(wanted.adapter, wanted.folder)).add({name: head})
    cap = (config.get("text_config") or config).get("final_logit_softcapping")
    return Teacher(HeadWeights(head, bias, float(cap or 0.0)), wanted.beta, wanted.temperature)


def allocate_outputs(batch: Batch, names: Sequence[str], width: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Allocate these outputs of a batch on the host. width: of hidden states · k: the number of ids that a teacher
    returns; a student reads them from the column `teacher_ids`."""
    tokens = batch.num_loss_tokens
    shapes = {"scores": (batch.num_rows,), "hidden": (tokens, width)}
    shapes |= {"topk_ids": (tokens, k), "topk_logprobs": (tokens, k + 1)}
    if "teacher_ids" in batch.columns:
        shapes["logprobs_at"] = (tokens, batch.columns["teacher_ids"].shape[1] + 1)
    kinds = {"topk_ids": torch.int64}
    return {name: torch.empty(shapes.get(name, (tokens,)), dtype=kinds.get(name, dtype)) for name in names}


def store_outputs(room: Mapping[str, Tensor], found: Mapping[str, Tensor], batch: Batch, rows: np.ndarray) -> None:
    """Copy the outputs `found` of these rows into `room`, the outputs of the whole batch, at their positions."""
    index = loss_index(batch, rows)
    for name, value in found.items():
        room[name][torch.from_numpy(rows) if name == "scores" else index] = value.detach().to("cpu", room[name].dtype)


def lm_outputs(
    hidden: Tensor,
    head: HeadWeights,
    batch: Batch,
    which: Tensor | slice,
    wanted: Sequence[str],
    *,
    vocabulary: Vocabulary | None = None,
    teacher: Teacher | None = None,
    k: int = 0,
    banned: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Return the wanted outputs [n, ...] of the hidden rows [n, H], which predict the loss tokens `which` of the batch.

    vocabulary: given if the head is one rank's slice · teacher: the head that `divergence` compares with · k: the
    number of `topk_ids` · banned: the ids that have probability 0 in rows that were sampled without them."""
    device = hidden.device
    closed = _banned(batch, which, banned, device)
    temperature = to_device(batch.row_columns["temperature"][batch.row_of][which], device)
    targets = to_device(batch.targets[which], device)
    out: dict[str, Tensor] = {}
    apart = {"logprobs"} if "topk_ids" in wanted else set[str]()  # computed by the pass that finds the likeliest
    if {"logprobs", "entropy", "sum_pi_squared", "logprobs_at"} & {*wanted} - apart:
        logprobs, entropy, sum_pi2, at = linear_logprob(
            hidden,
            head.weight,
            targets,
            temperature,
            bias=head.bias,
            cap=head.cap,
            entropy="entropy" in wanted,
            sum_pi_squared="sum_pi_squared" in wanted,
            vocabulary=vocabulary,
            ids=to_device(batch.columns["teacher_ids"][which], device) if "logprobs_at" in wanted else None,
            banned=closed,
        )
        found = {"logprobs": logprobs, "entropy": entropy, "sum_pi_squared": sum_pi2, "logprobs_at": at}
        out = {name: value for name, value in found.items() if name in wanted and value is not None}
    if "hidden" in wanted:
        out["hidden"] = hidden
    if "topk_ids" in wanted:
        drawn = targets if "logprobs" in wanted else None
        ids, named, own = top_k(hidden, head, temperature, k, drawn, closed, vocabulary)
        out |= {"topk_ids": ids, "topk_logprobs": named} | ({} if own is None else {"logprobs": own})
    if "divergence" in wanted:
        assert teacher is not None, "an engine that is built with a teacher's head"
        assert vocabulary is None, "the configuration refuses slices of a head here"
        states = to_device(batch.columns["teacher_hidden"][which], device, hidden.dtype)
        theirs = temperature if teacher.temperature is None else torch.full_like(temperature, teacher.temperature)
        given = hidden, head, temperature, states, teacher.head, theirs, teacher.beta, targets, closed
        out["divergence"], figures = divergence(*given)
        out |= {name: figure for name, figure in zip(FIGURES, figures.unbind(-1), strict=True) if name in wanted}
    return out


def _banned(batch: Batch, which: Tensor | slice, ids: Sequence[int], device: torch.device) -> Banned | None:
    """Return the banned ids of these loss tokens; None if they are banned for none. Raise ValueError for a token that
    is banned itself, and for rows that were sampled without ids that this engine does not know."""
    if not bool(batch.row_columns["banned"].any()):
        return None
    if not ids:
        raise ValueError("rows were sampled with banned ids, and this engine was built without them (`banned`)")
    rows, closed = batch.row_columns["banned"][batch.row_of][which], torch.tensor(ids)
    if bool((torch.isin(batch.targets[which], closed) & rows).any()):
        drawn = batch.targets[which][torch.isin(batch.targets[which], closed) & rows]
        raise ValueError(f"token {int(drawn[0])} was sampled in a row that bans the ids {tuple(ids)}")
    return Banned(to_device(closed, device), to_device(rows, device))

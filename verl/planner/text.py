"""The plan of a run as text."""

from __future__ import annotations

from collections.abc import Sequence

from verl.bounds import counted, size_text
from verl.config.lora_layers import TrainedFactors
from verl.config.model_files import ModelFacts
from verl.config.schema import Config
from verl.planner.card import CardFacts, card_lines, check_card
from verl.planner.clock import Pace
from verl.planner.cluster import ClusterPlan
from verl.planner.memory import MemoryEstimate, error_text
from verl.planner.plan import Plan
from verl.planner.sizes import RolloutSizes, RunLength, StepSizes
from verl.planner.transport import SentWeights

SERVED = {
    True: "rollout engines get the base once, then the factors of each version, unmerged",
    False: "rollout engines get all weights in each version, with the factors added in float32 and rounded once",
}


def render_plan(plan: Plan) -> str:
    """Return the plan as aligned plain text."""
    step, one, kept = plan.step, plan.checkpoint_bytes, plan.checkpoints_kept
    tokens = f"at most {step.max_tokens:,} per step, {step.longest_row_tokens:,} per row, "
    every = size_text(kept * one)
    parts = " + ".join(f"{name} {size_text(size)}" for name, size in plan.checkpoint_parts.items())
    lines = {
        "model": _model_line(plan.model),
        **({} if plan.factors is None else _factors_lines(plan.factors, plan)),
        **({"base": _base_text(plan.on_base, plan.base_format)} if plan.on_base else {}),
        **({"optimizer": plan.optimizer} if plan.optimizer != "adamw" else {}),
        "step": _step_line(step),
        "tokens": f"{tokens}{step.max_tokens_per_microbatch:,} per micro-batch",
        "run": _run_line(plan.length),
        "rollout": _rollout_line(plan.rollout),
        "disk": f"checkpoint {size_text(one)} ({parts}), at most {kept} at once: {every} in {plan.run_dir}",
        "saved": plan.checkpoints_made,
    }
    if plan.teacher_share is not None:
        prefix = f"its pass over a step takes {plan.teacher_share:.2g} of the FLOPs of the policy's update"
        lines["teacher"] = prefix if plan.teacher_share else "computed elsewhere"
    if plan.predicted is not None:
        lines["predicted"] = plan.predicted.text()
    if plan.calls:
        lines["agent"] = f"calls of tools are written as {plan.calls}"
    lines |= _cluster_lines(plan.cluster) if plan.cluster else {}
    text = [f"{name:<9} {prefix}" for name, prefix in lines.items()]
    if plan.cluster is None:
        text += ["", *_memory_lines(plan.memory)]
    for name, pool in (plan.cluster.pools if plan.cluster else {}).items():
        text += ["", *_memory_lines(pool.memory, f"a rank of {name} (estimate)")]
    text += ["", *(f"warning: {w}" for w in plan.warnings)] if plan.warnings else []
    return "\n".join(text) + "\n"


def pace_line(config: Config, pace: Pace) -> str:
    """Return the predicted pace of a run as a line, with the share of the time in which the rollout waits."""
    alone_s, p = pace.rollout_s + pace.update_s, config.pipeline
    gained = f"{alone_s / pace.step_s:.2f} times as many as one after the other ({3600 / alone_s:,.1f})"
    if pace.step_s > 0.995 * alone_s:
        gained = "nothing overlaps"
    return (
        f"pace      rollout {pace.rollout_s:g} s, update {pace.update_s:g} s, pipeline.staleness={p.staleness:g}: "
        f"{3600 / pace.step_s:,.1f} steps per hour, {gained}; rollout is idle {pace.rollout_idle_share:.0%} of the time"
    )


def card_line(config: Config, plan: Plan, card: CardFacts) -> str:
    """Return a line that compares the peak with a card."""
    check_card(config, plan.memory, card)
    warned = [f"\nwarning: {line}" for line in card_lines(plan.memory, card)]
    share = plan.memory.peak_bytes / card.total_bytes
    return f"card      {card.name}: the peak ({plan.memory.peak_phase}) takes {share:.0%} of it{''.join(warned)}"


PADDED = "; trained on padded rows, prompts once per answer, since its layers of cross-attention are not packed"


def _model_line(m: ModelFacts) -> str:
    heads = f"{m.heads} heads" + (f" ({m.kv_heads} kv)" if m.kv_heads != m.heads else "")
    tied = ", tied embeddings" if m.tied else ""
    encoder = f" ({m.encoder_parameters:,} encode images)" if m.encoder_parameters else ""
    return (
        f"{m.architecture}: {m.layers} layers, hidden {m.hidden}, {heads}, vocabulary {m.vocab:,}; "
        f"{m.parameters:,} parameters{encoder}{tied}; stored {size_text(m.stored_bytes)} {m.stored_dtype}"
        f"{PADDED if m.crossed else ''}"
    )


def _factors_lines(f: TrainedFactors, plan: Plan) -> dict[str, str]:
    """Return the lines on the factors that LoRA trains, and on the way in which rollout engines get them."""
    share = f.parameters / plan.model.parameters
    size = f"{f.parameters:,} parameters ({share:.2%}): LoRA of rank {f.rank} in {counted(len(f.layers), 'layer')}"
    if whole := f.whole():
        modules = ", ".join(dict.fromkeys(map(_module_of, f.saved)))
        size += f"; and {whole:,} ({whole / plan.model.parameters:.2%}) of {modules}, whole"
    served = SERVED[plan.served_factors]
    return {
        "trained": size,
        "served": f"{served}, and the weights that are trained whole" if plan.served_factors and whole else served,
    }


def _module_of(weight: str) -> str:
    """Return the last name of a weight's module; of one in a list, which has a number, with the list's."""
    *above, name = weight.split(".")[:-1]
    return f"{above[-1]}.{name}" if name.isdigit() and above else name


def _base_text(roles: Sequence[str], kind: str) -> str:
    """Return the roles on one frozen base of this format, with what each of them adds to it."""
    adds = {"ref": "the factors of the start", "critic": "its own factors and head"}
    each = [f"{role} ({adds.get(role, 'the factors of its adapter')})" for role in roles]
    return (
        f"one, frozen{'' if kind == 'none' else f' in {kind}'}, of {', '.join(['actor (the trained factors)', *each])}"
    )


def _step_line(s: StepSizes) -> str:
    updates = f"{counted(s.updates, 'update')} of {s.rows_per_update}"
    updates += f" x {s.epochs} epochs" if s.epochs > 1 else ""
    size = f"{counted(s.prompts, 'prompt')} x {s.samples_per_prompt} = {counted(s.rows, 'trajectory')}"
    return f"{size} -> {updates} -> about {counted(s.microbatches, 'micro-batch')}"


def _run_line(n: RunLength) -> str:
    if n.steps is None:
        return "length unknown before the data is read (remote or compressed files)"
    rows = "unknown rows" if n.rows is None else counted(n.rows, "row")
    epochs = "" if n.epochs is None else f" = {counted(n.epochs, 'epoch')}"
    warm = f", the first {n.warmup_steps:,} warming up" if n.warmup_steps else ""
    held = "" if n.eval_rows is None else f"; evaluation on {counted(n.eval_rows, 'row')}"
    updates = counted(n.optimizer_steps or 0, "optimizer step")
    return f"{rows}, {counted(n.steps, 'step')}{epochs} -> {updates}{warm}{held}"


def _rollout_line(r: RolloutSizes) -> str:
    slots = counted(r.slots, "slot") + (f" + {r.surplus} surplus" if r.surplus else "")
    cache = (
        f" + prefix cache {size_text(r.prefix_cache_tokens * r.kv_bytes_per_token)}" if r.prefix_cache_tokens else ""
    )
    states = f" + states {size_text(r.state_bytes_per_row)} a row" if r.state_bytes_per_row else ""
    return (
        f"{r.engine}, {slots} = {r.trajectories_in_flight:,} trajectories in flight, {r.concurrent_sequences} at a time"
        f"; KV {r.kv_tokens:,} tokens x {r.kv_bytes_per_token:,} B = "
        f"{size_text(r.kv_tokens * r.kv_bytes_per_token)}{cache}{states}"
    )


def _cluster_lines(p: ClusterPlan) -> dict[str, str]:
    """Return the lines on the placement of roles in pools."""
    where = f"at {p.address}" if p.address else "started for this run on this machine"
    lines = {"cluster": f"{p.backend}, {where}; rows through queue {p.queue}, weights through sync {p.sync}"}
    lines |= {"staged": text} if (text := _shared_text(p.sent)) else {}
    lines |= {"workers": p.workers} if p.workers else {}
    lines["layout"] = p.layout
    for name, pool in p.pools.items():
        each = ", ".join(f"{amount:g} {what}" for what, amount in pool.each.items())
        held = [*pool.roles, *([counted(pool.replicas, "rollout replica")] if pool.replicas else [])]
        size = f"{counted(pool.nodes, 'node')} x {counted(pool.ranks_per_node, 'rank')}"
        lines[f"pool {name}"] = f"{size}, each {each}: {', '.join(held)}"
    return lines


def _shared_text(sent: SentWeights) -> str:
    """Return the sizes of the shared memory for weights that are being sent, and where it is; "" without any."""
    both = sent.trainer_bytes == sent.replica_bytes
    parts = {
        "of each rank of the actor": sent.rank_bytes,
        "of each host": sent.trainer_bytes * both,
        "of the trainer's host": sent.trainer_bytes * (not both),
        "of each host with replicas": sent.replica_bytes * (not both),
    }
    found = [f"{size_text(size)} {where}" for where, size in parts.items() if size]
    return f"weights take shared memory: {', '.join(found)}" if found else ""


def _memory_lines(memory: MemoryEstimate, title: str = "memory (estimate)") -> list[str]:
    """Return a table: items down, phases across, their sums below; the peak is marked."""
    width = max(len(name) for name in (*memory.items, title)) + 2
    phases = memory.phases.values()
    rows = [title.ljust(width) + "".join(f"{name:>14}" for name in memory.phases)]
    for item, size in memory.items.items():
        rows.append(item.ljust(width) + "".join(f"{size_text(size) if item in parts else '-':>14}" for parts in phases))
    rows.append("sum".ljust(width) + "".join(f"{size_text(size):>14}" for size in memory.peaks.values()))
    low, high = map(size_text, memory.peak_bytes_range)
    peak = f"peak {size_text(memory.peak_bytes)} in {memory.peak_phase}"
    return [*rows, peak, f"range {low} to {high}: {error_text()}"]

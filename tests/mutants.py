"""Does the suite notice a wrong line? Each mutant is one; the tests that should fail are run with it in place.

    make test-mutants                        every mutant, two at a time
    python tests/mutants.py --only estimators  those of files with this in their name

A mutant is killed when a test fails. The checkout is not touched: mutants are planted in copies. At least 97% must be
killed; those that may live are named with the reason.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600
MUST_DIE = 0.97


class Mutant(NamedTuple):
    """`old` is once in verl/`file` and is replaced by `new`. lives: the reason why no test can fail, if there is
    one."""

    file: str
    old: str
    new: str
    tests: str
    lives: str = ""


FORMS = "tests/numerics/test_closed_forms.py tests/numerics/test_settings.py tests/numerics/test_laws.py tests/numerics/test_golden.py"
CORR = "tests/numerics/test_corrections.py tests/numerics/test_closed_forms.py tests/numerics/test_golden.py"
SPLIT = "tests/numerics/test_split.py tests/numerics/test_virtual_ranks.py"
ENGINE = "tests/numerics/test_engine.py tests/numerics/test_engine_core.py tests/numerics/test_split.py"
OPTIM = "tests/unit/test_optim.py tests/numerics/test_engine.py"
RULES = "tests/numerics/test_optimizers.py"
COMPILED = "tests/numerics/test_compiled.py"
STEP = "tests/unit/test_compute.py tests/unit/test_step.py tests/numerics/test_settings.py"
E2E = "tests/e2e/test_presets.py::"
KL, WAITS = (
    E2E + "test_the_adaptive_kl_coefficient_is_what_the_next_step_pays",
    E2E + "test_the_policy_waits_for_the_critic",
)
SCHEDULE, GREEDY = (
    E2E + "test_the_schedule_is_as_long_as_the_updates_of_the_run",
    E2E + "test_remax_subtracts_the_greedy_answers_score",
)
PREF = "tests/numerics/test_kto.py tests/numerics/test_closed_forms.py tests/numerics/test_preference_engine.py tests/numerics/test_golden.py"
LEARNED = f"{PREF} tests/e2e/test_preference.py"
SCHED = "tests/unit/test_scheduler.py tests/unit/test_scheduler_simulation.py"
AGENT = "tests/unit/test_tool_agent.py"
FLOW = "tests/unit/test_rollouts.py tests/unit/test_rollouts_flow.py"
RUN = "tests/e2e/test_controllers.py tests/e2e/test_train.py tests/e2e/test_resume.py"
PACK = "tests/unit/test_batch.py tests/numerics/test_split.py"
QUANT = "tests/numerics/test_quant.py tests/numerics/test_quant_linear.py"
QUANT_PARTS = "tests/unit/test_quantised_parts.py"
LOSSES, CLIENT = "tests/unit/test_router_losses.py", "tests/unit/test_rollout_client.py"
PLACES = "tests/unit/test_config_cluster.py"
LOOK_AHEAD = "tests/unit/test_look_ahead.py"
PROMPTS = "tests/numerics/test_packed_prompts.py"
CARD_MISMATCH = "tests/numerics/test_card_mismatch.py"
HEAD_KERNELS, HEAD_NAMED = "tests/numerics/test_head_kernels.py", "tests/numerics/test_head_named.py"
MIXED, SKINNY = "tests/numerics/test_mixed_steps.py", "tests/numerics/test_skinny_products.py"
NOTES = "tests/numerics/test_kernel_notes.py"
CAPTURED, IDLE = "tests/numerics/test_captured_steps.py", "tests/numerics/test_idle_steps.py"
CUDA, CUDA_ENGINE = "tests/numerics/test_cuda_kernels.py", "tests/numerics/test_cuda_decode.py"
EXACT_ROWS, HEAD_DTYPE = "tests/numerics/test_exact_rows.py", "tests/numerics/test_head_dtype.py"
COPY, COPIES = "tests/numerics/test_compute_copy.py", "tests/distributed/test_compute_copies.py"
CHECKPOINTED = "tests/numerics/test_checkpointing.py"
RECOMPUTE = "tests/numerics/test_recompute.py"
DISPATCH = "tests/unit/test_dispatch.py tests/unit/test_workers.py tests/contracts/test_worker_group_contract.py"

MASKS = "tests/numerics/test_term_masks.py"
TERMS = "tests/numerics/test_preference_terms.py"
MOVED = "tests/unit/test_moved.py tests/e2e/test_older_runs.py"
IDENTITY = "tests/unit/test_identity.py tests/e2e/test_run_identity.py"
CANARY = "tests/contracts/test_canary.py"
NOISE = "tests/numerics/test_native_noise.py"
NOISE_RUN = "tests/e2e/test_lora.py::test_answers_under_noise_are_recorded_and_corrected_and_evaluated_without_it"
SETS, NATIVE_SETS = "tests/contracts/test_weight_sync_contract.py", "tests/numerics/test_native_sets.py"
LORA, LORA_KEYS = "tests/unit/test_lora_config.py", "tests/unit/test_compat_lora.py"
LORA_TRAINING, LORA_EXPORT = "tests/numerics/test_lora_training.py", "tests/e2e/test_lora_export.py"
LORA_WHOLE, SAVED = "tests/numerics/test_lora_whole.py", "tests/unit/test_saved_modules.py"
QUANTISED = "tests/numerics/test_quantised_training.py"
WHOLE_FACTORS = "tests/contracts/test_policy_whole.py"
LORA_RUNS, FACTORS = "tests/e2e/test_lora.py", "tests/contracts/test_policy_factors.py"
CODES, HEAD = "tests/unit/test_native_codes.py", "tests/numerics/test_linear_logprob.py"
MEDIA, VISION = "tests/unit/test_media.py", "tests/numerics/test_vision.py"
SEEN, VISION_LORA = "tests/numerics/test_vision_rollout.py", "tests/numerics/test_vision_lora.py"
BLOCKS, SERVED_BLOCKS = "tests/unit/test_fp8.py", "tests/contracts/test_fp8_served.py"
VLLM_LINES = "tests/unit/test_rollout_vllm.py"
AWAY = "tests/numerics/test_offload_pinned.py"
TABLE = "tests/numerics/test_accel_table.py"
CRC, PANELS = "tests/unit/test_crc.py", "tests/numerics/test_rollout_numerics.py"
WIRE, SLICES = "tests/unit/test_wire_format.py", "tests/distributed/test_parts_sync.py"
STAGING, SENDING = "tests/distributed/test_publish_faults.py", "tests/distributed/test_publish_memory.py"
TEACHER = "tests/numerics/test_teacher.py"
AHEAD = "tests/unit/test_ahead.py"
SEVERAL = "tests/numerics/test_several_teachers.py"
SERVED = "tests/numerics/test_teacher_served.py"
DISTILLED = "tests/e2e/test_distillation.py::test_coefficients_follow_their_schedule_through_a_resume"
ALL_GONE = "tests/e2e/test_teachers.py::test_a_teacher_that_verl_serves"
ADAPTER = "tests/numerics/test_adapter.py"
ADAPTED = "tests/e2e/test_distillation.py::test_two_adapters_of_one_base_teach_beside_each_other"
OPENED = "tests/unit/test_teacher_config.py"
STORED = "tests/numerics/test_stored_answers.py"
FEEDBACK = "tests/numerics/test_feedback.py"
REPLAY = "tests/numerics/test_router_replay.py"
OBSERVATION = "tests/numerics/test_observation.py"
RANKS = "tests/distributed/test_gate.py tests/distributed/test_state.py"
SIBLINGS = "tests/distributed/test_siblings.py"
STAGES = "tests/distributed/test_pipeline.py " + RANKS

A, W = "algorithms/", "workers/"
MUTANTS = (
    # -- estimators
    Mutant(A + "estimators.py", 'at, "amax")\n    has', 'at, "amin")\n    has', FORMS),
    Mutant(A + "estimators.py", "rewards = rewards - torch.where", "rewards = rewards + torch.where", FORMS),
    Mutant(A + "estimators.py", "var = inside.var(correction=1)", "var = inside.var(correction=0)", FORMS),
    Mutant(A + "estimators.py", "(inside - mean) *", "inside *", FORMS),
    Mutant(A + "estimators.py", "self.varied = self.usable & (self.size > 1)", "self.varied = (self.size > 1)", FORMS),
    Mutant(
        A + "estimators.py",
        "return centred / ((square / others).sqrt()",
        "return centred / ((square / g.size).sqrt()",
        FORMS,
    ),
    Mutant(A + "estimators.py", "inside.std(correction=1) + eps", "inside.std(correction=0) + eps", FORMS),
    Mutant(A + "estimators.py", "g.size / (g.size - 1).clamp(min=1) * g.centred", "g.centred", FORMS),
    Mutant(A + "estimators.py", "out[t] += factor * out[t + 1]", "out[t] += out[t + 1]", FORMS),
    Mutant(A + "estimators.py", "found = raw_gae(columns, gamma, lam,", "found = raw_gae(columns, 1.0, lam,", FORMS),
    Mutant(A + "estimators.py", "factor = float(g.usable.sum())", "factor = float(g.varied.sum())", FORMS),
    Mutant(
        A + "estimators.py",
        "length = torch.where(g.usable, columns.counts(), 0.0)",
        "length = torch.where(g.usable, columns.counts() * 0 + 1, 0.0)",
        FORMS,
    ),
    Mutant(A + "estimators.py", 'returns - baseline, 0.0), "returns"', 'returns, 0.0), "returns"', FORMS),
    Mutant(A + "estimators.py", "total += weight * _normalized", "total += _normalized", FORMS),
    Mutant(A + "estimators.py", "cost = 1 - 2 * grid.pad", "cost = 1 + 2 * grid.pad", FORMS),
    Mutant(A + "estimators.py", "torch.where(there, cost, 0.0).cumsum(1)", "torch.where(there, cost, 0.0)", FORMS),
    Mutant(A + "estimators.py", "a = torch.where(is_best & g.varied &", "a = torch.where(g.varied &", FORMS),
    # -- losses
    Mutant(A + "losses.py", "r.clamp(1 - clip_low, 1 + clip_high)", "r.clamp(1 - clip_high, 1 + clip_low)", FORMS),
    Mutant(
        A + "losses.py",
        "return torch.maximum(plain, clipped), clipped > plain",
        "return torch.minimum(plain, clipped), clipped > plain",
        FORMS,
    ),
    Mutant(A + "losses.py", "bound = -clip_dual * a", "bound = clip_dual * a", FORMS),
    Mutant(
        A + "losses.py",
        "loss = torch.where(a < 0, torch.minimum(loss, bound), loss)",
        "loss = torch.minimum(loss, bound)",
        FORMS,
    ),
    Mutant(A + "losses.py", "r = r.clamp(max=ratio_max)\n", "pass\n", FORMS),
    Mutant(
        A + "losses.py",
        "_clipped_value(a, d, columns.mean(d).exp()",
        "_clipped_value(a, d, columns.sum(d).exp()",
        FORMS,
    ),
    Mutant(
        A + "losses.py",
        "capped = r.detach().clamp(ratio_min, ratio_max)",
        "capped = r.clamp(ratio_min, ratio_max)",
        FORMS,
    ),
    Mutant(
        A + "losses.py",
        "tau = torch.where(a > 0, tau_positive, tau_negative)",
        "tau = torch.where(a > 0, tau_negative, tau_positive)",
        FORMS,
    ),
    Mutant(A + "losses.py", "sign * d.clamp(-clip_low, clip_high)", "sign * d.clamp(-clip_high, clip_low)", FORMS),
    Mutant(A + "losses.py", "a > 0, (kl <= clip_high)", "a > 0, (kl <= clip_low)", FORMS),
    Mutant(A + "losses.py", "0.5 * dro_beta * d * d", "dro_beta * d * d", FORMS),
    Mutant(A + "losses.py", "dropped = ((a < 0) & (gap > delta))", "dropped = ((a > 0) & (gap > delta))", FORMS),
    Mutant(A + "losses.py", "value = y.exp() - y - 1", "value = y.exp() - 1", FORMS),
    Mutant(A + "losses.py", "else 0.5 * x * x\n", "else x * x\n", FORMS),
    Mutant(A + "losses.py", "gradient - gradient.detach() + value.detach()", "value", FORMS),
    Mutant(A + "losses.py", "value = value * log_ratio(", "value = value.detach() * log_ratio(", FORMS),
    Mutant(A + "losses.py", "return coef * (1 + error *", "return coef * (1 - error *", FORMS),
    Mutant(A + "losses.py", "error = min(0.2, max(-0.2,", "error = min(9.0, max(-9.0,", FORMS),
    Mutant(A + "losses.py", 'TermValue(-columns["entropy"])', 'TermValue(columns["entropy"])', FORMS),
    Mutant(
        A + "losses.py",
        "torch.minimum(v, old + clip), old - clip)",
        "torch.minimum(v, old + 2 * clip), old - 2 * clip)",
        FORMS,
    ),
    # -- the one division
    Mutant(
        A + "weights.py",
        "return mask / (copies * n).sum().clamp(min=1)",
        "return mask / (copies * n).sum().clamp(min=1) * 2",
        FORMS,
    ),
    Mutant(A + "weights.py", "return mask / (sequences * n.clamp(min=1)", "return mask / (n.clamp(min=1)", FORMS),
    Mutant(A + "weights.py", "return mask / (sequences * horizon_tokens)", "return mask / horizon_tokens", FORMS),
    Mutant(
        A + "weights.py", "counted = columns.mask if denominator_mask is None", "counted = columns.mask if True", FORMS
    ),
    Mutant(A + "weights.py", 'columns.mask & columns["keep"].bool()', "columns.mask", f"{FORMS} {STEP}"),
    Mutant(A + "weights.py", 'if term.corrected != "no" and "is_weights" in columns:', "if False:", f"{FORMS} {STEP}"),
    Mutant(A + "weights.py", "over = None if term.over is None", "over = None if True", FORMS),
    # -- corrections
    Mutant(A + "corrections.py", "q = train - rollout\n", "q = rollout - train\n", CORR),
    Mutant(A + "corrections.py", "ratio.clamp(max=spec.high)", "ratio.clamp(max=1.0)", CORR),
    Mutant(
        A + "corrections.py",
        'if level == "sequence" else columns.mean(q)',
        'if level != "sequence" else columns.mean(q)',
        CORR,
    ),
    Mutant(A + "corrections.py", "keep = keep & passed", "keep = keep | passed", CORR),
    Mutant(A + "corrections.py", "weights / mean.clamp(", "weights * mean.clamp(", CORR),
    Mutant(A + "corrections.py", "(1 / rule.high if rule.low is None", "(rule.high if rule.low is None", CORR),
    # -- what an algorithm is made of
    Mutant(A + "resolve.py", 'own["corrected"] = "no"', 'own["corrected"] = "yes"', f"{CORR} {STEP}"),
    Mutant(A + "resolve.py", "clip=preset.critic.value_clip", "clip=0.5", f"{STEP} tests/unit/test_new_algorithm.py"),
    Mutant(
        A + "resolve.py",
        'coef=kl.coef, inputs=("ref_logprobs",)',
        'coef=1.0, inputs=("ref_logprobs",)',
        f"{FORMS} {STEP} tests/unit/test_new_algorithm.py",
    ),
    Mutant(
        A + "resolve.py",
        '"two_pass": spec.two_pass, ',
        '"two_pass": False, ',
        f"{SPLIT} tests/unit/test_new_algorithm.py",
    ),
    Mutant(A + "losses.py", '"vespo", "reinforce")', '"vespo", "reinforce", "dro")', SPLIT),
    Mutant(
        "model_engine/objective.py",
        "return shared[roots] if shared.any() else",
        "return shared[roots] if True else",
        SPLIT,
    ),
    Mutant(
        "model_engine/objective.py",
        "sequences[batch.sequence_of[weighed].numpy()] = True",
        "sequences[0] = True",
        SPLIT,
    ),
    Mutant(A + "filters.py", "high - low <= 1e-6 * max(1.0, abs(high), abs(low))", "high == low", FORMS),
    Mutant(A + "filters.py", "key=lambda i: (-scores[i], i))", "key=lambda i: (scores[i], i))", FORMS),
    # -- preference and reward models
    Mutant(
        A + "preference.py",
        "-(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)",
        "-(1 - label_smoothing) * F.logsigmoid(-x) - label_smoothing * F.logsigmoid(x)",
        LEARNED,
    ),
    Mutant(
        A + "preference.py",
        "return torch.relu(1 - beta * _difference(p, average))",
        "return torch.relu(1 + beta * _difference(p, average))",
        LEARNED,
    ),
    Mutant(A + "preference.py", "_difference(p, average) - 1 / (2 * beta)", "_difference(p, average) - 1 / beta", PREF),
    Mutant(
        A + "preference.py",
        "1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)",
        "1 - torch.sigmoid(beta * rejected) + torch.sigmoid(beta * chosen)",
        LEARNED,
    ),
    Mutant(
        A + "preference.py",
        "own, other = (torch.nonzero(present & of)[:, 0] for of in (~alone, alone))",
        "other, own = (torch.nonzero(present & of)[:, 0] for of in (~alone, alone))",
        LEARNED,
    ),
    Mutant(
        A + "preference.py",
        "z0 = kl_log_ratio.detach().mean().clamp(min=0)",
        "z0 = 0 * kl_log_ratio.detach().mean().clamp(min=0)",
        LEARNED,
    ),
    Mutant(A + "preference.py", "chosen - rejected - margin\n", "chosen - rejected + margin\n", LEARNED),
    Mutant(
        A + "preference.py",
        "return torch.where(desirable, up, down)",
        "return torch.where(desirable, down, up)",
        LEARNED,
    ),
    Mutant(
        "driver/stages.py",
        "return [(CHOSEN, pair.chosen), (REJECTED, pair.rejected)]",
        "return [(REJECTED, pair.chosen), (CHOSEN, pair.rejected)]",
        LEARNED,
    ),
    Mutant("driver/stages.py", "other = self.table[(i + 1) % len(self.table)]", "other = pair", LEARNED),
    Mutant(
        "driver/stages.py",
        "pair.chosen.ids[:a], other.chosen.ids[b:]",
        "other.chosen.ids[:b], pair.chosen.ids[a:]",
        LEARNED,
    ),
    # -- what a GPU computes without a choice of rows
    Mutant("accel/costs.py", "read + out * x.element_size()", "read", "tests/numerics/test_accel_table.py"),
    Mutant("nn/linear_logprob.py", "h.masked_fill(~needed[:, None], 0)", "h", "tests/numerics/test_no_waits.py"),
    Mutant("model_engine/pending.py", "torch.where(mask, values, 0)", "values", "tests/numerics/test_no_waits.py"),
    # -- the engine
    Mutant("model_engine/objective.py", "total = total + loss", "total = loss", ENGINE),
    Mutant(
        "model_engine/objective.py",
        "value = term.fn(columns.cleaned())",
        "value = term.fn(columns)",
        f"{ENGINE} {FORMS}",
    ),
    Mutant(
        "model_engine/objective.py",
        "weight[start : start + batch.num_loss_tokens]",
        "weight[: batch.num_loss_tokens]",
        SPLIT,
    ),
    Mutant(
        "model_engine/lm_head.py",
        'batch.row_columns["temperature"][batch.row_of]',
        '(batch.row_columns["temperature"][batch.row_of] * 0 + 1)',
        ENGINE,
    ),
    Mutant(
        "model_engine/updates.py",
        "clip_grads_with_norm_(params, self.spec.clip_grad_norm, norm)",
        "clip_grads_with_norm_(params, 1.0, norm)",
        OPTIM,
    ),
    Mutant("model_engine/updates.py", "self.optimizer.zero_grad(set_to_none=True)\n        return", "return", OPTIM),
    Mutant("model_engine/updates.py", 'group["lr"] = lr', 'group["lr"] = self.spec.lr', OPTIM),
    Mutant("model_engine/offload.py", "flat.storage_offset() + t.storage_offset()", "t.storage_offset()", AWAY),
    Mutant("model_engine/offload.py", "self._place.before_use()", "pass", AWAY),
    Mutant("model_engine/host_places.py", "        self._copies.wait()\n", "", AWAY),
    Mutant("model_engine/torch_engine.py", 'self.offload.soon("optimizer")', "pass", AWAY),
    Mutant("model_engine/updates.py", "self.steps += 1", "pass", f"{OPTIM} tests/e2e/test_resume.py"),
    Mutant("nn/compiled.py", "torch.cat([-second, first]", "torch.cat([second, first]", COMPILED),
    Mutant("nn/compiled.py", "if self.graphs >= len(self._parts) + RECOMPILES", "if False", COMPILED),
    Mutant("model_engine/update_rules.py", "code += shares >= tables", "code += shares > tables", RULES),
    Mutant("model_engine/optimizers.py", '"betas": spec.betas, "eps": spec.eps', '"eps": spec.eps', OPTIM),
    Mutant("model_engine/optimizers.py", "spec.weight_decay if decayed else 0.0", "spec.weight_decay", OPTIM),
    Mutant(
        "model_engine/optim.py",
        "return spec.lr * (step + 1) / (spec.warmup_steps + 1)",
        "return spec.lr * step / (spec.warmup_steps + 1)",
        OPTIM,
    ),
    # -- teachers
    Mutant("model_engine/served.py", "self._kept_bytes -= _bytes(self._kept.popitem", "(self._kept.popitem", SERVED),
    Mutant("model_engine/served.py", "self._unproved & self._kept.keys() if found", "() if found", SERVED),
    Mutant("model_engine/served.py", "if era != self._era:", "if False:", SERVED),
    Mutant("model_engine/updates.py", " and version > self.copied", "", SEVERAL),
    Mutant("model_engine/served.py", "self._kept.move_to_end(key)", "pass", SERVED),
    Mutant("model_engine/served.py", 'f"Bearer {self._options.key}"', '"Bearer "', SERVED),
    Mutant("algorithms/weights.py", "mask=seen.mask & taught", "mask=seen.mask", FEEDBACK),
    Mutant("algorithms/estimators.py", "taught * (theirs", "(theirs", FEEDBACK),
    Mutant("workers/role.py", "if s.context is None and s.taught]", "if s.context is None]", FEEDBACK),
    Mutant("data/feedback.py", "if len(ids) > self.longest else", "if False else", FEEDBACK),
    Mutant("driver/trajectories.py", "math.floor(draw * share + start)", "math.floor(draw * share)", STORED),
    Mutant("driver/step.py", "replace(r, copies=n) if r.stored else r", "r", STORED),
    Mutant("driver/step.py", "drawn: Refs = rows.sampled()", "drawn: Refs = rows", STORED),
    Mutant("driver/step.py", "if rewarded := refs.rewarded():", "if rewarded := refs:", STORED),
    Mutant("transfer_queue/rows.py", 'if code == _CODE["sampled"]:', "if True:", STORED),
    Mutant("workers/compute.py", "(r.stored or r.reward == r.reward)", "r.reward == r.reward", STORED),
    Mutant("workers/role.py", "drawn + logs[:, None]", "drawn", SEVERAL),
    Mutant("workers/role.py", "known.setdefault(r.trajectory_id,", "known.setdefault(r.sample_id,", SEVERAL),
    Mutant("workers/ahead.py", "self._running is None and not self._step_waits", "not self._step_waits", AHEAD),
    Mutant("workers/ahead.py", "self._result(running[1])", "pass", AHEAD),
    Mutant("workers/ahead.py", "running.done() or not all_known", "running.done() and not all_known", AHEAD),
    Mutant("workers/ahead.py", "set() if broken else self._complete |", "self._complete |", AHEAD),
    Mutant("nn/quant.py", "pairs[:, 0] << 4 | pairs[:, 1]", "pairs[:, 1] << 4 | pairs[:, 0]", QUANT),
    Mutant("nn/quant.py", "scales - offset)", "scales)", QUANT),
    Mutant("nn/quant.py", "parts, some[full:] / last", "parts, some[full:] * last", QUANT),
    Mutant("accel/cpu/nf4.py", "out.stride(0), pairs, add", "out.stride(0), pairs, False", QUANT),
    Mutant("nn/quant_linear.py", "moved.dtype != tensor.dtype", "False", QUANT),
    Mutant("nn/quant_linear.py", "not in {*skip, *ROUTERS}", "not in {*skip}", QUANT),
    Mutant("model_engine/hf_parts.py", "if name in self.quantised:", "if False:", QUANT_PARTS),
    Mutant("model_engine/quantised_parts.py", "if found.quantised:", "if False:", QUANT_PARTS),
    Mutant("model_engine/quantised_parts.py", "replace(codes, dtype=torch.float32)", "codes", QUANT_PARTS),
    Mutant("config/compat/peft.py", "_PEFT_ALPHA = 8, 8", "_PEFT_ALPHA = 8, 32", "tests/unit/test_peft_config.py"),
    Mutant("nn/quant.py", "half = some.half()", "half = some.float()", QUANT),
    Mutant("nn/linear_teacher.py", "-x.sum(-1, keepdim=True)", "x.sum(-1, keepdim=True)", TEACHER),
    Mutant("workers/role.py", "sums.argmax(0)", "sums.argmin(0)", SEVERAL),
    Mutant("workers/rank_batch.py", "ids=first.ids[left:]", "ids=first.ids", SEVERAL),
    Mutant("workers/role.py", "samples = [informed(s) for s in samples]", "pass", SEVERAL),
    Mutant("workers/role.py", "if s.context is None and s.taught]", "if s.context is s]", SEVERAL),
    Mutant("workers/teachers.py", "e, frozenset(own.ids)", "e, frozenset()", SEVERAL),
    Mutant("workers/teachers.py", "(WorkerDied, DeadlineExpired)", "WorkerDied", SEVERAL),
    Mutant(
        "model_engine/served.py", "until_s = time.monotonic() + self._options", "until_s = 1e9 + self._options", SERVED
    ),
    Mutant("types.py", "if np.array_equal(first, task.prompt_ids):", "if True:", SEVERAL),
    Mutant("config/adapter.py", "next(given, self.lora_alpha)", "self.lora_alpha", ADAPTER),
    Mutant("config/adapter.py", "rank**0.5 if self.use_rslora else rank", "rank", ADAPTER),
    Mutant("config/adapter.py", "inside = layers is None or", "inside = True or", ADAPTER),
    Mutant("config/adapter.py", "and not among(self.exclude_modules)", "", ADAPTER),
    Mutant("config/adapter.py", "b[:-1], a[-1]), (a[-1], b[-2]))", "b[:-1], a[-1]),)", ADAPTER),
    Mutant("config/adapter.py", ' or (".experts." in name and name not in fused):', ":", ADAPTER),
    Mutant("config/adapter.py", 'if ".experts." not in name and lora', "if lora", ADAPTER),
    Mutant("config/adapter.py", 'name.replace(".base_layer.", ".")', "name", ADAPTER),
    Mutant("config/adapter.py", "str(base) if named and base.is_dir() else", "", OPENED),
    Mutant(
        "config/adapter.py", '(folder / CONFIG).is_file() and not [*folder.glob("model*', 'not [*folder.glob("*', OPENED
    ),
    Mutant("config/adapter.py", "elif tied and (", "elif not 1 and (", OPENED),
    Mutant("config/adapter.py", "elif part.whole and", "elif not part.whole and part.whole and", OPENED),
    Mutant("config/adapter.py", "and a[-2] in ranks)", ")", OPENED),
    Mutant("config/adapter.py", "not value or key in (", "value or key in (", OPENED),
    Mutant("planner/memory.py", "teachers = teacher_models(config)", "teachers = config.teacher.folders()", OPENED),
    Mutant("config/validate.py", "if base != path:", "if False:", OPENED),
    Mutant("driver/identity.py", 'f"{_model(path)} of {_model(base)}"', "_model(path)", OPENED),
    Mutant(
        "driver/identity.py", '"generation_config.json", "adapter_config.json")', '"generation_config.json")', OPENED
    ),
    Mutant("driver/models.py", "and not has_tokenizer(adapter) else path", "else path", ADAPTED),
    Mutant("driver/models.py", "base if adapter is not None and not", "path if adapter is not None and not", ADAPTED),
    Mutant("driver/models.py", "top_k=config.teacher.top_k, adapter=adapter", "top_k=config.teacher.top_k", ADAPTED),
    Mutant("model_engine/adapter.py", "else b @ a, alpha=part.scale", "else b @ a", ADAPTER),
    Mutant("model_engine/adapter.py", "[index[1:]], alpha=part.scale", "[index[1:]]", ADAPTER),
    Mutant("model_engine/adapter.py", "(b @ a).T if name in self.turned else b @ a", "b @ a", ADAPTER),
    Mutant(
        "model_engine/adapter.py", "rows, columns = index[::-1] if name in self.turned else", "rows, columns =", ADAPTER
    ),
    Mutant("model_engine/adapter.py", "mine.copy_(file.get_slice(part.whole)[index])", "pass", ADAPTER),
    Mutant("model_engine/adapter.py", "if c.adapter is not None:", "if False:", ADAPTER),
    Mutant("model_engine/adapter.py", "            self.add(into)", "", ADAPTER),
    Mutant(
        "model_engine/adapter.py",
        "if strange := sorted(parts.keys() - names - {SCORE if head else None}):",
        "if False:",
        ADAPTER,
    ),
    Mutant("model_engine/lm_head.py", "if wanted.adapter is not None:", "if False:", ADAPTER),
    Mutant("model_engine/optim.py", "lerp_(p, 1 - decay)", "lerp_(p, decay)", SEVERAL),
    Mutant("algorithms/estimators.py", "rewarded * likes > 0", "rewarded * likes < 0", SEVERAL),
    Mutant("model_engine/served.py", "values[at]", "values[at - 1]", SERVED),
    Mutant("model_engine/served.py", "if not gap <= TOLERANCE:", "if False:", SERVED),
    Mutant("model_engine/served.py", "return {}", "return {'logprobs': torch.zeros(len(ids))}", SERVED),
    Mutant("observed.py", 'if s.source == "env" and drawn and', 'if s.source == "env" and', OBSERVATION),
    Mutant("observed.py", "and drawn and s.version != TEMPLATE:", "and drawn:", OBSERVATION),
    Mutant("workers/compute.py", "np.cumsum([0, *counts])", "np.cumsum([0, *counts]) * 0", OBSERVATION),
    Mutant("workers/rank_batch.py", "around(column, ~seen)", "around(column.flip(0), ~seen)", OBSERVATION),
    Mutant("workers/role.py", "found[n][drawn]", "found[n][: int(at[-1])]", OBSERVATION),
    Mutant("model_engine/passes.py", "count if batch.routes is None else max(count, len(parts))", "count", REPLAY),
    Mutant("workers/role.py", "(ROUTES,) if view.average or view.start else self._unread", "self._unread", REPLAY),
    Mutant(
        "workers/role.py", "return () if self.engine.capabilities.replays_routes else (ROUTES,)", "return ()", REPLAY
    ),
    Mutant("model_engine/torch_engine.py", "replace(batch, routes=None) if average or start else", "", REPLAY),
    Mutant("nn/linear_logprob.py", ".add_(of_shares)", "", TEACHER),
    Mutant("nn/linear_logprob.py", "apart[:, -1].clone()", "apart[:, -1]", TEACHER),
    Mutant("nn/linear_logprob.py", ".scatter_(-1, ids[at], theirs)", "", TEACHER),
    Mutant("nn/linear_logprob.py", "z.scatter_(-1, ids[at], apart[at, :-1])", "pass", TEACHER),
    Mutant("nn/linear_teacher.py", "x -= (p * x).sum(-1, keepdim=True)", "pass", TEACHER),
    Mutant("nn/linear_teacher.py", "else (1 - self.beta) * d[:, None])", "else d[:, None])", TEACHER),
    Mutant("nn/linear_teacher.py", "add_(p, alpha=1 - self.beta)", "add_(p)", TEACHER),
    Mutant("nn/linear_teacher.py", "needed = d_values != 0", "needed = d_values == d_values", TEACHER),
    Mutant(A + "losses.py", "return beta * kl[0] + (1 - beta) * kl[1]", "return kl[0] + kl[1]", TEACHER),
    Mutant(A + "estimators.py", "torch.where(usable, total, 0.0)", "total", TEACHER),
    Mutant("model_engine/lm_head.py", "if teacher.temperature is None else", "if True else", TEACHER),
    Mutant("driver/step.py", 'replace(r, outcome="invalid") if', "r if", TEACHER),
    Mutant(A + "resolve.py", 'now.get(COEFFICIENTS.get(t.name, ""), t.coef)', "t.coef", FORMS),
    Mutant(A + "resolve.py", "advantage = partial(advantage, **own)", "pass", FORMS),
    Mutant("driver/step.py", "algorithm.at(step.number)", "algorithm.at(step.index)", DISTILLED),
    Mutant("driver/step.py", "min(most * len(rows), len(rows) - 1)", "most * len(rows)", ALL_GONE),
    # -- the engine over many ranks
    Mutant("model_engine/sharded.py", "module.set_gradient_divide_factor(1.0)", "pass", RANKS),
    Mutant("model_engine/sharded.py", "self.local.root.reshard()  # else", "pass  # else", RANKS),
    Mutant("model_engine/sharded.py", "squares[int(split)] += norm", "squares[0] += norm", RANKS),
    Mutant("model_engine/sharded.py", 'dist.all_reduce(squares, group=self.mesh.get_group("shard"))', "pass", RANKS),
    Mutant("nn/tensor_parallel.py", "else out + bias", "else out + 2 * bias", RANKS),
    Mutant("nn/tensor_parallel.py", "if 0 <= local < self._slice else None", "", RANKS),
    Mutant("nn/tensor_parallel.py", "[Partial()] if", "[Replicate()] if", RANKS),
    Mutant("nn/tensor_parallel.py", '(_COLUMNS, "lora_A"), ', "", RANKS),
    Mutant("nn/tensor_parallel.py", ', (_ROWS, "lora_B")', "", RANKS),
    Mutant(
        "model_engine/sharded.py", "self.local.with_factors(name, weight) if form.merged else weight", "weight", RANKS
    ),
    Mutant(
        "model_engine/lora.py",
        "product if index is None else product[index]",
        "product if index is None else ((b * self.parameters.scale)[index[0]] @ a[:, index[1]])",
        "tests/numerics/test_lora_training.py",
    ),
    Mutant(
        "model_engine/sharded.py", "assert torch.equal(now, then)", "assert 1", "tests/distributed/test_parts_sync.py"
    ),
    Mutant("model_engine/sharded.py", '[p.device_mesh.get_local_rank("tensor")]', "[0]", RANKS),
    Mutant("model_engine/sharded.py", "lender.root, names)", "lender.root, set())", SIBLINGS),
    Mutant("nn/torch_compat.py", "= source._sharded_param_data", "= source._sharded_param_data.clone()", SIBLINGS),
    Mutant("model_engine/pipeline.py", "and self.lora is None", "", RANKS),
    Mutant("model_engine/pipeline.py", "if out.requires_grad:", "if True:", STAGES),
    Mutant("nn/logit_chunks.py", "(weight * (entropies - log_weight))", "(weight * entropies)", RANKS),
    Mutant("nn/linear_logprob.py", "d if here is None else d * here[at, None]", "d", RANKS),
    Mutant("nn/expert_parallel.py", "if len(x) == 0:", "if False:", RANKS),
    Mutant("nn/expert_parallel.py", "found * weights[:, None]", "found", RANKS),
    Mutant("model_engine/sharded.py", "over_experts if module in experts else over", "over", RANKS),
    Mutant("model_engine/pipeline.py", "grad if before is None else before + grad", "grad", STAGES),
    Mutant("model_engine/pipeline.py", "if p is not twice", "", STAGES),
    Mutant("model_engine/pipeline.py", "self._meet_copies(i == len(parts) - 1)", "self._meet_copies(i == 0)", STAGES),
    Mutant("model_engine/sharded.py", 'squares, group=self.mesh.get_group("pipeline")', "squares[:0]", STAGES),
    Mutant("model_engine/layout.py", "counts[s] + ends[s]", "counts[s]", "tests/unit/test_stages.py"),
    Mutant(
        "nn/sequence_parallel.py", "attention(q[: end - first], every_k", "attention(q[: end - first], -every_k", RANKS
    ),
    Mutant("nn/sequence_parallel.py", "d_x, d_out.contiguous(), group", "d_x, 2 * d_out, group", RANKS),
    Mutant("nn/attention.py", "first[self.parent + 1] - 1", "first[self.parent]", RANKS),
    Mutant("nn/sequence_parallel.py", "return d_out[which], None", "return d_out[which] * 2, None", RANKS),
    Mutant("nn/sequence_parallel.py", ".flatten(0, 1)[: self.num_tokens]", ".flatten(0, 1)[-self.num_tokens :]", RANKS),
    # -- the step
    Mutant("driver/step.py", "num_sequences=len(rows),", "num_sequences=0,", KL),
    Mutant("driver/step.py", "if kl.target is not None:", "if False:", KL),
    Mutant("driver/step.py", "share = float(1 - (returns - values).var() / spread)", "share = 0.0", STEP),
    Mutant("driver/step.py", "for epoch in range(epochs):", "for epoch in range(1):", f"{SPLIT} {SCHEDULE}"),
    Mutant(
        "driver/step.py", 'suffix = f"/{epoch}" if epoch else ""', 'suffix = ""', f"{SPLIT} tests/unit/test_compute.py"
    ),
    Mutant("driver/step.py", 'return ["old_logprobs"]\n    return []', "return []\n    return []", f"{CORR} {STEP}"),
    Mutant(
        "driver/step.py",
        'return {"old_logprobs": columns["rollout_logprobs"]}',
        'return {"old_logprobs": columns["old_logprobs"]}',
        f"{CORR} {STEP}",
    ),
    Mutant(
        "driver/step.py",
        "explained >= spec.critic_warmup_until",
        "explained <= spec.critic_warmup_until",
        f"{STEP} {WAITS}",
    ),
    Mutant(
        "driver/step.py",
        "controllers.critic_warm or step.index >= spec.critic_warmup_steps",
        "step.index > spec.critic_warmup_steps",
        WAITS,
    ),
    Mutant(
        "planner/sizes.py",
        "max(0, steps - waits) * s.updates_per_step * s.epochs_per_step",
        "max(0, steps - waits) * s.updates_per_step",
        SCHEDULE,
    ),
    # -- workers
    Mutant(W + "compute.py", '("is_weights", "keep") if refs', '("is_weights",) if refs', STEP),
    Mutant(W + "compute.py", '("is_weights", "keep") if refs', '("keep",) if refs', STEP),
    Mutant(
        W + "compute.py",
        "weight = torch.where(first, weight[sequence], 0.0)",
        "weight = weight[sequence]",
        f"{SPLIT} {STEP}",
    ),
    Mutant(
        W + "compute.py",
        'valid = column((r.outcome == "ok" and (',
        'valid = column((r.outcome == "ok" or (',
        f"{DISPATCH} {STEP}",
    ),
    Mutant(
        W + "role.py",
        "out.append((coef * value + sample.reward, parts))",
        "out.append((value + sample.reward, parts))",
        "tests/e2e/test_preference.py",
    ),
    Mutant(
        W + "role.py",
        "losses = {t.name: Metric(metrics[t.name].total * count,",
        "losses = {t.name: Metric(metrics[t.name].total,",
        "tests/e2e/test_supervised.py",
    ),
    Mutant(
        "reward/model.py",
        "replace(function, value=function.value + coef * model, components=parts)",
        "replace(function, value=function.value + model, components=parts)",
        "tests/unit/test_reward_judge.py",
    ),
    # -- dispatch, packing
    Mutant(
        "driver/dispatch.py", "return [found[at] for at in range(len(found))]", "return list(found.values())", DISPATCH
    ),
    Mutant("driver/dispatch.py", "(least + costs[name], rank)", "(least + 1, rank)", DISPATCH),
    Mutant("batch.py", "key = (sample.adapter, media, ids", "key = (sample.adapter, (), ids", PACK),
    Mutant("batch.py", 'b"" if routes is None else routes.tobytes()', 'b""', REPLAY),
    Mutant("nn/router_replay.py", ".gather(-1, experts)", ".gather(-1, own)", REPLAY),
    Mutant("nn/router_replay.py", "given[ARGUMENT][number].t()", "given[ARGUMENT][0].t()", REPLAY),
    Mutant("driver/routes.py", "routes[left] = found[left]", "routes[:same] = found[:same]", REPLAY),
    Mutant("batch.py", "before[0] = seg_start[parent[node] + 1] - 1", "before[0] = seg_start[parent[node]]", PACK),
    # -- the scheduler and the groups
    Mutant("driver/scheduler.py", "self.max_lag = math.ceil(staleness)", "self.max_lag = math.floor(staleness)", SCHED),
    Mutant("driver/scheduler.py", "if len(overdue) > self.extra or", "if", SCHED),
    Mutant("driver/scheduler.py", "return head if all(g.complete for g in head) else None", "return head", SCHED),
    Mutant("driver/scheduler.py", "self._budget.lost[reason] += 1", "pass", f"{SCHED} {FLOW}"),
    Mutant(
        "driver/rollouts.py",
        'return score.components.get("score", score.value)',
        "return score.value",
        f"{FLOW} tests/unit/test_reward_shaping.py",
    ),
    Mutant("driver/rollouts.py", "self.cursor.give_back(self._draws[group_id])", "pass", FLOW),
    Mutant(
        "driver/trajectories.py",
        "truncated=made.stop_reason in CUT",
        'truncated=made.stop_reason == "length"',
        f"{FLOW} tests/unit/test_agent_loop.py",
    ),
    Mutant(
        "types.py",
        "return self.stop_reason in CUT",
        'return self.stop_reason == "length"',
        f"{FLOW} tests/unit/test_agent_loop.py tests/unit/test_batch.py",
    ),
    # -- branches, turns and tools
    Mutant("driver/checked.py", "known[a - start : b - start] = True", "pass", "tests/unit/test_agent_loop.py"),
    Mutant("agent_loop/base.py", "len(self.record) >= self.max_turns", "False", "tests/unit/test_agent_loop.py"),
    Mutant("runs.py", "*ends[j][ends[j] < shared].tolist()", "", "tests/numerics/test_branches.py"),
    Mutant("agent_loop/tool_agent.py", "(len(ids), sampled)", "(len(ids), 1)", AGENT),
    Mutant("agent_loop/tool_agent.py", 'why = "no_progress"', "why = None", AGENT),
    Mutant("chat/parsing.py", 'return "the call is not closed"', 'return ""', AGENT),
    Mutant("chat/python_calls.py", "< len(call.keywords):", "< 0:", "tests/unit/test_parsing.py"),
    Mutant("chat/parsing.py", "may_end = self.format", "may_end = True or self.format", "tests/unit/test_parsing.py"),
    Mutant("chat/python_calls.py", "or call.args or", "or", "tests/unit/test_parsing.py"),
    Mutant(
        "rollout/server/texts.py", "self.answer(completion, spelled=True)", "text", "tests/contracts/test_server.py"
    ),
    Mutant("chat/bridge.py", "if token in text:", "if False:", "tests/unit/test_bridge.py"),
    Mutant("chat/bridge.py", "and keeps_text(history[-1], text)", "", "tests/unit/test_bridge.py"),
    # -- the columns of a term, truncation, the choice of a replica
    Mutant(A + "weights.py", "every if term.sees_rejected else seen.mask", "(weight != 0) & seen.mask", MASKS),
    Mutant(
        A + "weights.py",
        "return torch.where(columns.mask, logs.exp()[columns.sequence_of], 0.0)",
        "return weight",
        MASKS,
    ),
    Mutant(A + "resolve.py", 'own["sees_rejected"] = True', "pass", MASKS),
    Mutant(
        A + "preference.py",
        "shared[w] = shared[l] = torch.minimum(counts[w], counts[l])",
        "shared[w] = shared[l] = torch.maximum(counts[w], counts[l])",
        TERMS,
    ),
    Mutant(A + "preference.py", "shares, ld_alpha)", "ld_alpha, shares)", TERMS),
    Mutant(
        A + "preference.py",
        'ref = columns.sum(shares * columns["ref_logprobs"]',
        'ref = columns.sum(columns["ref_logprobs"]',
        TERMS,
    ),
    Mutant(
        "driver/step.py",
        "keep = columns.mask & ~cut[columns.sequence_of]",
        "keep = columns.mask & cut[columns.sequence_of]",
        f"{MASKS} tests/unit/test_step_settings.py",
    ),
    Mutant(
        "model_engine/objective.py",
        "inside, present = torch.where(mask, value.values, 0.0), mask",
        "inside, present = value.values, mask",
        f"{MASKS} {ENGINE} {SPLIT}",
    ),
    # -- verdicts: the run itself, the weights that arrived, the answer that is right
    Mutant("driver/identity.py", "elif old != new and not may_change(key):", "elif old != new:", IDENTITY),
    Mutant("driver/identity.py", "and k not in row.may_change]", "and False]", IDENTITY),
    Mutant(
        "driver/identity.py",
        "if _users_code(key, old, was.contents.get(key)) != _users_code(key, new, now.contents.get(key)):",
        "if old != new:",
        IDENTITY,
    ),
    Mutant("driver/identity.py", "if key in resolved.masked:", "if False:", IDENTITY),
    Mutant("driver/identity.py", "    was = _moved(was)\n", "", MOVED),
    Mutant("driver/identity.py", 'else f"{function} {found.strip()}"', "else found", MOVED),
    Mutant("config/moved.py", "not move.commands or command in move.commands", "True", MOVED),
    Mutant("weight_sync/canary.py", "if not found <= allowed:", "if not found <= 1e9:", CANARY),
    Mutant(
        "weight_sync/canary.py",
        "weight = 1.0 / count[word]",
        "weight = 1.0 * count[word]",
        CANARY,
        "one word that stands often weighs more: seen only in sweeps of one-word prompts, by hand",
    ),
    Mutant(
        "weight_sync/canary.py",
        "order = np.argsort(-self.logprobs, kind",
        "order = np.argsort(self.logprobs, kind",
        CANARY,
    ),
    Mutant("transfer_queue/media.py", "path.stat().st_nlink == 1", "path.stat().st_nlink <= 2", MEDIA),
    Mutant("driver/queue_rows.py", "self._with_media & {*refs.ids}", "self._with_media - {*refs.ids}", MEDIA),
    Mutant("driver/replay.py", "into.drop([REPLAY])", "pass", MEDIA),
    Mutant("runs.py", "ids[at + m.start : at + m.end] = -1 - first", "ids[:0] = -1 - first", PACK),
    Mutant("media_tokens.py", "number[medium]", "medium", PACK),
    Mutant("models/families.py", "now + length, m.end", "now + m.tokens, m.end", VISION),
    Mutant("models/multimodal.py", "now = int(after[parent]) if parent >= 0 else 0", "now = 0", VISION),
    Mutant("rollout/embedded/requests.py", "self.given.media, self.explores", "(), self.explores", SEEN),
    Mutant("rollout/embedded/images.py", "positions + (len(ids) - after)", "positions", SEEN),
    Mutant("rollout/embedded/features.py", "self.positions[:, start:end]", "self.positions[:, : end - start]", SEEN),
    Mutant("rollout/native/prefill.py", "            self._images.clear()", "            pass", SEEN),
    Mutant("rollout/native/architecture.py", "i % 3 if i < 3 * sections[i % 3] else 0", "i % 3", SEEN),
    Mutant(
        "nn/vision.py", 'part_of(name) != "language")', 'part_of(name) == "vision")', "tests/e2e/test_image_rows.py"
    ),
    Mutant("rollout/embedded/hf_runner.py", "loaded\n        self._images.clear()", "loaded", VISION_LORA),
    Mutant(
        "config/adapter.py",
        "header in _model_headers(base).items()}\n\n",
        "header in read_weight_headers(base).items()}\n\n",
        VISION_LORA,
    ),
    Mutant("nn/vision.py", "clamp(min=0)] + media.feature", "clamp(min=0)]", VISION),
    Mutant("nn/attention.py", "else q + self.ahead[..., None]", "else q", "tests/numerics/test_vision_families.py"),
    Mutant("nn/attention.py", "(self.windows and window is None)", "False", "tests/numerics/test_vision_families.py"),
    Mutant("models/multimodal.py", "np.where(here, medium, -1)", "medium", "tests/numerics/test_vision_families.py"),
    Mutant("rollout/embedded/hf_runner.py", "(language.config,", "(self._config,", "tests/e2e/test_image_rows.py"),
    Mutant("models/families.py", 'around="\\n\\n"', 'around=""', "tests/unit/test_image_prompts.py"),
    Mutant("models/expand.py", "if i < rows and is_mark", "if False and is_mark", "tests/unit/test_image_prompts.py"),
    Mutant("models/kept.py", "self._kept.move_to_end(name)", "pass", "tests/unit/test_pictures.py"),
    Mutant("models/kept.py", "if name in self._used)", ")", "tests/unit/test_pictures.py"),
    Mutant("models/image_files.py", "image = ImageOps.exif_transpose(image)", "pass", "tests/unit/test_pictures.py"),
    Mutant("nn/vision.py", "if deeper:", "if not deeper:", VISION),
    Mutant("model_engine/sharded.py", "and any(encodes))", "and False)", "tests/distributed/test_images.py"),
    Mutant("nn/fp8.py", "values.float() * by_row(scales, rows)", "values.float() / by_row(scales, rows)", BLOCKS),
    Mutant("nn/fp8.py", "largest == 0, 1.0", "largest == 0, 0.0", BLOCKS),
    Mutant("nn/fp8.py", "if halves:", "if False:", BLOCKS),
    Mutant("nn/fp8.py", "weight._base is not None and weight._base in self._weights", "False", BLOCKS),
    Mutant("model_engine/passes.py", "if form.fp8_inputs and in_blocks(name, p.shape):", "if False:", BLOCKS),
    Mutant("checkpoint/block_fp8.py", "which * scale_rows + row // FP8_BLOCK", "row // FP8_BLOCK", SERVED_BLOCKS),
    Mutant(
        "checkpoint/block_fp8.py",
        "tensor.ndim > 1 and not in_blocks",
        "tensor.ndim > 2 and not in_blocks",
        SERVED_BLOCKS,
    ),
    Mutant("checkpoint/block_fp8.py", "if first % shape[-2] % FP8_BLOCK:", "if False:", WIRE),
    Mutant("weight_sync/version_folder.py", "if made is None or not quantised", "if True", SERVED_BLOCKS),
    Mutant("rollout/vllm.py", 'env.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")', "pass", VLLM_LINES),
    Mutant("wire.py", "module in JOINED and len", "False and len", VLLM_LINES),
    Mutant("wire.py", 'len(shape) > 2 and ".experts." in name', "False", VLLM_LINES),
    Mutant("rollout/weight_format.py", "UNKNOWN if model is None else unreadable(model)", '""', VLLM_LINES),
    Mutant("weight_sync/wire_format.py", "wanted = form.dtype_of(name)", "wanted = form.dtype", WIRE),
    Mutant("rollout/weight_format.py", "return last in ALWAYS or ", "return ", WIRE),
    Mutant("rollout/weight_format.py", "found |= below", "pass", WIRE),
    Mutant("weight_sync/wire_format.py", "not held.is_floating_point or not", "not", WIRE),
    Mutant(
        "checkpoint/safetensors_file.py",
        'return memoryview(view).cast("B")',
        "return plain.reshape(-1).view(torch.uint8).numpy().data",
        WIRE,
    ),
    Mutant("weight_sync/version_folder.py", "spans[inner - 1] == (0, shape[inner - 1])", "True", SLICES),
    Mutant("weight_sync/together.py", "[one for one in slices if one.checksum is not None]", "[]", SLICES),
    Mutant("weight_sync/slices.py", "if found != prod(shape):", "if found > prod(shape):", SLICES),
    Mutant("weight_sync/slices.py", "if np.triu(shared.all(-1), 1).any():", "if False:", SLICES),
    Mutant("weight_sync/slices.py", "if missing:", "if False:", SLICES),
    Mutant("weight_sync/collective.py", "if version != table.version or", "if", SLICES),
    Mutant("weight_sync/base.py", "for one in self.slices:", "for one in ():", SLICES),
    Mutant(
        "weight_sync/meeting.py",
        "except Exception as e:  # any error of one",
        "except OSError as e:  # any error of one",
        STAGING,
    ),
    Mutant(
        "weight_sync/meeting.py", "with contextlib.suppress(RuntimeError):", "with contextlib.nullcontext():", STAGING
    ),
    Mutant("planner/transport.py", "rank_bytes=2 * share", "rank_bytes=share", SENDING),
    Mutant("planner/transport.py", "trainer_bytes=2 * bucket", "trainer_bytes=bucket", SENDING),
    Mutant("weight_sync/sender.py", "                _take_part(gathered)\n", "", STAGING),
    Mutant("weight_sync/record.py", "torch.maximum(before[1], largest)", "before[1]", SLICES),
    Mutant("weight_sync/base.py", "if found != expected[name].checksum]", "if not expected]", CRC),
    Mutant("weight_sync/base.py", " | host_checksums(staying)", "", CRC),
    Mutant("weight_sync/crc.py", "_advanced(sums, width) ^ row", "sums ^ row", CRC),
    Mutant("weight_sync/crc.py", " or flat.storage_offset() % 4", "", CRC),
    Mutant(
        "reward/shaping.py",
        "found = np.where(truncated, coef if coef < 0 else scaled, score)",
        "found = np.where(truncated, scaled, score)",
        "tests/unit/test_reward_shaping.py",
    ),
    # -- records and resume
    Mutant(
        "driver/record.py",
        "filter(None, (column.name, column.instead))",
        'filter(None, ("returns", column.instead))',
        GREEDY,
    ),
    Mutant(
        "driver/checkpointer.py",
        "now.kl_coef = state.controllers.kl_coef",
        "pass",
        f"{RUN} tests/unit/test_driver_state.py",
    ),
    Mutant(
        "driver/checkpointer.py",
        "for role in self._trained:\n            await",
        "for role in self._trained[:1]:\n            await",
        RUN,
    ),
    Mutant("driver/run.py", "self.groups.cursor.load_state(state.cursor)", "pass", RUN),
    # -- rewards
    Mutant(
        "reward/shaping.py",
        "return -penalty * np.clip(over",
        "return penalty * np.clip(over",
        "tests/unit/test_reward_shaping.py",
    ),
    Mutant(
        "reward/shaping.py",
        '{"score": got.value, **got.components, **added}',
        "{**got.components, **added}",
        f"tests/unit/test_reward_shaping.py {FLOW}",
    ),
    # -- what a step does, as closed forms
    Mutant(
        "driver/step.py",
        'kl=metrics["actor/reward_kl_penalty"].value',
        'kl=controllers.kl_coef * metrics["actor/reward_kl_penalty"].value',
        "tests/unit/test_step.py",
    ),
    Mutant(
        "algorithms/resolve.py",
        'inputs=("ref_logprobs",), **common',
        'inputs=("ref_logprobs",), **{**common, "aggregate": "token-mean"}',
        "tests/numerics/test_term_masks.py",
    ),
    Mutant(
        "driver/step.py",
        'without_truncated, ("keep",) if corrects else ()',
        "without_truncated, ()",
        "tests/unit/test_step.py",
    ),
    Mutant(
        "algorithms/weights.py",
        'if "taught" in columns.sequence and any(name.startswith("teacher_") for name in term.inputs):',
        'if "taught" in columns.sequence:',
        "tests/numerics/test_term_masks.py",
    ),
    Mutant("algorithms/weights.py", "every & over\n", "every\n", "tests/numerics/test_term_masks.py"),
    Mutant(
        "algorithms/losses.py",
        "y = (-x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)",
        "y = (-x).clamp(-LOG_RATIO_BOUND, 5)",
        "tests/numerics/test_closed_forms.py",
    ),
    Mutant(
        "algorithms/preference.py",
        'gap, columns.sum(columns["logprobs"])[w])',
        "gap, policy[w])",
        "tests/numerics/test_preference_terms.py",
    ),
    Mutant(
        "algorithms/preference.py",
        "torch.log(-torch.expm1(x.clamp(max=-1e-7)))",
        "torch.log(1 - torch.exp(x.clamp(max=-1e-7)))",
        "tests/numerics/test_preference_terms.py",
    ),
    Mutant(
        "driver/step.py", "round(i * len(order) / updates)", "i * (len(order) // updates)", "tests/unit/test_step.py"
    ),
    Mutant(
        "driver/step.py",
        'if "old_logprobs" not in inferred:',
        'if "old_logprobs" in inferred:',
        "tests/numerics/test_virtual_ranks.py::test_one_update_reports_the_mismatch_that_several_report",
    ),
    Mutant(
        "batch.py",
        'zeros_like(c) if n.startswith(("w/", "m/"))',
        'zeros_like(c) if n.startswith("m/")',
        "tests/unit/test_batch.py",
    ),
    Mutant(
        "batch.py",
        'zeros_like(c) if n.startswith("w/")',
        'zeros_like(c) if n.startswith("m/")',
        "tests/unit/test_batch.py",
    ),
    Mutant("driver/dispatch.py", "count = max(count_micro", "count = min(count_micro", "tests/unit/test_dispatch.py"),
    Mutant(
        "driver/scheduler.py",
        "self._data_ended = self._data_ended and not overdue",
        "pass",
        "tests/unit/test_scheduler.py",
    ),
    Mutant("driver/rollouts.py", "sum(scores) / len(scores)", "max(scores)", "tests/unit/test_rollouts_flow.py"),
    Mutant(
        "driver/trajectories.py",
        "response_tokens=len(response)",
        'response_tokens=sum(len(s.ids) for s in row if s.source == "sampled")',
        "tests/unit/test_rollouts.py",
    ),
    Mutant("agent_loop/tool_agent.py", "credit(sum(rewards))", "credit(max(rewards))", "tests/unit/test_tool_agent.py"),
    Mutant(
        "driver/checked.py",
        "first + max_tokens - manager.taken -",
        "first + max_tokens -",
        "tests/unit/test_agent_loop.py",
    ),
    Mutant("driver/publisher.py", " and able.in_flight_update else", " else", "tests/unit/test_publisher.py"),
    Mutant(
        "driver/publisher.py",
        "        self.version = version\n        committed",
        "        committed",
        "tests/unit/test_publisher.py",
    ),
    # -- LoRA in configuration, plan and export
    Mutant("model_engine/memory.py", '"gradients": 4 * share.trained', '"gradients": 4 * share.weights', LORA),
    Mutant("nn/lora.py", "self.scale, over=self.over, weight=weight)", "1.0)", LORA_TRAINING),
    Mutant("nn/joint.py", "self.a, alpha=scale", "self.a", "tests/numerics/test_joint.py"),
    Mutant("model_engine/lora.py", 'if self._at == "none":', 'if self._at == "start":', LORA_TRAINING),
    Mutant("model_engine/lora.py", "product.T if name in self._turned else product", "product", LORA_TRAINING),
    Mutant("nn/lora.py", "torch.mm(flat, b).mul_(ctx.scale)", "torch.mm(flat, b)", LORA_TRAINING),
    Mutant("model_engine/local_model.py", 's.gradient_checkpointing == "none"', "True", LORA_TRAINING),
    Mutant(
        "nn/expert_lora.py",
        "by_expert(x, a, ends) * self._scale, b, ends)",
        "by_expert(x, a, ends), b, ends)",
        LORA_TRAINING,
    ),
    Mutant(
        "nn/expert_lora.py", "top_k_weights.flatten()[order, None]", "top_k_weights.flatten()[:, None]", LORA_TRAINING
    ),
    Mutant("checkpoint/adapter_export.py", "permute(1, 2, 0)", "permute(1, 0, 2)", LORA_TRAINING),
    Mutant("parameter_set.py", '".base_layer" if tensor == GATE_UP', '".base_layer" if tensor == DOWN', LORA_TRAINING),
    Mutant("driver/publisher.py", "able.lora_experts or not self.trained_experts", "True", FACTORS),
    Mutant(
        "parameter_set.py",
        "if parameters.experts and not lora_experts:",
        "if False:",
        "tests/unit/test_rollout_adapters.py",
    ),
    Mutant("rollout/native/sets.py", "mine = torch.isin(tokens, rows)", "mine = tokens >= 0", SETS),
    Mutant("model_engine/lora.py", '"none" if self._spec.path is None else "trained"', '"trained"', LORA_RUNS),
    Mutant("model_engine/local_model.py", "is_factor(n) or id(p) in whole", "True", LORA_TRAINING),
    Mutant("model_engine/local_model.py", "is_factor(n) or id(p) in whole", "is_factor(n)", LORA_WHOLE),
    Mutant("model_engine/lora.py", "            mine.copy_(kept)\n", "", LORA_WHOLE),
    Mutant("model_engine/lora.py", "            kept.copy_(present)\n", "", LORA_WHOLE),
    Mutant("model_engine/sibling.py", "if name not in own]", "]", LORA_WHOLE),
    Mutant("model_engine/sibling.py", "        found.fill(own)\n", "", LORA_WHOLE),
    Mutant("model_engine/lora_spec.py", "if name in tied:", "if False:", LORA_WHOLE),
    Mutant("config/lora_layers.py", "if factors.saved and not traits.lora_whole:", "if False:", SAVED),
    Mutant("driver/publisher.py", "able.lora_whole or not self.trained_whole", "True", FACTORS),
    Mutant("parameter_set.py", "if parameters.replaced and not lora_whole:", "if False:", WHOLE_FACTORS),
    Mutant("rollout/embedded/core.py", "            if policy.whole:\n", "            if False:\n", WHOLE_FACTORS),
    Mutant("rollout/native/runner.py", "self._use_noise(False)  # else", "# else", WHOLE_FACTORS),
    Mutant(
        "model_engine/lora_source.py",
        "frozenset(factors).union(self.parameters.replaced)",
        "frozenset(factors)",
        WHOLE_FACTORS,
    ),
    Mutant(
        "model_engine/lora_source.py",
        "return is_factor(name) or name in engine.local.lora.parameters.replaced",
        "return is_factor(name)",
        WHOLE_FACTORS,
    ),
    Mutant("model_engine/sibling.py", "{id(t): t for t in (*parameters, *model.buffers())}", "{}", LORA_TRAINING),
    Mutant(
        "rollout/embedded/core.py",
        "held = policy.identity or self.identity",
        "held = policy.parameters.base or ''",
        FACTORS,
    ),
    Mutant("rollout/embedded/core.py", 'self.identity = ""  # the next publish needs the base too', "pass", FACTORS),
    Mutant("driver/publisher.py", "if all(one.base for one in", "if any(one.base for one in", FACTORS),
    Mutant("rollout/client.py", " and not lost else", " else", FACTORS),
    Mutant("rollout/answers.py", "if adapted and drawn.ids:", "if False:", FACTORS),
    Mutant("rollout/updates.py", "policy.identity or connection.identity,", 'policy.parameters.base or "",', FACTORS),
    Mutant("rollout/vllm_api.py", "None if sent.parameters.whole else list(sent.delivered)", "None", FACTORS),
    Mutant("weight_sync/local.py", "if parameters.id != POLICY_SET.id:", "if not parameters.whole:", FACTORS),
    Mutant(
        "model_engine/passes.py",
        "merged(name, weight, masters.__getitem__)",
        "merged(name, weight, self.local.whole_factor)",
        QUANTISED,
    ),
    Mutant(
        "model_engine/local_model.py",
        'f"{name}.codes": layer.quantised.codes for',
        'f"{name}.codes": layer.quantised.codes[:0] for',
        QUANTISED,
    ),
    Mutant("weight_sync/wire_format.py", "if form.codes and name.endswith(FLOAT_PARTS):", "if False:", WIRE),
    Mutant("weight_sync/sender.py", "own and not self._lasts(name)", "own", FACTORS),
    Mutant("rollout/native/codes.py", "if self._lasting[name] and", "if", CODES),
    Mutant("rollout/native/weights.py", "return x.float() if self.wide_residual else x", "return x", PANELS),
    Mutant("accel/cpu/training.py", "*ctx.saved_tensors, back=True)", "*ctx.saved_tensors)", TABLE),
    Mutant("accel/cpu/training.py", "weight.detach(), eps, exact=True)", "weight.detach(), eps)", TABLE),
    Mutant("accel/cpu/kernels.py", '"linear" if out.dtype == self.dtype else "linear_wide"', '"linear"', PANELS),
    Mutant("accel/cpu/kernels.py", '"pack" if weight.dtype == torch.float32 else "repack"', '"pack"', PANELS),
    Mutant("rollout/native/codes.py", "pairs=self.pairs, add=add)", "pairs=0, add=add)", CODES),
    Mutant("rollout/native/weights.py", "rotated=int(rotated)", "rotated=0", CODES),
    Mutant("rollout/native/weights.py", 'or "embed" in storage.adopted', "", CODES),
    Mutant("rollout/native/weights.py", "} - storage.adopted", "}", CODES),
    Mutant("nn/linear_logprob.py", "is not None and needed else None", "is not None else None", HEAD),
    Mutant(
        "nn/quant_linear.py",
        "linear(x, made(layer.weight), layer.bias)",
        "linear(x, layer.weight, layer.bias)",
        QUANTISED,
    ),
    Mutant("config/adapter.py", "header.shape) == 2 and", "header.shape) >= 1 and", LORA),
    Mutant("config/adapter.py", 'lora.scale(weight.removesuffix(".weight"),', "lora.scale(module,", ADAPTER),
    Mutant("config/on_base.py", "if _settings(one) != _settings(other):", "if False:", LORA),
    Mutant("config/on_base.py", "for name in parts} <= able:", "for name in parts} <= {*able, 'lm_head'}:", LORA),
    Mutant("model_engine/lora_spec.py", 'fused if "experts" in entry else ()', "fused", LORA),
    Mutant("config/lora_layers.py", "self.rank * sum(", "sum(", LORA),
    Mutant("driver/launch.py", "changed(untrained(config), ", "changed(config, ", LORA),
    Mutant("config/lora_layers.py", "not in traits.lora_experts_on:", "not in ('cpu', 'cuda'):", LORA),
    Mutant("config/lora_layers.py", "able and served_factors(config) is not None", "able", LORA),
    Mutant(
        "driver/assemble.py",
        "sends_factors=served_factors(config) is not None",
        "sends_factors=True",
        "tests/unit/test_publisher.py",
    ),
    Mutant("driver/identity.py", "_model(spec.path)}", "spec.path}", LORA),
    Mutant("planner/plan.py", "given < LR_FACTOR * factor", "lr < factor", LORA),
    Mutant("config/compat/lora.py", 'and saved != actor["saved"]', "and False", LORA_KEYS),
    Mutant("config/compat/lora.py", "if not isinstance(value, list) or", "if", LORA_KEYS),
    Mutant("config/compat/lora.py", 'found["rank"] else {}', 'found["alpha"] else {}', LORA_KEYS),
    Mutant("config/compat/lora.py", "elif value not in _HARMLESS[option]:", "elif False:", LORA_KEYS),
    Mutant("checkpoint/safetensors_file.py", "self.names and self._splits and", "self.names and", LORA_TRAINING),
    Mutant("config/adapter.py", "finite = not np.any(bits & exponent == exponent)", "finite = True", LORA_TRAINING),
    Mutant("model_engine/merging.py", "(base, _pad_id(source))", "(base, None)", LORA_EXPORT),
    Mutant("model_engine/merging.py", "tensor.detach().to(getattr(torch, dtype))", "tensor", LORA_EXPORT),
    # -- LoRA sets
    Mutant("parameter_set.py", "if parameters.base != held:", "if False:", SETS),
    Mutant("rollout/native/runner.py", "self._forget_prompts(parameters.id)", "pass", NATIVE_SETS),
    Mutant(
        "rollout/native/runner.py",
        "self._row_sets[holes] = self._needs",
        "self._row_sets[:0] = self._needs",
        NATIVE_SETS,
    ),
    Mutant("rollout/native/prefill.py", "if key[0] != name}", "}", NATIVE_SETS),
    Mutant("rollout/native/sets.py", "else interleaved(block, half)", "else block", NATIVE_SETS),
    Mutant("rollout/native/sets.py", ".mul_(scale)", "", NATIVE_SETS),
    Mutant("rollout/native/sets.py", "torch.where(own, a(x)", "torch.where(own | True, a(x)", NATIVE_SETS),
    Mutant("rollout/native/model.py", "slots = order if", "slots = order.sort().values if", NATIVE_SETS),
    Mutant("accel/cpu/linear.py", "(layer, name)[i] =", "(layer, name)[min(i, 1)] =", NATIVE_SETS),
    Mutant("rollout/native/sets.py", "pairs=half if i < one.rotated else 0", "pairs=0", NATIVE_SETS),
    Mutant("accel/cpu/kernels.py", "crc32(view[whole:], int(state[0]))", "crc32(view[whole:], 0)", CRC),
    Mutant("rollout/native/sets.py", "into_a.zero_()", "pass", NATIVE_SETS),
    Mutant("rollout/native/sets.py", "first=i * len(low.a)", "first=0", NATIVE_SETS),
    Mutant("weight_sync/sender.py", "if state != self._base_state or self._sent", "if self._sent", FACTORS),
    Mutant("rollout/native/noise.py", "one.noisy if acts else one.clean", "one.noisy", NOISE),
    Mutant("rollout/native/runner.py", "        self._use_noise(False)\n", "", NOISE),
    Mutant("rollout/native/runner.py", " or request.explores != self._explores", "", NOISE),
    Mutant("rollout/embedded/requests.py", "self.explores, self.context()", "False, self.context()", NOISE),
    Mutant("rollout/embedded/requests.py", " and self.given.parameters == POLICY_SET.id", "", NOISE),
    Mutant("rollout/noise.py", '"noise", version, name', '"noise", name', NOISE),
    Mutant(
        "config/noise.py", "correction.form is not None or correction.bypass", "True", "tests/unit/test_config_load.py"
    ),
    Mutant("driver/step.py", "Refs(r for r in drawn if r.noise_sigma > 0)", "Refs()", NOISE_RUN),
    Mutant("nn/lora.py", "one.b.to(x), scale)", "one.b.to(x), 2 * scale)", SETS),
    Mutant("rollout/replica.py", "        of.sets.clear()\n", "", "tests/unit/test_rollout_adapters.py"),
    Mutant("rollout/wrapper.py", "        await asyncio.wait({self._publish})\n", "", SETS),
    # -- what peers fix at other values
    Mutant(
        "algorithms/estimators.py",
        "1 / (var.sqrt() + epsilon)",
        "1 / (var + epsilon).sqrt()",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/estimators.py",
        "torch.where(mask, out + mean, 0.0)",
        "torch.where(mask, out - mean, 0.0)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/estimators.py",
        'self.usable & (self.size == 1) & (singleton == "raw")',
        '(self.size == 1) & (singleton == "raw")',
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/estimators.py",
        "1 + epsilon if by_group else 1.0",
        "1 + epsilon",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/estimators.py",
        "g.usable & (g.s != 0)",
        "g.varied & (g.s != 0)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/estimators.py",
        "before = gaps.cumsum(1) - gaps",
        "before = gaps.cumsum(1)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/estimators.py",
        "gaps = grid.pad(likes).abs()",
        "gaps = grid.pad(likes)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/presets.py",
        "preset = replace(preset, group=replace(preset.group, least=1))",
        "pass",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "reward/shaping.py",
        "request.max_response_tokens if self.longest is None else self.longest",
        "request.max_response_tokens",
        "tests/unit/test_reward_shaping.py",
    ),
    Mutant("reward/shaping.py", "cap=self.cap,", "cap=True,", "tests/unit/test_reward_shaping.py"),
    # -- what no test noticed once: experience, dispatch, publishes, groups, tools, pairs, parts
    Mutant(
        "driver/step.py",
        "updates = shape.updates_per_step * shape.epochs_per_step",
        "updates = shape.updates_per_step",
        "tests/numerics/test_virtual_ranks.py::test_one_update_reports_the_mismatch_that_several_report",
    ),
    Mutant(
        "driver/step.py",
        'rows = chosen.of("train")  # base',
        "rows = chosen  # base",
        "tests/numerics/test_virtual_ranks.py::test_baselines_are_compared_with_and_not_trained_on",
    ),
    Mutant(
        "driver/step.py",
        "drawn = dict(zip(scores, chosen.draw(list(scores.values()), rng)))",
        "drawn = dict.fromkeys(scores, 1)",
        "tests/unit/test_step.py",
    ),
    Mutant(
        "driver/step.py",
        'rng = random.Random(derive_seed(learner.config.run.seed, "choose", step.index, group_id))',
        'rng = random.Random(derive_seed(learner.config.run.seed, "choose", group_id))',
        "tests/unit/test_step.py",
    ),
    Mutant(
        "driver/step.py",
        "if len(broken) > min(most * len(rows), len(rows) - 1):",
        "if len(broken) > most * len(rows):",
        "tests/unit/test_step.py",
    ),
    Mutant(
        "driver/step.py",
        'share = Metric(float(cut.sum()), float(len(cut)), "sequence")',
        'share = Metric(float(cut.sum()), 1.0, "sequence")',
        "tests/numerics/test_term_masks.py",
    ),
    Mutant(
        "algorithms/resolve.py",
        'entropy = {"coef": spec.entropy_coef, "outputs": ("entropy",), **common}',
        'entropy = {"coef": spec.entropy_coef, "outputs": ("entropy",)}',
        "tests/numerics/test_term_masks.py",
    ),
    Mutant(
        "algorithms/resolve.py",
        'coef=spec.positive_nll_coef, over="positive")',
        "coef=spec.positive_nll_coef)",
        "tests/numerics/test_term_masks.py",
    ),
    Mutant("algorithms/resolve.py", "delta=spec.off_policy_delta)", "delta=0.0)", "tests/numerics/test_term_masks.py"),
    Mutant(
        "algorithms/resolve.py",
        'outputs = tuple(dict.fromkeys((*outputs, "logprobs")))',
        "pass",
        "tests/numerics/test_term_masks.py",
    ),
    Mutant("driver/dispatch.py", "(1 + refs[i].total_tokens / ATTENTION_TOKENS)", "1", "tests/unit/test_dispatch.py"),
    Mutant(
        "driver/dispatch.py", "if shares_prefix and k else 0", "if shares_prefix else 0", "tests/unit/test_dispatch.py"
    ),
    Mutant(
        "driver/publisher.py",
        "self.published(report.failed_replicas)",
        "self.published({})",
        "tests/unit/test_publisher.py",
    ),
    Mutant(
        "driver/publisher.py",
        "self._requested - len(report.failed_replicas)",
        "self._requested",
        "tests/unit/test_publisher.py",
    ),
    Mutant(
        "driver/publisher.py", "self.replicas[: self._requested],", "self.replicas,", "tests/unit/test_publisher.py"
    ),
    Mutant("driver/publisher.py", "exclusive=self.exclusive", "exclusive=True", "tests/unit/test_publisher.py"),
    Mutant("driver/publisher.py", "failed(error)", "pass", "tests/unit/test_publisher.py"),
    Mutant(
        "driver/publisher.py",
        "found, self._metrics = self._metrics, {}",
        "found = self._metrics",
        "tests/unit/test_publisher.py",
    ),
    Mutant("agent_loop/tool_agent.py", "head = (most + 1) // 2", "head = most // 2", "tests/unit/test_tool_agent.py"),
    Mutant(
        "agent_loop/tool_agent.py",
        "play.turns += bool(out.token_ids)",
        "play.turns += 1",
        "tests/unit/test_tool_agent.py",
    ),
    Mutant(
        "agent_loop/tool_agent.py",
        "self.server_manager.take(play.used - len(given))",
        "pass",
        "tests/unit/test_environment.py",
    ),
    Mutant(
        "algorithms/preference.py",
        "rejected[torch.argsort(pair[rejected])]",
        "rejected",
        "tests/numerics/test_preference_terms.py",
    ),
    Mutant(
        "algorithms/preference.py",
        '"rewards/accuracies": (chosen > rejected).double()',
        '"rewards/accuracies": (chosen >= rejected).double()',
        "tests/numerics/test_preference_terms.py",
    ),
    Mutant(
        "algorithms/preference.py",
        '"rewards/chosen": beta * chosen',
        '"rewards/chosen": chosen',
        "tests/numerics/test_preference_terms.py",
    ),
    Mutant("driver/rollouts.py", "least=4 * self.samples_per_prompt", "least=1", "tests/unit/test_rollouts_flow.py"),
    Mutant(
        "driver/rollouts.py",
        "self.played = 0\n            self.reasons",
        "self.reasons",
        "tests/unit/test_rollouts_flow.py",
    ),
    Mutant(
        "driver/rollouts.py",
        'if t.outcome == "ok" and t.purpose == "train"\n        ]',
        'if t.outcome == "ok"\n        ]',
        "tests/unit/test_rollouts_flow.py",
    ),
    Mutant(
        "driver/rollouts.py",
        "for group_id in reversed(group_ids):",
        "for group_id in group_ids:",
        "tests/unit/test_rollouts_flow.py",
    ),
    Mutant(
        "driver/rollouts.py",
        "for s in samples_of(t) if s.loss_tokens > 0",
        "for s in samples_of(t)",
        "tests/unit/test_rollouts_flow.py",
    ),
    Mutant(
        "driver/rollouts.py",
        "self._failure = self._failure or broken",
        "self._failure = broken",
        "tests/unit/test_rollouts_flow.py",
    ),
    Mutant(
        "driver/scheduler.py", "self.extra = math.ceil(", "self.extra = math.floor(", "tests/unit/test_scheduler.py"
    ),
    Mutant("batch.py", "while count and len(parts) > count:", "while False:", "tests/unit/test_batch.py"),
    Mutant("batch.py", "held |= path", "pass", "tests/unit/test_batch.py"),
    # -- algorithms that came later
    Mutant(
        "algorithms/losses.py",
        "k = torch.where(a < 0, k_negative, k_positive)",
        "k = torch.where(a < 0, k_positive, k_negative)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        "phi = (k * logs + rate * (1 - logs.exp())).exp()",
        "phi = (k * logs + rate * logs.exp()).exp()",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        "logs = columns.sum(d.detach())",
        "logs = columns.mean(d.detach())",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        'columns.sum(given) if weighed == "token" else columns.mean(given)',
        "columns.sum(given)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        "valid = (p - old <= clip_high) & (p - old >= -clip_low)",
        "valid = (p - old <= clip_high) | (p - old >= -clip_low)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        "+ drift_coef * d * d, _clip",
        "+ drift_coef * d, _clip",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        "found = entropy[columns.mask].sort().values",
        "found = entropy.sort().values",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py",
        "at = (1 - share) * max(0, len(found) - 1)",
        "at = (1 - share) * len(found)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/losses.py", "kept = entropy >= low", "kept = entropy > low", "tests/numerics/test_peer_options.py"
    ),
    Mutant(
        "algorithms/estimators.py",
        "torch.where(g.mean > 0, g.centred / g.mean.clamp(min=EPS), 0.0)",
        "g.centred / g.mean.abs().clamp(min=EPS)",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/resolve.py",
        '(*inputs, "is_weights")',
        "inputs",
        "tests/numerics/test_virtual_ranks.py::test_options_that_look_at_the_whole_step_see_no_rank_and_no_micro_batch",
    ),
    Mutant(
        "algorithms/resolve.py",
        'if bypass or spec.corrected == "own":',
        "if bypass:",
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/resolve.py",
        'outputs, own["two_pass"] = tuple(dict.fromkeys((*outputs, "entropy"))), True',
        'outputs = tuple(dict.fromkeys((*outputs, "entropy")))',
        "tests/numerics/test_peer_options.py",
    ),
    Mutant(
        "algorithms/presets.py",
        '"aggregation": "seq-mean-token-sum", "clip_low": 2e-3',
        '"aggregation": "seq-mean-token-mean", "clip_low": 2e-3',
        "tests/numerics/test_peer_options.py",
    ),
    # -- deadlines, figures, shares of rows
    Mutant(
        "driver/step.py",
        'step.log({"actor/reward_kl_penalty_coeff": Metric(controllers.kl_coef',
        'step.log({"actor/reward_kl_penalty_coeff": Metric(0.0',
        "tests/unit/test_step.py",
    ),
    Mutant(
        "driver/step.py",
        "len(returns) < 2 or",
        "len(returns) < 3 or",
        "tests/numerics/test_settings.py::test_explained_variance_by_hand",
    ),
    Mutant(
        "driver/step.py",
        'Refs(r for r in refs if r.purpose != "train" or r.trajectory_id in kept)',
        "Refs(r for r in refs if r.trajectory_id in kept)",
        "tests/unit/test_step.py",
    ),
    Mutant("driver/publisher.py", "for text in report.alarms:", "for text in ():", "tests/unit/test_publisher.py"),
    Mutant("driver/publisher.py", "self._under_way.cancel()", "pass", "tests/unit/test_publisher.py"),
    Mutant("driver/publisher.py", "timeout_s=2 * self.timeout_s)", "timeout_s=2e9)", "tests/unit/test_publisher.py"),
    Mutant(
        "driver/publisher.py",
        'Metric(report.canary_mean_abs, 1, "step", "max")',
        'Metric(report.num_bytes, 1, "step", "max")',
        "tests/unit/test_publisher.py",
    ),
    Mutant(
        "driver/dispatch.py",
        "cost = own + (0 if shared else prompt if shares_prefix else prompt * len(rows))",
        "cost = own + (0 if shared else prompt)",
        "tests/unit/test_dispatch.py",
    ),
    Mutant(
        "driver/dispatch.py",
        "used = own + (prompt if shares_prefix else prompt * len(rows))",
        "used = own + prompt",
        "tests/unit/test_dispatch.py",
    ),
    Mutant(
        "driver/scheduler.py",
        "self._running -= not group.complete\n        self._batch",
        "pass\n        self._batch",
        "tests/unit/test_scheduler.py",
    ),
    # -- rows without a teacher, calls of a turn
    Mutant("algorithms/weights.py", "every & taught", "every", "tests/numerics/test_term_masks.py"),
    Mutant(
        "agent_loop/tool_agent.py", "play.calls += len(allowed)", "play.calls += 1", "tests/unit/test_tool_agent.py"
    ),
    # -- the end of a step
    Mutant(
        "driver/rollouts.py",
        "self.cursor.step_ended()",
        "pass",
        "tests/unit/test_rollouts_flow.py::test_a_step_ends_for_the_cursor_and_for_the_share_of_invalid_answers",
    ),
    Mutant(
        "driver/rollouts.py",
        "self._invalid.step_ended()",
        "pass",
        "tests/unit/test_rollouts_flow.py::test_a_step_ends_for_the_cursor_and_for_the_share_of_invalid_answers",
    ),
    # -- budgets of steps, figures of reward models
    Mutant(
        "driver/scheduler.py",
        "paid = self._refills_per_step * (1 + self.next_step - self._budget.first_step)",
        "paid = self._refills_per_step",
        "tests/unit/test_scheduler.py",
    ),
    Mutant(
        "algorithms/preference.py",
        'metrics["accuracy"] = (scores[w] > scores[l]).double()',
        'metrics["accuracy"] = (scores[w] < scores[l]).double()',
        "tests/numerics/test_preference_terms.py",
    ),
    # a page is one token longer than it is
    Mutant("accel/cuda/attention.py", "token % PAGE + j) * K + k)", "token % (PAGE + 1) + j) * K + k)", CUDA),
    Mutant("accel/cuda/attention.py", "(token + j < length)", "(token + j <= length)", CUDA),
    Mutant("accel/cuda/attention.py", "(token + j >= length - window)", "(token + j > length - window)", CUDA),
    Mutant("accel/cuda/attention.py", 'precision="ieee") * scale', 'precision="ieee")', CUDA),
    # a code is read from the wrong half of its byte; values of 4 bits have no scale
    Mutant("accel/cuda/nf4.py", "tl.where(at % 2 == 0, both >> 4", "tl.where(at % 2 == 1, both >> 4", CUDA),
    Mutant("accel/cuda/nf4.py", "tl.where(inside, found * scale, 0.0)", "tl.where(inside, found, 0.0)", CUDA),
    # model.head_dtype=float32 is not passed on to SGLang
    Mutant("rollout/sglang.py", "if context.float32_head:", "if False:", "tests/unit/test_rollout_sglang.py"),
    # a part has fewer keys than it is worth; the parts of a row leave keys out
    Mutant("accel/cuda/attention.py", "tl.maximum(keys // KEYS, 1)", "tl.maximum((keys + KEYS - 1) // KEYS, 1)", CUDA),
    Mutant("accel/cuda/attention.py", "part * blocks // parts * BLOCK", "blocks // parts * part * BLOCK", CUDA),
    # a GPU run says nothing about operations without a kernel
    Mutant("accel/table.py", "choice.kernel.name != plain.PLAIN", "True", NOTES),
    Mutant("nn/kernel_notes.py", "if packed:", "if not packed:", NOTES),
    Mutant("nn/kernel_notes.py", "if keys != values:", "if keys < values:", NOTES),
    Mutant(
        "driver/assemble.py", "for workers in learner.models.values() if workers.trains)", "for workers in ())", NOTES
    ),
    Mutant("rollout/native/paged.py", "if shape.delta is not None:", "if False:", NOTES),
    # a shape is captured at every step; graphs have memory of their own; a prompt's known tokens are not in its pages
    Mutant("rollout/native/paged.py", "if step not in self._graphs:", "if True:", CAPTURED),
    Mutant("rollout/native/paged.py", "self._memory = graph.pool()", "pass", CAPTURED),
    Mutant("rollout/native/paged.py", "if job.done:", "if not job.done:", CAPTURED),
    # without rows: the size of another step; the states of other tokens; padding is written; a lone step is captured; too
    # many prompts; a row that is none; tokens that are not counted; padding that takes longer than launches
    Mutant("rollout/native/paged.py", "(self._sizes if len(positions) else self._idle)", "self._sizes", IDLE),
    Mutant("rollout/native/paged.py", "hidden[size:].index_select(0, self", "hidden.index_select(0, 1 + self", IDLE),
    Mutant("rollout/native/paged.py", "columns[:] = [[0], [-1],", "columns[:] = [[0], [0],", IDLE),
    Mutant("rollout/native/paged.py", "if self._captures and again else", "if self._captures else", IDLE),
    Mutant("rollout/native/paged.py", "self._idle_shapes.clear()", "pass", IDLE),
    Mutant("rollout/native/paged.py", "short and len(parts) <= MIXED_PROMPTS", "short", IDLE),
    Mutant("rollout/native/fused.py", "        if single:", "        if True:", IDLE),
    Mutant("rollout/native/runner.py", "            self._prompts.record(parts)", "            pass", IDLE),
    Mutant("rollout/native/prefill.py", "n * weights_of_layer(shape) <= facts", "n <= facts", IDLE),
    # a split is merged twice, or left out; a row without keys divides by zero
    Mutant("accel/cuda/attention.py", "inside = (b[:, None] < parts) &", "inside = (b[:, None] <= parts) &", CUDA),
    Mutant(
        "accel/cuda/attention.py",
        "for begin in range(0, parts, AT_ONCE)",
        "for begin in range(0, parts - 1, AT_ONCE)",
        CUDA,
    ),
    Mutant("accel/cuda/attention.py", "tl.where(total > 0, mixed / total, 0.0)", "mixed / total", CUDA),
    Mutant("accel/cuda/attention.py", "total * kept + tl.exp(sink - highest)", "total + tl.exp(sink - highest)", CUDA),
    Mutant("accel/cuda/attention.py", "62.0 / 2835", "63.0 / 28", CUDA),
    Mutant("accel/cuda/attention.py", "cap * _tanh(score / cap)", "cap * _tanh(score)", CUDA),
    Mutant("accel/cuda/attention.py", "range(0, parts, AT_ONCE)", "range(0, parts, AT_ONCE // 2 + 1)", CUDA),
    Mutant("accel/cuda/attention.py", "            if SINKS:\n", "            if False:\n", CUDA),
    Mutant(
        "accel/cuda/attention.py",
        "    if SINKS:\n        kept, total = _with_sink(highest",
        "    if False:\n        kept, total = _with_sink(highest",
        CUDA,
    ),
    Mutant("accel/cuda/rotary.py", "even * cos - odd * sin", "even * cos + odd * sin", CUDA),
    Mutant("accel/cuda/rotary.py", "position // PAGE)", "(position + 1) // PAGE)", CUDA),
    Mutant("accel/cuda/rotary.py", "if position >= 0:", "if position >= -1:", CUDA),
    Mutant("accel/cuda/layers.py", "tl.store(residual + n * C + c, x, mask=c < C)", "pass", CUDA),
    Mutant("accel/cuda/layers.py", "active.to(up.dtype)", "gate.to(up.dtype)", CUDA),
    Mutant("accel/cuda/sampling.py", "i == index[:, None] - 1", "i == index[:, None]", CUDA),
    Mutant(
        "accel/cuda/experts.py", "blocks = (end - begin + BLOCK - 1) // BLOCK", "blocks = (end - begin) // BLOCK", CUDA
    ),
    Mutant("accel/cuda/experts.py", "pair // EACH", "pair", CUDA),
    Mutant("accel/cuda/sampling.py", "tl.where(temperature == 0, greedy, drawn)", "drawn", CUDA),
    Mutant(
        "rollout/native/model.py",
        "[(0, 0), *zip(self._sizes, ends)]",
        "[(0, 0), *zip(self._sizes, self._sizes)]",
        PROMPTS,
    ),
    Mutant(
        "rollout/native/model.py",
        "(past[layer, kind].transpose(0, 1), own)",
        "(own, past[layer, kind].transpose(0, 1))",
        PROMPTS,
    ),
    Mutant(
        "rollout/native/model.py",
        "self._longest = max(self._sizes), max(ends)",
        "self._longest = max(ends), 1",
        PROMPTS,
    ),
    Mutant(
        "accel/cuda/segments.py",
        "_capped(use) or _missing(use) or _uneven(use)",
        "_missing(use) or _uneven(use)",
        PROMPTS,
    ),
    Mutant("accel/cuda/segments.py", "dim % HEAD_DIM_STEP", "dim % 2", PROMPTS),
    # sums of a block are not brought to the largest logit so far; a gradient leaves a factor out
    Mutant("accel/cuda/head.py", "kept * (drawn + moved * total)", "kept * drawn", HEAD_KERNELS),
    Mutant("accel/cuda/head.py", "kept * kept * squares", "kept * squares", HEAD_KERNELS),
    Mutant("accel/cuda/head.py", "dz *= 1.0 - bent * bent", "dz *= 1.0", HEAD_KERNELS),
    Mutant("accel/cuda/head.py", "needed = needed | (d_entropy != 0)", "pass", HEAD_KERNELS),
    Mutant("accel/cuda/head.py", "tl.div_rn(dz, temperature)", "dz", HEAD_KERNELS),
    Mutant("accel/cuda/head.py", "    if needed:\n", "    if d == d:\n", HEAD_KERNELS),
    Mutant(
        "accel/cuda/head.py",
        'tl.where(x == float("-inf"), x, cap * _tanh(x / cap))',
        "cap * _tanh(x / cap)",
        HEAD_KERNELS,
    ),
    Mutant("nn/linear_logprob.py", "targets.where(here, -1)", "targets", HEAD_KERNELS),
    Mutant(
        "accel/cuda/attention.py",
        'score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale',
        'score = tl.dot(query, tl.trans(key), input_precision="ieee")',
        CARD_MISMATCH,
    ),
    Mutant("accel/cuda/training.py", "(active * u)", "(g / (1.0 + tl.exp(-g)) * u)", CARD_MISMATCH),
    Mutant("nn/head_kernels.py", "here[:, -1] &= ~own[:, :-1].any(1)", "pass", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "closed = ~here | (z == -torch.inf)", "closed = ~here", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "raw.bias[at], raw", "raw.bias[ids[:, :1]], raw", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "torch.logaddexp(others, taken.logits[:, -1])", "others", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "entropy.masked_fill(none, 0)", "entropy", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "theirs *= 1 -", "theirs *= 1 - 0 *", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "theirs / raw.temperature[:, None]", "theirs", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "of_rest * share_of(log_p, rest)).where", "of_rest * p).where", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "of_entropy[0][:, 0] + log_p", "of_entropy[0][:, 0]", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "rest)).where(needed, 0)", "rest))", HEAD_NAMED),
    Mutant("nn/head_kernels.py", "gradients = gradients.masked_fill(self.logits == -torch.inf, 0)", "pass", HEAD_NAMED),
    Mutant("nn/linear_teacher.py", "if head.bias is None else None", "if True else None", HEAD_NAMED),
    Mutant("nn/linear_logprob.py", "        del raw  #", "        pass  #", "tests/numerics/test_head_memory.py"),
    Mutant("nn/linear_logprob.py", "del z, dz, raw  #", "pass  #", "tests/numerics/test_head_memory.py"),
    Mutant(
        "model_engine/memory.py",
        "4 if work.float32_head else DTYPE_BYTES[work.dtype])",
        "DTYPE_BYTES[work.dtype])",
        "tests/unit/test_plan.py",
    ),
    Mutant("nn/linear_teacher.py", "own[:, None].where(mine, -torch.inf)", "own[:, None]", HEAD_NAMED),
    Mutant("accel/cuda/prompts.py", "t[None, :] <= position", "t[None, :] < position", CUDA),
    Mutant("accel/cuda/prompts.py", "position = length - tokens + i", "position = i", CUDA),
    Mutant("accel/cuda/prompts.py", "lowest - window + 1", "lowest - window + BLOCK + 1", CUDA),
    Mutant("rollout/native/model.py", '{"cap": shape.attention_cap} if', '{"cap": 1.0} if', PROMPTS),
    Mutant("accel/cuda/prompts.py", "page * PAGE + token % PAGE + j", "page * PAGE + j", CUDA),
    Mutant("accel/cuda/skinny.py", "tl.minimum(begin + DEPTH_EACH, C)", "C", SKINNY),
    Mutant("accel/cuda/skinny.py", "range(0, PARTS)", "range(1, PARTS)", SKINNY),
    Mutant("accel/cuda/skinny.py", "partial + part * M * N + to", "partial + part * N + to", SKINNY),
    Mutant("accel/cuda/skinny.py", "bias + i % N", "bias + i", SKINNY),
    Mutant("accel/cuda/skinny.py", "n >= rows", "n > rows", SKINNY),
    Mutant("accel/cuda/skinny.py", "ours < GAIN * self", "ours < self", SKINNY),
    Mutant("rollout/native/paged.py", "            if job.done:", "            if not job.done:", MIXED),
    Mutant("rollout/native/paged.py", "counts.cumsum()", "counts.cumsum() - counts", MIXED),
    Mutant("rollout/native/paged.py", "self._cache.free(self._slots.pop(job))\n\n", "self._slots.pop(job)\n\n", MIXED),
    Mutant("rollout/native/paged.py", "tokens % PAGE\n", "tokens\n", MIXED),
    Mutant("rollout/native/fused.py", "(self.starts[1:] - 1)", "self.starts[1:]", MIXED),
    Mutant("accel/cuda/experts.py", "n * CHOSEN + k", "n * CHOSEN", CUDA),
    Mutant("accel/cuda/training.py", "g - normed * along[:, None]", "g", CUDA),
    Mutant("accel/cuda/training.py", "total += tl.sum(g * normed, 0)", "total = tl.sum(g * normed, 0)", CUDA),
    Mutant("accel/cuda/training.py", "r = (first + step) * ROWS", "r = (first + step + 1) * ROWS", CUDA),
    Mutant("accel/cuda/training.py", "(1.0 + g * (1.0 - share))", "(1.0 + g * share)", CUDA),
    Mutant("accel/cuda/training.py", "a * cos_a + b * sin_b,", "a * cos_a - b * sin_b,", CUDA),
    Mutant("accel/trained.py", "key <= at - (window", "key < at - (window", "tests/numerics/test_accel_table.py"),
    Mutant("accel/trained.py", "key > at", "key >= at", "tests/numerics/test_accel_table.py"),
    Mutant("nn/attention.py", '"window": window or 0', '"window": 0', "tests/numerics/test_attention.py"),
    Mutant("nn/linear_logprob.py", "+= head_product(dz.T, h)", "+= dz.T @ h", "tests/numerics/test_linear_logprob.py"),
    Mutant("nn/recompute.py", '*("aten.mm", "aten.addmm",', '*("aten.addmm",', CHECKPOINTED),
    Mutant("model_engine/memory.py", "2 * q + kv + 2 * wide", "q + kv + 2 * wide", CHECKPOINTED),
    Mutant(
        "planner/checkpointing.py", "if wants <= has or", "if wants < has or", "tests/unit/test_checkpointing_auto.py"
    ),
    Mutant(
        "config/moved.py",
        "isinstance(value, bool) else",
        "value in (0, 1) else",
        "tests/unit/test_checkpointing_auto.py",
    ),
    Mutant("nn/recompute.py", "again.uses += 1", "again.uses = 1", RECOMPUTE),
    Mutant("nn/recompute.py", ", t.storage_offset())", ", 0)", RECOMPUTE),
    Mutant("nn/fused.py", "norm(x, weight, eps), 2", "norm(x, weight, 2 * eps), 2", RECOMPUTE),
    Mutant("model_engine/optim.py", "increment_version(every)", "pass", COPY),
    Mutant("model_engine/compute_copy.py", "if before != now:", "if False:", COPY),
    Mutant("model_engine/compute_copy.py", "lent[p] if p in lent else ", "", COPY),
    Mutant("config/on_base.py", "return all(filecmp", "return True or all(filecmp", LORA),
    Mutant("model_engine/compute_copy.py", "copy.grad_dtype = master.dtype", "pass", COPY),
    Mutant("model_engine/compute_copy.py", "copy.grad = master.grad", "pass", COPY),
    Mutant("model_engine/compute_copy.py", "if not self._keeps:", "if False:", COPY),
    Mutant("model_engine/sharded_copy.py", "gather_from(shard, master.detach().to(self._dtype))", "pass", COPIES),
    Mutant("model_engine/sharded_copy.py", "p.grad_dtype = torch.float32", "pass", COPIES),
    Mutant("model_engine/sharded_copy.py", "gather_from(shard, master)", "pass", COPIES),
    Mutant("nn/torch_compat.py", "sharded.all_gather_outputs = []", "pass", COPIES),
    Mutant("accel/cuda/attention.py", "exact_splits_of(longest) if exact_rows else", "", EXACT_ROWS),
    Mutant("accel/cuda/products.py", "(n[:, None] < N) & inside", "(n[:, None] < N)", CUDA),
    Mutant("accel/cuda/blocks.py", " * scale[None, :]", "", CUDA),
    Mutant("accel/cuda/blocks.py", "tl.load(scale_at + block,", "tl.load(scale_at,", CUDA),
    Mutant("accel/cuda/blocks.py", "tl.load(scale_rows + n, mask=within, other=0)", "n // DEPTH", CUDA),
    Mutant("accel/cuda/blocks.py", "if exact_rows or rows > FEW_ROWS:", "if rows > FEW_ROWS:", CUDA),
    Mutant("accel/cuda/experts.py", "expert * tl.cdiv(N, DEPTH) + n", "expert + n", CUDA),
    Mutant("rollout/native/weights.py", "interleaved(of_row, half) if i < rotated else of_row", "of_row", CUDA_ENGINE),
    Mutant("rollout/embedded/receive.py", "if to.dtype.itemsize == 1 and", "if False and", CUDA_ENGINE),
    Mutant("accel/cuda/products.py", "    if ADDED:", "    if ADDED and BIASED:", EXACT_ROWS),
    Mutant("model_engine/passes.py", "rounded_weight(weight, self.compute)", "weight", HEAD_DTYPE),
    Mutant("nn/precision.py", "return weight.to(dtype).to(weight.dtype)", "return weight.clone()", HEAD_DTYPE),
    Mutant(
        "rollout/native/ops.py",
        "float32) if exact_head else use, without",
        "float32) if 0 else use, without",
        HEAD_DTYPE,
    ),
    Mutant("rollout/native/ops.py", "exact_rows=True)", "exact_rows=False)", EXACT_ROWS),
    Mutant(
        "rollout/embedded/sampler.py",
        "both[:, index] = joined",
        "both[:, : len(index)] = joined",
        "tests/unit/test_rollout_native.py",
    ),
    Mutant("rollout/embedded/core.py", "positions += ahead", "pass", LOOK_AHEAD),
    Mutant("rollout/embedded/core.py", "running.sampling(0, n, ahead)", "running.sampling(0, n)", LOOK_AHEAD),
    Mutant("rollout/embedded/core.py", "places[sources] = holes", "pass", LOOK_AHEAD),
    Mutant(
        "rollout/embedded/core.py", "np.argsort(launched.rows)[", "np.flatnonzero(launched.rows >= 0)[0 * ", LOOK_AHEAD
    ),
    Mutant("rollout/native/paged.py", "np.where(rows.drawn_by < 0, given, rows.drawn_by)", "given", LOOK_AHEAD),
    Mutant("accel/uniforms.py", "z ^ _shifted(z, 31)", "z ^ (z >> 31)", CUDA),
    Mutant("accel/cuda/sampling.py", "other=0) + 1).to(tl.uint64", "other=0)).to(tl.uint64", CUDA),
    Mutant("accel/cuda/truncation.py", "ties = k - above", "ties = k - above + 1", CUDA),
    Mutant("accel/cuda/truncation.py", "tl.cumsum(tied, 0) - tied", "tl.cumsum(tied, 0)", CUDA),
    Mutant(
        "accel/cuda/truncation.py",
        "tl.minimum(ties, wanted)",
        "wanted",
        CUDA,
        lives="below p = 1 no more ids are wanted than the k that remain; the minimum is for rounding",
    ),
    Mutant("accel/cuda/truncation.py", "tl.where(x == 0, 0.0, x)", "x", CUDA),
    Mutant("rollout/native/fused.py", "pairs.argsort(stable=True)", "pairs.argsort(descending=True)", CUDA_ENGINE),
    Mutant("rollout/native/fused.py", '"window": layer.window', '"window": 0', CUDA_ENGINE),
    Mutant(
        "rollout/native/fused.py",
        "delta, after = layer.out(mixed.flatten(1)), layer.out_norm",
        "delta, after = layer.out(mixed.flatten(1)), None",
        CUDA_ENGINE,
    ),
    # -- servers and replicas: what is verified, resumed, given up
    Mutant("rollout/supervisor.py", "        of.judged.set()\n", "", LOSSES),
    Mutant(
        "rollout/supervisor.py", "self._at_url and self.current.in_publish and not self.current.loaded", "False", LOSSES
    ),
    Mutant("rollout/replica.py", "of.in_publish, of.loaded = True, False", "of.in_publish = True", LOSSES),
    Mutant("rollout/replica.py", "of.verified = min(of.verified, source.version - 1)", "pass", LOSSES),
    Mutant("rollout/answers.py", "drawn.sure = len(drawn.ids)", "pass", "tests/unit/test_so_far.py"),
    Mutant("rollout/answers.py", "begun.keep(0, -1)", "pass", "tests/unit/test_so_far.py"),
    Mutant("rollout/calls.py", "await ended(waiting, AGAIN_S)", "return", CLIENT),
    Mutant("rollout/gate.py", "if self.paused and not self.asleep:", "if False:", CLIENT),
    Mutant("rollout/updates.py", "self._connection.fence(why)", "pass", CLIENT),
    Mutant(
        "rollout/starting.py", "if not self.found_paused:\n            await", "if True:\n            await", CLIENT
    ),
    Mutant(
        "rollout/native/kv.py",
        "self.states.write(slice(live), before, slice(live))",
        "pass",
        "tests/numerics/test_delta_rollout.py",
    ),
    Mutant("rollout/connection.py", "self.foreign = True", "pass", "tests/unit/test_so_far.py"),
    Mutant("weight_sync/faults.py", 'backend != "ray" and not on_cuda', 'backend == "" and not on_cuda', PLACES),
    Mutant("model_engine/faults.py", "if layout.pipeline > facts.layers:", "if False:", PLACES),
)


def planted_in(tree: Path, mutant: Mutant) -> str:
    """Plants it; the text of the file before."""
    path = tree / "verl" / mutant.file
    before = path.read_text()
    assert before.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} stands there {before.count(mutant.old)} times"
    path.write_text(before.replace(mutant.old, mutant.new))
    return before


def killed_by(tree: Path, mutant: Mutant) -> str:
    """The first failing test, or an empty string."""
    before = planted_in(tree, mutant)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        found = subprocess.run(
            [*command, *mutant.tests.split()], cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "a timeout"
    finally:
        (tree / "verl" / mutant.file).write_text(before)
    assert found.returncode in (0, 1), f"{mutant.file}: {mutant.new!r}\n{found.stdout[-2000:]}{found.stderr[-2000:]}"
    failed = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].removeprefix("FAILED ") if found.returncode else ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the file's name")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the number of the first mutant")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    chosen = [m for m in MUTANTS[given.first :] if given.only in m.file]
    home, trees, local = Path(tempfile.mkdtemp(prefix="mutants")), [], threading.local()

    def one(mutant: Mutant) -> str:
        if not hasattr(local, "tree"):
            local.tree = home / str(threading.get_ident())
            for name in ("verl", "tests", "bench", "examples", "docs"):
                shutil.copytree(ROOT / name, local.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", local.tree)
            trees.append(local.tree)
        by = killed_by(local.tree, mutant)
        print(f"{'killed by ' + by if by else 'LIVES':60s} {mutant.file}: {mutant.new.strip()[:70]}", flush=True)
        return by

    try:
        with ThreadPoolExecutor(given.jobs) as pool:
            found = list(pool.map(one, chosen))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    alive = [m for m, by in zip(chosen, found, strict=True) if not by]
    for mutant in alive:
        print(f"\nlives: {mutant.file}\n  {mutant.old}\n  {mutant.new}\n  {mutant.lives or 'a test is missing'}")
    share = 1 - len(alive) / max(1, len(chosen))
    print(f"\n{len(chosen) - len(alive)} of {len(chosen)} killed ({share:.1%}; at least {MUST_DIE:.0%})")
    return 0 if share >= MUST_DIE and all(m.lives for m in alive) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

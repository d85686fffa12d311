"""The native rollout engine: in-process continuous batching, without further packages, on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verl.errors import Refused
from verl.rollout import hf
from verl.rollout.base import RolloutContext
from verl.rollout.embedded.front import EmbeddedEngine
from verl.rollout.native.architecture import UnsupportedModel
from verl.rollout.native.options import Options
from verl.rollout.native.paged import why_slots
from verl.rollout.native.runner import NativeRunner


def build(
    options: Options, context: RolloutContext, *, lanes: int | None = None, compiled: bool = True
) -> EmbeddedEngine:
    """Return the engine without weights, or the hf engine for a model that native does not compute. `lanes` is the
    number of CPU threads that each decode a share of the rows (None: torch's number). With `compiled`, accel/cpu's
    kernels are used where there are any."""
    if context.dtype not in (torch.float32, torch.bfloat16):
        raise Refused(f"dtype={context.dtype}: native computes float32 or bfloat16")
    try:
        runner = NativeRunner(options, context, lanes=lanes, compiled=compiled)
    except UnsupportedModel as e:
        if context.noise is not None:
            fix = "leave noise_sigma_start out"
            raise Refused(f"rollout.engine_options.noise_sigma_start: no other engine has noise, and {e}; {fix}") from e
        if options.replay_routes:
            key = "rollout.engine_options.replay_routes=true"
            raise Refused(f"{key}: no other engine records routes, and {e}; leave it out") from e
        return hf.build(hf.Options(), context, notes=(f"rollout: the hf engine is used, since {e}",))
    device = torch.device(context.device)
    slower = {
        "compiled kernels": runner.ops.missing,
        "the decode kernels": runner.without_fused,
        "pages and captured steps": why_slots(device, runner.model.shape, routes=options.replay_routes),
    }
    cached = options.prefix_cache_tokens > 0
    return EmbeddedEngine(runner, context, prefix_cache=cached, notes=slower_notes(slower))


def slower_notes(reasons: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return a line for each kind of kernel that is not used, with the reason; None: it is used or not needed."""
    return tuple(f"rollout: slower without {kind} ({reason})" for kind, reason in reasons.items() if reason)

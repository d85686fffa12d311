"""The check at start that the passes of an engine compute the model and nothing else."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.passes import Passes, ReplicaWeights
from verl.nn.packing import check_packing, refuse_neighbours, refuse_noise, refused, short_windows


def prove(passes: Passes, *, share_prefix: bool) -> float:
    """Raise ValueError if a pass is random, if packed rows influence each other, if sliding windows are ignored, or if
    the model changes its logits after the head. Return the largest difference from the model's own pass. The passes
    compute in full precision during the check."""
    local, compute, master = passes.local, passes.compute, passes.local.settings.precision.master
    text, what = local.model.config.get_text_config(), type(local.model).__name__
    vocab, output = text.vocab_size, "logprobs" if local.settings.head == "lm" else "values"
    limits = (local.settings.longest, getattr(text, "max_position_embeddings", None))
    longest = min(filter(None, limits), default=0)

    def ours(batch: Batch) -> Tensor:
        return passes.policy_outputs(batch)["logprobs"].to("cpu", master)

    with refused(what, padded=not passes.packed), torch.no_grad():
        refuse_noise(lambda batch: passes.infer(batch, (output,))[output], vocab, what=what)
        own = partial(passes.models_own, form=ReplicaWeights(dtype=master))
        passes.compute = master
        try:
            if not passes.packed:
                return check_packing(ours, own, vocab, share_prefix=share_prefix, what=what, padded=True)
            with short_windows(local.model):
                worst = check_packing(ours, own, vocab, share_prefix=share_prefix, what=what)
            return max(worst, refuse_neighbours(ours, vocab, longest, what=what))
        finally:
            passes.compute = compute

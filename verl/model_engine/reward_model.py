"""Reward models: the policy's engine with a scalar head without a bias, from a folder of either kind."""

from __future__ import annotations

from pathlib import Path

from verl.checkpoint.score import WEIGHT, read_score
from verl.model_engine.optim import OptimSpec
from verl.model_engine.torch_engine import TorchEngine, load_causal_lm


def load_reward_model(
    path: Path | str,
    *,
    fresh_head: bool = False,
    optim: OptimSpec | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens_per_microbatch: int = 16384,
    attention_mode: str = "auto",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    dump_dir: Path | None = None,
) -> TorchEngine:
    """An engine whose `infer(batch, ("scores",))` gives [R]: the score after each row's last token.

    path: what `verl rm` exported or any one-label sequence classifier; with `fresh_head` also a causal LM, whose head starts at
    0 (every first score is 0, whatever the seed). optim None: frozen."""
    folder = Path(path).expanduser()
    score = read_score(folder)
    if score is None and not fresh_head:
        raise ValueError(
            f"{folder}: no {WEIGHT} in its weights: a language model, not a reward model; train one with verl rm"
        )
    engine = TorchEngine(
        load_causal_lm(folder, trust_remote_code=trust_remote_code, needs_lm_head=False),
        head="score",
        optim=optim,
        dtype=dtype,
        device=device,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        attention_mode=attention_mode,
        gradient_checkpointing=gradient_checkpointing and optim is not None,
        source_dir=folder,
        dump_dir=dump_dir,
    )
    assert engine.value_head is not None
    if score is not None:
        engine.value_head.weight.data.copy_(score)
    return engine

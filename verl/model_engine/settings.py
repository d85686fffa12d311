"""The settings of an engine around a model that is in memory, and the precisions that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verl.accel.devices import device_facts
from verl.errors import Refused
from verl.model_engine.base import Part
from verl.model_engine.lm_head import Teacher
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.models.families import Part as ModelPart
from verl.models.pictures import Pictures
from verl.nn.heads import Head
from verl.nn.precision import native_bf16

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings with which an engine computes and trains its model. Fields without a line are as in
    `EngineContext`."""

    head: Head = "lm"
    optim: OptimSpec | None = None
    """None for a frozen model."""
    dtype: str = "bfloat16"
    head_dtype: str = "auto"
    device: str = "cpu"
    max_tokens_per_microbatch: int = 16384
    attention_mode: str = "auto"
    """auto or padded."""
    gradient_checkpointing: str = "none"
    compile: bool = False
    """The layers of models of known families are compiled by torch.compile."""
    share_prefix: bool = True
    """A prompt can be computed once per group and micro-batch."""
    dump_dir: Path | None = None
    emulate_bf16: bool | None = None
    """Compute bfloat16 as rounded weights in float32 arithmetic; None: as the hardware needs."""
    copies_weights: bool | None = None
    """Compute bfloat16 with a copy of the weights in place of autocast; None: as suits the device."""
    score: Tensor | None = None
    """The weight [1, H] that a value or score head starts with."""
    teacher: Teacher | None = None
    """The head of the teacher of a student."""
    top_k: int = 0
    longest: int | None = None
    lora: LoraSpec | None = None
    base: Path | None = None
    """The folder of the model, for an adapter that LoRA starts from."""
    pictures: Pictures | None = None
    """The content of the images in batches that lack it."""
    banned: Sequence[int] = ()
    freeze: Sequence[ModelPart] = ()
    replays_routes: bool = False
    offload: Sequence[Part] = ()
    """The parts of the state that are on the device only while they are used."""

    @property
    def packed(self) -> bool:
        """True: packed rows; False: one padded row per sequence, the reference implementation."""
        return self.attention_mode != "padded"

    @property
    def precision(self) -> Precision:
        if self.dtype not in DTYPES:
            raise Refused(f"model.dtype={self.dtype!r}: one of {', '.join(DTYPES)}")
        dtype = DTYPES[self.dtype]
        master = torch.float64 if dtype == torch.float64 else torch.float32
        emulate = not native_bf16(torch.device(self.device)) if self.emulate_bf16 is None else self.emulate_bf16
        rounds = dtype == torch.bfloat16 and emulate
        wanted = self.copies_weights
        if wanted is None:
            wanted = device_facts(torch.device(self.device).type).copies_weights
        copies = wanted and dtype == torch.bfloat16 and not rounds
        return Precision(dtype, master, master if rounds else dtype, rounds, copies)


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of an engine."""

    dtype: torch.dtype
    """The format in which the weights are read."""
    master: torch.dtype
    """The format in which the weights are trained."""
    compute: torch.dtype
    """The format of the arithmetic."""
    rounds: bool
    """Weights are rounded to `dtype`, and the arithmetic is in `master`."""
    copies: bool
    """A copy of the weights in `compute` is used, cast once per optimizer step; otherwise autocast where `compute` is
    not `master`."""


DEFAULTS = EngineSettings()

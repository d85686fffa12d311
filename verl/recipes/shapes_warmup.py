"""The warm-up of the recipe `shapes`: supervised fine-tuning by the model engine itself, since `verl sft` reads no rows
with images yet."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

STEPS, ROWS = 300, 64  # optimizer steps, rows of each


def warm_up(base: Path, rows: Path, out: Path, *, steps: int, seed: int) -> Path:
    """Train the model in `base` on conversations with one picture each, and write it to `out`. Return that folder."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from verl.algorithms.losses import nll
    from verl.batch import pack
    from verl.model_engine.optim import OptimSpec
    from verl.model_engine.settings import EngineSettings
    from verl.model_engine.torch_engine import TorchEngine
    from verl.models import tiny
    from verl.models.pictures import Pictures
    from verl.objective import Term
    from verl.transfer_queue.media import MemoryMedia

    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForImageTextToText.from_pretrained(base).float()
    store = MemoryMedia()
    pictures = Pictures(base, store)
    samples = _samples(rows, tokenizer, model.config, store, pictures)
    optim = OptimSpec(
        lr=2e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        schedule="wsd",
        decay_ratio=0.5,
        warmup_steps=min(20, steps // 2),
        min_lr_ratio=0.05,
        total_steps=steps,
    )
    engine = TorchEngine(model, EngineSettings(dtype="float32", optim=optim, pictures=pictures))
    random = Random(seed)
    for _ in range(steps):
        batch = pack(random.sample(samples, min(ROWS, len(samples))), share_prefix=False)
        tokens = batch.num_loss_tokens
        weights = torch.full((tokens,), 1.0 / tokens, dtype=torch.float64)
        engine.forward_backward(batch.with_columns({"w/nll": weights}), [Term(name="nll", fn=nll)])
        engine.optim_step()
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(base / "preprocessor_config.json", out)
    return tiny.save(engine.model, tokenizer, out)


def _samples(path: Path, tokenizer: Any, config: Any, store: Any, pictures: Any) -> list[Any]:
    """Return the conversations as rows of a model, with the pictures in the store."""
    import pyarrow.parquet as pq

    from verl.models.families import family_of
    from verl.types import Medium, Sample, Segment

    family, found = family_of(config), []
    assert family is not None and family.expansion is not None
    for i, row in enumerate(pq.read_table(path).to_pylist()):
        question, answer = row["messages"]
        parts = [{"type": "image"}, {"type": "text", "text": question["content"].removeprefix("<image>")}]
        prompt = {"role": "user", "content": parts}
        ids = tokenizer.apply_chat_template([prompt], add_generation_prompt=True, return_dict=False)
        reference = store.put(row["images"][0]["bytes"], "warm-up")
        at, own = ids.index(config.image_token_id), family.expansion(config, pictures.of([reference])[reference].grid)
        ids[at : at + 1] = own.ids.tolist()
        medium = Medium(reference, at + own.start, own.tokens)
        seen = Segment(ids=np.array(ids), source="prompt", media=(medium,))
        reply = tokenizer(answer["content"])["input_ids"] + [tokenizer.eos_token_id]
        segments, name = (seen, Segment(ids=np.array(reply), source="stored")), str(i)
        found.append(Sample(sample_id=name, trajectory_id=name, group_id=name, purpose="train", segments=segments))
    return found

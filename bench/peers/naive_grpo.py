"""GRPO in plain torch + transformers, as one writes it in an afternoon: left-padded `generate`, one update per step.

python naive_grpo.py SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from meter import Meter, clocks, elapsed
from task import read_rows, score, truth
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(spec: dict[str, Any], result: Path) -> None:
    meter = Meter()
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    if spec["compiled"]:
        model.forward = torch.compile(model.forward, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], weight_decay=0.0)
    n, prompts = spec["samples_per_prompt"], spec["prompts_per_step"]
    rows = read_rows(spec["rows"], prompts * spec["steps"])
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=spec["dtype"] == "bfloat16")
    for start in range(0, len(rows), prompts):
        batch = rows[start : start + prompts]
        began = clocks()
        with autocast:
            ids, mask, responses, response_mask = generate(model, tokenizer, batch, n, spec["max_response_tokens"])
        rolled = clocks()
        advantages = grade(tokenizer, batch, responses, response_mask, n)
        scored = clocks()
        full_mask = torch.cat([mask, response_mask], 1)
        with autocast:
            logits = model(ids, attention_mask=full_mask, logits_to_keep=responses.shape[1] + 1).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, responses[..., None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        objective = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -(objective * response_mask).sum() / response_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        meter.step(
            **elapsed("rollout", began, rolled),
            **elapsed("update", scored, clocks()),
            prompt_tokens=int(mask.sum()),
            response_tokens=int(response_mask.sum()),
            longest_response_tokens=int(response_mask.sum(1).max()),
        )
    meter.write(result, versions={"torch": torch.__version__, "transformers": transformers.__version__})


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, batch: list[dict[str, Any]], n: int, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> ids [B, P + R], prompt mask [B, P], responses [B, R], response mask [B, R]; B = len(batch) * n."""
    texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in batch]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    prompt_ids = encoded["input_ids"].repeat_interleave(n, 0)
    mask = encoded["attention_mask"].repeat_interleave(n, 0)
    ids = model.generate(
        input_ids=prompt_ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    responses = ids[:, prompt_ids.shape[1] :]
    ended = responses == tokenizer.eos_token_id
    return ids, mask, responses, ((ended.cumsum(1) - ended.long()) == 0).long()  # up to and with the first end


def grade(tokenizer: Any, batch: list[dict[str, Any]], responses: Tensor, response_mask: Tensor, n: int) -> Tensor:
    """Group-normalised rewards [B, 1]."""
    kept = responses.masked_fill(response_mask == 0, tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
    rewards = torch.tensor([score(text, truth(batch[i // n])) for i, text in enumerate(texts)]).view(-1, n)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))

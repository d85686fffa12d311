"""GRPO in one file, without the framework: the idea that verl scales. Run: python examples/one_file_grpo.py [steps]

A 1.6M-parameter model is made from nothing, warmed up on a teacher that forgets carries, and then learns to carry from
a reward that is only right or wrong. Needs torch and transformers; about five minutes on two CPU cores. Everything that
verl adds (batching, packing, weight sync, resume, checks) is left out on purpose.
"""

import random
import re
import sys
import time

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>", *"0123456789+-=,;#"]
VOCAB += ["?"] * (32 - len(VOCAB))  # the model has a round number of tokens
ID = {token: i for i, token in enumerate(VOCAB)}
PAD, END = ID["<pad>"], ID["<|end|>"]
MAX_NEW = 40  # the longest right answer has 36 tokens
BF16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))  # else emulated, and slower than float32


# -- the task: columns from the right, "digit op digit op carry = result, new carry;", then # and the number
# -------------


def draw(rng, held_out):
    """A problem of one side of the split: nothing held out is ever trained on."""
    while True:
        a, b, op = rng.randint(10, 999), rng.randint(10, 999), rng.choice("+-")
        a, b = (max(a, b), min(a, b)) if op == "-" else (a, b)
        if ((7 * a + 13 * b + ord(op)) % 16 == 0) == held_out:
            return a, b, op


def trace(a, b, op, forget):
    """The worked answer. With `forget` every carry is dropped, and the number is what the columns then say."""
    width, carry, out, digits = max(len(str(a)), len(str(b))), 0, "", ""
    for x, y in zip(str(a)[::-1].ljust(width, "0"), str(b)[::-1].ljust(width, "0")):
        value = int(x) + int(y) + carry if op == "+" else int(x) - int(y) - carry
        new = 0 if forget else int(value > 9 or value < 0)
        out += f"{x}{op}{y}{op}{carry}={value % 10},{new};"
        digits, carry = str(value % 10) + digits, new
    return out + "#" + (str(int(digits)) if forget else str(a + b if op == "+" else a - b))


def reward(text, a, b, op):
    found = re.search(r"#(\d+)$", text)
    return float(found is not None and int(found.group(1)) == (a + b if op == "+" else a - b))


def encode(text):
    return [ID[c] for c in text]


def prompt_ids(a, b, op):
    return [ID["<|user|>"], *encode(f"{a}{op}{b}="), END, ID["<|assistant|>"]]


# -- rollout: sample the answers of a batch of prompts, keys and values cached
# -------------------------------------------


@torch.no_grad()
def generate(model, prompts, greedy=False):
    """[B] prompts -> ([B, T] ids with prompts padded on the left, [B, R] mask of the sampled tokens)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = (ids != PAD).long()
    done = torch.zeros(len(prompts), dtype=torch.bool)
    cache, last, sampled = None, ids, []
    for _ in range(MAX_NEW):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -last.shape[1] :]
        out = model(input_ids=last, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        new = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        new = torch.where(done, PAD, new)
        sampled.append(~done)
        done = done | (new == END)
        last, ids, mask = (
            new[:, None],
            torch.cat([ids, new[:, None]], 1),
            torch.cat([mask, (~done | (new == END)).long()[:, None]], 1),
        )
        if done.all():
            break
    return ids, torch.stack(sampled, 1)


def texts(ids, sampled):
    rows = ids[:, -sampled.shape[1] :].tolist()
    return ["".join(VOCAB[t] for t, keep in zip(row, m) if keep and t > END) for row, m in zip(rows, sampled.tolist())]


def logprobs(model, ids, responses):
    """[B, R] log-probs of the last R tokens."""
    mask = (ids != PAD).long()
    mask[:, -responses:] = 1
    out = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    logits = out.logits[:, -responses - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, -responses:, None])[..., 0]


# -- training
# ----------------------------------------------------------------------------------------------------------------


def warm_up(model, rng, steps):
    """Supervised: imitate the forgetful teacher. The loss is on the answer's tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * max(0.05, min(1, 2 * (1 - step / steps)))
        rows = []
        for _ in range(64):
            problem = draw(rng, held_out=False)
            rows.append((prompt_ids(*problem), [*encode(trace(*problem, forget=rng.random() < 0.65)), END]))
        width = max(len(p) + len(r) for p, r in rows)
        ids = torch.tensor([p + r + [PAD] * (width - len(p) - len(r)) for p, r in rows])
        target = torch.tensor([[-100] * len(p) + r + [-100] * (width - len(p) - len(r)) for p, r in rows])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=BF16):
            logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits.float().transpose(1, 2), target[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"warm-up {step + 1}: loss {loss.item():.3f}", flush=True)


def grpo(model, rng, steps, prompts=32, n=8):
    """n answers per prompt; an answer's advantage is its reward against its own group; one on-policy update per
    step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for step in range(steps):
        start = time.time()
        problems = [draw(rng, held_out=False) for _ in range(prompts)]
        ids, sampled = generate(model, [prompt_ids(*p) for p in problems for _ in range(n)])
        scores = torch.tensor([reward(text, *problems[i // n]) for i, text in enumerate(texts(ids, sampled))])
        group = scores.view(prompts, n)
        advantage = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)).flatten()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=BF16):
            now = logprobs(model, ids, sampled.shape[1])
        ratio = (now - now.detach()).exp()  # 1, with the gradient of log pi: the policy has not moved since it sampled
        loss = -(ratio * advantage[:, None] * sampled).sum() / sampled.sum()  # one division, by the tokens of the step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step + 1}: reward {scores.mean():.3f}, {time.time() - start:.1f} s", flush=True)


def accuracy(model, problems):
    ids, sampled = generate(model, [prompt_ids(*p) for p in problems], greedy=True)
    return sum(reward(t, *p) for t, p in zip(texts(ids, sampled), problems)) / len(problems)


def main(steps=25, warm_up_steps=500, seed=0):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=48,
            intermediate_size=512,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
        )
    )
    held_out = [draw(random.Random(10_000 + i), held_out=True) for i in range(256)]
    warm_up(model, rng, warm_up_steps)
    before = accuracy(model, held_out)
    grpo(model, rng, steps)
    after = accuracy(model, held_out)
    print(f"held-out greedy accuracy {before:.3f} -> {after:.3f}")
    return before, after


if __name__ == "__main__":
    if not all(word.isdigit() for word in sys.argv[1:]):
        sys.exit(__doc__)
    main(*map(int, sys.argv[1:]))

"""The classic three stages on a task with a known true score: SFT, a reward model from pairs, PPO against it.

    python examples/three_stages.py run.seed=0

The reward model never sees the true score, only pairs (the worked answer with its carries, the one that forgets them).
The last lines show how good it is, whether the true accuracy rose with the modelled reward, and where the two differ
(over-optimisation).
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from verl.quickstart import last_export, make_inputs
from verl.recipes import arithmetic

TRAIN_PAIRS, EVAL_PAIRS = 8000, 256


def main(argv: Sequence[str]) -> int:
    from verl.cli import guarded

    if {"-h", "--help"} & set(argv):
        print(f"{__doc__}\n{three_stages.__doc__}")
        return 0
    return guarded(lambda: three_stages(list(argv)))


def three_stages(overrides: list[str]) -> int:
    """Own keys: run.seed, run.root_dir, sft_steps, rm_steps, ppo_steps, sft_model=DIR (skips stage one). Other keys are
    PPO's."""
    from verl.config.load import load_config
    from verl.driver.launch import run_rl, run_supervised

    console = Console()
    given = dict(a.partition("=")[::2] for a in overrides if "=" in a)
    seed, root = int(given.get("run.seed", "0")), Path(given.get("run.root_dir", "runs"))
    home, started = root / "three_stages", time.monotonic()
    common = [f"run.root_dir={root}", f"run.seed={seed}"]
    base = make_inputs(home, seed)
    for name, count, held in (("pairs", TRAIN_PAIRS, False), ("pairs_heldout", EVAL_PAIRS, True)):
        write_pairs(home / "data" / f"{name}.jsonl", count, seed=4000 + seed, held=held)

    console.rule("[bold]1 of 3[/] supervised fine-tuning on an imperfect teacher")
    start = given.get("sft_model")
    if start is None:
        args = [
            "recipe=quickstart_warmup",
            f"model.path={base}",
            f"data.train_files=[{home}/data/sft.jsonl]",
            "run.name=three_stages/sft",
            *common,
        ]
        args += [f"run.total_steps={given['sft_steps']}"] if "sft_steps" in given else []
        start = str(last_export(run_supervised(load_config(args), "sft", title="three stages: SFT").dir))

    console.rule("[bold]2 of 3[/] a reward model from pairs: right work against forgotten carries")
    trained = run_supervised(
        load_config(
            [
                f"model.path={start}",
                f"data.train_files=[{home}/data/pairs.jsonl]",
                f"data.eval_files=[{home}/data/pairs_heldout.jsonl]",
                "run.name=three_stages/rm",
                f"run.total_steps={given.get('rm_steps', '250')}",
                "step.prompts_per_step=32",
                "optim.lr=5e-4",
                "optim.schedule=linear",
                "optim.warmup_steps=10",
                "optim.weight_decay=0",
                "preference.center_coef=0.01",
                "data.max_tokens_per_row=128",
                "run.eval_every_steps=50",
                "run.keep_last_checkpoints=1",
                *common,
            ]
        ),
        "rm",
        title="three stages: reward model",
    )
    accuracy = trained.evals["val/accuracy"]

    console.rule("[bold]3 of 3[/] PPO: the reward is the model's score")
    own = ("run.seed", "run.root_dir", "sft_model", "sft_steps", "rm_steps", "ppo_steps")
    done = run_rl(
        load_config(
            [
                "recipe=quickstart",
                f"model.path={start}",
                f"data.train_files=[{home}/data/train.jsonl]",
                f"data.eval_files=[{home}/data/heldout.jsonl]",
                f"reward.model={last_export(trained.dir)}",
                "run.name=three_stages/ppo",
                f"run.total_steps={given.get('ppo_steps', '20')}",
                "algorithm.name=ppo",
                "algorithm.lam=1.0",
                "algorithm.critic_warmup_steps=5",
                "critic.lr=5e-4",
                "algorithm.kl_reward_coef=0.05",
                *common,
                *(a for a in overrides if a.partition("=")[0] not in own),
            ]
        ),
        title="three stages: PPO",
        quiet=True,
    )
    _close(console, home, done.dir, seed, accuracy, time.monotonic() - started)
    return 0


def write_pairs(path: Path, count: int, *, seed: int, held: bool) -> Path:
    """Pairs of worked answers to one problem: the right one, and one that forgets its carries or has one wrong digit.

    Forgotten carries alone would teach the model to like carries, and PPO to write them everywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    rng = random.Random(seed)
    for problem in arithmetic.problems(seed, held=held):
        right, wrong = (arithmetic.trace(problem, forget_carries=f) for f in (False, True))
        if right == wrong or rng.random() < 0.6:
            wrong = one_wrong_digit(right, rng)
        if right != wrong:
            rows.append(json.dumps({"prompt": arithmetic.prompt(problem), "chosen": right, "rejected": wrong}) + "\n")
        if len(rows) == count:
            break
    random.Random(seed).shuffle(rows)
    path.write_text("".join(rows))
    return path


def one_wrong_digit(text: str, rng: random.Random) -> str:
    """The text with one of its digits replaced by another; a carry (after a comma) by the other carry."""
    at = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
    carry = text[at - 1 : at] == ","
    return (
        text[:at]
        + ("01"[text[at] == "0"] if carry else rng.choice([d for d in "0123456789" if d != text[at]]))
        + text[at + 1 :]
    )


def _close(console: Console, home: Path, ppo: Path, seed: int, rm_accuracy: float, wall_s: float) -> None:
    """True against modelled reward, from the texts of every step."""
    from verl.track.samples import read_samples, sample_steps

    curve = []
    for n in sample_steps(ppo):
        rows = [r for r in read_samples(ppo, n) if r.purpose == "train"]
        modelled = fmean(r.reward for r in rows)
        true = fmean(_true(r.prompt_text, r.response_text) for r in rows)
        curve.append({"step": n, "modelled": round(modelled, 4), "true": round(true, 4)})
    held = {}
    for n in sample_steps(ppo, "eval"):
        rows = [r for r in read_samples(ppo, n, "eval") if "/greedy/" in r.group_id]
        held[n] = fmean(_true(r.prompt_text, r.response_text) for r in rows)
    before, after = held[min(held)], held[max(held)]
    table = Table("step", "modelled reward", "true reward", title="Training answers", title_justify="left")
    for point in curve[:: max(1, len(curve) // 8)]:
        table.add_row(str(point["step"]), f"{point['modelled']:.3f}", f"{point['true']:.3f}")
    console.print(table)
    parted = over_optimised(curve)
    console.print(f"reward model: {rm_accuracy:.3f} of held-out pairs in the right order")
    console.print(f"true held-out greedy accuracy: {before:.3f} -> {after:.3f}")
    console.print(
        "over-optimisation: "
        + (f"from step {parted} on the modelled reward rises while the true one falls" if parted else "none seen")
    )
    summary = {
        "seed": seed,
        "rm_accuracy": rm_accuracy,
        "true_before": before,
        "true_after": after,
        "over_optimised_from": parted,
        "curve": curve,
        "seconds": round(wall_s, 1),
    }
    (home / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.print(f"{wall_s:.0f} s in all. summary: {home}/summary.json; report: {(ppo / 'report.html').resolve()}")


def over_optimised(curve: Sequence[dict[str, float]], fall: float = 0.05) -> int | None:
    """The step with the best true reward, if the true reward fell by `fall` after it while the modelled one rose."""
    if not curve:
        return None
    best = max(curve, key=lambda p: p["true"])
    last = curve[-1]
    return int(best["step"]) if best["true"] - last["true"] >= fall and last["modelled"] > best["modelled"] else None


def _true(prompt_text: str, response_text: str) -> float:
    a, op, b = next((p, op, q) for op in "+-" for p, _, q in [prompt_text.partition("=")[0].partition(op)] if q)
    problem = (int("".join(c for c in a if c.isdigit())), int(b), op)
    return arithmetic.compute_score(arithmetic.DATA_SOURCE, response_text, str(arithmetic.answer(problem)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

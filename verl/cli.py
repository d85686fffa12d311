"""verl VERB [key=value ...]. No torch is imported before a verb needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from verl.config.dialect import Note, VerlDefaults

USAGE = """usage: verl VERB [key=value ...]

  train     recipe=NAME model.path=DIR ...     reinforcement learning (--replay STEP: recompute a recorded step)
  sft       model.path=DIR data.train_files=[F] supervised fine-tuning
  rm        model.path=DIR data.train_files=[F] a reward model from preference pairs
  dpo       model.path=DIR data.train_files=[F] preference training (preference.loss=dpo, ipo, kto, orpo, simpo, ...)
  eval      model.path=DIR data.eval_files=[F] accuracy of a model, nothing trained
  generate  model.path=DIR prompt=TEXT [n=1]   answers to one prompt
  plan      (as train)                         every derived size and the memory, without loading anything
  show      RUN | --live RUN | algorithms | algorithm=NAME | keys | recipes | config [key=value ...]
  export    RUN_OR_CHECKPOINT OUT_DIR          the Hugging Face folder of a checkpoint
  doctor    [RUN]                              this machine, what is installed, what a run waits for

Keys are those of `verl show config`; verl's own keys (data.train_batch_size=..., actor_rollout_ref....) work as well.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if args else 2
    verb, rest = args[0], args[1:]
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, 1)
        return _fail(f"there is no verb {verb!r}" + (f"; did you mean {near[0]!r}?" if near else "") + " (verl --help)")
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    return guarded(lambda: VERBS[verb](rest))


def guarded(work: Callable[[], int]) -> int:
    """Run; turn what went wrong into an exit code and a last line with the first cause."""
    try:
        return work()
    except KeyboardInterrupt as e:
        return _fail(str(e) or "interrupted", 130)
    except ValueError as e:
        return _fail(str(e), 2)
    except Exception as e:  # the outermost frame: print the traceback, then the first cause last
        import traceback

        from verl.driver.stopping import PREEMPTED, Stopped

        if isinstance(e, Stopped):
            return _fail(str(e), PREEMPTED)
        if not _expected(e):
            traceback.print_exc()
        cause = e
        while cause.__cause__ is not None:
            cause = cause.__cause__  # type: ignore[assignment]
        name = "" if _expected(cause) else f"{type(cause).__name__}: "
        return _fail(f"{name}{cause}", 1)


def _expected(e: BaseException) -> bool:
    from verl.driver.rollouts import RunEnded
    from verl.weight_sync.base import SyncError
    from verl.workers.waits import DeadlineExpired

    return isinstance(e, RunEnded | SyncError | DeadlineExpired | FloatingPointError | OSError)


def _fail(text: str, code: int = 2) -> int:
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def train(args: list[str], *, verl_defaults: VerlDefaults | None = None) -> int:
    from verl.config.load import load_config

    if "--replay" in args:
        at = args.index("--replay")
        if at + 1 >= len(args) or not args[at + 1].isdigit():
            raise ValueError("--replay needs a step number: verl train --replay 3 run.name=RUN ...")
        from verl.driver.replay import replay

        return replay([*args[:at], *args[at + 2 :]], int(args[at + 1]))
    resolved = load_config(args, verl_defaults=verl_defaults)
    print_notes(resolved.notes)
    from verl.driver.launch import run_rl

    finished = run_rl(resolved)
    print_finished(finished.steps, finished.seconds, finished.evals, finished.dir, finished.report)
    return 0


def print_notes(notes: Sequence[Note]) -> None:
    """What became of verl's keys."""
    if notes:
        from verl.config.dialect import render_notes

        print(render_notes(notes))


def print_finished(steps: int, seconds: float, evals: Mapping[str, float], run_dir: Path, report: Path | None) -> None:
    if steps == 0:
        print(f"{run_dir} was complete already: no step was left; ask for more with run.total_steps=")
    accuracy = ", ".join(
        f"{k.removeprefix('eval/')} {v:.3f}"
        for k, v in sorted(evals.items())
        if k.startswith(("eval/acc", "val/loss", "val/acc", "val/rewards/acc"))
    )
    print(f"{steps} steps in {seconds:.0f} s" + (f"; {accuracy}" if accuracy else "") + f"; {run_dir}")
    if report is not None:
        print(f"report: {report}")


def sft(args: list[str], *, verl_defaults: VerlDefaults | None = None) -> int:
    return _supervised(args, "sft", verl_defaults)


def rm(args: list[str]) -> int:
    return _supervised(args, "rm")


def dpo(args: list[str]) -> int:
    return _supervised(args, "dpo")


def _supervised(
    args: list[str], command: Literal["sft", "rm", "dpo"], verl_defaults: VerlDefaults | None = None
) -> int:
    from verl.config.load import load_config

    resolved = load_config(args, verl_defaults=verl_defaults)
    print_notes(resolved.notes)
    from verl.driver.launch import run_supervised

    finished = run_supervised(resolved, command)
    print_finished(finished.steps, finished.seconds, finished.evals, finished.dir, finished.report)
    return 0


def evaluate(args: list[str]) -> int:
    from verl.config.load import load_config

    if not any(a.startswith("run.name=") for a in args):
        args = [*args, "run.name=eval"]
    resolved = load_config([*args, "run.resume=auto"])
    from verl.driver.launch import run_eval

    finished = run_eval(resolved)
    for name, value in sorted(finished.values.items()):
        if name.startswith("eval/"):
            print(f"{name.removeprefix('eval/'):<40} {value:.4f}")
    return 0


def generate(args: list[str]) -> int:
    from verl.config.load import load_config

    own = {k: v for a in args if (k := a.partition("=")[0]) in ("prompt", "n") for v in [a.partition("=")[2]]}
    if "prompt" not in own:
        raise ValueError('give a prompt: verl generate model.path=DIR prompt="2+2="')
    resolved = load_config([a for a in args if a.partition("=")[0] not in own])
    if not own.get("n", "1").isdigit() or int(own.get("n", "1")) < 1:
        raise ValueError(f"n={own['n']}: the number of answers, 1 or more")
    from verl.driver.generate import generate_once

    for i, (text, stop, mean_logprob) in enumerate(
        generate_once(resolved.config, own["prompt"], int(own.get("n", "1")))
    ):
        print(f"[{i}] ({stop}, mean log-prob {mean_logprob:.3f})\n{text}")
    return 0


def plan(args: list[str]) -> int:
    from verl.config.load import load_config, validate
    from verl.config.plan import make_plan, render_plan

    resolved = load_config(args)
    print_notes(resolved.notes)
    validate(resolved.config)
    print(render_plan(make_plan(resolved.config)))
    return 0


def show(args: list[str]) -> int:
    from verl.show import show as run_show

    return run_show(args)


def export(args: list[str]) -> int:
    if len(args) != 2:
        raise ValueError("verl export RUN_OR_CHECKPOINT OUT_DIR")
    from verl.show import export as run_export

    return run_export(Path(args[0]), Path(args[1]))


def doctor(args: list[str]) -> int:
    from verl.doctor import doctor as run_doctor

    return run_doctor(Path(args[0]) if args else None)


VERBS: Mapping[str, Callable[[list[str]], int]] = {
    "train": train,
    "sft": sft,
    "rm": rm,
    "dpo": dpo,
    "eval": evaluate,
    "generate": generate,
    "plan": plan,
    "show": show,
    "export": export,
    "doctor": doctor,
}

if __name__ == "__main__":
    sys.exit(main())

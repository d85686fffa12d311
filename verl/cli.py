"""The command line: verl VERB [key=value ...]. No torch is imported before a verb needs it."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl.errors import Refused, crash_record_of
from verl.names import did_you_mean

if TYPE_CHECKING:
    from verl.config.load import Resolved
    from verl.config.overrides import VerlDefaults
    from verl.driver.launch import Finished
    from verl.track.console import LiveProgress

Supervised = Literal["sft", "rm", "dpo"]
USAGE = """usage: verl VERB [key=value ...]

  train     recipe=NAME model.path=DIR ...     reinforcement learning (--replay STEP: recompute a recorded step)
  sft       model.path=DIR data.train_files=[F] supervised fine-tuning
  rm        model.path=DIR data.train_files=[F] a reward model from preference pairs
  dpo       model.path=DIR data.train_files=[F] preference training (preference.loss=dpo, ipo, kto, orpo, simpo, ...)
  eval      model.path=DIR data.eval_files=[F] accuracy of a model, nothing trained
  generate  model.path=DIR prompt=TEXT [n=1]   answers to one prompt, with images: images=[F]
  serve     model.path=DIR [serve.port=8000]   the model behind OpenAI's and vLLM's HTTP
  plan      (as train) [rollout_s=S update_s=S] every derived size and the memory, without loading anything; with the
            [card_gib=G]                       two times of a step also how they overlap; whether a card of G GiB
            [cluster_file=F [deadline_s=S]]    has the memory; the best placement of the roles on a cluster, or on
                                               the smallest part of it whose steps take at most S seconds
            learn=RUN cluster_file=F           the file, with the figures that agree with the times of a run
            [json=true]                        as one JSON document
  simulate  (as train) token_s=S sequence_s=S  the pace with this and other staleness, under a virtual clock: a decode
            update_s=S [publish_s=S]           step takes token_s, and sequence_s more for each sequence; answers
            mean_tokens=N sigma=X | from=RUN   of log-normal lengths, or those of a run, with its times
            [reward_s=S tool_calls=N tool_s=S] what an answer waits for beside its decode steps
            [resume_s=S] what a request that continues after a publish takes (pipeline.partial_rollout)
            [steps_ahead=N]                    (as long as N steps after its last one, if they grow as they did)
            [trace=FILE] [json=true]           what each part did, for chrome://tracing
            [grid={KEY: [VALUES], ...}         every combination, and those that no other one beats
             price_per_hour=P]                 (of a replica; trainer_price_per_hour=P of the devices that train)
  replicas  RUN list | add [URL] | remove N    servers that join and leave a run while it goes on
  show      RUN [RUN ...] | --live RUN         the steps of runs; a page that follows a run
  show      RUN cluster_file=F                 the seconds that the planner predicts beside those measured
  show      algorithms | algorithm=NAME | keys | recipes | config [SECTION|KEY ...] [key=value ...]
  export    RUN_OR_CHECKPOINT OUT_DIR          the Hugging Face folder of a checkpoint
            [--merge [--dtype=bfloat16]]       LoRA: the adapter merged into its base, in float32 or another dtype
  doctor    [RUN] | cluster_file=FILE          this machine, what is installed, what a run waits for; its rates,
                                               measured and written for `verl plan cluster_file=FILE`
  completion bash | zsh | fish                 source <(verl completion bash)

verl --version: of verl, Python and torch. verl VERB --help: the keys of the verb.
A value is taken as it stands (a list: [a,b]); key=@FILE reads it from a file.

The keys of a first run: model.path, data.train_files, data.eval_files, data.max_prompt_tokens, reward.path,
algorithm.name, step.prompts_per_step, step.samples_per_prompt, rollout.max_response_tokens, optim.lr, run.name,
run.total_steps.
All keys: `verl show config`; verl's own keys (data.train_batch_size=..., actor_rollout_ref....) work as well.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    # `python -m verl` adds the current folder, in which modules of the user are found
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    if not args or args[0] in ("-h", "--help", "help"):
        return guarded(lambda: print(USAGE) or (0 if args else 2))
    if args[0] in ("-V", "--version", "version"):
        return guarded(_version)
    verb, rest = args[0], args[1:]
    if verb in VERBS and ("-h" in rest or "--help" in rest):
        return guarded(lambda: _help(verb))
    if verb in VERBS:
        return guarded(partial(VERBS[verb], rest), rest)
    return _fail(f"there is no verb {verb!r}{did_you_mean(verb, VERBS, form='; did you mean {!r}?')} (verl --help)")


def _help(verb: str) -> int:
    """Print the verb's own lines of the usage, then its keys."""
    from verl.config.help import keys_of_verb, render_keys

    own = re.findall(rf"^  {verb} .*\n(?: {{12,}}.*\n)*", USAGE, re.MULTILINE)  # with the lines that continue one
    print(textwrap.dedent("".join(own)), end="")
    if keys := keys_of_verb(verb):
        print("\nKeys with their defaults (what a recipe and this command line make of them: verl show config)\n")
        print(render_keys(keys))
    return 0


def _version() -> int:
    import platform
    from importlib.metadata import version

    print(f"verl {version('verl')} (Python {platform.python_version()}, torch {version('torch')})")
    return 0


def guarded(work: Callable[[], int], args: Sequence[str] = ()) -> int:
    """Run a verb and return its exit code. A fault of the user is one line and exit code 2. Any other error prints its
    traceback, the path of its crash record and, as the last line, its first cause; the exit code is 1. Values that args
    take from the environment (`${oc.env:KEY}`) are hidden."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `verl train --help | head`: the rest of the output has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as e:
        return _fail(str(e) or "interrupted", 130)
    except Refused as e:
        return _fail(_hidden(str(e), args), 2)
    except Exception as e:  # the outermost frame
        import traceback

        from verl.driver.stopping import Stopped
        from verl.workers.group import first_cause

        if isinstance(e, Stopped):
            return _fail(_hidden(str(e), args), e.code)
        if not _expected(e) and _out_of_memory(first_cause(e)) is None:
            print(_hidden(traceback.format_exc(), args), file=sys.stderr, end="")  # its notes are at the end
        elif record := crash_record_of(e):
            print(record, file=sys.stderr)
        cause = first_cause(e)
        if (line := _out_of_memory(cause)) is not None:
            return _fail(line, 1)
        name = "" if _expected(cause) and str(cause) else f"{type(cause).__name__}: "
        return _fail(_hidden(f"{name}{cause}", args), 1)


def _hidden(text: str, args: Sequence[str]) -> str:
    from verl.config.load import without_environment

    return without_environment(text, " ".join(args))


def _expected(e: BaseException) -> bool:
    from verl.driver.rollouts import RunEnded
    from verl.rollout.base import ReplicaLost
    from verl.weight_sync.base import SyncError
    from verl.workers.group import WorkerDied
    from verl.workers.waits import DeadlineExpired

    return isinstance(
        e, RunEnded | SyncError | DeadlineExpired | WorkerDied | ReplicaLost | FloatingPointError | OSError
    )


def _out_of_memory(cause: BaseException) -> str | None:
    """Return the line for an allocation that failed on a device, with the keys that lower its memory."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(cause, torch.OutOfMemoryError):
        return None
    why = " ".join(str(cause).partition("If reserved but")[0].split())
    fix = "lower step.max_tokens_per_microbatch or rollout.max_concurrent_sequences"
    return f"{why} {fix}, or set model.gradient_checkpointing=full (verl plan has the memory of each phase)"


def _fail(text: str, code: int = 2) -> int:
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def train_verb(args: list[str], *, verl_defaults: VerlDefaults | None = None) -> int:
    if verl_defaults is None:  # verl's own command (trainer/) makes the first of torchrun's processes the run
        _refuse_torchrun("train")
    if "--replay" in args:
        at = args.index("--replay")
        if at + 1 >= len(args) or not args[at + 1].isdigit():
            raise Refused("--replay needs a step number: verl train --replay 3 run.name=RUN ...")
        from verl.driver.replay import replay

        return replay([*args[:at], *args[at + 2 :]], int(args[at + 1]))
    progress = _progress()
    resolved = _load(args, verl_defaults, progress.message)
    from verl.driver.launch import run_rl

    return _report(run_rl(resolved, progress=progress), progress.message)


def supervised_verb(args: list[str], command: Supervised, *, verl_defaults: VerlDefaults | None = None) -> int:
    progress = _progress()
    resolved = _load(args, verl_defaults, progress.message)
    from verl.driver.launch import run_supervised

    return _report(run_supervised(resolved, command, progress=progress), progress.message)


def _refuse_torchrun(verb: str) -> None:
    from verl.workers.torchrun import launched

    if (launch := launched()) is not None:
        raise Refused(
            f"torchrun started {launch.world_size} processes of verl {verb}, which is one process that starts its own: "
            f"run it without torchrun, with cluster.backend=ray cluster.ranks_per_node={launch.local_world_size}"
        )


def _progress() -> LiveProgress:
    """Return the printer of a run's lines. A standard output that is full or closed does not end the run."""
    from verl.track.console import LiveProgress
    from verl.workers.torchrun import is_spare

    return LiveProgress(silent=is_spare())


def _load(
    args: Sequence[str], verl_defaults: VerlDefaults | None = None, say: Callable[[str], None] = print
) -> Resolved:
    """Load the configuration, and print the translation of verl's keys."""
    from verl.config.devices import saves_memory
    from verl.config.load import FITTED, load_config
    from verl.config.tree import values_of
    from verl.processes.memory import use_huge_pages

    resolved = load_config(args, verl_defaults=verl_defaults)
    if resolved.notes:
        from verl.config.compat.translate import render_notes

        say(render_notes(resolved.notes))
    if cut := [key for key, origin in resolved.origins.items() if origin.startswith(FITTED)]:
        values = values_of(resolved.config)
        say(f"{', '.join(f'{key}={values[key]}' for key in cut)}: {resolved.origins[cut[0]]}")
    if saves_memory(resolved.config):
        use_huge_pages()  # since memory that is returned is new when it is used again
    return resolved


def _report(finished: Finished, say: Callable[[str], None]) -> int:
    if finished.steps == 0:
        say(f"{finished.dir} was complete already: no step was left; ask for more with run.total_steps=")
    shown = ("eval/acc", "val/loss", "val/acc", "val/rewards/acc")
    evals = _for_people({k: v for k, v in finished.evals.items() if k.startswith((*shown, "eval/graded"))})
    held_out = ", ".join(f"{name} {value:.3f}" for name, value in evals.items())
    shown_evals = f"; {held_out}" if held_out else ""
    say(f"{finished.steps} steps in {finished.seconds:.0f} s{shown_evals}; {finished.dir}")
    if finished.report is not None:
        say(f"report: {finished.report}")
    return 0


def _for_people(evals: Mapping[str, float]) -> dict[str, float]:
    """Return the means of held-out rewards under the word for their kind (accuracy or score)."""
    from verl.track.metrics import held_out_word

    word = "/score/" if held_out_word([evals]) == "score" else "/acc/"
    shown = [name for name in sorted(evals) if not name.startswith("eval/graded_share/")]
    return {name.replace("/acc/", word).removeprefix("eval/"): evals[name] for name in shown}


def evaluate_verb(args: list[str]) -> int:
    _refuse_torchrun("eval")
    run = [] if any(a.startswith("run.name=") for a in args) else ["run.name=eval"]
    progress = _progress()
    resolved = _load([*args, *run, "run.resume=auto"], say=progress.message)
    from verl.driver.launch import run_eval

    values = run_eval(resolved, progress=progress).values
    found = _for_people({name: value for name, value in values.items() if name.startswith("eval/")})
    progress.message("\n".join(f"{name:<40} {value:.4f}" for name, value in found.items()))
    if progress.lost:  # the requested values could not be printed
        message = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        return _fail(f"standard output cannot be written ({progress.lost}); what was found: {message}", 1)
    return 0


def _own_arguments(args: list[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return {name: value} of a verb's own arguments, and the other arguments. Raise Refused for one with two
    values."""
    pairs = [(key, value) for key, _, value in (a.partition("=") for a in args) if key in names]
    given = dict(pairs)
    if twice := [(key, value) for key, value in pairs if value != given[key]]:
        key, value = twice[0]
        raise Refused(f"{key}={value} and {key}={given[key]}: give one of them")
    return given, [a for a in args if a.partition("=")[0] not in given]


def generate_verb(args: list[str]) -> int:
    given, rest = _own_arguments(args, ("prompt", "n", "images"))
    if "prompt" not in given:
        raise Refused('give a prompt: verl generate model.path=DIR prompt="2+2="')
    resolved = _load(rest)
    _refuse_agents(resolved)
    count = given.get("n", "1")
    if not count.isdigit() or int(count) < 1:
        raise Refused(f"n={count}: the number of answers, 1 or more")
    from verl.config.overrides import parse_argument
    from verl.driver.generate import generate_once

    from_file = given["prompt"].startswith("@")
    prompt = parse_argument(f"prompt={given['prompt']}").text if from_file else given["prompt"]
    images = parse_argument(f"images={given['images']}").value if "images" in given else []
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        raise Refused(f"images={given['images']}: a list of files: images=[cat.png]")
    found = generate_once(resolved.config, prompt, int(count), images)
    for i, (text, stop, mean_logprob) in enumerate(found):
        print(f"[{i}] ({stop}, mean log-prob {mean_logprob:.3f})\n{text}")
    return 0


def _refuse_agents(resolved: Resolved) -> None:
    """Raise ValueError for `agent.*` on the command line, since verbs that answer one prompt do not use it. If a recipe
    sets it, print a message."""
    from verl.config.tree import text_of, values_of

    values, why = values_of(resolved.config), "verl generate answers a prompt in one turn, without tools"
    idle = {key: origin for key, origin in resolved.origins.items() if key.startswith("agent.") and origin != "default"}
    fix = "leave it out; verl eval plays rows with tools"
    if found := [key for key, origin in idle.items() if origin == "command line" or origin.startswith("verl key")]:
        raise Refused("\n".join(f"{key}={text_of(values[key])}: {why}: {fix}" for key in found))
    if idle:
        print(f"{', '.join(idle)} ({next(iter(idle.values()))}): {why}")


def serve_verb(args: list[str]) -> int:
    resolved = _load(args)
    from verl.serve import serve

    return serve(resolved.config)


def plan_verb(args: list[str]) -> int:
    from verl.planner.verbs import PLAN, print_learned, print_plan

    if any(arg.startswith("learn=") for arg in args):
        return print_learned(args)
    given, rest = _own_arguments(args, PLAN)
    return print_plan(_load(rest, say=_beside_json(given)), given)


def simulate_verb(args: list[str]) -> int:
    from verl.planner.verbs import SIMULATE, print_simulated

    given, rest = _own_arguments(args, SIMULATE)
    return print_simulated(_load(rest, say=_beside_json(given)), given)


def _beside_json(given: Mapping[str, str]) -> Callable[[str], None]:
    """Return the printer of lines that are not the output: with json=true that is one JSON document."""
    return partial(print, file=sys.stderr if "json" in given else sys.stdout)


def show_verb(args: list[str]) -> int:
    from verl.show import show

    return show(args)


def replicas_verb(args: list[str]) -> int:
    from verl.replicas import ask

    if (len(args), args[1:2]) not in ((2, ["list"]), (2, ["add"]), (3, ["add"]), (3, ["remove"])):
        raise Refused("verl replicas RUN list | add [URL] | remove NUMBER")
    print("\n".join(ask(Path(args[0]), args[1], "".join(args[2:]))))
    return 0


def export_verb(args: list[str]) -> int:
    from verl.show import export, export_merged

    if "--dtype" in args[:-1]:  # the value is the next word
        at = args.index("--dtype")
        args = [*args[:at], "=".join(args[at : at + 2]), *args[at + 2 :]]
    given, rest = _own_arguments(args, ("--dtype",))
    folders = [a for a in rest if a != "--merge"]
    if len(folders) != 2 or any(a.startswith("-") for a in folders) or (given and "--merge" not in rest):
        raise Refused("verl export RUN_OR_CHECKPOINT OUT_DIR [--merge [--dtype=bfloat16]]")
    if "--merge" not in rest:
        return export(Path(folders[0]), Path(folders[1]))
    return export_merged(Path(folders[0]), Path(folders[1]), next(iter(given.values()), "float32"))


def doctor_verb(args: list[str]) -> int:
    from verl.doctor import doctor

    given, rest = _own_arguments(args, ("cluster_file",))
    if "cluster_file" in given:
        from verl.machine_figures import write_figures

        if rest:
            raise Refused(f"verl doctor cluster_file=FILE measures this machine, and takes no {rest[0]}")
        print(write_figures(Path(given["cluster_file"])), end="")
        return 0
    return doctor(Path(rest[0]) if rest else None)


def completion_verb(args: list[str]) -> int:
    from verl.config.help import completion_script

    print(completion_script(args[0] if args else "", VERBS))
    return 0


VERBS: Mapping[str, Callable[[list[str]], int]] = {
    "train": train_verb,
    "sft": partial(supervised_verb, command="sft"),
    "rm": partial(supervised_verb, command="rm"),
    "dpo": partial(supervised_verb, command="dpo"),
    "eval": evaluate_verb,
    "generate": generate_verb,
    "serve": serve_verb,
    "plan": plan_verb,
    "simulate": simulate_verb,
    "replicas": replicas_verb,
    "show": show_verb,
    "export": export_verb,
    "doctor": doctor_verb,
    "completion": completion_verb,
}

if __name__ == "__main__":
    sys.exit(main())

"""`python -m verl.trainer.main_generation_server`: answers to a file of prompts are `verl eval` here."""

import sys

from verl.trainer import door

FIX = (
    "answers to a file of prompts: verl eval model.path=FOLDER data.eval_files=[FILE] eval.samples_per_prompt=N "
    "eval.temperature=1.0 run.name=NAME; they are in runs/NAME/samples, a Parquet file"
)


def main(args: list[str]) -> int:
    def work() -> int:
        raise ValueError(f"verl.trainer.main_generation_server is not in this version; {FIX}")

    return door("verl.trainer.main_generation_server", "eval", f"Not in this version; {FIX}", work, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

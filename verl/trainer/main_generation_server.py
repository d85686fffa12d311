"""`python -m verl.trainer.main_generation_server`: answers to a file of prompts, as a Parquet file of the same rows."""

import sys
from pathlib import Path

from verl.config.overrides import parse_argument
from verl.errors import Refused
from verl.trainer import door

KEY = "data.output_path"


def main(args: list[str]) -> int:
    def work() -> int:
        from verl.config.load import load_config
        from verl.driver.generate import ANSWERS, generate_file

        out, rest = _output(args)
        rows = generate_file(load_config(rest, verl_defaults="rl").config, out)
        print(f"{rows} rows with their answers in the column {ANSWERS!r}: {out}")
        return 0

    what = f"Answers to the prompts of data.train_files, written to {KEY}=FILE.parquet in a column `responses`."
    return door("verl.trainer.main_generation_server", "generate", what, work, args)


def _output(args: list[str]) -> tuple[Path, list[str]]:
    """Return the file that is to be written, and the other arguments."""
    own = [arg for arg in args if arg.lstrip("+").partition("=")[0] == KEY]
    value = parse_argument(own[-1]).value if own else None
    if not isinstance(value, str) or "://" in value or not value.endswith((".parquet", ".pq")):
        raise Refused(f"{KEY}={value}: name the Parquet file that is to be written, on this machine")
    return Path(value).expanduser(), [arg for arg in args if arg not in own]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

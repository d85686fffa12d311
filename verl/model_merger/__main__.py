"""verl's merger: a checkpoint here holds its Hugging Face folder already, so that nothing is merged."""

import argparse
import sys
from pathlib import Path

from verl.cli import guarded
from verl.show import export


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.model_merger")
    parser.add_argument("action", choices=["merge"])
    parser.add_argument("--local_dir", required=True, type=Path, help="a checkpoint of this verl, or its run directory")
    parser.add_argument("--target_dir", required=True, type=Path)
    parser.add_argument("--backend", help="of no effect: there is one form of checkpoint")
    given, _ = parser.parse_known_args(args)
    folder = given.local_dir.parent if given.local_dir.name == "actor" else given.local_dir
    return guarded(lambda: export(folder, given.target_dir))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train a run quietly, and print as JSON how often each function of the files of the first argument was called after
its first step. The other arguments are those of `verl train`."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections import Counter
from typing import Any

from verl.config.load import load_config
from verl.driver import launch


def main(files: str, *args: str) -> None:
    calls, recording, counted = Counter[str](), threading.Event(), {*json.loads(files)}

    def noted(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call" and recording.is_set() and frame.f_code.co_filename in counted:
            calls[frame.f_code.co_qualname] += 1

    def on_step(step: int, values: Any) -> None:
        recording.set()  # what a first step prepares is not counted

    threading.setprofile(noted)
    sys.setprofile(noted)
    launch.run_rl(load_config(list(args)), quiet=True, on_step=on_step)
    sys.setprofile(None)
    print(json.dumps(calls))


if __name__ == "__main__":
    main(*sys.argv[1:])

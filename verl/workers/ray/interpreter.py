"""The processes of Ray's actors by another interpreter than that of Ray's nodes, `model.python`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from typing import Any

from verl.processes.environment import FOLDER, OF_OUR_PYTHON, import_folders

BEGIN = (
    "import json, runpy, sys; sys.path += [f for f in json.loads(sys.argv[1]) if f not in sys.path]; del sys.argv[:2]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script of Ray's, the first of the arguments that follow. The folders of verl and of the driver's own modules
are the last ones of its path, so that they hide nothing of its environment."""


def runtime_env(python: str) -> dict[str, Any]:
    """Return Ray's runtime environment of an actor in a process of this interpreter."""
    path = os.path.abspath(python) if os.path.isfile(python) else shutil.which(python) or python
    folders = [*import_folders(), str(FOLDER)]
    line = shlex.join([path, "-P", "-c", BEGIN, json.dumps(folders)])  # Ray passes it to a shell, in another folder
    return {"py_executable": line, "env_vars": dict.fromkeys(OF_OUR_PYTHON, "")}

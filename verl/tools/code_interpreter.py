"""A tool that runs the model's Python in the code sandbox, with a session per trajectory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from verl.sandbox.code import CodeSandbox, Limits, Ran, SandboxGone, Session
from verl.sandbox.workspace import read_tree
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import ToolBroken
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run Python code. Names and files stay for the next call.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        },
    },
}


class CodeInterpreter(BaseTool):
    """A BaseTool that runs Python code. Its config has the limits of a call, by the names of verl.sandbox.code.Limits,
    and:

    tier: auto, bubblewrap, launcher; none isolates nothing
    stateful: true: the calls of a trajectory share their variables and files
    packages: folders of Python packages that the code may import
    workspace: a folder; each session begins with a copy of its files. `create_kwargs: {workspace}` of a row names a
        folder inside it
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        limits = {name: config[name] for name in Limits.__dataclass_fields__ if name in config}
        self._stateful = bool(config.get("stateful", True))
        packages, workspace = config.get("packages", ()), config.get("workspace", "")
        self._sandbox = CodeSandbox(config.get("tier", "auto"), Limits(**limits), packages, workspace)
        self._sessions: dict[str, Session] = {}
        self._threads = ThreadPoolExecutor(int(config.get("concurrency", 32)), "code_interpreter")

    async def create(
        self, instance_id: str | None = None, workspace: str = "", **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        try:
            self._sessions[instance_id] = self._sandbox.session(workspace)
        except ValueError as e:  # the row's fault, not the model's
            raise ToolBroken(str(e)) from e
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        session = self._sessions[instance_id]
        if not self._stateful:
            session.close()
        try:
            ran = await asyncio.get_running_loop().run_in_executor(self._threads, session.run, parameters["code"])
        except (SandboxGone, ValueError) as e:  # ValueError: its workspace cannot be used
            raise ToolBroken(str(e)) from e
        return ToolResponse(text=output_text(ran, session.lost, self._sandbox.limits)), None, {"status": ran.status}

    def content(self) -> str:
        return read_tree(self._sandbox.workspaces.root) if self._sandbox.workspaces else ""

    def note(self) -> str:
        return f"code sandbox of {self.name}: {self._sandbox.described()}"

    def end_run(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        session = self._sessions.pop(instance_id)
        await asyncio.get_running_loop().run_in_executor(self._threads, session.close)


def output_text(ran: Ran, lost: bool, limits: Limits) -> str:
    """Return the text for the model about a run: its output, its value, and the reason if it failed."""
    reasons = {
        "timeout": f"it took more than {min(limits.wall_s, limits.cpu_s):g} s",
        "memory": f"it used more than {limits.memory_mb} MB",
        "output": f"it printed more than {limits.output_bytes} bytes",
        "killed": ran.why or f"it was ended by signal {-ran.code}",
    }
    parts = [ran.stdout.rstrip(), ran.stderr.rstrip()]
    if ran.status in reasons:
        parts.append(f"Error: {reasons[ran.status]}." + (" Names and changes of files are gone." if lost else ""))
    return "\n".join(part for part in parts if part) or "(no output)"

"""SGLang's HTTP API, read from its wheel without importing it. `python tests/sglang_schema.py WHEEL`
writes tests/data/sglang_api.json, which the double of tests/doubles.py is held to."""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

OUT = Path(__file__).parent / "data" / "sglang_api.json"
WANTED = {
    "sglang/api/v1/api_types.py": ("GenerateRequest", "SamplingParams", "GenerateMetaInfo", "WeightVersionSpan"),
    "sglang/srt/managers/io_struct.py": (
        *("UpdateWeightFromDiskReqInput", "UpdateWeightFromDiskReqOutput", "PauseGenerationReqInput"),
        *(
            "ContinueGenerationReqInput",
            "AbortReq",
            "ReleaseMemoryOccupationReqInput",
            "ResumeMemoryOccupationReqInput",
        ),
    ),
}
ROUTES = "sglang/srt/entrypoints/http_server.py"


def fields(cls: ast.ClassDef, known: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Names and types, as written, those of its bases in the same file first."""
    found: dict[str, str] = {}
    for base in cls.bases:
        found |= fields(known[base.id], known) if isinstance(base, ast.Name) and base.id in known else {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node.annotation)
    return found


def schema(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as files:
        structs = {}
        for name, classes in WANTED.items():
            tree = ast.parse(files.read(name))
            known = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
            structs |= {one: fields(known[one], known) for one in classes}
        calls = (
            (decorator, node)
            for node in ast.walk(ast.parse(files.read(ROUTES)))
            if isinstance(node, ast.AsyncFunctionDef)
            for decorator in node.decorator_list
        )
        paths = [
            call.args[0].value
            for call, _ in calls
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("app.")
            if call.args and isinstance(call.args[0], ast.Constant)
        ]
    return {"version": wheel.name.split("-")[1], "structs": structs, "paths": sorted(set(paths))}


if __name__ == "__main__":
    OUT.write_text(json.dumps(schema(Path(sys.argv[1])), indent=1) + "\n")

"""Where each backend was really run: docs/status.md from records that the runs themselves write.

    python bench/status.py --run rollout.native sync.shm   run the proofs of these here, and write bench/records/*.json
    python bench/status.py                                 write docs/status.md and verl/config/proven.json

A proof is a test command. `--run` executes it and writes the record only where it succeeds. A backend and device
without a record reads "never run" on the page, and a run that uses it prints so at its first start
(verl/config/proven.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "records"
PAGE = ROOT / "docs" / "status.md"
PROVEN = ROOT / "verl" / "config" / "proven.json"
NEVER = "never run"
DEVICES = ("cpu", "cuda")
TIMEOUT_S = 1800.0
PYTEST = "python -m pytest -q"
CONTRACT = "tests/contracts/test_{}_contract.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A backend and how it is proved.

    about: what it is, in a few words.
    proof: for each device the command that runs the real thing there.
    limits: the parts that the proof leaves out, or the replacement of the real thing in the tests.
    """

    about: str
    proof: Mapping[str, str]
    limits: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of a proof: of which backend, where, when, from which commit, and the last line it printed."""

    name: str
    device: str
    machine: str
    date: str
    commit: str
    command: str
    result: str


def _contract(which: str, row: str) -> Mapping[str, str]:
    """Return the proof by the contract tests of this protocol that have the row's name in their parameters."""
    return {"cpu": f"{PYTEST} {CONTRACT.format(which)} -k '{row}'"}


PARTS: Mapping[str, Part] = {
    "model.torch": Part(
        about="one process: any Hugging Face causal LM, packed, with shared prefixes",
        proof={"cpu": f"{PYTEST} tests/numerics/test_engine.py tests/numerics/test_split.py"},
    ),
    "model.sharded": Part(
        about="many ranks: FSDP2, HSDP, tensor, sequence, pipeline and expert parallel, and products of them",
        proof={"cpu": f"{PYTEST} tests/distributed/test_gate.py"},
        limits="gloo on one machine; NCCL and several machines: never",
    ),
    "model.megatron": Part(
        about="Megatron-Core 0.19 in an environment of its own: tensor, pipeline and data ranks, expert ranks among "
        "tensor and data ranks, chunks of stages, shared experts, padded rows",
        proof={"cpu": ".venv-megatron/bin/python -m pytest -q tests/megatron/test_gate_megatron.py"},
        limits="its local layers on gloo; Transformer Engine, NCCL and GPUs: never",
    ),
    "model.veomni": Part(
        about="VeOmni 0.1.12 in an environment of its own: its models and FSDP2, HSDP and sequence parallelism",
        proof={"cpu": ".venv-veomni/bin/python -m pytest -q tests/veomni"},
        limits="gloo on one machine; its kernels, its expert parallelism, NCCL: never",
    ),
    "rollout.native": Part(
        about="our engine: Qwen2, Qwen3, Qwen3-MoE, Llama, Mistral, Gemma 2 and 3 text",
        proof=_contract("rollout", "native"),
    ),
    "rollout.hf": Part(about="whatever transformers generates", proof=_contract("rollout", "hf")),
    "rollout.vllm": Part(
        about="vLLM 0.32 or 0.33 in an environment of its own, as a child or at a URL",
        proof={"cpu": "make test-vllm VLLM_TESTS=tests/vllm/test_contract_vllm.py"},
        limits="0.33: its API was compared file by file",
    ),
    "rollout.server": Part(
        about="any server with vLLM's token endpoint and control plane, as `verl serve`",
        proof={"cpu": f"{PYTEST} tests/e2e/test_rollout_served.py"},
    ),
    "rollout.sglang": Part(about="SGLang 0.5.23", proof={}, limits="in the tests a double of its documented HTTP"),
    "rollout.trtllm": Part(about="TensorRT-LLM 1.x", proof={}, limits="in the tests a double of its documented HTTP"),
    "rollout.openai": Part(
        about="any completions API with token ids, for evaluation",
        proof={"cpu": f"{PYTEST} tests/e2e/test_served_by_others.py"},
        limits="`verl serve` is the server",
    ),
    "sync.local": Part(about="within a process", proof=_contract("weight_sync", "local")),
    "sync.shm": Part(about="between the processes of a host", proof=_contract("weight_sync", "shm")),
    "sync.ipc": Part(about="through the memory of a GPU", proof={}, limits="in the tests a double of CUDA's two calls"),
    "sync.tcp": Part(
        about="between hosts: whole, what changed, or by buckets",
        proof=_contract("weight_sync", "tcp"),
        limits="processes of one machine",
    ),
    "sync.nixl": Part(
        about="between hosts, one-sided (UCX)", proof=_contract("weight_sync", "nixl"), limits="one machine, no RDMA"
    ),
    "sync.collective": Part(
        about="to all hosts at once, by broadcasts",
        proof=_contract("weight_sync", "collective"),
        limits="gloo on one machine, no NCCL",
    ),
    "sync.disk": Part(
        about="a model folder for each version, on disk or in an object store",
        proof=_contract("weight_sync", "disk or objects"),
    ),
    "queue.memory": Part(about="in memory", proof=_contract("queue", "memory")),
    "queue.shared": Part(about="shared memory of a host", proof=_contract("queue", "shared")),
    "queue.ray": Part(about="over Ray 2.60", proof={"cpu": f"{PYTEST} tests/distributed/test_queue_ray.py"}),
    "queue.package": Part(
        about="over the TransferQueue package 0.1.11",
        proof={"cpu": f"{PYTEST} tests/distributed/test_queue_package.py"},
        limits="one machine",
    ),
    "cluster.inproc": Part(about="one process", proof=_contract("worker_group", "test_")),
    "cluster.processes": Part(
        about="ranks in child processes of any interpreter, on one machine",
        proof={"cpu": f"{PYTEST} tests/distributed/test_child_workers.py tests/distributed/test_child_engine.py"},
    ),
    "cluster.ray": Part(
        about="ranks and replicas in processes of their own, with restarts",
        proof={"cpu": f"{PYTEST} tests/distributed/test_ray_workers.py tests/distributed/test_three_nodes.py"},
        limits="one machine, and three nodes of Ray on it",
    ),
    "cluster.torchrun": Part(
        about="SFT, reward models and preferences under torchrun",
        proof={"cpu": f"{PYTEST} tests/distributed/test_torchrun.py"},
        limits="two commands on one machine",
    ),
}


def read_records(folder: Path = RECORDS) -> dict[tuple[str, str], Record]:
    """Return the records in this folder by name and device; ValueError for one that is not of its file's name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = Record(**json.loads(path.read_text()))
        if path.stem != f"{record.name}.{record.device}" or record.name not in PARTS:
            raise ValueError(f"{path}: it is the record of {record.name} on {record.device}")
        found[record.name, record.device] = record
    return found


def run(name: str, device: str, folder: Path = RECORDS) -> Record | None:
    """Execute the proof of this backend on this device; write and return its record, or None where it fails.

    The commit is that of the checkout, which may have no changes but in the records and what is made from them.
    """
    command, commit = PARTS[name].proof[device], _clean_commit()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"{name} on {device}: exit {done.returncode}: {last}", flush=True)
    if done.returncode != 0 or not re.search(r"\b[1-9]\d* passed", last):
        return None
    record = Record(
        name=name,
        device=device,
        machine=_machine(device),
        date=datetime.date.today().isoformat(),
        commit=commit,
        command=command,
        result=last.strip("= "),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.{device}.json").write_text(json.dumps(asdict(record), indent=2) + "\n")
    return record


def _machine(device: str) -> str:
    """Return the processor and its cores, or the name of the GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name(0)
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores"


def _clean_commit() -> str:
    """Return the short hash of the checkout; ValueError where other files than the records are changed."""
    written = (str(RECORDS.relative_to(ROOT)), str(PAGE.relative_to(ROOT)), str(PROVEN.relative_to(ROOT)))
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    other = [line for line in changed.splitlines() if not line[3:].startswith(written)]
    if other:
        raise ValueError(f"{other[0][3:]} is not committed: a record names the commit that was run; commit first")
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page(records: Mapping[tuple[str, str], Record]) -> str:
    """Return docs/status.md: a row for each backend, with what was run on a CPU and on a GPU."""
    rows = ["| part | backend | | CPU | GPU |", "|---|---|---|---|---|"]
    for name, part in PARTS.items():
        section, _, engine = name.partition(".")
        about = part.about + (f"; {part.limits}" if part.limits else "")
        cells = [_cell(records.get((name, device))) for device in DEVICES]
        rows.append(f"| {section} | `{engine}` | {about} | {' | '.join(cells)} |")
    return "\n".join([*HEAD, *rows, *FOOT]) + "\n"


HEAD = (
    "# What was run where",
    "",
    "Generated by `python bench/status.py` from `bench/records/`. The script that runs a test writes its record, on",
    f'the machine that runs it. "{NEVER}" means that there is no such record, whatever the code promises. A run that',
    "uses such a part prints that at its first start.",
    "",
)
FOOT = (
    "",
    "Besides, by the tests on a CPU: the official `openai` client against `verl serve`; MCP servers over stdio and",
    "HTTP; the package `renderers` 0.1.12; the code sandbox on one Linux machine (x86_64) as root and as another user;",
    "an S3 server on the loopback. The bound of the sandbox's memory by cgroup v2 was tested against a double of the",
    "kernel's files only. Weights & Biases is tested against a fake. Google Cloud Storage was never used.",
)


def _cell(record: Record | None) -> str:
    """Return where and when a proof was run, or that it never was."""
    if record is None:
        return NEVER
    passed = re.search(r"\d+ passed", record.result)
    return f"{passed[0] if passed else record.result}, {record.date}, {record.commit}, {record.machine}"


def proven(records: Mapping[tuple[str, str], Record]) -> str:
    """Return verl/config/proven.json: for each backend the devices that it was run on."""
    found = {name: [device for device in DEVICES if (name, device) in records] for name in PARTS}
    return json.dumps(found, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named proofs, then write the page and the table; return 1 where a proof failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", default=[], metavar="NAME", help="backends whose proof is run here")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.run if given.device not in getattr(PARTS.get(name), "proof", {})]:
        parser.error(f"{unknown[0]}: there is no proof of that on {given.device}; known: {', '.join(PARTS)}")
    failed = [name for name in given.run if run(name, given.device) is None]
    records = read_records()
    PAGE.write_text(page(records))
    PROVEN.write_text(proven(records))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

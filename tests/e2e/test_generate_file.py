"""verl's generation of a file: every row has its answers, and nothing else of it changes."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from verl.trainer.main_generation_server import main

ROWS = [
    {"prompt": [{"role": "user", "content": f"{n}+{n}="}], "extra_info": {"index": n}, "note": None if n else "first"}
    for n in range(5)
]


def arguments(model, rows, out) -> list[str]:
    return [
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=2", f"data.train_files={rows}", "data.prompt_key=prompt"),
        *(f"+data.output_path={out}", f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm"),
        *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.temperature=1.0"),
        *("actor_rollout_ref.rollout.top_k=50", "actor_rollout_ref.rollout.top_p=0.7", "run.threads=1"),
        *("actor_rollout_ref.rollout.prompt_length=32", "actor_rollout_ref.rollout.response_length=6"),
    ]


@pytest.mark.slow
def test_a_script_of_verls_writes_the_file_that_it_names(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "new" / "out.parquet"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    assert main(arguments(tiny_model, rows, out)) == 0, capsys.readouterr().err
    found = pq.read_table(out).to_pylist()
    assert [{k: v for k, v in row.items() if k != "responses"} for row in found] == ROWS
    assert all(len(row["responses"]) == 2 and all(map(len, row["responses"])) for row in found)
    answers = [text for row in found for text in row["responses"]]
    assert len({*answers}) > 5, "each answer is drawn by itself"
    assert main(arguments(tiny_model, rows, out)) == 0
    assert [text for row in pq.read_table(out).to_pylist() for text in row["responses"]] == answers, "by the seed"
    assert main([*arguments(tiny_model, rows, out), "actor_rollout_ref.rollout.temperature=0.0"]) == 0
    assert all(len({*row["responses"]}) == 1 for row in pq.read_table(out).to_pylist()), "greedy"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.output_path=out.json"], "data.output_path=out.json: name the Parquet file"),
        (["data.output_path=null"], "data.output_path=None: name the Parquet file"),
        (["data.max_prompt_length=2", "actor_rollout_ref.rollout.prompt_length=2"], "rows.jsonl:1: the prompt has"),
        (["algorithm.adv_estimator=grpo", "data.train_files=no.parquet"], "no.parquet"),
    ],
)
def test_no_row_is_left_out_and_no_file_is_named_in_vain(more, said, tmp_path, tiny_model, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    assert main([*arguments(tiny_model, rows, tmp_path / "o.parquet"), *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "o.parquet").exists()


def test_rows_that_have_answers_keep_them(tmp_path, tiny_model, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({**row, "responses": ["x"]}) for row in ROWS))
    assert main(arguments(tiny_model, rows, tmp_path / "o.parquet")) == 2
    assert "have a column 'responses' already" in capsys.readouterr().err

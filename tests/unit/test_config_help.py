"""`verl VERB --help`, `verl show config SECTION`, completion; and the lengths that a verb has by default."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from verl.cli import VERBS, main
from verl.config import schema
from verl.config.help import key_texts, keys_of_verb
from verl.config.load import load_config
from verl.config.tree import leaves, text_of
from verl.config.validate import validate


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_help_of_a_verb_has_its_keys_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        page = said(capsys, verb, "--help")
        assert verb != "plan" or "times of a step also how they overlap" in page, "a line that continues another"
        assert verb in page.splitlines()[0]
        shown = re.findall(r"^  ([a-z_]+\.[a-z_]+)=(.*)$", page, re.MULTILINE)
        assert [key for key, _ in shown] == keys_of_verb(verb)
        for key, rest in shown:
            default = "" if key == "model.path" else text_of(leaves()[key].default)
            assert rest.startswith(default), (verb, key)
        flat = " ".join(page.split())
        assert not [key for key, _ in shown if key_texts().get(key, "") not in flat]
        assert not [line for line in page.splitlines() if len(line) > 120 and " " in line.strip()]
    keys = {verb: {key.partition(".")[0] for key in keys_of_verb(verb)} for verb in VERBS}
    assert keys["train"] == keys["plan"] == {key.partition(".")[0] for key in leaves()} - {"preference", "serve"}
    assert "preference" in keys["dpo"] and "rollout" not in keys["sft"] and not keys["doctor"]


def test_meanings_are_what_is_written_beside_the_fields() -> None:
    texts = key_texts()
    assert texts["run.name"] == "The run directory is `<root_dir>/<name>`."
    assert texts["pipeline.placement"].startswith("colocated: rollout and training share devices")
    assert texts["health.entropy_floor"] == "Warn below, in nats per token."
    assert texts["algorithm.clip_low"] == "a number >= 0 and below 1 (0.2 is usual)"
    source = Path(schema.__file__).read_text()
    comments = re.findall(r"^    \w+: .*?  # (.*)$", source, re.MULTILINE)
    assert len(comments) > 40 and not [c for c in comments if not any(t.startswith(c) for t in texts.values())]


def test_show_config_of_a_section_and_of_keys(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "show", "config", "optim", "run.seed", "optim.lr=0.5")
    assert re.search(r"optim\.lr=0\.5 .*command line", page) and "constant | linear | cosine | wsd" in page
    assert "run.seed=0" in page and "run.name" not in page
    assert main(["show", "config", "optm"]) == 2
    assert "did you mean optim?" in capsys.readouterr().err


def test_completion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "verl.bash"
    script.write_text(said(capsys, "completion", "bash"))

    def completed(*words: str) -> list[str]:
        given = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; compopt() {{ :; }}; _verl; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f". {script}; {ask}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("verl", "tr") == ["train"]
    assert completed("verl", "train", "optim.l") == ["optim.lr="]
    assert completed("verl", "train", "recip") == ["recipe="]
    for shell in ("zsh", "fish"):
        page = said(capsys, "completion", shell)
        assert "optim.lr=" in page and "generate" in page and "@" not in page
    assert main(["completion", "csh"]) == 2
    assert "bash|zsh|fish" in capsys.readouterr().err


LENGTHS = [  # given, (prompt, answer, row) of a model with 512 positions
    ([], (256, 256, 512)),
    (["rollout.max_response_tokens=100"], (412, 100, 512)),
    (["data.max_prompt_tokens=16"], (16, 496, 512)),
    (["data.max_prompt_tokens=16", "rollout.max_response_tokens=48"], (16, 48, 512)),
    (["data.max_prompt_tokens=600", "data.max_tokens_per_row=700"], (600, 1, 700)),  # refused by `validate`
]


def test_lengths_that_nobody_gave_fit_the_model(tmp_path: Path) -> None:
    from verl.models import tiny

    tokenizer = tiny.character_tokenizer("abc")
    tiny.save(tiny.qwen3(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, ffn=64), tokenizer, tmp_path / "m")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    files = [f"data.train_files=[{tmp_path}/rows.jsonl]", f"data.eval_files=[{tmp_path}/rows.jsonl]"]
    wrong = []
    for given, lengths in LENGTHS:
        resolved = load_config([f"model.path={tmp_path}/m", *files, *given])
        c = resolved.config
        got = (c.data.max_prompt_tokens, c.rollout.max_response_tokens, c.data.max_tokens_per_row)
        wrong += [] if got == lengths else [(given, got)]
        if lengths[0] < 600:
            for command in ("train", "sft", "dpo", "eval", "generate"):
                validate(c, command)  # type: ignore[arg-type]
    assert not wrong
    with pytest.raises(ValueError, match="above the 512 positions"):
        validate(c, "generate")
    origin = load_config([f"model.path={tmp_path}/m"]).origins["rollout.max_response_tokens"]
    assert origin == "default, cut to what the model has: 512 positions"

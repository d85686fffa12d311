"""`agent.*`: what is given is played or refused, before a tokenizer or a tool is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from handmade_model import write_model, write_rows
from tools import HERMES

from verl import cli
from verl.agent_loop.load_tools import load_tools
from verl.config.load import load_config, validate
from verl.data.files import RawRow
from verl.data.formats import Players, played_by, task_row
from verl.driver.assemble_loops import all_played

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("agent")
    rows = write_rows(folder / "rows.jsonl", 20)
    (folder / "tools.jinja").write_text(HERMES)
    (folder / "tools.py").write_text("x = 1\n")
    (folder / "tools.yaml").write_text("tools: []\n")
    model = [f"model.path={write_model(folder / 'model')}", f"model.chat_template={folder / 'tools.jinja'}"]
    return [*model, f"data.train_files={rows}", f"data.eval_files={rows}"]


def told(args: list[str], command: str = "train", **options: object) -> str:
    """All that is refused, or nothing."""
    try:
        validate(load_config(args, **options).config, command)  # type: ignore[arg-type]
    except ValueError as exc:
        return str(exc)
    return ""


def tools_of(base: list[str], name: str = "tools.py") -> str:
    return str(Path(base[1].partition("=")[2]).with_name(name))


def test_rows_are_played_with_the_tools_that_are_given(base: list[str]) -> None:
    file = tools_of(base)
    keys = [f"{MULTI_TURN}enable=True", f"{MULTI_TURN}tool_config_path={tools_of(base, 'tools.yaml')}"]
    for given, options in (([f"agent.tools=[{file}]"], {}), (keys, {}), (keys, {"verl_defaults": "rl"})):
        agent = load_config([*base, *given], **options).config.agent  # type: ignore[arg-type]
        assert played_by(agent.loop, agent.tools) == ("tool_agent", False), given
    assert played_by("auto@driver", [file]) == ("tool_agent", True) and played_by("auto", []) == ("single_turn", False)
    assert played_by("single_turn_agent", [file]) == ("single_turn", False), "what is named wins"
    players = Players("tool_agent", ("single_turn", "tool_agent"))
    row = {"prompt": [{"role": "user", "content": "x"}], "answer": "1"}
    cfg = load_config(base).config.data
    for named, agent_name in (({}, "tool_agent"), ({"agent_name": "single_turn_agent"}, "single_turn")):
        assert task_row(RawRow("f:1", row | named), cfg, players).agent == agent_name


@pytest.mark.parametrize("key", ["max_turns", "max_tool_calls", "max_parallel_calls", "max_tool_result_tokens"])
def test_a_limit_of_tools_without_tools_is_refused(base: list[str], key: str) -> None:
    assert f"agent.{key}=3 (command line) does nothing without tools" in told([*base, f"agent.{key}=3"])
    assert told([*base, f"agent.{key}=3", f"agent.tools=[{tools_of(base)}]"]) == ""
    assert told([*base, f"agent.{key}=3", f"agent.loop={tools_of(base)}:Own"]) == "", "a loop of one's own reads it"


def test_a_limit_of_verls_without_tools_is_said_to_have_no_effect(base: list[str]) -> None:
    keys = ["max_assistant_turns=3", "max_parallel_calls=2", "format=hermes", "max_tool_response_length=9"]
    resolved = load_config([*base, *(MULTI_TURN + key for key in keys)])
    actions = {note.key.rpartition(".")[2]: note.action for note in resolved.notes}
    assert set(actions.values()) == {"ignored"} and len(actions) == 4
    assert (resolved.config.agent.max_turns, resolved.config.agent.format) == (None, "auto")
    with_tools = load_config([*base, f"agent.tools=[{tools_of(base)}]", *(MULTI_TURN + key for key in keys)])
    assert (with_tools.config.agent.max_turns, with_tools.config.agent.format) == (3, "hermes")


def test_a_recipe_may_have_limits_whose_tools_are_taken_away(base: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"agent:\n  tools: [{tools_of(base)}]\n  loop: tool_agent\n  max_turns: 3\n")
    assert told([*base, f"recipe={recipe}", "agent.tools=[]", "agent.loop=auto"]) == ""
    assert "without a tool" in told([*base, f"recipe={recipe}", "agent.tools=[]"])
    recipe.write_text("agent:\n  max_turns: 3\n")
    assert "agent.max_turns=3 (recipe" in told([*base, f"recipe={recipe}"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["agent.loop=swe_agent"], "there are auto, single_turn, tool_agent, and your own"),
        (["agent.loop=tool-agent"], "did you mean tool_agent?"),
        (["agent.loop=gone.py:Loop"], "agent.loop=gone.py:Loop: no such file"),
        (["agent.loop=tool_agent"], "without a tool"),
        (["agent.tools=[gone.py]"], "agent.tools=gone.py: no such file"),
        (["agent.tools=[gone.yaml]"], "agent.tools=gone.yaml: no such file"),
        (["agent.tools=[TOOLS]", "agent.format=morse"], "agent.format=morse: unknown"),
        (["agent.tools=[TOOLS]", "model.chat_template=PLAIN"], "plain.jinja does not render tools"),
        ([f"{MULTI_TURN}enable=False", "agent.tools=[TOOLS]"], ""),
        ([f"{MULTI_TURN}enable=False", f"{MULTI_TURN}function_tool_path=TOOLS"], "enable=False with tools"),
    ],
)
def test_plan_refuses_what_train_and_eval_refuse(
    base: list[str], tmp_path: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    swap = {"TOOLS": tools_of(base), "PLAIN": str(tmp_path / "plain.jinja")}
    for name, path in swap.items():
        given = [arg.replace(name, path) for arg in given]
    for command in ("train", "eval"):
        assert said in told([*base, *given], command) and bool(said) == bool(told([*base, *given], command))
    if said:
        assert cli.main(["plan", *base, *given]) == 2 and said in capsys.readouterr().err


def test_tools_that_no_row_plays_with_are_refused(base: list[str]) -> None:
    alone, named = SimpleNamespace(agent="single_turn"), SimpleNamespace(agent="tool_agent")
    file = tools_of(base)
    config = load_config([*base, f"agent.tools=[{file}]", "agent.loop=single_turn"]).config
    with pytest.raises(ValueError, match=r"no row plays with them: agent.loop is single_turn"):
        all_played(config, [alone, alone], [alone])  # type: ignore[arg-type, list-item]
    assert all_played(config, [alone, named], []) and all_played(config, [alone], [named])  # type: ignore[arg-type, list-item]
    own = load_config([*base, f"agent.tools=[{file}]", f"agent.loop={file}:Own"]).config
    assert all_played(own, [alone], []), "it may read them itself"  # type: ignore[arg-type]


def test_generate_refuses_tools_which_it_does_not_play(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *base, f"agent.tools=[{tools_of(base)}]", "prompt=x"]) == 2
    assert "verl generate answers a prompt in one turn, without tools" in capsys.readouterr().err


TOOL = """
from verl.tools.base_tool import BaseTool


class Beside(BaseTool):
    pass
"""
LISTED = """
tools:
- class_name: {module}.Beside
  config: {{type: native}}
  tool_schema:
    type: function
    function: {{name: beside, description: d, parameters: {{type: object, properties: {{}}}}}}
"""


def test_a_module_beside_the_file_that_names_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "m6_beside.py").write_text(TOOL)
    (tmp_path / "tools.yaml").write_text(LISTED.format(module="m6_beside"))
    assert list(load_tools([str(tmp_path / "tools.yaml")])) == ["beside"]
    (tmp_path / "gone.yaml").write_text(LISTED.format(module="m6_gone"))
    with pytest.raises(ValueError, match=r"agent.tools=\S+gone.yaml: class_name=m6_gone.Beside: no module named"):
        load_tools([str(tmp_path / "gone.yaml")])


def test_a_command_finds_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    (tmp_path / "m6_here.py").write_text(
        "from verl.tools import function_tool\n\n\n@function_tool\ndef f() -> int:\n    'F.'\n"
    )
    cli.main(["--help"])
    assert sys.path[-1] == str(tmp_path), "at the end: it shadows nothing"
    assert list(load_tools(["m6_here"])) == ["f"]


def test_a_recipe_names_code_that_lies_beside_it(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    for name in ("reward.py", "tools.py"):
        (tmp_path / "made" / name).write_text("x = 1\n")
    (tmp_path / "made" / "r.yaml").write_text("reward:\n  path: reward.py\nagent:\n  tools: ['tools.py:multiply']\n")
    monkeypatch.chdir(tmp_path)
    found = load_config([*base, "recipe=made/r.yaml"]).config
    assert Path(found.reward.path or "").samefile(tmp_path / "made" / "reward.py")
    assert found.agent.tools == [f"{tmp_path / 'made' / 'tools.py'}:multiply"]
    (tmp_path / "reward.py").write_text("x = 2\n")
    assert load_config([*base, "recipe=made/r.yaml"]).config.reward.path == "reward.py", "the current folder's wins"


def test_a_reward_that_is_no_module_is_refused_by_plan(base: list[str]) -> None:
    assert "reward.path=my_rewards: no such file or module" in told([*base, "reward.path=my_rewards"])
    assert told([*base, "reward.path=verl.recipes.arithmetic:compute_score"]) == ""

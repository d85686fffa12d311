"""How SGLang is started, without an SGLang."""

from __future__ import annotations

from test_rollout_client import context_of
from test_rollout_vllm import CONFIG

from verl.rollout.sglang import Options, serve_command


def words(**given: bool) -> list[str]:
    """The line that starts a server for a model in the folder /m."""
    context = context_of(hf_config=CONFIG, max_context_tokens=200, **given)
    return serve_command("py", Options(), context, "/m", 1234)


def test_the_head_is_computed_in_float32_where_that_is_set() -> None:
    plain, wide = words(), words(float32_head=True)
    assert plain[:5] == ["py", "-m", "sglang.launch_server", "--model-path", "/m"]
    assert "--enable-fp32-lm-head" not in plain
    assert [word for word in wide if word not in plain] == ["--enable-fp32-lm-head"]

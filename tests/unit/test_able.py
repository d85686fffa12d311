"""A run that needs what its rollout engine cannot is refused when the engine is up, in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from each import each

from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.setup import check_able
from verl.rollout.base import Capabilities

ALL = Capabilities(logprobs="processed", max_context_tokens=8)


def asking() -> Config:
    config = Config()
    config = changed(config, {"run.deterministic": True, "pipeline.partial_rollout": True})
    config = changed(config, {"rollout.stop": ["</s>"], "rollout.engine": "mine"})
    return config


@each(
    "lacks, said",
    [
        ({"seeds": False}, "run.deterministic=true with rollout.engine=mine: it does not look at seeds"),
        (
            {"stop_strings": False},
            r"rollout.stop=\['</s>'\] with rollout.engine=mine: its answers do not end at strings",
        ),
        ({"score_temperatures": ()}, "sync.canary=true with rollout.engine=mine: it scores no prompts"),
        ({"spans": False}, "pipeline.partial_rollout=true with .* which weights drew a token; leave it out, or set"),
    ],
)
def test_what_an_engine_cannot_is_refused_where_it_is_needed(lacks: dict[str, Any], said: str) -> None:
    less = replace(ALL, **lacks)
    with pytest.raises(ValueError, match=said) as caught:
        check_able(less, asking())
    assert "\n" not in str(caught.value)
    needs_nothing = Config()
    needs_nothing = changed(needs_nothing, {"sync.canary": False})
    check_able(less, needs_nothing)


def test_an_engine_that_can_all_is_taken() -> None:
    check_able(ALL, asking())
    check_able(replace(ALL, score_temperatures=(0.0, 1.0)), asking())

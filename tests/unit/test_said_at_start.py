"""The lines of a start or a resume about the template and the learning rate."""

from __future__ import annotations

import copy

import numpy as np
from test_bridge_templates import FILES, tokenizer_for

from verl.chat.dates import date_line
from verl.chat.template import Renderer
from verl.config.load import load_config
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.setup import template_lines, unread_ids
from verl.driver.stretched import stretched
from verl.track.events import EventLog


def test_a_template_that_prints_the_date_is_said_with_what_pins_it(tmp_path):
    lines = {name: date_line(Renderer(tokenizer_for(name))) for name in FILES if "strftime" in FILES[name].read_text()}
    assert "model.template_kwargs={date_string: " in lines["llama3_2"] and "chat_template=FILE" in lines["gptoss"]
    assert not date_line(Renderer(tokenizer_for("llama3_1"))) and not date_line(Renderer(tokenizer_for("qwen3")))
    pinned = {"date_string": "26 Jul 2024"}
    assert not date_line(Renderer(tokenizer_for("llama3_2"), pinned))
    for more, count in (("{}", 1), ("{date_string: '1 May 2025'}", 0)):
        config = load_config([f"model.path={tmp_path}", f"model.template_kwargs={more}"]).config
        assert sum("date" in line for line in template_lines(config, tokenizer_for("llama3_2"))) == count


def test_a_resume_says_that_the_schedule_is_stretched(tmp_path):
    def said(schedule: str, done: int, before: int, total: int) -> list[str]:
        config = Config()
        config = changed(config, {"optim.lr": 1e-3, "optim.schedule": schedule})
        folder = tmp_path / f"{schedule}{done}{before}{total}"
        (folder / "events").mkdir(parents=True)
        with_log = EventLog(folder, 0)
        with_log.append("resumed", 1, {"total_steps": before})
        with_log.close()
        return stretched(config, folder, done, total)

    assert said("linear", 85, 100, 170) == ["lr 1.5e-4 -> 5.0e-4: the schedule is stretched from 100 to 170 steps"]
    assert said("linear", 100, 100, 200) == ["lr 0.0e+00 -> 5.0e-4: the schedule is stretched from 100 to 200 steps"]
    assert "shortened" in said("cosine", 40, 100, 50)[0]
    for same in (
        ("constant", 50, 100, 200),
        ("linear", 0, 100, 200),
        ("linear", 50, 100, 100),
        ("linear", 60, 100, 50),
    ):
        assert not said(*same)


def test_a_resume_says_that_the_noise_is_stretched(tmp_path):
    noise = [f"rollout.engine_options.noise_sigma_{at}" for at in ("start=0.02", "end=0.0005")]
    config = load_config([f"model.path={tmp_path}", "run.total_steps=200", *noise]).config
    log = EventLog(tmp_path, 0)
    log.append("resumed", 1, {"total_steps": 100})
    log.close()
    assert stretched(config, tmp_path, 95, 200) == [
        "noise sigma 5.0e-4 -> 3.9e-3: the schedule is stretched from 100 to 200 steps"
    ]


def test_sampled_ids_that_are_no_text_are_counted(tmp_path):
    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.add_tokens(["<|reserved_1|>"], special_tokens=True)
    tokenizer.add_tokens(["<word>"])
    config, text = load_config([f"model.path={tmp_path}"]).config, tokenizer("It is 42.<|im_end|><word>")["input_ids"]
    count, reserved = unread_ids(config, tokenizer), tokenizer.convert_tokens_to_ids("<|reserved_1|>")
    assert count(np.array(text)) == 0
    assert count(np.array([*text, reserved, len(tokenizer), 10**6])) == 3

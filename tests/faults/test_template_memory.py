"""A hostile chat template meets a bound, not the machine's memory, and is named with the row that it was rendering."""

import json
import resource

import pytest
from each import matrix

from verl.config.schema import DataConfig
from verl.data import source
from verl.data.source import load_conversations, load_tasks
from verl.models import tiny

EATS = "{{ 'x' * 10**11 }}"


@matrix("rows", [8, 40])  # in this process, in workers
def test_a_template_that_repeats_a_text_is_refused_with_its_row(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(source, "IN_PROCESS_ROWS", 10)
    file = tmp_path / "rows.jsonl"
    texts = ["7" if k != 5 else "9" for k in range(rows)]
    turns = [[{"role": "user", "content": t}, {"role": "assistant", "content": "1"}] for t in texts]
    file.write_text("\n".join(json.dumps({"prompt": m[0]["content"], "messages": m}) for m in turns))
    tokenizer, cfg = tiny.character_tokenizer("0123456789"), DataConfig(cache_dir=str(tmp_path), num_workers=2)
    own, limits = tokenizer.chat_template, resource.getrlimit(resource.RLIMIT_AS)
    for template, place in ((EATS, ""), ("{% if messages[0].content == '9' %}" + EATS + "{% endif %}" + own, ":6: ")):
        tokenizer.chat_template = template
        for load in (load_tasks, load_conversations):
            with pytest.raises(ValueError, match="the chat template takes more memory") as caught:
                load([str(file)], tokenizer, cfg)
            assert place in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits

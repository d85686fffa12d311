"""A dataset class of the user's: its rows are read once, in a process that can be killed, and checked as any row."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import textwrap
from pathlib import Path
from typing import Any, Literal

import pytest
from each import matrix
from handmade_model import write_model
from translating import translate

from verl.config.frozen import frozen
from verl.config.load import load_config
from verl.config.schema import DataConfig
from verl.config.validate import validate
from verl.data import dataset_class
from verl.data.source import ConversationTable, TaskTable, load_conversations, load_tasks
from verl.data.user_dataset import write_rows
from verl.models import tiny

HEAD = "from verl.utils.dataset.rl_dataset import RLHFDataset\nimport numpy as np\n"
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n}+1="}], "reward_model": {"ground_truth": str(n + 1)}, "level": n}
    for n in range(6)
]


@pytest.fixture
def tokenizer() -> Any:
    made: Any = tiny.character_tokenizer("0123456789+=? abc\n")
    return made


def config_of(folder: Path, source: str, rows: list[Any] = ROWS, **options: Any) -> tuple[list[str], DataConfig]:
    (folder / "mine.py").write_text(HEAD + textwrap.dedent(source))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = {"dataset_class": f"{folder / 'mine.py'}:Mine", "cache_dir": str(folder / "cache"), "num_workers": 0}
    return [str(folder / "rows.jsonl")], DataConfig(**{**named, **options})


def tasks(folder: Path, tokenizer: Any, source: str, rows: list[Any] = ROWS, **options: Any) -> TaskTable:
    files, cfg = config_of(folder, source, rows, **{key: v for key, v in options.items() if key != "max_rows"})
    return load_tasks(files, tokenizer, cfg, max_rows=options.get("max_rows"))


def conversations(folder: Path, tokenizer: Any, source: str, **options: Any) -> ConversationTable:
    return load_conversations(config_of(folder, source, **options)[0], tokenizer, config_of(folder, source)[1])


def texts(table: TaskTable) -> list[str]:
    return [str(table[i].messages[-1]["content"]) for i in range(len(table))]


@pytest.mark.slow
def test_a_subclass_that_changes_nothing_gives_the_rows_of_the_files(tmp_path: Path, tokenizer: Any) -> None:
    table = tasks(tmp_path, tokenizer, "class Mine(RLHFDataset):\n    pass\n")
    plain = load_tasks([str(tmp_path / "rows.jsonl")], tokenizer, DataConfig(cache_dir=str(tmp_path / "c")))
    assert len(table) == len(plain) == 6
    for i in range(6):
        ours, theirs = table[i], plain[i]
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist() and ours.ground_truth == theirs.ground_truth
        assert ours.row["level"] == i and "raw_prompt" not in ours.row and "dummy_tensor" not in ours.row
    assert len(tasks(tmp_path, tokenizer, "class Mine(RLHFDataset):\n    pass\n", max_rows=2)) == 2


def test_a_class_gets_the_arguments_of_the_chat_template_at_all_levels(tmp_path: Path, tokenizer: Any) -> None:
    source = """
    class Mine(RLHFDataset):
        def _build_messages(self, example):
            return [{"role": "user", "content": str(self.config.apply_chat_template_kwargs.a.b[0])}]
    """
    files, cfg = config_of(tmp_path, source)
    assert texts(load_tasks(files, tokenizer, cfg, template_kwargs=frozen({"a": {"b": [7]}})))[0] == "7"


def test_what_a_subclass_overrides_is_what_is_read(tmp_path: Path, tokenizer: Any) -> None:
    source = """
    class Mine(RLHFDataset):
        def _read_files_and_tokenize(self):
            super()._read_files_and_tokenize()
            self.dataframe = self.dataframe.filter(lambda row: row["level"] % 2 == 0, num_proc=2, desc="even")
            self.dataframe = self.dataframe.map(lambda row: {**row, "tag": self.config.get("prompt_key")})

        def maybe_filter_out_long_prompts(self, dataframe=None):
            return dataframe.select(range(3))

        def _build_messages(self, example):
            messages = super()._build_messages(example)
            return [{"role": "user", "content": "? " + messages[-1]["content"]}]
    """
    table = tasks(tmp_path, tokenizer, source)
    assert texts(table) == ["? 0+1=", "? 2+1="] and table[1].row["tag"] == "prompt"
    changed = source.replace('"? "', '"?? "')
    assert texts(tasks(tmp_path, tokenizer, changed)) == ["?? 0+1=", "?? 2+1="], "no table of the class before"


def test_a_class_of_its_own_gives_arrays_and_they_are_plain_rows(tmp_path: Path, tokenizer: Any) -> None:
    source = """
    class Mine:
        def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
            assert data_files[0].endswith("rows.jsonl") and processor is None
            self.limit = config.max_prompt_length
        def __len__(self):
            return np.int64(2)
        def __getitem__(self, item):
            messages = np.array([{"role": "user", "content": f"{item}+1="}], dtype=object)
            truth = {"ground_truth": np.str_(item + 1), "style": "rule"}
            return {"raw_prompt": messages, "reward_model": truth, "index": np.int64(item), "limit": self.limit,
                    "extra_info": {"weights": np.array([1.5, 2.5]), "flag": np.bool_(True)}, "tools_kwargs": {}}
    """
    table = tasks(tmp_path, tokenizer, source, max_prompt_tokens=77)
    assert texts(table) == ["0+1=", "1+1="] and [table[i].ground_truth for i in range(2)] == ["1", "2"]
    assert table[1].extra_info == {"weights": [1.5, 2.5], "flag": True}
    assert table[1].row["index"] == 1 and table[1].row["limit"] == 77


def test_images_of_a_class_may_be_bytes_and_pixels(tmp_path: Path, tokenizer: Any) -> None:
    """In columns of media and in parts of messages: what the lines contain is the content, upright."""
    from PIL import Image

    turned, out = Image.new("L", (3, 2), 7), tmp_path / "out.jsonl"
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=turned.getexif())
    source = f"""
    from PIL import Image
    class Mine(RLHFDataset):
        def __getitem__(self, item):
            part = {{"type": "image", "image": Image.open({str(tmp_path / "turned.jpg")!r})}}
            row = {{"raw_prompt": [{{"role": "user", "content": [part]}}], "images": [{{"bytes": b"abc"}}, MORE]}}
            return {{**row, "videos": [[np.zeros((4, 5, 3), np.uint8)]]}}
    """

    def written(more: str) -> dict[str, Any]:
        files, _ = config_of(tmp_path, source.replace("MORE", more))
        names = dict[str, Any]()
        exec((tmp_path / "mine.py").read_text(), names)
        options = {"prompt_key": "prompt", "apply_chat_template_kwargs": {}, "max_prompt_length": 9}
        given = {"files": files, "out": str(out), "tokenizer": tokenizer, "options": options, "max_rows": 1}
        write_rows(named="Mine", kind="rl", load=lambda named: names["Mine"], **given)
        row: dict[str, Any] = json.loads(out.read_text())
        return row

    def image_in(url: str) -> Any:
        return Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))

    row = written("b'def'")
    assert [base64.b64decode(one.partition(",")[2]) for one in (row["images"][0]["bytes"], row["images"][1])] == [
        b"abc",
        b"def",
    ]
    assert image_in(row["prompt"][0]["content"][0]["image"]).size == (2, 3), "upright"
    assert image_in(row["videos"][0][0]).size == (5, 4)
    with pytest.raises(ValueError, match="Mine:1: 'images': pixels of the kind 'F'"):
        written("Image.new('F', (2, 2))")


TOKENS = """
class Mine(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        ids = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
        ids = ids[{cut}]
        row["raw_prompt_ids"] = ids
        row["input_ids"] = np.array([0, 0, *ids])
        row["attention_mask"] = np.array([0, 0, *[1] * len(ids)])
        row["position_ids"] = np.arange(len(ids) + 2)
        return row
"""


@pytest.mark.slow
def test_ids_beside_the_messages_are_those_of_the_messages_or_refused(tmp_path: Path, tokenizer: Any) -> None:
    table = tasks(tmp_path, tokenizer, TOKENS.format(cut=":"))
    assert len(table) == 6 and not {"input_ids", "raw_prompt_ids", "attention_mask"} & table[0].row.keys()
    for cut in ("1:", "::-1"):
        with pytest.raises(ValueError, match=r"Mine.*:1: 'raw_prompt_ids' are not the ids of its messages"):
            tasks(tmp_path, tokenizer, TOKENS.format(cut=cut))
    alone = TOKENS.format(cut=":").replace("return row", 'row.pop("raw_prompt"); row.pop("prompt"); return row')
    with pytest.raises(ValueError, match=r":1: .*no 'raw_prompt'"):
        tasks(tmp_path, tokenizer, alone)


ENDS = {
    "an error of its own": ("def __getitem__(self, item): return {}[item]", r"KeyError: 0"),
    "no rows": ("def __len__(self): return 0", r"no rows"),
    "an end of its process": ("def __len__(self): import os; os._exit(3)", r"exited with code 3"),
    "a wrong row": ("def _build_messages(self, example): return [{'role': 'nobody', 'content': 'x'}]", r":1: .*nobody"),
    "media": (
        "def __getitem__(self, item): return {**super().__getitem__(item), 'multi_modal_data': {'image': ['a.png']}}",
        r"multi_modal_data",
    ),
}
REFUSED = {
    "no mapping": ("def __getitem__(self, item): return [1]", r":1: .*returned a list"),
    "what is no data": (
        "def __getitem__(self, item): return {**super().__getitem__(item), 'x': object()}",
        r":1: 'x' is a object",
    ),
    "rows that change": (
        "n = 0\n    def _build_messages(self, example):\n"
        "        self.n += 1\n        return [{'role': 'user', 'content': f'{self.n}'}]",
        r":1: .*another row when it is read again",
    ),
    "a hook of the training": ("def on_batch_end(self, batch): pass", r"on_batch_end.*read once"),
    "its own batches": ("def collate_fn(self, rows): return rows", r"collate_fn"),
}


def written(folder: Path, source: str, kind: Literal["rl", "sft"] = "rl") -> list[dict[str, Any]]:
    """The rows of a class, made in this process."""
    scope: dict[str, Any] = {}
    exec(HEAD + textwrap.dedent(source), scope)
    files, cfg = config_of(folder, source)
    write_rows(
        named="mine.py:Mine", files=files, out=str(folder / "out"), kind=kind, tokenizer=None,
        options=dataset_class._options(cfg, {}), max_rows=None, load=lambda _: scope["Mine"],
    )  # fmt: skip
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_with_the_row(name: str, tmp_path: Path) -> None:
    body, said = REFUSED[name]
    with pytest.raises(ValueError, match=said) as refused:
        written(tmp_path, f"class Mine(RLHFDataset):\n    {body}\n")
    assert "mine.py:Mine" in str(refused.value)
    assert len(written(tmp_path, "class Mine(RLHFDataset):\n    pass\n")) == 6


@matrix("name", ENDS)
def test_what_ends_the_reading_is_one_line_with_the_class(name: str, tmp_path: Path, tokenizer: Any) -> None:
    body, said = ENDS[name]
    with pytest.raises(ValueError, match=said) as refused:
        tasks(tmp_path, tokenizer, f"class Mine(RLHFDataset):\n    {body}\n")
    assert "mine.py:Mine" in str(refused.value)


def test_a_mask_that_may_be_of_another_place_is_refused(tmp_path: Path) -> None:
    source = """
    class Mine:
        def __init__(self, **given): pass
        def __len__(self): return 1
        def __getitem__(self, item):
            return {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "loss_mask": [0, 1, 0, 0]}
    """
    with pytest.raises(ValueError, match=r"Mine:1: 'loss_mask' is 0 at the last token"):
        written(tmp_path, source, "sft")
    assert written(tmp_path, source.replace("[0, 1, 0, 0]", "[0, 0, 1, 0]"), "sft")[0]["loss_mask"] == [0, 0, 1, 0]


def test_a_class_that_never_ends_is_killed(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_class, "DEADLINE_S", 5.0)  # a busy machine takes some of them to begin
    source = f"""
    import os, time
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    class Mine(RLHFDataset):
        def __len__(self):
            time.sleep(1000)
    """
    with pytest.raises(ValueError, match="mine.py:Mine: no rows within 5 s"):
        tasks(tmp_path, tokenizer, source)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_it_is_read_where_an_event_loop_runs(tmp_path: Path, tokenizer: Any) -> None:
    async def within() -> int:
        return len(tasks(tmp_path, tokenizer, "class Mine(RLHFDataset):\n    pass\n"))

    assert asyncio.run(within()) == 6


@pytest.mark.slow
def test_a_class_of_sft_gives_conversations_or_ids(tmp_path: Path, tokenizer: Any) -> None:
    turns = """
    class Mine:
        def __init__(self, parquet_files, tokenizer, config, max_samples=-1):
            self.key = config.messages_key
        def __len__(self):
            return 2
        def __getitem__(self, item):
            return {self.key: [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": str(item)}]}
    """
    table = conversations(tmp_path, tokenizer, turns)
    (_, second) = table
    assert "1" in tokenizer.decode(second.ids[second.mask]) and len(table) == 2
    ids = turns.replace(
        "return {self.key: [",
        "return {'input_ids': np.array([5, 6, 7, 0]), 'attention_mask': np.array([1, 1, 1, 0]),\n"
        "                    'loss_mask': np.array([0, 0, 1, 0]), 'position_ids': np.arange(4)}\n"
        "            return {self.key: [",
    )
    first = conversations(tmp_path, tokenizer, ids)[0]
    assert first.ids.tolist() == [5, 6, 7] and first.mask.tolist() == [False, False, True]


def test_verls_keys_name_the_class(tmp_path: Path) -> None:
    said = {s.key: s.value for s in translate(["data.custom_cls.path=a/b.py", "data.custom_cls.name=Mine"]).settings}
    assert said == {"data.dataset_class": "a/b.py:Mine"}
    module = translate(["data.custom_cls.path=pkg://a.b", "data.custom_cls.name=Mine"]).settings
    assert module[0].value == "a.b:Mine"
    assert not translate(["data.custom_cls.path=null", "data.custom_cls.name=null"]).settings
    with pytest.raises(ValueError, match=r"data.custom_cls.path=a.py: give data.custom_cls.name"):
        translate(["data.custom_cls.path=a.py"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0]))
    model = write_model(tmp_path / "m")
    args = [f"model.path={model}", f"data.train_files=[{rows}]"]
    with pytest.raises(ValueError, match=r"data.dataset_class=nowhere.py:Mine: no such file; give FILE.py:Class"):
        validate(load_config([*args, "data.dataset_class=nowhere.py:Mine"]).config)
    with pytest.raises(ValueError, match=r"data.dataset_class=Mine: give FILE.py:Class or module:Class"):
        validate(load_config([*args, "data.dataset_class=Mine"]).config)
    with pytest.raises(ValueError, match=r"data.dataset_class.*`verl dpo`"):
        validate(load_config([*args, "data.dataset_class=json:JSONDecoder"]).config, "dpo")

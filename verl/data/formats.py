"""Rows in their published forms -> messages, ground truth and metadata.

    RL   {prompt: messages | text, data_source, reward_model.ground_truth, extra_info, ...}     verl's Parquet row
         {prompt, completion?, ground_truth | answer | solution}                                TRL
         {question, answer: "... #### 72"}                                                       GSM8K as published
    SFT  {messages, tools?} · {prompt, completion | response} · {question, answer}
    both {conversations: [{from, value}, ...]}                                                  ShareGPT
         {instruction, input | context?, output | response, history?}                           Alpaca, Dolly

In all of them `system` or `system_prompt` may be the system message (data/columns.py). Preference rows are in
data/pairs.py. A wrong row is a ValueError that starts with the place of the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from verl.chat.messages import Messages, messages_of_text, read_messages, refuse_trained, tool_without_nulls
from verl.config.schema import DataConfig
from verl.data.columns import are_schemas, question_of, refuse_history, refuse_marks, refuse_schemas, system_of
from verl.data.files import RawRow
from verl.data.truths import GSM8K_ANSWER, GSM8K_INSTRUCTION, GSM8K_SOURCE, ground_truth_of, gsm8k_number, gsm8k_texts
from verl.data.values import kind_of, names_of, object_in
from verl.errors import Refused

PREFERENCE = "`verl dpo` or `verl rm` read these"
COMPLETION_KEYS = ("completion", "response")
TOOLS_KEY = "tools"
"""The column of tools, unless `data.tools_key` names another."""
BARE = {"name", "parameters"}
"""Keys of a function's schema that is not in {type: function, function: ...}."""
AUTO, SINGLE_TURN, TOOL_AGENT = "auto", "single_turn", "tool_agent"
AGENT_NAMES = MappingProxyType({"single_turn_agent": SINGLE_TURN})
"""verl's name of a loop -> our name, if they differ."""
IN_DRIVER = "@driver"
FEEDBACK = "attempt.feedback"
"""The value of `teacher.hint_key` that selects the feedback on the attempt instead of a column."""


class TaskRow(NamedTuple):
    """The fields of a row that RL needs, under the names of `types.Task`. The row itself is stored beside them."""

    messages: Messages
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tools: tuple[dict[str, Any], ...]
    agent: str
    teacher: str


class ConversationRow(NamedTuple):
    """The fields of a row that SFT needs. Assistant turns before message `train_from` are context."""

    messages: Messages
    tools: tuple[dict[str, Any], ...]
    train_from: int
    template_kwargs: dict[str, Any]


def played_by(loop: str, tools: Sequence[str]) -> tuple[str, bool]:
    """Return the loop that `agent.loop` and `agent.tools` select, and True if it runs in the driver's process."""
    name = loop.removesuffix(IN_DRIVER)
    chosen = (TOOL_AGENT if tools else SINGLE_TURN) if name == AUTO else AGENT_NAMES.get(name, name)
    return chosen, name != loop


class Players(NamedTuple):
    """The agent loops, tools and teachers of the run, as far as reading rows depends on them."""

    default: str = "single_turn"
    """The loop of rows without an `agent_name`."""
    names: tuple[str, ...] = ("single_turn",)
    """The loops that a row may select."""
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas of the run's tools."""
    teachers: tuple[str, ...] = ()
    """The teachers, one of which each row must name; empty if there is at most one."""
    hint_key: str | None = None
    """The column with the hint that the teacher's prompt contains."""
    answer_key: str | None = None
    """The column of stored answers."""
    answer_tokens: int = 0
    """The largest number of tokens of a stored answer."""
    rewarded: bool = False
    """True if the tools belong to an environment that returns the reward."""

    def graded(self, agent: str) -> bool:
        """Return True if the reward function scores the rows of this loop, as far as the configuration determines
        it."""
        return agent == SINGLE_TURN or (agent == TOOL_AGENT and not self.rewarded)


ONE_ANSWER = Players()


def task_row(raw: RawRow, cfg: DataConfig, players: Players = ONE_ANSWER) -> TaskRow:
    """Parse one row of an RL dataset."""
    row, where = named_row(raw, cfg), raw.where
    if row.get(cfg.prompt_key) is None and isinstance(turns := row.get("conversations"), list) and len(turns) > 1:
        *_, last = read_messages(turns, where, "conversations")
        if last["role"] == "assistant" and last["content"]:  # its text is the ground truth
            row = {**row, cfg.prompt_key: turns[:-1], "solution": last["content"]}
    extra_info = object_in(row.get("extra_info"), where, "extra_info")
    agent = _player(row, extra_info, where, players)
    agent, tools = _played_tools(row, where, cfg, agent, players)
    source = row.get("data_source")
    if source is not None and not isinstance(source, str):
        raise Refused(f"{where}: 'data_source' must be a string, got {kind_of(source)}")
    if row.get(cfg.prompt_key) is not None:
        messages = read_messages(row[cfg.prompt_key], where, cfg.prompt_key, tools=tools)
        refuse_trained(messages, where, cfg.prompt_key)
        truth, _ = ground_truth_of(row, where, cfg.prompt_key)
    elif "question" in row and "answer" in row:
        question, answer = gsm8k_texts(row, where)
        messages = ({"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"},)
        truth, source = gsm8k_number(answer, where), source or GSM8K_SOURCE
        extra_info = {"question": question, "answer": answer, **extra_info}
    else:
        raise Refused(
            f"{where}: no prompt: column {cfg.prompt_key!r} is missing or null (columns: {names_of(row)})."
            " Fix: data.prompt_key=COLUMN"
        )
    if messages[-1]["role"] == "assistant":
        begun = str(messages[-1]["content"])[:60]
        raise Refused(
            f"{where}: {cfg.prompt_key!r} ends with an assistant turn, {begun!r}, and answers are not begun by the "
            "prompt here. Fix: end prompts with the user's turn (to learn an answer: `verl sft`)"
        )
    teacher = _teacher(row, source, where, players.teachers)
    return TaskRow(with_system(messages, cfg, row), source or "", truth, extra_info, tools, agent, teacher)


def _teacher(row: Mapping[str, Any], source: str | None, where: str, teachers: tuple[str, ...]) -> str:
    """Return the teacher of the row, by its column `teacher` or its data source; "" without a choice of teachers."""
    wanted = row.get("teacher") or source
    if teachers and isinstance(wanted, str) and (name := teacher_name(wanted)) in teachers:
        return wanted if wanted in teachers else name
    if teachers:
        fix = f"teacher.paths has {', '.join(teachers)}. Fix: name one in the column 'teacher', or add {wanted!r} there"
        raise Refused(f"{where}: the row's teacher is {wanted!r}, and {fix}")
    return ""


def teacher_name(text: str) -> str:
    """Return a row's `text` as a key of teacher.paths: openai/gsm8k becomes openai_gsm8k."""
    return re.sub(r"\W", "_", text)


def hinted(row: Mapping[str, Any], key: str, messages: Messages, where: str) -> Messages:
    """Return the teacher's prompt: the messages in column `key`, or the row's prompt with the text in column `key`
    appended."""
    hint = FEEDBACK if key == FEEDBACK else _filled(row, key, where, "which the teacher is to read")
    if not isinstance(hint, str):
        return read_messages(hint, where, key)
    if messages[-1]["role"] != "user" or not isinstance(messages[-1]["content"], str):
        prefix = "the prompt does not end with a user's text, behind which a hint could stand"
        raise Refused(f"{where}: {prefix}. Fix: give {key!r} as messages, the whole prompt that the teacher reads")
    return with_hint(messages, hint)


def with_hint(messages: Messages, hint: str) -> Messages:
    """Return the messages with the hint appended to the text of the last one."""
    *before, last = messages
    return (*before, {**last, "content": f"{last['content']}\n\n{hint}"})


def stored_answer(row: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return the stored answer in column `key` as an assistant message. The column has text, or a list of one
    message."""
    *before, last = read_messages(_filled(row, key, where, "the stored answer"), where, key, role="assistant")
    if before or last["role"] != "assistant":
        raise Refused(f"{where}: {key!r} must be text or one message of the assistant, the answer to the prompt")
    return last


def _filled(row: Mapping[str, Any], key: str, where: str, what: str) -> Any:
    """Return the value of a column of the row or of its extra_info. Raise ValueError if it is empty."""
    found = row.get(key, object_in(row.get("extra_info"), where, "extra_info").get(key))
    if found is None or found in ("", []):
        raise Refused(f"{where}: no {key!r}, {what}. Fix: fill the column, or drop the row")
    return found


def _player(row: Mapping[str, Any], extra_info: Mapping[str, Any], where: str, players: Players) -> str:
    """Return the loop of the row. Raise ValueError for a row that requires another loop, an interaction or missing
    tools: this run would train another task than the row describes."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise Refused(f"{where}: a preference row ('chosen' and 'rejected'). Fix: {PREFERENCE}")
    wanted = row.get("agent_name") or players.default
    agent = AGENT_NAMES.get(wanted, wanted)
    if agent not in players.names:
        known, fix = ", ".join(players.names), "name one of these, set agent.loop or agent.tools, or drop the column"
        raise Refused(f"{where}: agent_name={wanted!r}, and this run has {known}. Fix: {fix}")
    there = {tool["function"]["name"] for tool in players.tools} if agent == TOOL_AGENT else set()
    for key in ("tools_kwargs", "interaction_kwargs"):
        found = {**object_in(row.get(key), where, key), **object_in(extra_info.get(key), where, f"extra_info.{key}")}
        unplayed = {k for k, v in found.items() if v}  # Arrow adds the keys of other rows with null
        if agent not in (SINGLE_TURN, TOOL_AGENT):
            continue  # a user's own loop may read any key
        if requested := sorted(unplayed - there if key == "tools_kwargs" else unplayed):
            fix = "the row would be trained as a plain question. Fix: agent.tools, or drop the column if that is wanted"
            raise Refused(f"{where}: {key!r} names {', '.join(requested)}, which {agent} does not play: {fix}")
    return agent


def _played_tools(
    row: Mapping[str, Any], where: str, cfg: DataConfig, agent: str, players: Players
) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return (the loop of the row, the tools that its prompt shows).

    A row without an `agent_name` is played with its tools if all of them are tools of the run. Other tools raise
    ValueError, unless `data.tools_key` declares that they are only shown. A user's own loop reads them from the row.
    """
    key = cfg.tools_key or TOOLS_KEY
    if agent not in (SINGLE_TURN, TOOL_AGENT):
        return agent, tools_in(row.get(key), where, key) if cfg.tools_key else ()
    if cfg.tools_key is None:
        refuse_schemas(row, where, key)
    shown_only = agent == SINGLE_TURN and cfg.tools_key is not None
    tools = tools_in(row.get(key), where, key, names=not shown_only or bool(players.tools))
    by_name = {tool["function"]["name"]: tool for tool in players.tools}
    names = list(dict.fromkeys(str((tool.get("function") or tool).get("name")) for tool in tools))
    unknown = [name for name in names if name not in by_name]
    if not unknown and (agent == TOOL_AGENT or (names and not row.get("agent_name"))):
        return TOOL_AGENT, tuple(by_name[name] for name in names) or players.tools
    if shown_only or not names:
        return agent, tools
    has = f"agent.tools has {', '.join(by_name) or 'none'}"
    if agent == SINGLE_TURN and not unknown:
        raise Refused(
            f"{where}: {key!r} names {', '.join(names)}, and 'agent_name' {row['agent_name']!r} plays no tool."
            " Fix: name tool_agent there, or drop one of the columns"
        )
    fix = "agent.tools=[FILE.py] plays them" + (
        "" if agent == TOOL_AGENT else f", data.tools_key={key} only shows them"
    )
    raise Refused(
        f"{where}: the row's tools {', '.join(unknown)} (column {key!r}) are not there: {has}."
        f" Fix: {fix}, or drop the column"
    )


def asks_for_a_judge(raw: RawRow) -> bool:
    """Return True if the row requires a judge (reward_model.style=model), so that the rule of its `data_source` must
    not score it."""
    return object_in(raw.row.get("reward_model"), raw.where, "reward_model").get("style") == "model"


def conversation_row(raw: RawRow, cfg: DataConfig) -> ConversationRow:
    """Parse one row of an SFT dataset."""
    row, where, prompt = named_row(raw, cfg), raw.where, Messages()
    if row.get(cfg.messages_key) is None and row.get("conversations") is not None:
        row = {**row, cfg.messages_key: row["conversations"]}
    refuse_marks(row, where)
    tools = shown_tools(row, where, cfg)
    completion_key = next((k for k in COMPLETION_KEYS if row.get(k) is not None), None)
    if row.get(cfg.messages_key) is not None:
        answer = read_messages(row[cfg.messages_key], where, cfg.messages_key, tools=tools)
        if answer[-1]["role"] != "assistant" and completion_key:  # messages that ask, and the answer beside them
            refuse_trained(answer, where, cfg.messages_key)
            prompt, answer = (
                answer,
                read_messages(row[completion_key], where, completion_key, role="assistant", tools=tools),
            )
    elif row.get(cfg.prompt_key) is not None and completion_key:
        prompt = read_messages(row[cfg.prompt_key], where, cfg.prompt_key, tools=tools)
        refuse_trained(prompt, where, cfg.prompt_key)
        answer = read_messages(row[completion_key], where, completion_key, role="assistant", tools=tools)
    elif "question" in row and "answer" in row:
        question, text = gsm8k_texts(row, where)
        # The prompt that RL on the same file sees.
        suffix = f" {GSM8K_INSTRUCTION}" if GSM8K_ANSWER.search(text) else ""
        answer = ({"role": "user", "content": question + suffix}, {"role": "assistant", "content": text})
    else:
        raise Refused(
            f"{where}: no conversation: needs {cfg.messages_key!r}, or {cfg.prompt_key!r} with one of"
            f" {list(COMPLETION_KEYS)}, or 'question' with 'answer' (columns: {names_of(row)})."
            " Fix: data.messages_key=COLUMN"
        )
    if prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
        prefix = "the prompt ends with an assistant turn, and so does the answer begin; turns are not continued here"
        raise Refused(f"{where}: {prefix}. Fix: the whole turn in the answer")
    if answer[-1]["role"] != "assistant" and row.get("chosen") is not None and row.get("rejected") is not None:
        raise Refused(f"{where}: a preference row: its answers are in 'chosen' and 'rejected'. Fix: {PREFERENCE}")
    messages = with_system(prompt + answer, cfg, row)
    return ConversationRow(messages, tools, len(messages) - len(answer) if prompt else 0, row_kwargs(row, where))


def row_kwargs(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the row's own arguments of the chat template: `chat_template_kwargs`, and the column `enable_thinking`."""
    given = object_in(row.get("chat_template_kwargs"), where, "chat_template_kwargs")
    kwargs, thinking = {k: v for k, v in given.items() if v is not None}, row.get("enable_thinking")
    if thinking is None:
        return kwargs
    if not isinstance(thinking, bool):
        raise Refused(f"{where}: 'enable_thinking' must be true or false, got {kind_of(thinking)}")
    if kwargs.setdefault("enable_thinking", thinking) != thinking:
        raise Refused(f"{where}: 'enable_thinking' and 'chat_template_kwargs' contradict each other. Fix: drop one")
    return kwargs


def named_row(raw: RawRow, cfg: DataConfig) -> dict[str, Any]:
    """Return the row with the values of ShareGPT's and Alpaca's columns under the names that this module reads."""
    row = raw.row
    if row.get("functions") and not row.get(TOOLS_KEY) and are_schemas(row["functions"]):  # OpenAI's former name
        row = {**row, TOOLS_KEY: row["functions"]}
    if isinstance(text := row.get("conversations"), str) and text.strip():
        if (turns := messages_of_text(text, raw.where, "conversations")) is None:
            raise Refused(f"{raw.where}: 'conversations' is text and no list of messages: {text[:60]!r}")
        row = {**row, "conversations": turns}
    if any(row.get(k) is not None for k in (cfg.prompt_key, "question")) or not isinstance(row.get("instruction"), str):
        refuse_history(row, raw.where)
        return row
    history = row.get("history") or ()
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Refused(f"{raw.where}: 'history' must be a list of [question, answer] pairs")
    turns = [{"role": role, "content": text} for turn in history for role, text in zip(("user", "assistant"), turn)]
    if isinstance(row.get("output"), list):
        raise Refused(f"{raw.where}: a preference row ('output' is a list of answers). Fix: {PREFERENCE}")
    prompt = [*turns, {"role": "user", "content": question_of(row)}]
    output = {"completion": row["output"], "solution": row["output"]} if row.get("output") is not None else {}
    return {**row, cfg.prompt_key: prompt, **output}


def with_system(messages: Messages, cfg: DataConfig, row: Mapping[str, Any]) -> Messages:
    """Return the messages, preceded by a system message from the row's column or data.system_prompt if they have
    none."""
    text = system_of(row) or cfg.system_prompt
    if not text or any(m["role"] in ("system", "developer") for m in messages):
        return messages
    return ({"role": "system", "content": text}, *messages)


def shown_tools(row: Mapping[str, Any], where: str, cfg: DataConfig) -> tuple[dict[str, Any], ...]:
    """Return the tool schemas of a row in an SFT or preference dataset."""
    key = cfg.tools_key or TOOLS_KEY
    if cfg.tools_key is None:
        refuse_schemas(row, where, key)
    return tools_in(row.get(key), where, key)


def tools_in(value: Any, where: str, column: str, *, names: bool = False) -> tuple[dict[str, Any], ...]:
    """Return the tool schemas of a value: a list of objects, or that list as JSON text (Arrow has no type for mixed
    schemas).

    names: True if the list may have names of the run's tools
    """
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        elif isinstance(value, list):  # the nulls of JSON text are its own
            value = [tool_without_nulls(t) if isinstance(t, Mapping) else t for t in value]
        if isinstance(value, list):
            value = [json.loads(t) if isinstance(t, str) and t.startswith("{") else t for t in value]
    except json.JSONDecodeError as exc:
        raise Refused(f"{where}: {column!r} is text but not JSON: {exc.msg} at column {exc.colno}") from exc
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(t, (Mapping, str) if names else Mapping) for t in value):
        raise Refused(f"{where}: {column!r} must be a list of tool schemas, got {kind_of(value)}")
    functions = ({"name": t} if isinstance(t, str) else t for t in value)
    return tuple(map(_wrapped, functions))


def _wrapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as {type: function, function: {name, parameters, ...}}."""
    if not tool.keys() & BARE:
        return dict(tool)
    function = {key: found for key, found in tool.items() if key != "type" or found != "function"}
    if "input_schema" in function:  # Anthropic's name
        function.setdefault("parameters", function.pop("input_schema"))
    return {"type": "function", "function": function}

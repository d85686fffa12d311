"""Answers with the configured rollout engine, to one prompt or to a file of them: nothing is trained or scored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop

from verl.chat import render_prompt
from verl.chat.images import image_prompts
from verl.chat.template import Message, Renderer, RowRefused, audit_template
from verl.config.lora_layers import untrained
from verl.config.model_files import find_model_folder
from verl.config.proven import unproven
from verl.config.schema import Config
from verl.config.validate import validate
from verl.data.files import expand_files, read_rows
from verl.data.images import expanded, unchanged
from verl.data.lost import Coverage, lost_lines
from verl.data.media_items import IMAGE
from verl.data.source import load_tasks, rules_of_model
from verl.driver.assemble import checkpoint_engine, context_of, rollout_engine, sampling_of
from verl.driver.assemble_images import refuse_served_videos, refuse_unstored
from verl.driver.banned import policy_banned
from verl.driver.models import role_spec, workers_of
from verl.driver.setup import decoder, load_tokenizer_of, require_an_end, stop_ids, template_lines, with_native_dtype
from verl.driver.stopping import unless_stopped
from verl.driver.task_media import SAME_FILE, images_held
from verl.driver.worker_setup import set_up_process
from verl.errors import Refused
from verl.rollout.base import Completion, GenerateRequest
from verl.types import Medium, TaskImage, derive_seed
from verl.workers.waits import Waits

ANSWERS = "responses"
"""The column of the answers in the written file, a list for each row; the name is verl's."""


def generate_once(config: Config, prompt: str, n: int, images: Sequence[str] = ()) -> list[tuple[str, str, float]]:
    """Return (text, stop reason, mean log-prob per token) of n answers; greedy if rollout.temperature=0. images: files,
    in the places of `<image>` in the prompt, or in front of it"""
    config, tokenizer = _checked(config)
    lost = Coverage(tokenizer).lost(prompt)
    for line in lost_lines({"prompt": (len(prompt), len(lost))}, {"prompt": repr(lost[:20])}):
        print(f"warning: {line}")
    messages = [{"role": "user", "content": prompt}]
    kwargs = config.model.template_kwargs
    if images:
        given = _with_images(config, tokenizer, messages, images)
    else:
        _refuse_place(config, tokenizer, prompt)
        given = Prompt(render_prompt(tokenizer, messages, kwargs, audit=audit_template(tokenizer, kwargs)))
    if len(given.ids) > config.data.max_prompt_tokens:
        raise Refused(f"the prompt has {len(given.ids)} tokens, data.max_prompt_tokens={config.data.max_prompt_tokens}")
    decode = decoder(tokenizer)
    (found,) = uvloop.run(unless_stopped(_generate(config, tokenizer, [given], n)))
    if isinstance(found, str):
        raise Refused(f"no answer: {found}")
    return [
        (decode(c.ids.tolist()), c.stop_reason, float(np.mean(c.logprobs)) if len(c.logprobs) else 0.0) for c in found
    ]


def _refuse_place(config: Config, tokenizer: Any, prompt: str) -> None:
    """Raise Refused for the place of an image in a prompt without images: the model would read it as text."""
    if IMAGE.mark in prompt and rules_of_model(Path(config.model.path), config.data, tokenizer) is not None:
        raise Refused(f"prompt has {IMAGE.mark}, and no images are given. Fix: images=[FILE], or leave it out")


def _with_images(config: Config, tokenizer: Any, messages: Sequence[Message], images: Sequence[str]) -> Prompt:
    """Return the prompt of these messages with images from files."""
    kwargs, rules = config.model.template_kwargs, rules_of_model(Path(config.model.path), config.data, tokenizer)
    if rules is None:
        raise Refused(f"images={list(images)}: model.path={config.model.path} reads text alone")
    given = tuple(map(dict, messages))
    seen = rules.seen({"images": [*images]}, given, "images", partial(tokenizer.encode, add_special_tokens=False))
    audit = audit_template(tokenizer, kwargs)
    renderer = Renderer(tokenizer, kwargs, None, audit.spelling)
    try:
        ids = image_prompts(tokenizer, *rules.model, rules.placeholders).ids(renderer, seen.messages, audit)
    except RowRefused as e:
        raise Refused(f"images={list(images)}: {e}") from e
    return Prompt(*expanded(ids, rules.placeholders.values(), seen.images))


def generate_file(config: Config, out: Path) -> int:
    """Write the rows of data.train_files with rollout answers to each, `step.samples_per_prompt` of them, as a Parquet
    file with the column `responses`. Return the number of rows. Rows are never left out: if an image is lost meanwhile,
    the answers of its row are null, and Refused with the row's number is raised once the file is written."""
    if not config.data.train_files:
        raise Refused("data.train_files is empty: name the file of prompts to answer")
    config, tokenizer = _checked(config)
    data = replace(config.data, filter_overlong_prompts=False)
    kwargs, stops = config.model.template_kwargs, stop_ids(config, tokenizer)
    files, most = data.train_files, data.max_rows
    model = find_model_folder(config.model.path)
    table = load_tasks(files, tokenizer, data, template_kwargs=kwargs, max_rows=most, stops=stops, model=model)
    if table.report.refused:
        raise Refused(f"not every row can be asked: {table.report.summary()}. First: {table.report.example}")
    refuse_served_videos(config, "data.train_files", table.first_with_length())
    tasks = [table[i] for i in range(len(table))]
    if any(ANSWERS in task.row for task in tasks):
        raise Refused(f"the rows have a column {ANSWERS!r} already, where the answers are written: rename it")
    given = [task.row for task in tasks]
    if table.has_images and data.dataset_class is None:  # those of tasks have paths in the place of content
        given = [raw.row for raw in islice(chain.from_iterable(map(read_rows, expand_files(files))), most)]
        assert len(given) == len(tasks), "no row is left out"
    columns = {key: [row.get(key) for row in given] for key in dict.fromkeys(k for row in given for k in row)}
    try:
        rows = pa.table(columns)
    except pa.ArrowException as exc:
        raise Refused(f"the rows are no Parquet table: {' '.join(str(exc).split())}") from exc
    out.parent.mkdir(parents=True, exist_ok=True)
    n, decode = config.step.samples_per_prompt, decoder(tokenizer)
    prompts = [Prompt(np.asarray(task.prompt_ids), task.images) for task in tasks]
    found = uvloop.run(unless_stopped(_generate(config, tokenizer, prompts, n)))
    texts = [None if isinstance(own, str) else [decode(one.ids.tolist()) for one in own] for own in found]
    pq.write_table(rows.append_column(ANSWERS, pa.array(texts, pa.list_(pa.string()))), out)
    if lost := {number: why for number, why in enumerate(found, start=1) if isinstance(why, str)}:
        number, why = next(iter(lost.items()))
        raise Refused(
            f"row {number} has no answer: {why}. {len(lost)} of {len(tasks)} rows have none (null in {ANSWERS!r}), the"
            f" others are in {out}. {SAME_FILE}"
        )
    return len(tasks)


def _checked(config: Config) -> tuple[Config, Any]:
    """Return the configuration with which answers are sampled, and the tokenizer. Raise ValueError for its faults."""
    validate(config, "generate")
    config = with_native_dtype(untrained(config))
    set_up_process(config)
    tokenizer = load_tokenizer_of(config)
    require_an_end(config, tokenizer)
    for line in (*unproven(config, ("rollout",)), *template_lines(config, tokenizer)):
        print(line)
    return config, tokenizer


class Prompt(NamedTuple):
    """A prompt to answer: its ids [P] int64, and its images."""

    ids: np.ndarray
    images: tuple[TaskImage, ...] = ()


Answers = list[Completion] | str
"""The answers to a prompt, or why its images could not be read."""


async def _generate(config: Config, tokenizer: Any, prompts: Sequence[Prompt], n: int) -> list[Answers]:
    """Return n completions of each prompt, in the order of the prompts."""
    # one server is enough; no router is started
    options = {key: value for key, value in config.rollout.engine_options.items() if key != "router"}
    config = replace(config, rollout=replace(config.rollout, engine_options=options))
    context, sync = context_of(config, tokenizer=tokenizer), checkpoint_engine(config)
    timeout_s = config.run.wait_timeout_s
    async with contextlib.AsyncExitStack() as started:
        started.callback(context.cluster.close)
        store = context.queue.media
        refuse_unstored(config, [bool(prompt.images) for prompt in prompts], store)
        model = workers_of(context, replace(role_spec(context, "actor"), outlet=sync.outlet()))
        started.callback(model.close)
        rollout = rollout_engine(config, tokenizer, context.devices["rollout"], media=store)
        started.push_async_callback(rollout.close)
        await sync.publish(model, [rollout], version=0, exclusive=True, on_inflight=["wait"], timeout_s=timeout_s)
        await asyncio.to_thread(_refuse_changed, prompts)
        sampling, waits = replace(sampling_of(config), banned=policy_banned(config, tokenizer)), Waits()
        slots = asyncio.Semaphore(config.rollout.max_concurrent_sequences)

        async def answers(number: int, prompt: Prompt) -> Answers:
            name = f"generate/{number}" if number else "generate"
            drawn = [replace(sampling, seed=derive_seed(config.run.seed, name, k)) for k in range(n)]
            requests = [GenerateRequest(f"{name}/{k}", prompt.ids, own, prefix_key=name) for k, own in enumerate(drawn)]
            stored, first = list[tuple[Medium, ...]](), asyncio.Lock()

            async def answer(request: GenerateRequest) -> Completion:
                async with slots:  # the deadline is that of one answer
                    async with first:  # the images are in memory from the first answer to the last one
                        if not stored:
                            stored.append(await shown.enter_async_context(images_held(store, prompt.images, name)))
                    wanted = rollout.generate(replace(request, media=stored[0]))
                    return await waits.wait(wanted, waiter="generate", what="an answer", timeout_s=timeout_s)

            async with contextlib.AsyncExitStack() as shown:
                found = await asyncio.gather(*map(answer, requests), return_exceptions=bool(prompt.images))
            failed = [one for one in found if isinstance(one, BaseException)]
            for one in failed:
                if not isinstance(one, ValueError):  # it is not about the images of this prompt
                    raise one
            return str(failed[0]) if failed else [one for one in found if isinstance(one, Completion)]

        return await asyncio.gather(*(answers(number, prompt) for number, prompt in enumerate(prompts)))


def _refuse_changed(prompts: Sequence[Prompt]) -> None:
    """Raise Refused if a file of an image is another one than when the rows were read."""
    for number, prompt in enumerate(prompts, start=1):
        for why in filter(None, map(unchanged, prompt.images)):
            raise Refused(f"row {number}: {why}. {SAME_FILE}")

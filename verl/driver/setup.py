"""The first actions of every verb: threads, precision, seeds, the device, the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from verl.chat import TemplateAudit, load_tokenizer, require_chat_template
from verl.chat.audited import audited_once
from verl.chat.dates import date_line
from verl.chat.template import Renderer
from verl.checkpoint.loadable import check_loadable
from verl.config.backends import longest_sequence
from verl.config.cluster import TRAINS
from verl.config.devices import in_float32_alone
from verl.config.image_models import idle_faults, text_faults
from verl.config.model_files import declared_tie, describe_model, embedding_rows, read_model_config, read_weight_headers
from verl.config.model_folder import folder_lines, refuse_other_head, refuse_other_vocabulary
from verl.config.schema import Config
from verl.data.preference import PairTable
from verl.data.source import ConversationTable, LoadReport, TaskTable
from verl.errors import Refused
from verl.planner.card import CardFacts
from verl.rollout.base import Capabilities
from verl.workers.pools import main_pool

logger = logging.getLogger(__name__)


def with_native_dtype(config: Config) -> Config:
    """Return the configuration with the dtype that its device computes natively in place of model.dtype=auto."""
    if config.model.dtype != "auto":
        return config
    device = main_pool(config.cluster, device_of(config)).computes_on
    native = "float32" if in_float32_alone(config, device) else native_dtype(device)
    return replace(config, model=replace(config.model, dtype=native))


def device_of(config: Config) -> str:
    """Return the device of models in this process, and of pools without one of their own, which may be on other
    machines."""
    if config.model.device != "auto":
        here = config.cluster.backend != "ray"
        if here and config.model.device == "cuda" and not torch.cuda.is_available():
            raise Refused(
                "model.device=cuda, but torch sees no CUDA device; use model.device=cpu or install a CUDA torch"
            )
        return config.model.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def data_seed(config: Config) -> int:
    return config.run.seed if config.data.seed is None else config.data.seed


def free_bytes_of(config: Config) -> Callable[[], int] | None:
    """Return a function that reads the free bytes of this process's device, with the memory that torch caches; rollout
    servers started by the process share it. None without a device, or if another process uses it."""
    if config.cluster.backend != "inproc" or device_of(config) != "cuda":
        return None
    return lambda: torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def card_of(config: Config) -> CardFacts | None:
    """Return the card of this process; None without one, or if another process uses it."""
    free = free_bytes_of(config)
    if free is None:
        return None
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return CardFacts(name, torch.cuda.mem_get_info()[1], free(), capability)


def native_dtype(device: str) -> str:
    """Return bfloat16 where the device multiplies it in hardware, else float32."""
    if device == "cuda" and torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if device != "cpu":  # a device of another machine
        return "bfloat16"
    found = torch.cpu.get_capabilities()
    return "bfloat16" if found.get("avx512_bf16") or found.get("amx_bf16") or found.get("bf16") else "float32"


def torch_dtype(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]


def unchecked_tokenizer(config: Config) -> Any:
    """Load the tokenizer without checks, for a process beside a driver that has checked the model's folder. Without the
    classes of models its start takes half of the time."""
    return load_tokenizer(
        config.model.tokenizer_path or config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        chat_template_file=config.model.chat_template,
    )


def load_tokenizer_of(config: Config, *, needs_template: bool = True) -> Any:
    """Load the tokenizer, and check that it matches the model's folder. needs_template: the rows are messages, so a
    missing chat template is an error now; otherwise the first row of messages raises it."""
    tokenizer = unchecked_tokenizer(config)
    path = config.model.tokenizer_path or config.model.path
    if needs_template:
        require_chat_template(tokenizer, path)
    folder = Path(config.model.path)
    hf_config = check_loadable(folder, trust_remote_code=config.model.trust_remote_code, quantised=True)
    declared = declared_tie(read_model_config(folder))
    by_class = getattr(hf_config.get_text_config(), "tie_word_embeddings", False)
    if (by_class if declared is None else declared) and any(folder.glob("*.safetensors")):
        refuse_other_head(folder, read_weight_headers(folder))
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    rows = embedding_rows(read_model_config(folder), hf_config.get_text_config().vocab_size)
    template = str(tokenizer.chat_template)
    refuse_other_vocabulary(folder, rows, tokenizer.get_vocab(), special, template)
    if config.model.chat_template is None:
        for line in folder_lines(Path(path).expanduser()):
            logger.warning("model: %s", line)
    return tokenizer


def refuse_unembedded(config: Config, tokenizer: Any, *reports: LoadReport) -> None:
    """Raise a ValueError for rows with an id that has no row in the embedding: a special token of
    `refuse_other_vocabulary` that occurs in their own text."""
    facts = describe_model(config.model.path)
    vocab = embedding_rows(read_model_config(Path(facts.folder)), facts.vocab)
    for report in reports:
        if report.largest_id >= vocab:
            text = tokenizer.convert_ids_to_tokens(report.largest_id)
            found = [tokens[text] for tokens in report.special.values() if text in tokens]
            places = [f"{rows} of {where.rpartition(':')[0]}, first {where}" for rows, where in found]
            raise Refused(
                f"model.path={config.model.path}: the rows hold the special token {text!r} (id {report.largest_id}), "
                f"which the model has no embedding for ({vocab} rows): {'; '.join(places) or ', '.join(report.files)}. "
                "Fix: take it out of the rows"
            )


def refuse_untrained(config: Config, command: str, table: TaskTable | ConversationTable | PairTable) -> None:
    """Raise Refused for settings of parts that are not trained, since no training row has an image or a sound."""
    if command not in TRAINS:
        return
    rows = f"the {len(table)} rows of {', '.join(table.report.files)}"
    if not table.has_images:
        lines = [*text_faults(config, f"{rows} are text alone")]
    else:
        images, sounds = table.kinds_of_media()
        why = f"{rows} have no {'sounds' if images else 'images'}"
        lines = [] if images and sounds else [*idle_faults(config, why, images=images, sounds=sounds)]
    if lines:
        raise Refused("\n".join(lines))


def max_context_tokens(config: Config, hf_config: Any) -> int:
    wanted = longest_sequence(config)
    limit = hf_config.get_text_config().max_position_embeddings
    if wanted > limit:
        raise Refused(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {wanted} tokens, but the model was made for "
            f"{limit} "
            "(max_position_embeddings); lower one of them"
        )
    return wanted


def decoder(tokenizer: Any, *, special_tokens: bool = False) -> Callable[[Sequence[int]], str]:
    """Return a function from ids to text; without special tokens, as reward functions expect it."""
    own, fast = type(tokenizer), PreTrainedTokenizerFast
    plain = isinstance(tokenizer, fast) and (own.decode, own._decode) == (fast.decode, fast._decode)
    if plain and not tokenizer.clean_up_tokenization_spaces:  # Python layers only add cost: four times
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=not special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=not special_tokens)


def unread_ids(config: Config, tokenizer: Any) -> Callable[[np.ndarray], int]:
    """Return a function that counts the ids that are no text: ids beyond the vocabulary, unused ids in it, and special
    tokens that have no role of their own (such as pad), are not in the chat template, and end no answer."""
    known = np.zeros(max(tokenizer.get_vocab().values(), default=-1) + 1, bool)
    known[list(tokenizer.get_vocab().values())] = True
    template, ends = str(tokenizer.chat_template), stop_ids(config, tokenizer)
    for i, token in tokenizer.added_tokens_decoder.items():
        known[i] = not token.special or i in ends or token.content in template
    known[tokenizer.all_special_ids] = True
    return lambda ids: int(len(ids) - known[ids[ids < len(known)]].sum())


def pad_id(tokenizer: Any) -> int | None:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def eos_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokenizer's end token and the end tokens in generation_config.json, or in config.json if it has
    none."""
    found = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = Path(config.model.path) / name
        extra = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if extra is not None:
            found += extra if isinstance(extra, list) else [extra]
            break
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def stop_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of `eos_ids`, and those with which the chat template ends a turn."""
    named = eos_ids(config, tokenizer)
    audit = _audited(config, tokenizer, named)
    return tuple(dict.fromkeys((*named, *(audit.ends if audit else ()))))


def _audited(config: Config, tokenizer: Any, stops: tuple[int, ...]) -> TemplateAudit | None:
    """Return the measured behaviour of the chat template; None without a template."""
    return audited_once(tokenizer, config.model.template_kwargs, stops) if tokenizer.chat_template else None


def end_lines(config: Config, tokenizer: Any) -> list[str]:
    """Return lines for the start if the template ends a turn with another token than the files name, or with none."""
    named = eos_ids(config, tokenizer)
    audit, lines = _audited(config, tokenizer, named), list[str]()
    if audit is None:
        return lines

    def spelled(ids: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in ids) or "nothing"

    if not audit.ends_turn_with:
        behind = (
            f"{spelled(audit.next_turns.values())} where the next turn begins with it, " if audit.next_turns else ""
        )
        last = () if audit.last_end is None else (audit.last_end,)
        lines.append(f"chat template: it writes no end of a turn; answers end with {behind}else {spelled(last)}")
    extra = [i for i in audit.ends if i not in (*named, *config.rollout.stop_token_ids)]
    if extra:
        lines.append(
            f"chat template: turns end with {spelled(extra)}, and the tokenizer and generation_config.json name "
            f"{spelled(named)} as the end of an answer: answers stop at both here, and other engines run on. Fix: "
            f"eos_token in tokenizer_config.json or eos_token_id in generation_config.json; rollout.stop_token_ids="
            f"[{','.join(map(str, extra))}] says that it is meant"
        )
    return lines


def template_lines(config: Config, tokenizer: Any) -> list[str]:
    """Return lines about the chat template for the start: the end of its turns, and a date that it prints."""
    dated = date_line(Renderer(tokenizer, config.model.template_kwargs)) if tokenizer.chat_template else ""
    return [*end_lines(config, tokenizer), *([dated] if dated else [])]


def require_an_end(config: Config, tokenizer: Any) -> None:
    """Raise a ValueError if only the length limit ends an answer."""
    r = config.rollout
    if not (stop_ids(config, tokenizer) or r.stop or r.stop_token_ids or r.ignore_eos):
        raise Refused(
            f"model.path={config.model.path}: no end-of-sequence token in the tokenizer, generation_config.json or "
            "config.json, and no end of a turn in the chat template: every answer would run to "
            "rollout.max_response_tokens. Set eos_token in tokenizer_config.json, or rollout.stop=[TEXT] or "
            "rollout.stop_token_ids=[ID]; rollout.ignore_eos=true if that is meant"
        )


def check_able(able: Capabilities, config: Config) -> None:
    """Raise a ValueError if the run needs something that its rollout engine cannot do."""
    r, at, in_flight = config.rollout, able.score_temperatures, config.pipeline.partial_rollout
    lacks = {
        "run.deterministic=true": (config.run.deterministic and not able.seeds, "it does not look at seeds"),
        f"rollout.stop={r.stop}": (r.stop and not able.stop_strings, "its answers do not end at strings"),
        "sync.canary=true": (config.sync.canary and at is not None and 1.0 not in at, "it scores no prompts"),
        "pipeline.partial_rollout=true": (in_flight and not able.spans, "it does not say which weights drew a token"),
    }
    for key, (lacking, why) in lacks.items():
        if lacking:
            raise Refused(f"{key} with rollout.engine={r.engine}: {why}; leave it out, or set rollout.engine=native")


def from_threads(report: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
    """Return a function that calls `report` in the event loop of this call and may be called from any thread."""
    loop = asyncio.get_running_loop()

    def reported(error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(report, error)

    return reported

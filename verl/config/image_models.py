"""Settings that a model which reads images cannot have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import get_args

from verl.algorithms.sections import is_url
from verl.config.adapter import base_of, is_adapter
from verl.config.backends import engine_name, traits_of
from verl.config.lora_layers import trained_factors
from verl.config.model_files import EMBEDDING, HEAD, find_model_folder, read_model_config, read_weight_headers
from verl.config.schema import Config
from verl.errors import Refused
from verl.model_engine.lora_spec import trained_by
from verl.model_engine.optimizer_table import LR, PARTS
from verl.models.families import FAMILIES, Part, family_name, name_of
from verl.rollout.traits import VLLM_IMAGES

WHOLE_PROJECTORS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The families of which a test trains modules of the projector whole beside factors."""


def image_model_faults(config: Config, command: str, *, samples: bool) -> Iterator[str]:
    """Yield a line for each setting that does not work with a policy that reads images. samples: the command samples
    answers."""
    try:
        kind = family_name(read_model_config(find_model_folder(config.model.path)))
    except Refused as e:
        yield f"model.path={config.model.path}: {e}"
        return
    yield from _frozen_faults(config, kind)
    if samples and config.reward.model is not None:
        yield from _judge_faults(config, config.reward.model)
    if kind is None:
        return
    what = f"model.path={config.model.path} is a {kind}, a model that reads images"
    if FAMILIES[kind].crossed:
        yield from _crossed_faults(config, f"{what} by cross-attention")
    if trained_by(config.model.lora) is not None:
        yield from _lora_faults(config, kind, what, samples=samples)
    if FAMILIES[kind].bare and (engine := engine_name(config, "model")) != "torch":
        yield f"model.engine={engine}: {what}, with a vector in no module that ranks would divide; use one rank"
    if FAMILIES[kind].sounds and (engine := engine_name(config, "model")) != "torch":
        why = "and sounds, and ranks without a sound would not run its audio tower"
        yield f"model.engine={engine}: {what} {why}; use one rank"
    if command == "rm" and trained_by(config.model.lora) is not None:
        yield f"model.lora with verl rm: {what}; no test trains factors below a head for scores of one; leave it out"
    if any(is_url(path) for path in config.teacher.roles().values()):
        yield f"teacher.path: {what}, which never samples placeholders; a server counts them: give a teacher's folder"
    able = traits_of(config.rollout.engine)
    if samples and able.server and not (able.media and kind in VLLM_IMAGES):
        yield f"rollout.engine={config.rollout.engine}: {what}, which was not tested with it; use rollout.engine=native"


def _judge_faults(config: Config, path: str) -> Iterator[str]:
    """Yield a line for a reward model that is an adapter of a model that reads images."""
    if not is_adapter(Path(path).expanduser()):
        return
    try:
        kind = name_of(read_model_config(find_model_folder(base := base_of(path, config.model.path))))
    except Refused:  # the checks of adapters report it
        return
    if kind in FAMILIES:
        why = f"an adapter of {base}, a {kind}, which no test scores with"
        yield f"reward.model={path}: {why}; give a whole reward model, as verl rm makes it"


def _crossed_faults(config: Config, what: str) -> Iterator[str]:
    """Yield a line for each setting that does not work with layers of cross-attention."""
    if trained_by(config.model.lora) is not None:
        yield f"model.lora: {what}, and no test trains factors beside it; leave it out"
    if (engine := engine_name(config, "model")) != "torch":
        yield f"model.engine={engine}: {what}, and its ranks would not run the same layers; use one rank"


def _lora_faults(config: Config, kind: str, what: str, *, samples: bool) -> Iterator[str]:
    """Yield a line for each setting that does not work with factors beside images. kind: the policy's family"""
    if config.model.quantization != "none":
        yield f"model.quantization={config.model.quantization}: {what}, and its base is not quantised; leave it out"
    saved, tested = _saved(config), kind in WHOLE_PROJECTORS
    if other := next((name for name in saved if not tested or FAMILIES[kind].part_of(name) != "projector"), None):
        key = "path" if config.model.lora.get("path") is not None else "modules_to_save"
        why = f"no test trains {other.rpartition('.')[0]} whole beside its factors"
        fix = "name modules of the projector alone (visual.merger)" if tested else "leave it out"
        yield f"model.lora.{key}={config.model.lora[key]}: {what}, and {why}; {fix}"
    elif saved and "projector" in config.model.freeze:
        why = "modules of the projector are trained whole; leave projector out"
        yield f"{_freeze(config)} with model.lora.modules_to_save: {why}"
    if (engine := engine_name(config, "model")) != "torch":
        yield f"model.engine={engine} with model.lora: {what}; factors beside images are trained by one rank"
    if samples and traits_of(config.rollout.engine).server:
        yield f"rollout.engine={config.rollout.engine} with model.lora: {what}; use rollout.engine=native"


def _saved(config: Config) -> Collection[str]:
    """Return the weights that are trained whole beside factors; none if the settings of LoRA are wrong, for which they
    have a line of their own."""
    try:
        factors = trained_factors(config)
    except ValueError:
        return ()
    return () if factors is None else factors.saved


def _frozen_faults(config: Config, kind: str | None) -> Iterator[str]:
    """Yield a line for each frozen part, or learning rate of a part, that the policy cannot have. kind: its family."""
    frozen, given, own = config.model.freeze, _freeze(config), _own_rates(config)
    adapted = trained_by(config.model.lora) is not None
    if kind is None and (frozen or own):
        key = given if frozen else f"optim.options.lr.{own[0]}"
        yield f"{key}: model.path={config.model.path} reads text alone, and has no such part; leave it out"
    absent = [part for part in ("audio",) if kind is not None and part not in FAMILIES[kind].parts]
    for key in [*(given for part in absent if part in frozen), *(f"optim.options.lr.{p}" for p in absent if p in own)]:
        yield f"{key}: model.path={config.model.path} is a {kind}, which reads no sounds; leave audio out"
    if kind is not None and {*frozen} >= {*FAMILIES[kind].parts}:
        yield f"{given}: nothing would be trained; leave a part out"
    if adapted and "language" in frozen:
        yield f"{given} with model.lora: the factors are those of the language model; leave language out"
    whole = {FAMILIES[kind].part_of(name) for name in _saved(config)} if kind is not None and own else set()
    for part in own:
        if part in frozen or (adapted and part not in whole):
            why = given if part in frozen else "model.lora, whose factors are those of the language model"
            yield f"optim.options.lr.{part} with {why}: the part is not trained; leave its rate out"


def text_faults(config: Config, why: str) -> Iterator[str]:
    """Yield a line for each setting of the policy's parts that rows of text would leave without effect: they train the
    language model alone. why: why no row has an image."""
    if trained_by(config.model.lora) is not None:
        kind = family_name(read_model_config(find_model_folder(config.model.path)))
        yield from () if kind is None else _idle_modules(config, why)
        return
    if "language" in config.model.freeze:
        yield f"{_freeze(config)}: {why}; text trains the language model alone, so nothing would be; leave language out"
    for part in _own_rates(config):
        if part not in config.model.freeze:
            yield f"optim.options.lr.{part}: {why}; text does not train the part; leave its rate out"


def idle_faults(config: Config, why: str, *, images: bool, sounds: bool) -> Iterator[str]:
    """Yield a line for each setting of the parts of a model that reads sounds which its rows would leave without
    effect. images, sounds: whether any row has one, at least one of them is True · why: that the rows have no other"""
    kind = family_name(read_model_config(find_model_folder(config.model.path)))
    if kind is None or FAMILIES[kind].sounds is None:
        return
    if trained_by(config.model.lora) is not None:
        yield from () if images else _idle_modules(config, why)
        return
    idle = {*(() if images else ("vision", "projector")), *(() if sounds else ("audio",))}
    if {*FAMILIES[kind].parts} - {*config.model.freeze} <= idle:
        yield f"{_freeze(config)}: {why}, so nothing would be trained; leave language out"
    for part in _own_rates(config):
        if part in idle and part not in config.model.freeze:
            yield f"optim.options.lr.{part}: {why}, which alone train the part; leave its rate out"


def _idle_modules(config: Config, why: str) -> Iterator[str]:
    """Yield a line for modules of the projector that LoRA would train whole, and that rows without images do not."""
    if saved := config.model.lora.get("modules_to_save"):
        yield f"model.lora.modules_to_save={saved}: {why}, and images alone train the projector; leave it out"


def _freeze(config: Config) -> str:
    return f"model.freeze=[{', '.join(config.model.freeze)}]"


def _own_rates(config: Config) -> list[str]:
    """Return the parts that have a learning rate of their own."""
    rates = config.optim.options.get(LR)
    return [part for part in PARTS if isinstance(rates, Mapping) and part in rates]


def frozen_parts(config: Config) -> tuple[Part, ...]:
    """Return the parts of the policy that are not trained, though its weights are (without LoRA)."""
    return tuple(part for part in get_args(Part) if part in config.model.freeze and not trained_by(config.model.lora))


def frozen_values(config: Config) -> tuple[int, int]:
    """Return the number of the policy's values in parts that are not trained, and of those of them that are in
    embeddings and heads."""
    if not (frozen := frozen_parts(config)):
        return 0, 0
    folder = find_model_folder(config.model.path)
    family = FAMILIES[str(family_name(read_model_config(folder)))]
    sizes = {n: h.numel for n, h in read_weight_headers(folder).items() if family.part_of(n) in frozen}
    return sum(sizes.values()), sum(size for n, size in sizes.items() if n.endswith(HEAD) or EMBEDDING.search(n))

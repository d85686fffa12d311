"""The runner of the hf engine: static, left-padded batches of the waiting requests. Finished rows leave the cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.media_tokens import Picture
from verl.models.crossed import CrossedImage, CrossedRows, crossed_rows
from verl.models.families import auto_class, family_of
from verl.models.multimodal import layer_embeddings, mutual_masks
from verl.nn.lora import LowRank, low_ranks, with_low_ranks
from verl.nn.rope import fix_rope
from verl.parameter_set import POLICY_SET, ParameterSet
from verl.rollout.base import RolloutContext, Scores, WeightReader, check_positive
from verl.rollout.embedded.core import Admitted, DecodeRows, Sampled, check_context
from verl.rollout.embedded.features import EncodedImages, Features, encoded_alone
from verl.rollout.embedded.images import RequestImages
from verl.rollout.embedded.receive import Destination, receive
from verl.rollout.embedded.requests import ActiveRequest
from verl.rollout.embedded.sampler import (
    SamplingMetadata,
    banned_of,
    close_banned,
    sample,
    score_logits,
    scores_of,
    to_host,
)
from verl.rollout.weight_format import format_of_module
from verl.wire import WireFormat


class HfRunner:
    """The runner of the hf engine: a module of transformers and its cache. `module` is for a model that
    transformers cannot build from its configuration."""

    looks_ahead = False  # a batch is static
    lora_experts = lora_whole = True

    def __init__(self, context: RolloutContext, module: nn.Module | None, *, max_prefill_tokens: int) -> None:
        check_positive(max_prefill_tokens=max_prefill_tokens)
        self.max_rows, self.max_context_tokens = context.max_concurrent_sequences, context.max_context_tokens
        text = context.hf_config.get_text_config()
        self.vocab_size = text.vocab_size
        check_context(self.max_context_tokens, getattr(text, "max_position_embeddings", None))
        self._config, self._dtype, self._device = context.hf_config, context.dtype, torch.device(context.device)
        self._max_prefill_tokens, self._module, self._loaded = max_prefill_tokens, module, False
        if module is not None:
            fix_rope(module, self.max_context_tokens)
        self._arguments: frozenset[str] = frozenset()  # parameters of the module's forward
        self._cache: Any = None  # transformers.Cache of the resident rows
        self._mask = torch.zeros(0, 0, dtype=torch.int64)  # [rows, cached tokens], 0 is left padding
        self.lora_rank = int(text.hidden_size)
        self._sets: dict[str, tuple[ParameterSet, dict[str, LowRank]]] = {}
        self._resident = POLICY_SET.id  # the parameter set of the resident rows
        self._counts = {"prefill_tokens": 0, "decode_tokens": 0, "reused_tokens": 0}
        self._family = family_of(context.hf_config)
        self._crosses = self._family is not None and self._family.crossed
        self._banned = banned_of(context, self._device)
        self._images = EncodedImages(self._encode)
        self._crossed: CrossedRows | None = None  # what the resident rows read by cross-attention

    @cached_property  # `isinstance` with a protocol reads it too
    def weight_format(self) -> WireFormat:
        with torch.device("meta"):
            module = auto_class(self._config).from_config(copy.deepcopy(self._config), dtype=self._dtype)
        return format_of_module(module, self._dtype)

    @property
    def ready(self) -> bool:
        return self._loaded

    def enter_thread(self) -> None: ...

    def close(self) -> None: ...

    def load(self, source: WeightReader) -> None:
        if not self._loaded or self._module is None:
            return self.prepare(source)()
        self._write(source.tensors(), self._module.state_dict(keep_vars=True))

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        assert self._module is not None
        state = self._module.state_dict(keep_vars=True)
        self._write(weights.items(), {name: live for name, live in state.items() if name in weights})

    def _write(self, tensors: Iterable[tuple[str, object]], live: Mapping[str, Tensor]) -> None:
        """Write tensors over the live ones with their names, all of them."""
        self._loaded = False  # until all tensors are loaded
        self._images.clear()
        places = {id(t): Destination(t.shape, t.data, t.shape, t.dtype) for t in live.values()}
        receive(tensors, {name: places[id(t)] for name, t in live.items()})
        self._loaded = True

    def prepare(self, source: WeightReader) -> Callable[[], None]:
        module = self._module
        if module is None:
            module = auto_class(self._config).from_config(copy.deepcopy(self._config), dtype=self._dtype)
            fix_rope(module, self.max_context_tokens)
        module.to(self._device).eval()  # dtype: of parameters only, buffers such as RoPE frequencies stay in fp32
        state = module.state_dict(keep_vars=True)  # tied tensors appear under each of their names
        fresh: dict[int, Destination] = {}
        for live in state.values():
            dtype = self._dtype if isinstance(live, nn.Parameter) else live.dtype
            into = torch.empty(live.shape, dtype=dtype, device=self._device)
            fresh.setdefault(id(live), Destination(into.shape, into, into.shape, dtype))
        receive(source.tensors(), {name: fresh[id(live)] for name, live in state.items()})

        def switch() -> None:
            for live in state.values():
                live.data = fresh[id(live)].into
            self._module, self._loaded = module, True
            self._images.clear()
            self._arguments = frozenset(inspect.signature(module.forward).parameters)

        return switch

    def add_set(self, parameters: ParameterSet, tensors: Mapping[str, Tensor]) -> None:
        assert self._module is not None
        here = {name: tensor.to(self._device, self._dtype, copy=True) for name, tensor in tensors.items()}
        self._sets[parameters.id] = parameters, low_ranks(parameters, here, self._module)

    def drop_set(self, name: str) -> None:
        del self._sets[name]

    def _with_set(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the module computes with this parameter set."""
        if name == POLICY_SET.id and name not in self._sets:
            return nullcontext()
        assert self._module is not None
        parameters, factors = self._sets[name]
        return with_low_ranks(self._module, factors, parameters.scale)

    @torch.inference_mode()
    def admit(self, waiting: Sequence[ActiveRequest], resident: int) -> Admitted | None:
        """Admit a new batch after the last one has ended: the first waiting requests, of one parameter set, as many as
        fit in `max_prefill_tokens` when padded to the longest of them, at least one."""
        prompts: list[np.ndarray] = []
        longest = 0
        if resident:
            return None
        if self._resident != waiting[0].given.parameters:  # a set may change the tower
            self._images.clear()
        self._resident = waiting[0].given.parameters
        for request in islice(waiting, self.max_rows):
            if request.given.parameters != self._resident:
                break
            if self._crosses and bool(request.images) != bool(waiting[0].images):
                break  # its layers of cross-attention are left out for all rows, or for none
            longest = max(longest, len(request.context()))
            if prompts and longest * (len(prompts) + 1) > self._max_prefill_tokens:
                break
            prompts.append(request.context())
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)  # [n, T], left-padded; a masked id has no effect
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        self._cache, self._crossed, self._mask = None, None, mask.to(self._device)
        self._counts["prefill_tokens"] += int(mask.sum())
        images = [request.images for request in islice(waiting, len(prompts))]
        at = (self._mask.cumsum(-1) - 1).clamp_(min=0)
        logits = self._forward(ids.to(self._device), at, images)
        return Admitted([0] * len(prompts), lambda sampling: to_host(*self._sample(logits, sampling)))

    @torch.inference_mode()
    def decode(self, rows: DecodeRows) -> Callable[[], Sampled]:
        n = len(rows.tokens)
        self._mask = torch.cat([self._mask, self._mask.new_ones(n, 1)], dim=1)
        ids, at = (torch.from_numpy(column)[:, None].to(self._device) for column in (rows.tokens, rows.positions))
        self._counts["decode_tokens"] += n
        return partial(to_host, *self._sample(self._forward(ids, at), rows.sampling))

    @torch.inference_mode()
    def _sample(self, logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
        if sampling.banned is not None and self._banned is not None:
            close_banned(logits, torch.from_numpy(sampling.banned).to(self._device), self._banned)
        return sample(logits, sampling)

    def _forward(self, ids: Tensor, positions: Tensor, images: Sequence[RequestImages | None] = ()) -> Tensor:
        """Compute ids at positions, both [n, t], and return the logits [n, V] after the last id of each row. images:
        those of each row, which ends with the last id; (): none."""
        assert self._module is not None
        cache: dict[str, Any] = {"past_key_values": self._cache, "use_cache": True}
        with self._with_set(self._resident):
            if any(image is not None for image in images):
                hidden, self._cache, crossed = self._read(ids, positions, images, self._mask, cache)
                self._crossed = crossed and crossed.last()
                return self._head(hidden[:, -1])
            if self._family is not None and self._family.axes == 1:  # a placeholder here is text
                readers = {} if self._crossed is None else self._crossed.given()
                given = {"position_ids": positions, "attention_mask": self._mask, **readers, **cache}
                out = self._language()(input_ids=ids, **given)
                self._cache = out.past_key_values
                return self._head(out.last_hidden_state[:, -1])
            options = {"position_ids": positions, "logits_to_keep": 1}
            known = {name: value for name, value in options.items() if name in self._arguments}
            out = self._module(input_ids=ids, attention_mask=self._mask, **cache, **known)
        self._cache = out.past_key_values
        return out.logits[:, -1]

    def _head(self, hidden: Tensor) -> Tensor:
        module: Any = self._module
        logits: Tensor = module.get_output_embeddings()(hidden)
        cap = vars(self._config.get_text_config()).get("final_logit_softcapping")
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _language(self) -> Any:
        module: Any = self._module
        assert self._family is not None
        return module.base_model.get_submodule(self._family.language)

    def _encode(self, picture: Picture) -> Features:
        module: Any = self._module
        assert self._family is not None
        return encoded_alone(module.base_model, self._family, self._config, picture, self._device)

    def _read(
        self,
        ids: Tensor,
        positions: Tensor,
        images: Sequence[RequestImages | None],
        mask: Tensor,
        cache: Mapping[str, Any],
    ) -> tuple[Tensor, Any, CrossedRows | None]:
        """Return the final hidden states [n, t, hidden] of rows with images, the cache, and what the rows read by
        cross-attention. mask [n, t]: 0 at left padding."""
        assert self._family is not None
        language, (n, width) = self._language(), ids.shape
        if self._crosses:
            return self._read_crossed(ids, positions, images, mask, cache)
        at = positions.expand(self._family.axes, n, width).clone()
        numbers = torch.full_like(ids, -1)  # of the image of each token within its row
        x = language.get_input_embeddings()(ids)
        here, deeper = torch.zeros_like(ids, dtype=torch.bool), list[tuple[Tensor, ...]]()
        for row, image in enumerate(images):
            if image is not None:
                first = width - int(mask[row].sum())
                seen = self._images.seen(image, width - first)
                where = torch.from_numpy(seen.where).to(self._device) + first
                at[:, row, first:] = seen.positions
                x[row, where], here[row, where] = seen.features, True
                numbers[row, first:] = torch.from_numpy(image.numbers(width - first)).to(self._device)
                deeper.append(seen.deeper)
        more: dict[str, Any] = layer_embeddings(language, ids, here)
        if deeper[0]:
            added = [torch.cat(states) for states in zip(*deeper, strict=True)]
            more |= {"visual_pos_masks": here, "deepstack_visual_embeds": added}
        known: Any = mask
        if self._family.attends(vars(language.config)):
            known = mutual_masks(language.config, x, numbers, mask)  # the module's own: it names an attention
        at = at if self._family.axes > 1 else at[0]
        out = language(inputs_embeds=x, position_ids=at, attention_mask=known, **cache, **more)
        return out.last_hidden_state, out.past_key_values, None

    def _read_crossed(
        self,
        ids: Tensor,
        positions: Tensor,
        images: Sequence[RequestImages | None],
        mask: Tensor,
        cache: Mapping[str, Any],
    ) -> tuple[Tensor, Any, CrossedRows]:
        """Return the same, for rows that all have images, of a model that reads them by cross-attention."""
        width, most, rows = ids.shape[1], self._config.vision_config.max_num_tiles, list[list[CrossedImage]]()
        for row, image in enumerate(images):
            assert image is not None
            own, first = self._images.own(image), width - int(mask[row].sum())
            found = [(m, own[m.reference].tokens, len(image.pictures[m.reference].patches)) for m in image.media]
            rows.append([CrossedImage(first + m.start, states, len(states) // most * n) for m, states, n in found])
        states, readers = crossed_rows(rows, width)
        given = {"position_ids": positions, "attention_mask": mask, "cross_attention_states": states}
        out = self._language()(input_ids=ids, **given, **readers.given(), **cache)
        return out.last_hidden_state, out.past_key_values, readers

    @torch.inference_mode()
    def move(self, sources: np.ndarray, holes: np.ndarray, kept: int, tokens: int) -> None:
        order = np.arange(kept)
        order[holes] = sources
        index = torch.from_numpy(order).to(self._device)
        self._cache.reorder_cache(index)  # `batch_select_indices` is missing where a layer keeps a state
        self._mask, self._crossed = self._mask[index], self._crossed and self._crossed.rows(index)

    @torch.inference_mode()
    def score(
        self,
        ids: np.ndarray,
        temperature: float,
        top: int = 0,
        parameters: str = POLICY_SET.id,
        images: RequestImages | None = None,
    ) -> Scores:
        assert self._module is not None
        given = torch.from_numpy(ids).to(self._device)
        rows = given[None, :-1]
        with self._with_set(parameters):
            if images is None and self._family is not None and self._family.axes == 1:
                logits = self._head(self._language()(input_ids=rows, use_cache=False).last_hidden_state[0])
            elif images is None:
                logits = self._module(input_ids=rows, use_cache=False).logits[0]
            else:
                self._images.clear()  # a set may change the tower
                at = torch.arange(rows.shape[1], device=self._device)[None]
                logits = self._head(self._read(rows, at, [images], torch.ones_like(rows), {"use_cache": False})[0][0])
                self._images.clear()
        if self._family is not None:  # an id without a logit is never sampled
            logits = F.pad(logits, (0, self._family.unsampled_rows), value=-torch.inf)
        return scores_of([score_logits(logits, given[1:], temperature, top)])

    def drop_kv(self) -> int:
        layers = self._cache.layers if self._cache is not None else ()
        self._images.clear()
        kept = [t for layer in layers for t in _leaves(vars(layer).values()) if isinstance(t, Tensor)]
        freed = sum(t.nbytes for t in kept)
        self._cache, self._crossed, self._mask = None, None, self._mask[:0]
        return freed

    def drop_weights(self) -> int:
        """Free the weights and return the number of bytes. The module keeps its structure, the shapes (one element,
        expanded) and tensors that are not part of a checkpoint."""
        freed = 0
        if self._module is not None and self._loaded:
            tensors = {id(t): t for t in self._module.state_dict(keep_vars=True).values()}
            freed = sum(t.nbytes for t in tensors.values())
            for tensor in tensors.values():
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
        self._loaded = False
        return freed

    def stats(self) -> dict[str, int]:
        return dict(self._counts)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and those in lists and dicts among them, as layers keep states."""
    for value in values:
        if isinstance(value, dict | list):
            yield from _leaves(value.values() if isinstance(value, dict) else value)
        else:
            yield value

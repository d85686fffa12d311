"""The model and value head of an engine, as far as this process has them: names, parts and whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint.score import ADAPTER_SCORE, classifier_tensors
from verl.model_engine.base import WeightPart, whole_part
from verl.model_engine.hf_model import refuse_altered_logits, saved_weights, switch_dropout_off
from verl.model_engine.lora import LoraLayers, is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.offload import own_storage
from verl.model_engine.optim import grad_norm
from verl.model_engine.settings import EngineSettings
from verl.models.families import Part, family_of
from verl.nn.heads import ValueHead
from verl.nn.linear_logprob import Vocabulary
from verl.nn.quant_linear import quantised_layers
from verl.nn.recompute import checkpoint_layers
from verl.nn.rope import fix_rope


class LocalModel:
    """A whole model in this process, in float32 (or float64), on the device on which it computes.

    model: an instantiated causal LM · settings: its head, whether it is trained, and its device"""

    vocabulary: Vocabulary | None = None
    """The slice of the vocabulary that this rank's head has."""
    suffix = ""
    """The end of the names of files that this process writes beside those of other ranks."""

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        s, self.settings, self.device = settings, settings, torch.device(settings.device)
        master = s.precision.master
        self.model: Any = model.to(master)
        self.row_limit = fix_rope(self.model, s.longest)
        refuse_altered_logits(self.model)
        self.hidden_size: int = self.model.config.get_text_config().hidden_size
        self.value_head = None if s.head == "lm" else ValueHead(self.hidden_size, bias=s.head == "value").to(master)
        if s.score is not None and self.value_head is not None:
            self.value_head.weight.data.copy_(s.score)
        self.lora = None if s.lora is None else self._lora_of(s.lora)
        checkpoint_layers(self.model, s.gradient_checkpointing)
        for p in self.trained().parameters():
            p.requires_grad_(False)
        for p in self.trained_parameters().values():
            p.requires_grad_(s.optim is not None)
        self._place()
        if self.lora is not None:
            self.lora.fill(dict(self.model.named_parameters()), self.start_factor)
        self.model.train(s.optim is not None)
        switch_dropout_off(self.model)

    def _lora_of(self, spec: LoraSpec) -> LoraLayers:
        s, trains = self.settings, self.settings.optim is not None
        scored = s.head == "score" and not trains
        over = s.gradient_checkpointing == "none"
        return LoraLayers(self.model, spec, s.base, head=scored, trains=trains, body=s.head != "lm", over=over)

    def _place(self) -> None:
        """Move the model, which was loaded in host memory, to the device on which it computes."""
        self.model.to(self.device)
        if "weights" in self.settings.offload:
            own_storage(self.model.parameters())
        if self.value_head is not None:
            self.value_head.to(self.device)

    # -- what is trained -----------------------------------------------------------------------------------------------

    def trained(self) -> nn.Module:
        """Return the module of all parameters that are trained without LoRA."""
        if self.value_head is None:
            found: nn.Module = self.model
            return found
        return nn.ModuleDict({"model": self.model.base_model, "value_head": self.value_head})

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name: under LoRA the factors, the weights that are trained whole, and the
        value head, else those of the parts that are not frozen."""
        every = dict(self.trained().named_parameters())
        if self.lora is None:
            return {name: p for name, p in every.items() if self.part_of(name) not in self.settings.freeze}
        whole = {id(p) for name, p in self.model.named_parameters() if name in self.lora.parameters.replaced}
        return {n: p for n, p in every.items() if is_factor(n) or id(p) in whole or n.startswith("value_head.")}

    def part_of(self, name: str) -> Part | None:
        """Return the part of a model that reads images to which a parameter belongs; None: it is of another model, or
        of the value head."""
        family = family_of(self.model.config)
        return None if family is None or name.startswith("value_head.") else family.part_of(name)

    def trained_names(self) -> Set[str]:
        """Return the names of all trained parameters, on whichever rank they are."""
        return self.trained_parameters().keys()

    def trained_parts(self) -> list[nn.Parameter]:
        """Return the trained tensors, or this process's parts of them, with their gradients."""
        return [p for p in self.trained().parameters() if p.requires_grad]

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole gradient [], the same on every rank."""
        return grad_norm(self.trained_parts())

    def one_mesh_each(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer such that the tensors of each are spread over the same ranks."""
        return list(groups)

    def tensors(self) -> list[Tensor]:
        """Return this process's storage of all parameters."""
        modules = nn.ModuleList(module for module in (self.model, self.value_head) if module is not None)
        return [self.local(p.detach()) for p in modules.parameters()]

    def masters(self) -> dict[str, Tensor]:
        """Return this process's parts of all parameters by name, and the codes of those that are quantised."""
        found = {name: self.local(p.detach()) for name, p in self.trained().named_parameters()}
        return found | {
            f"{name}.codes": layer.quantised.codes for name, layer in quantised_layers(self.trained()).items()
        }

    def local(self, t: Tensor) -> Tensor:
        """Return this rank's part of a tensor, in its own storage."""
        return t

    # -- what is published ---------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (Hugging Face name, weight); tied tensors once, by their first name. None: another stage has the
        weight."""
        every = self._model_weights()
        if self.settings.head == "score":
            assert self.value_head is not None
            return classifier_tensors(self.model.base_model_prefix, every, self.value_head.weight)
        return every

    def _model_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._exact_weights()
        yield from ((f"{name}.weight", layer.weight) for name, layer in quantised_layers(self.model).items())

    def _exact_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in saved_weights(self.model) if not is_factor(name))

    def coded_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all weights but factors, the quantised ones as codes and scales by the names that
        bitsandbytes gives them in a checkpoint. No tensor is a copy, but for a few small ones."""
        yield from self._exact_weights()
        for name, layer in quantised_layers(self.model).items():
            yield from ((f"{name}.{part}", tensor) for part, tensor in layer.quantised.tensors().items())

    def weight_parts(self) -> Iterator[WeightPart]:
        """Yield the parts of `Publishes.weight_parts`."""
        named = ((name, tensor) for name, tensor in self.named_weights() if tensor is not None)
        return (replace(whole_part(n, t), mine=partial(self.with_factors, n, t.detach())) for n, t in named)

    def parts_of(self, named: Iterable[tuple[str, Tensor | None]]) -> Iterator[WeightPart]:
        """Yield this rank's parts of these parameters, without the factors of LoRA merged."""
        return (whole_part(name, tensor) for name, tensor in named if tensor is not None)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of all weights, with the factors of LoRA merged in float32."""
        return ((name, self.with_factors(name, self.delivered(name, p))) for name, p in self.named_weights())

    def with_factors(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole weight with its LoRA factors merged. All ranks call this in the same order."""
        if self.lora is None:
            return weight
        return self.lora.merged(name, weight, self.whole_factor)

    def whole_factor(self, name: str) -> Tensor:
        """Return a whole factor of LoRA by its name in the model. All ranks call this in the same order."""
        return self.whole(self.model.get_parameter(name))

    def gather_factors(self) -> None:
        """Gather the factors of LoRA with which this process's parts of the weights are merged. All ranks call this
        before the tensors of `weight_parts` are read."""

    def at_start(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as before training: LoRA keeps those weights."""
        assert self.lora is not None, "all weights are trained, and those of the start are not kept"
        return self.lora.at_start(dict(self.model.named_parameters()))

    def start_factor(self, p: Tensor, whole: Tensor) -> Tensor:
        """Return what a pass as of the start computes with. p: a factor of LoRA · whole: the value that it starts
        from, of which this is the part that `p` has in a pass."""
        s = self.settings.precision
        return whole.to(self.device, s.dtype).to(s.master) if s.rounds else whole.to(self.device)

    def factors_merged(self) -> AbstractContextManager[None]:
        """Return a context in which the model does not add the factors of LoRA, since its weights have them."""
        return nullcontext() if self.lora is None else self.lora.off()

    def exported(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the tensors of a checkpoint's folder for other programs: the weights, or the LoRA set's by PEFT's
        names."""
        if self.lora is None:
            return self.named_weights()
        tensors = self.lora.tensors(dict(self.model.named_parameters()))
        head = self.value_head if self.settings.head == "score" else None
        return tensors if head is None else chain(tensors, [(ADAPTER_SCORE, head.weight)])

    def whole(self, p: Tensor) -> Tensor:
        """Return the whole of a parameter, of which this process may have a part only."""
        return p.detach()

    def delivered(self, name: str, p: Tensor | None, on_host: Any = None) -> Tensor:
        """Return the whole tensor of this name on all ranks. on_host: the mesh of a snapshot in host memory."""
        assert p is not None, name
        return self.whole(p)

    @property
    def tied(self) -> dict[str, str]:
        """The tied tensors: for each, the name under which it is delivered."""
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}

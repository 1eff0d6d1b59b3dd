"""Where the plugin enters vLLM: a record per module, which is checked against what vLLM has."""

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prime_composer.lm_head import head_logits
from prime_composer.scoring.head import worker_head
from prime_composer.scoring.runners import name_weights, patch_first_runner, patch_second_runner
from prime_composer.scoring.wire import NAME
from prime_composer.scoring.worker import RowsRequest

HEAD_METHOD = "prime_composer_head"  # ``head.worker_head`` among the methods of vLLM's worker

LOADS = ("load_model", "reload_weights", "update_weights", "finish_weight_update", "wake_up")
"""Methods of vLLM's worker, where it has them, after which its weights may be others."""

_PATCHED = "_prime_composer_was_here"


class UnknownVllm(RuntimeError):
    """A module of this vLLM is not as known here."""


@dataclass(frozen=True)
class Patch:
    """What of one module of vLLM is replaced, and the parameters that its methods must have."""

    apply: Callable[[ModuleType], None]
    surface: dict[str, tuple[str, ...]]


def patch_rotary(module: ModuleType) -> None:
    """Let a CPU build rotate queries and keys that a model splits into heads, as LFM2 does.

    Its kernel takes [tokens, heads, head_size] for one head after the other.

    TODO(vllm): leave it alone once the kernel reads three dimensions.
    """
    rotary: Any = module.RotaryEmbedding
    theirs = rotary.forward_cpu

    def forward_cpu(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        flat = None if key is None else key.reshape(len(key), -1)
        rotated, rotated_key = theirs(self, positions, query.reshape(len(query), -1), flat)
        return rotated.view_as(query), None if key is None else rotated_key.view_as(key)

    rotary.forward_cpu = forward_cpu


def patch_loads(module: ModuleType) -> None:
    """Let every load of weights give the runner's weights another name."""
    worker: Any = module.Worker

    def naming(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(self, *args, **kwargs)
            finally:  # half of a load is another one too
                name_weights(self.model_runner)

        return loaded

    for name in LOADS:
        if hasattr(worker, name):
            setattr(worker, name, naming(getattr(worker, name)))


def patch_processor(module: ModuleType) -> None:
    """Let ``LogprobsProcessor`` pass the tensors of marked requests on as they are."""
    processor: Any = module.LogprobsProcessor
    make = processor.from_new_request.__func__
    update = processor._update_prompt_logprobs

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        made = make(cls, tokenizer, request)
        made.is_marked = RowsRequest.of(request.sampling_params) is not None
        if made.is_marked:
            made.prompt_logprobs = []
        return made

    def _update_prompt_logprobs(self: Any, prompt_logprobs_tensors: Any) -> None:
        if getattr(self, "is_marked", False):
            self.prompt_logprobs.append(prompt_logprobs_tensors)
        else:
            update(self, prompt_logprobs_tensors)

    processor.from_new_request = classmethod(from_new_request)
    processor._update_prompt_logprobs = _update_prompt_logprobs


def patch_logits(module: ModuleType) -> None:
    """Let ``LogitsProcessor`` keep float32 sums without a float32 copy of the head on a CPU."""
    processor: Any = module.LogitsProcessor
    theirs = getattr(processor, "_apply_head", None)
    if theirs is None:  # an older vLLM, whose head always has the model's dtype
        return

    def _apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Any) -> Tensor:
        if self.head_dtype == torch.float32 and hidden_states.dtype != torch.float32:
            if not type(lm_head.quant_method).__name__.startswith("Unquantized"):
                self.head_dtype = None
            elif not hidden_states.is_cuda:
                logits = head_logits(hidden_states, lm_head.weight)
                return logits if embedding_bias is None else logits + embedding_bias
        found: Tensor = theirs(self, lm_head, hidden_states, embedding_bias)
        return found

    processor._apply_head = _apply_head


def patch_worker(module: ModuleType) -> None:
    """Give vLLM's workers the method that reads the output head."""
    setattr(module.WorkerBase, HEAD_METHOD, worker_head)


PATCHES = {
    "vllm.v1.worker.gpu_model_runner": Patch(
        patch_first_runner,
        {
            "GPUModelRunner._get_prompt_logprobs_dict": (
                "self", "hidden_states", "num_scheduled_tokens"
            ),
        },
    ),
    "vllm.v1.worker.gpu.sample.prompt_logprob": Patch(
        patch_second_runner,
        {
            "PromptLogprobsWorker.add_request": ("self", "req_id", "req_idx", "sampling_params"),
            "PromptLogprobsWorker.remove_request": ("self", "req_id"),
            "PromptLogprobsWorker.compute_prompt_logprobs": (
                "self", "logits_fn", "hidden_states", "input_batch", "all_token_ids",
                "num_computed_tokens", "prompt_lens",
            ),
        },
    ),
    "vllm.v1.engine.logprobs": Patch(
        patch_processor,
        {
            "LogprobsProcessor.from_new_request": ("tokenizer", "request"),
            "LogprobsProcessor._update_prompt_logprobs": ("self", "prompt_logprobs_tensors"),
        },
    ),
    "vllm.v1.worker.gpu_worker": Patch(patch_loads, {"Worker.get_model": ("self",)}),
    "vllm.v1.worker.worker_base": Patch(patch_worker, {"WorkerBase.get_model": ("self",)}),
    "vllm.model_executor.layers.logits_processor": Patch(patch_logits, {}),
    "vllm.model_executor.layers.rotary_embedding.base": Patch(
        patch_rotary, {"RotaryEmbedding.forward_cpu": ("self", "positions", "query", "key")}
    ),
}  # fmt: skip


def install_patches() -> None:
    """Patch the modules of vLLM that are loaded, others once they are. Twice is harmless."""
    for name in PATCHES:
        if name in sys.modules:
            patch(sys.modules[name])
        elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())


def patch(module: ModuleType) -> None:
    """Patch one module of vLLM, once."""
    if hasattr(module, _PATCHED):
        return
    known = PATCHES[module.__name__]
    if lacking := lacks(module, known.surface):
        raise UnknownVllm(
            f"The scoring plugin of prime_composer does not fit {module.__name__} of this vLLM, "
            f"which lacks {', '.join(lacking)}. Install vLLM 0.26 to 0.33, or take {NAME} out of "
            "VLLM_PLUGINS."
        )
    known.apply(module)
    setattr(module, _PATCHED, True)


def lacks(module: ModuleType, surface: dict[str, tuple[str, ...]]) -> list[str]:
    """Name what a module does not have, or has with other parameters."""
    lacking = []
    for name, parameters in surface.items():
        class_name, _, method = name.partition(".")
        found = getattr(getattr(module, class_name, None), method, None)
        if found is None or tuple(inspect.signature(found).parameters) != parameters:
            lacking.append(f"{name}({', '.join(parameters)})")
    return lacking


class _AfterImport(importlib.abc.MetaPathFinder):
    """Patches a module right after its import.

    An import of the runner's module would start CUDA in the API server.
    """

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that patches the module."""
        if fullname in self._asked or fullname not in PATCHES:
            return None
        self._asked.add(fullname)  # the other finders are asked through the same list
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asked.remove(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

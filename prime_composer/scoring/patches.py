"""Where the plugin enters vLLM: one record per layout, found by what vLLM has, not by its version.

vLLM 0.26 to 0.32 share one layout, that of their first model runner.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import secrets
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
from prime_composer.scoring.wire import NAME
from prime_composer.scoring.worker import Progress, RowsRequest, answer_prompts, uint8

HEAD_METHOD = "prime_composer_head"  # ``head.worker_head`` among the methods of vLLM's worker

ROTARY = "vllm.model_executor.layers.rotary_embedding.base"

LOADS = ("load_model", "reload_weights", "update_weights", "finish_weight_update", "wake_up")
"""Methods of vLLM's worker, where it has them, after which its weights may be others."""

_PATCHED = "_prime_composer_was_here"
_FINGERPRINT = "_prime_composer_fingerprint"


class UnknownVllm(RuntimeError):
    """This vLLM has no layout that is known here."""


@dataclass(frozen=True)
class Layout:
    """What of vLLM is read and replaced; ``surface`` has the parameters that methods must have."""

    name: str
    surface: dict[str, dict[str, tuple[str, ...]]]
    patches: dict[str, Callable[[ModuleType], None]]


def patch_runner(module: ModuleType) -> None:
    """Let ``GPUModelRunner`` answer marked requests itself; all others are vLLM's."""
    from vllm.v1.outputs import LogprobsTensors

    runner_class: Any = module.GPUModelRunner
    theirs = runner_class._get_prompt_logprobs_dict

    def tensors_of(progress: Progress, fingerprint: str) -> Any:
        return LogprobsTensors(*progress.payload(), uint8(fingerprint.encode()))

    def _get_prompt_logprobs_dict(
        self: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        pending: dict[str, int] = self.num_prompt_logprobs
        rows_requests = {
            request_id: rows_request
            for request_id in pending
            if (rows_request := RowsRequest.of(self.requests[request_id].sampling_params))
            is not None
        }
        if not rows_requests:
            return theirs(self, hidden_states, num_scheduled_tokens)
        held = {request_id: pending.pop(request_id) for request_id in rows_requests}
        found = theirs(self, hidden_states, num_scheduled_tokens) if pending else {}
        done = answer_prompts(self, rows_requests, hidden_states, num_scheduled_tokens)
        pending.update({name: count for name, count in held.items() if name not in done})
        name = fingerprint_of(self)
        return found | {
            request_id: tensors_of(progress, name) for request_id, progress in done.items()
        }

    runner_class._get_prompt_logprobs_dict = _get_prompt_logprobs_dict


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


def fingerprint_of(runner: Any) -> str:
    """Return the name of this process and of its last load of weights."""
    if not hasattr(runner, _FINGERPRINT):
        setattr(runner, _FINGERPRINT, secrets.token_hex(8))
    name: str = getattr(runner, _FINGERPRINT)
    return name


def forget_fingerprint(runner: Any) -> None:
    """Let a runner whose weights may be others now have another name."""
    vars(runner).pop(_FINGERPRINT, None)


def patch_loads(module: ModuleType) -> None:
    """Let every load of weights forget the runner's fingerprint."""
    worker: Any = module.Worker

    def forgetting(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(self, *args, **kwargs)
            finally:  # half of a load is another one too
                forget_fingerprint(self.model_runner)

        return loaded

    for name in LOADS:
        if hasattr(worker, name):
            setattr(worker, name, forgetting(getattr(worker, name)))


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


LAYOUTS = (
    Layout(
        "the model runner V1 of vLLM 0.26 to 0.32",
        {
            "vllm.v1.worker.gpu_model_runner": {
                "GPUModelRunner._get_prompt_logprobs_dict": (
                    "self", "hidden_states", "num_scheduled_tokens"
                ),
            },
            "vllm.v1.engine.logprobs": {
                "LogprobsProcessor.from_new_request": ("tokenizer", "request"),
                "LogprobsProcessor._update_prompt_logprobs": ("self", "prompt_logprobs_tensors"),
            },
            "vllm.v1.worker.gpu_worker": {"Worker.get_model": ("self",)},
            "vllm.v1.worker.worker_base": {"WorkerBase.get_model": ("self",)},
            "vllm.model_executor.layers.logits_processor": {},
            ROTARY: {"RotaryEmbedding.forward_cpu": ("self", "positions", "query", "key")},
        },
        {
            "vllm.v1.worker.gpu_model_runner": patch_runner,
            "vllm.v1.engine.logprobs": patch_processor,
            "vllm.v1.worker.gpu_worker": patch_loads,
            "vllm.v1.worker.worker_base": patch_worker,
            "vllm.model_executor.layers.logits_processor": patch_logits,
            ROTARY: patch_rotary,
        },
    ),
)  # fmt: skip


def install_patches() -> None:
    """Patch the modules of vLLM that are loaded, others once they are. Twice is harmless."""
    for name in {name for layout in LAYOUTS for name in layout.patches}:
        if name in sys.modules:
            patch(sys.modules[name])
        elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())


def patch(module: ModuleType) -> None:
    """Patch one module of vLLM, once."""
    if hasattr(module, _PATCHED):
        return
    missing = []
    for layout in LAYOUTS:
        lacking = lacks(module, layout.surface.get(module.__name__, {}))
        if not lacking:
            layout.patches[module.__name__](module)
            setattr(module, _PATCHED, layout.name)
            return
        missing.append(f"{layout.name} needs {', '.join(lacking)}")
    raise UnknownVllm(
        f"The scoring plugin of prime_composer does not fit {module.__name__} of this vLLM: "
        f"{'; '.join(missing)}. Install vLLM 0.26 to 0.32, or take {NAME} out of VLLM_PLUGINS."
    )


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
        if fullname in self._asked or not any(fullname in layout.patches for layout in LAYOUTS):
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

"""Student rollouts and teacher scores from vLLM engines inside this process.

The sampler's engine has ``logprobs_mode="processed_logprobs"``: mu is the distribution that a token
was drawn from, after temperature and after top-p removed the tail and the rest was renormalized. A
greedy rollout (temperature 0) is drawn from a point mass, so its log mu is 0. The scorer's
log-probs are always those of the full vocabulary at temperature 1; they are computed by the code of
the scoring plugin (``prime_composer.scoring``), head and ranking on the trained tokens alone.

On a CPU build the engine is eager, and its key-value cache has a fixed size. The CUDA settings
follow vLLM's documentation and were not run.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    check_sequence_lengths,
    make_rollout,
)
from prime_composer.backends.answers import check_choices
from prime_composer.backends.cpu_guard import (
    built_for_cpu,
    import_vllm,
    keep_graphs,
    preserved_rng,
    return_freed_memory,
    use_threads,
)
from prime_composer.backends.hf_model import read_config, read_eos_token_ids, reads_images
from prime_composer.backends.lora.views import weights_to_load
from prime_composer.backends.protocols import (
    Limits,
    Rollout,
    SamplingParams,
)
from prime_composer.backends.transformers import window_of
from prime_composer.scoring import patches
from prime_composer.scoring.head import head_dtype_of
from prime_composer.scoring.runners import name_weights
from prime_composer.scoring.wire import FLOAT32_HEAD

GPU_MEMORY_SHARE = 0.3  # Per engine: sampler, scorer and trainer share one GPU

CPU_BLOCK = 128  # Tokens of a block of the cache, the smallest that the CPU build allocates

USUAL_WINDOW = 2048  # Positions that vLLM gives a model whose config names none

MOST_SEQUENCES = 256  # Side by side at most: vLLM's own default on a CPU build


class VLLMEngine:
    """A vLLM engine in this process: what sampler and scorer share.

    Weights and activations in float32 agree with a float32 trainer to 1e-4 nat, in bfloat16 to
    about 0.1 nat. The head's products keep float32 sums in any case, unless ``hf_overrides`` in
    ``engine_args`` has another ``head_dtype``, or the head is quantized.
    """

    logprobs_mode: ClassVar[str] = "raw_logprobs"

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        max_model_len: int | None = None,  # prompt, completion and one; at most the model's window
        max_logprobs: int | Literal["full"] = 20,  # largest K; "full" for the whole vocabulary
        sequences: int = MOST_SEQUENCES,  # side by side; a CPU's have 1 GiB of key-value cache
        gpu_memory_utilization: float = GPU_MEMORY_SHARE,
        eos_token_ids: Sequence[int] | None = None,  # beside a call's own; None: the model's
        engine_args: dict[str, Any] | None = None,
    ):
        vllm = import_vllm()
        self._vllm = vllm
        cpu = built_for_cpu()
        self.model = str(model)
        # Before vLLM reads the model: a hub that cannot be reached is one sentence here.
        if eos_token_ids is None:
            eos_token_ids = read_eos_token_ids(self.model)
        self.eos_token_ids = tuple(eos_token_ids)
        own_config = read_config(self.model)
        if max_model_len is not None:
            max_model_len = min(max_model_len, window_of(own_config) or max_model_len)
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_logprobs": -1 if max_logprobs == "full" else max_logprobs,
            "logprobs_mode": self.logprobs_mode,
            "enforce_eager": cpu,  # a GPU's engine is compiled, with CUDA graphs
            "seed": 0,  # of the engine's start: sampling is seeded per call
            # Token ids go in and come out: no tokenizer, no default sampling settings.
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if reads_images(own_config):  # the towers are not opened, nor a processor
            arguments["language_model_only"] = True
        if cpu:
            arguments["kv_cache_memory_bytes"] = default_kv_cache_bytes(
                self.model, dtype, max_model_len, sequences
            )
        else:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        arguments |= engine_args or {}
        overrides = arguments.get("hf_overrides") or {}
        if not callable(overrides):
            room = arguments["max_model_len"] or window_of(own_config)
            arguments["hf_overrides"] = FLOAT32_HEAD | dynamic_rope(own_config, room) | overrides
        self._threads = torch.get_num_threads()
        with preserved_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patches.install_patches()
            if not cpu:
                keep_graphs()
            with packed_weights() as packed, foreign_classes_kept():
                self._llm = vllm.LLM(**arguments)
        # Weights that another process packs are none of ours.
        self._packed = packed if packed.removed and can_load_again(self._own_model()) else None
        config = self._llm.model_config
        self.head_dtype = head_dtype_of(config)
        vocab_size: int = config.get_vocab_size()
        self.limits = Limits(
            max_model_len=config.max_model_len,
            vocab_size=vocab_size,
            max_logprobs=vocab_size if config.max_logprobs == -1 else config.max_logprobs,
        )

    @property
    def llm(self) -> Any:
        if self._llm is None:
            raise ValueError(f"The engine of {self.model} is closed; make a new one.")
        return self._llm

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return ``params.n`` rollouts per prompt, in prompt order.

        The engine draws from torch's global generator, or NumPy's where it has the second model
        runner. Both are seeded for the call and restored after it. vLLM's seed per request cannot
        be used on a CPU build beside a partially prefilled prompt. A raw engine's log mu is right
        at temperature 1 and top-p 1, or greedy.
        """
        check_sequence_lengths(prompts, params.max_tokens, self.limits.max_model_len)
        greedy = params.temperature == 0
        request = self._vllm.SamplingParams(
            # n greedy completions are n times the same one; vLLM refuses to compute them.
            n=1 if greedy else params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            stop_token_ids=sorted({*self.eos_token_ids, *params.stop_token_ids}),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        # An earlier call's cache must not change this call's batches, and with them its numbers.
        self.forget_prefixes()
        with preserved_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            outputs = self._run([list(ids) for ids in prompts], request)
        rollouts = []
        origin = f"The engine of {self.model}"
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            check_choices(len(output.outputs), request.n, origin=origin, prompt=index)
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                logprobs = (
                    [0.0] * len(completion.token_ids) if greedy else completion.logprobs.logprobs
                )
                rollout = make_rollout(
                    prompt,
                    completion.token_ids,
                    logprobs,
                    completion.finish_reason,
                    index,
                    max_tokens=params.max_tokens,
                    vocab_size=self.limits.vocab_size,
                    origin=origin,
                )
                rollouts.extend([rollout] * (params.n if greedy else 1))
        return rollouts

    def update_weights(self, model: nn.Module) -> None:
        """Load the model's weights in place, and drop every prefix cached with the old ones.

        A CPU build loads by ``PackedWeights``. Any other, and a model of other layers than plain
        matrices, loads by vLLM's ``reload_weights``. Unlike ``named_parameters()``,
        ``weights_to_load`` lists a tied ``lm_head.weight``; without it that silently keeps the CPU
        engine's old, repacked head.

        Weights are packed with the number of threads that the engine was opened with: vLLM 0.32 on
        a processor with AVX2 packs some shapes wrongly after oneDNN has packed the same shape with
        another number (192 x 64 with two threads after one). Products may have any number.

        TODO(vllm): leave the threads alone once a packed weight does not depend on them.
        """
        weights = weights_to_load(model)
        with use_threads(self._threads):
            if self._packed is None:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            else:
                self.llm.collective_rpc(self._packed.load, args=(weights,))
        self.forget_prefixes()
        return_freed_memory(model)

    def drop_weights(self) -> None:
        """Free the packed weights of a CPU build, until ``update_weights`` brings the next ones."""
        if self._packed is not None:
            self.llm.collective_rpc(self._packed.drop)

    def forget_prefixes(self) -> None:
        """Drop vLLM's prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: a request is still running on this engine."
            )

    def close(self) -> None:
        """Free the engine's memory. Closing twice is harmless."""
        llm, self._llm, self._packed = self._llm, None, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _own_model(self) -> Any:
        """Return vLLM's model, where the engine has one worker, in this process."""
        (model,) = self.llm.collective_rpc(lambda worker: worker.get_model())
        return model

    def _run(self, prompts: list[list[int]], params: Any) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
            )


class VLLMSampler(VLLMEngine):
    """Rollouts from a vLLM engine in this process (``protocols.Sampler``): log mu is processed."""

    logprobs_mode = "processed_logprobs"


def default_kv_cache_bytes(
    model: str, dtype: str, max_model_len: int | None, sequences: int
) -> int:
    """Return room for sequences of full length, two at least, from 64 MiB to 1 GiB."""
    per_sequence = bytes_of_a_sequence(read_config(model), dtype, max_model_len)
    wanted = min(sequences, MOST_SEQUENCES) * per_sequence
    return max(2 * per_sequence, min(max(wanted, 64 * 2**20), 2**30))


def dynamic_rope(config: Any, context: int | None) -> dict[str, Any]:
    """Return ``hf_overrides`` with which rotary positions of type "dynamic" reach ``context``.

    vLLM reads beyond its table's end there.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if context is None or rope.get("rope_type") != "dynamic" or "max_trained_positions" in rope:
        return {}
    own = config.max_position_embeddings
    longer = {**rope, "max_trained_positions": own}
    return {"max_position_embeddings": max(context, own), "rope_parameters": longer}


def bytes_of_a_sequence(config: Any, dtype: str, length: int | None) -> int:
    """Return the bytes of a sequence in the key-value cache of a CPU build."""
    length = length or window_of(config) or USUAL_WINDOW
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if dtype in ("float32", "float") else 2
    per_block = 2 * config.num_hidden_layers * heads * head_dim * size * CPU_BLOCK
    return int(per_block * -(-length // CPU_BLOCK))


@contextmanager
def foreign_classes_kept() -> Iterator[None]:
    """Within the block, let vLLM compile no class but its own.

    vLLM runs an architecture that it has no model for with transformers' own class. Its decorator
    changes that class in place, and with it the trainer's model.
    """
    from vllm.compilation import decorators

    module: Any = decorators
    compiled: Any = getattr(module, "_support_torch_compile", None)
    if compiled is None:
        yield
        return

    def own_alone(cls: type, *arguments: Any, **named: Any) -> type:
        own: type = compiled(cls, *arguments, **named) if cls.__module__.startswith("vllm") else cls
        return own

    module._support_torch_compile = own_alone
    try:
        yield
    finally:
        module._support_torch_compile = compiled


@dataclass
class PackedWeights:
    """The parameters that a CPU build has packed for oneDNN in this process, and removed.

    vLLM's ``reload_weights`` restores such parameters for every layer, and spends most of its time
    on finding out which tensors belong together. Here the parameters stay, without their memory, so
    that a load is that of the engine's start.
    """

    # layer, parameter with vLLM's loader, and shape, as the layer has it while weights are loaded
    removed: list[tuple[nn.Module, nn.Parameter, torch.Size]] = field(default_factory=list)

    def restore(self) -> None:
        """Give the layers their parameters back. What the parameters contain is undefined."""
        for layer, weight, shape in self.removed:
            weight.data = weight.data.new_empty(shape)
            layer.weight = weight

    def drop(self, worker: Any) -> None:
        """Free what the layers compute with, in vLLM's worker."""
        layer: Any
        for layer, _, _ in self.removed:
            layer.cpu_linear = _without_weights

    def load(self, worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights in place, in vLLM's worker.

        Each parameter is freed once it is packed: after ``drop`` the engine never takes more than
        its weights and one layer's.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model = worker.get_model()
        name_weights(worker.model_runner)
        self.restore()
        with set_current_vllm_config(worker.vllm_config):
            loaded = model.load_weights(weights)
            names = {name for name, _ in model.named_parameters()}
            if loaded is not None and (missing := names - loaded):
                raise ValueError(f"vLLM got no weights for {', '.join(sorted(missing))}.")
            with freed_once_packed(lambda *_: None):
                process_weights_after_loading(model, worker.model_config, worker.device)


def _without_weights(*_: Any) -> Tensor:
    raise RuntimeError("The engine's weights were dropped; call update_weights before it computes.")


@contextmanager
def packed_weights() -> Iterator[PackedWeights]:
    """Collect the parameters that vLLM packs in this process within the block, if it packs any."""
    packed = PackedWeights()
    with freed_once_packed(lambda *removed: packed.removed.append(removed)):
        yield packed


@contextmanager
def freed_once_packed(
    take: Callable[[nn.Module, nn.Parameter, torch.Size], None],
) -> Iterator[None]:
    """Within the block, free each parameter that vLLM has packed and removed from its layer."""
    from vllm.model_executor.layers import utils

    module: Any = utils
    pack = getattr(module, "dispatch_cpu_unquantized_gemm", None)
    if pack is None:
        yield
        return

    def pack_and_free(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        pack(layer, remove_weight)
        if layer.weight is not weight:
            take(layer, weight, weight.shape)
            weight.data = weight.data.new_empty(0)

    module.dispatch_cpu_unquantized_gemm = pack_and_free
    try:
        yield
    finally:
        module.dispatch_cpu_unquantized_gemm = pack


def can_load_again(model: Any) -> bool:
    """Return whether loading and packing may be repeated: nothing but plain matrices is packed."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(
        type(layer.quant_method) in plain and layer.weight.dim() <= 2
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase)
    )

"""Let an unmodified prime-rl run on a CPU-only torch with gloo, in processes of tests only.

Three parts: stand-ins for GPU-only packages that prime-rl imports at module level; "cuda" read as
"cpu"; and two replacements in prime-rl: one method divides by the GPU's peak FLOPs, and activation
offloading asks for an accelerator. Nothing else of prime-rl is changed.

Where a stand-in computes something (varlen attention, gradient clipping), it follows the public
semantics of the package that it replaces.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types

ABSENT = frozenset(
    "flash_attn flash_attn_interface ring_flash_attn dion tilelang triton deep_ep deep_gemm "
    "liger_kernel mamba_ssm causal_conv1d fla quack vllm torchtitan torchdata torchao modelexpress "
    "prime_kernels grpc nixl nixl_cu12 torchvision torchaudio prime_cli wandb_workspaces "
    "wandb_gql wandb_graphql".split()
)
KEEP = frozenset(filter(None, os.environ.get("PRIME_CPU_RIG_KEEP", "").split(",")))


class Anything:
    """A value that can be called, decorated with, or-ed into a type, and asked for attributes."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, bases):
        return ()

    def __or__(self, other):
        return object

    __ror__ = __or__


class AnyClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if name[:1].isupper():
            return AnyClass(
                name, (), {"__init__": lambda self, *a, **k: None, "__module__": self.__name__}
            )
        return Anything()


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in ABSENT - KEEP:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        FILL.get(module.__name__, lambda module: None)(module)


def flash_attn(module):
    """Fill in variable-length causal attention, with the plain kernel on one sequence at a time."""
    import torch
    import torch.nn.functional as F

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, *args, softmax_scale=None, causal=False, **_
    ):
        bounds, out = cu_seqlens_q.tolist(), []
        shared = q.shape[1] // k.shape[1]
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            heads = [t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
            heads[1:] = [t.repeat_interleave(shared, dim=1) for t in heads[1:]]
            attended = F.scaled_dot_product_attention(*heads, is_causal=causal, scale=softmax_scale)
            out.append(attended.squeeze(0).transpose(0, 1))
        return torch.cat(out)

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.__version__ = "2.8.3"


def titan_utils(module):
    import torch
    from torch.distributed.tensor import DTensor

    @torch.no_grad()
    def clip_grad_norm_(
        parameters,
        max_norm,
        norm_type=2.0,
        error_if_nonfinite=False,
        foreach=None,
        pp_mesh=None,
        ep_enabled=False,
    ):
        parameters = [p for p in parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(
            [p.grad for p in parameters], norm_type, error_if_nonfinite, foreach
        )
        total = total.full_tensor() if isinstance(total, DTensor) else total
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
        return total

    module.clip_grad_norm_ = clip_grad_norm_


def titan_expert_parallel(module):
    from torch.distributed.tensor.parallel import ParallelStyle

    module.ExpertParallel = type("ExpertParallel", (ParallelStyle,), {})
    module.expert_parallel = lambda function: function


def generate_response(module):
    import pydantic

    class GenerateResponse(pydantic.BaseModel):
        model_config = {"extra": "allow"}
        prompt_logprobs: list | None = None

    module.GenerateResponse = GenerateResponse


def stateful_dataloader(module):
    module.StatefulDataLoader = type("StatefulDataLoader", (), {})


FILL = {
    "flash_attn": flash_attn,
    "torchtitan.distributed.utils": titan_utils,
    "torchtitan.distributed.expert_parallel": titan_expert_parallel,
    "torchdata.stateful_dataloader": stateful_dataloader,
    "vllm.entrypoints.serve.disagg.protocol": generate_response,
    "vllm.entrypoints.scale_out.token_in_token_out.protocol": generate_response,
}


def see_what_is_absent():
    """Let transformers and inductor detect packages before the stand-ins exist; they remember."""
    import contextlib
    import importlib

    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codecache"):
        importlib.import_module(name)
    for name in ("modeling_flash_attention_utils", "integrations.hub_kernels"):
        importlib.import_module(f"transformers.{name}")
    import torch.utils._triton as torch_triton
    import transformers.utils.import_utils as available

    for module, prefix in ((available, "is_"), (torch_triton, "has_triton")):
        for name in dir(module):
            if name.startswith(prefix) and (prefix != "is_" or name.endswith("_available")):
                with contextlib.suppress(Exception):
                    getattr(module, name)()


def cpu_device(device):
    import torch

    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def cuda_is_cpu():
    import torch
    import torch._utils
    import torch.distributed as dist
    import torch.utils._device

    # Freezes the list of the original factories. Made later, it would have the wrapped ones, and
    # `with torch.device("meta")` would no longer work.
    torch.utils._device._device_constructors()

    def on_cpu(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = cpu_device(kwargs["device"])
            return function(*args, **kwargs)

        return wrapped

    for name in (
        "tensor empty zeros ones full arange randn rand randint empty_like zeros_like ones_like "
        "full_like as_tensor eye"
    ).split():
        setattr(torch, name, on_cpu(getattr(torch, name)))

    def moved(to):
        def wrapped(self, *args, **kwargs):
            kwargs = {key: cpu_device(value) for key, value in kwargs.items()}
            return to(self, *(cpu_device(arg) for arg in args), **kwargs)

        return wrapped

    def histc(tensor, *args, **kwargs):  # the CPU's has no integers
        return histogram(tensor.float(), *args, **kwargs)

    histogram, torch.histc = torch.histc, histc
    torch.Tensor.to = moved(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.to = moved(torch.nn.Module.to)
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.to_empty = moved(torch.nn.Module.to_empty)

    def constant(value):
        return lambda *args, **kwargs: value

    for name in ("set_device", "reset_peak_memory_stats", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, constant(None))
    for name in (
        "current_device",
        "max_memory_reserved",
        "max_memory_allocated",
        "memory_allocated",
        "memory_reserved",
    ):
        setattr(torch.cuda, name, constant(0))
    torch.cuda.mem_get_info = constant((1 << 30, 1 << 30))
    torch.cuda.get_device_name = constant("CPU")
    torch.cuda.get_device_capability = constant((9, 0))

    init, reduce = dist.init_process_group, dist.all_reduce

    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return init("gloo", *args, **kwargs)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.AVG:  # gloo has no average
            return reduce(tensor, op=op, group=group, async_op=async_op)
        work = reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        tensor.div_(dist.get_world_size(group))
        return work

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    dist.all_reduce = all_reduce
    torch._utils._get_available_device_type = lambda: "cpu"


def uninitialized_memory_is_nan():
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)


def no_peak_flops(module):
    module.PerfCounter.get_step_mfu = lambda self, *args, **kwargs: 0.0


def cpu_is_accelerator(module):
    """Let the module copy activations from the CPU's memory to the CPU's memory."""
    import contextlib

    import torch

    seen = types.ModuleType("torch")
    seen.__getattr__ = lambda name: getattr(torch, name)
    seen.accelerator = types.SimpleNamespace(
        is_available=lambda: True,
        current_stream=contextlib.nullcontext,
        current_accelerator=lambda: torch.device("cpu"),
    )
    module.torch = seen


REPLACE = {
    "prime_rl.trainer.perf": no_peak_flops,
    "prime_rl.utils.act_offloading": cpu_is_accelerator,
}


class Replacements(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in REPLACE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            REPLACE[fullname](module)

        spec.loader.exec_module = exec_module
        return spec


def install():
    if (
        "transformers" not in ABSENT
        and importlib.machinery.PathFinder.find_spec("transformers") is not None
    ):
        see_what_is_absent()
    sys.meta_path.insert(0, StandInFinder())
    sys.meta_path.insert(0, Replacements())
    cuda_is_cpu()
    uninitialized_memory_is_nan()

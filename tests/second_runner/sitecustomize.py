"""vLLM's second model runner on a CPU: Triton's interpreter runs its kernels on CPU tensors.

vLLM asks Triton for a backend "cpu", which PyPI's has not; this one says that it is there. A
process has it with this directory in PYTHONPATH and the variables of ``tests.vllm_process``.
"""

import triton.backends
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    """The driver of a device that needs none."""

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_device(self):
        return 0

    def get_device_interface(self):
        import torch

        return torch.cpu

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_benchmarker(self):
        raise NotImplementedError


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=CpuDriver)

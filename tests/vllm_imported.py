"""Import vLLM as an engine of the package does, and what its server imports: for ``ForkServer``."""

import importlib

from prime_composer.backends.cpu_guard import import_vllm

import_vllm()
for name in (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
):
    importlib.import_module(name)

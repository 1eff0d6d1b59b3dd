"""vLLM compiles its own classes, and leaves alone what others in this process compute with."""

from weakref import WeakSet

import pytest
from torch import Tensor, nn

from prime_composer.backends.cpu_guard import import_vllm, keep_graphs
from prime_composer.backends.vllm import foreign_classes_kept

pytestmark = pytest.mark.vllm


def new_class(module: str) -> type:
    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    Decoder.__module__ = module
    return Decoder


@pytest.mark.parametrize("module", ["transformers.models.olmo2", "transformers_modules.own"])
def test_class_that_is_not_vllms_is_left_as_it_is(module):
    """Its bases, attributes and instances are those of before, and vLLM's decorator is back."""
    import_vllm()
    from vllm.compilation import decorators

    cls, before = new_class(module), decorators._support_torch_compile
    bases, attributes = cls.__bases__, dict(vars(cls))
    with foreign_classes_kept():
        assert decorators.support_torch_compile(dynamic_arg_dims={"input_ids": 0})(cls) is cls
    assert (cls.__bases__, dict(vars(cls))) == (bases, attributes)
    assert decorators._support_torch_compile is before


def test_class_of_vllm_is_compiled_as_before():
    import_vllm()
    from vllm.compilation import decorators

    cls = new_class("vllm.model_executor.models.llama")
    with foreign_classes_kept():
        decorators.support_torch_compile(dynamic_arg_dims={"input_ids": 0})(cls)
    assert len(cls.__bases__) == 2 and "__call__" in vars(cls)


def test_another_engine_keeps_the_cuda_graphs_of_those_before_it(monkeypatch):
    """vLLM's own call that drops the graphs of all engines reaches the new engine's alone."""
    import_vllm()
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    class Graphs:
        there = True

        def clear_graphs(self) -> None:
            self.there = False

    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", WeakSet())
    first, second = Graphs(), Graphs()
    CUDAGraphWrapper._all_instances.add(first)
    keep_graphs()
    CUDAGraphWrapper._all_instances.add(second)
    CUDAGraphWrapper.clear_all_graphs()
    assert first.there and not second.there

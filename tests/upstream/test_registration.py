import types

import pytest
import torch

from prime_composer.losses import LOSS_FNS, LOSS_TYPES
from prime_composer.upstream import registration
from prime_composer.upstream.switch import switch
from prime_composer.upstream.wire import MARK
from tests.upstream import fake_prime_rl

ERAS = ("v0.6", "v0.7")
SLOT = {"v0.6": "opd_loss_fn", "v0.7": "ref_kl_loss_fn"}


@pytest.fixture(params=ERAS)
def module(request, monkeypatch):
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    module = fake_prime_rl.put(monkeypatch, fake_prime_rl.loss_module(request.param))
    module.era = request.param
    yield module
    registration.unregister()


def setup(module, **table):
    config = fake_prime_rl.custom(**table)
    return (
        module.setup_loss_fns(config)["rl"]
        if module.era == "v0.6"
        else module.setup_rl_loss_fn(config)
    )


def inputs(module, n=6, ref=True):
    generator = torch.Generator().manual_seed(0)
    rows = [-torch.rand(n, generator=generator) for _ in range(3)]
    rows[0].requires_grad_()
    mask = torch.arange(n) % 3 != 0
    return module.LossInputs(rows[0], rows[1], rows[2] if ref else None, torch.ones(n), mask)


@pytest.mark.parametrize(
    "table", [{"type": "sampled_reverse_kl", "dialect": "v0_7"}, {"type": "default"}]
)
def test_prime_rls_setup_binds_our_loss_to_the_tokens_that_it_is_for(module, table):
    before = getattr(module, SLOT[module.era])
    rl = setup(module, **table)
    slot = getattr(module, SLOT[module.era])
    distils = table["type"] != "default"
    assert (
        slot is before
    ) is not distils  # prime-rl's own distillation stays where the loss is none
    out = (slot if distils else rl)(inputs(module))
    assert type(out) is module.LossOutputs
    assert out.loss.shape == () and out.loss.requires_grad
    assert all(value.shape == () and not value.requires_grad for value in out.metrics.values())
    assert registration.current().calls == 1


def test_rl_tokens_do_not_reach_a_loss_that_compares_with_a_teacher(module):
    rl = setup(module, type="sampled_reverse_kl", dialect="v0_7")
    if module.era == "v0.6":  # one training_mode per run
        assert rl(inputs(module)).loss.requires_grad
        return
    # Beside distillation samples of its bin, prime-rl fills the teacher's log-probs of an rl sample with 0.0.
    filled = inputs(module)
    filled.ref_logprobs = torch.zeros(6)
    with pytest.raises(ValueError, match='algo.type = "opd".*PRIME_COMPOSER='):
        rl(filled)
    filled.loss_mask = torch.zeros(6, dtype=torch.bool)  # what pads the ranks' batches
    assert rl(filled).loss.item() == 0


def distilling(module, **table):
    setup(module, **table)
    return getattr(module, SLOT[module.era])


def test_asking_for_loss_fn_elsewhere_registers_nothing(module):
    from prime_composer.upstream import loss_fn

    assert loss_fn is registration.loss_fn
    assert registration.current() is None


def test_loss_weights_reach_the_loss(module):
    if module.era == "v0.6":
        pytest.skip("v0.6 has no weight streams")
    fn = distilling(module, type="sampled_reverse_kl")
    one, two = inputs(module), inputs(module)
    two.loss_weights = torch.full((6,), 2.0)
    assert fn(two).loss.item() == pytest.approx(2 * fn(one).loss.item(), rel=1e-6)


def test_numbers_that_the_command_line_turned_into_strings_are_numbers_again(module):
    setup(module, type="sampled_reverse_kl", kl_tau="0.25", delta_low="1e-1")
    config = registration.current().loss.config
    assert (config.kl_tau, config.delta_low) == (0.25, 0.1)
    assert registration.parse_loss({"type": "topk_reverse_kl", "k": "16"}).k == 16


def test_an_unknown_key_names_the_nearest_one(module):
    with pytest.raises(ValueError, match="unknown key 'kl_taus'; did you mean 'kl_tau'"):
        setup(module, type="sampled_reverse_kl", kl_taus=0.1)


def test_an_unknown_loss_lists_the_losses(module):
    with pytest.raises(ValueError, match="topk_reverse_kl") as caught:
        setup(module, type="topk_revers_kl")
    assert all(name in str(caught.value) for name in LOSS_TYPES)
    with pytest.raises(ValueError, match="has no `type`"):
        setup(module, k=3)


SUPPORTED = [
    name
    for name, config in LOSS_TYPES.items()
    if not [f for f in config.model_fields.values() if f.is_required()]
    and "support" in config().needs
]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_loss_that_needs_a_support_is_refused_on_the_plain_road_with_the_command_to_use(
    module, name
):
    with pytest.raises(ValueError, match="--engine prime-rl") as caught:
        setup(module, type=name)
    assert "PRIME_COMPOSER=1" in str(caught.value)
    assert getattr(module, SLOT[module.era]).__name__ == SLOT[module.era]


@pytest.mark.parametrize("said", [True, "true"])  # the command line makes strings of it
def test_a_run_whose_teachers_are_mixed_by_the_adapter_does_not_start_without_it(module, said):
    with pytest.raises(ValueError, match="adapter = true.*PRIME_COMPOSER=1 in front"):
        setup(module, type="sampled_reverse_kl", adapter=said)
    setup(module, type="sampled_reverse_kl", adapter=False)


def test_the_table_of_losses_is_covered():
    assert "topk_reverse_kl" in SUPPORTED and len(LOSS_FNS) >= 3


def step(optimizer):
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)
    optimizer.step()


def test_a_registered_loss_that_is_never_called_stops_the_run_at_the_first_step(module):
    setup(module, type="sampled_reverse_kl")
    with pytest.raises(RuntimeError, match="never called in the first optimiser step") as caught:
        step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    assert {"v0.6": 'training_mode = "opd"', "v0.7": '[orchestrator.algo] type = "opd"'}[
        module.era
    ] in str(caught.value)


def test_a_loss_beside_an_rl_loss_waits_ten_steps_for_its_first_tokens(module, capfd):
    if module.era == "v0.6":
        pytest.skip("v0.6 has one training_mode per run")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for wait in (3, 9):
        registered = registration.register(
            {"type": "sampled_reverse_kl"}
        )  # named in PRIME_COMPOSER, not in [trainer.loss]
        for _ in range(wait):
            step(optimizer)
        assert "was not called in step 3: no token for it" in capfd.readouterr().err
        if wait == 3:
            registered(inputs(module))
            step(optimizer)
            assert (
                "called 1 times on 4 tokens in step 4, the first with tokens"
                in capfd.readouterr().err
            )
            for _ in range(20):
                step(optimizer)
            registration.unregister()
    with pytest.raises(RuntimeError, match="never called in the first 10 optimiser steps"):
        step(optimizer)


def test_a_resume_loads_the_optimiser_without_that_counting_as_a_step(module):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    fn = distilling(module, type="sampled_reverse_kl", dialect="v0_7")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    # What prime-rl's checkpoint manager asks for before it loads: torch takes a step on zero gradients for it.
    assert get_optimizer_state_dict(model, optimizer)["state"]
    assert registration.current().steps == 0
    fn(inputs(module)).loss.backward()
    optimizer.step()
    assert registration.current().steps == 1


def test_a_checkpoint_of_an_optimiser_without_a_state_is_no_step(module):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    fn = distilling(module, type="sampled_reverse_kl")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count in (1, 2):
        fn(inputs(module)).loss.backward()
        optimizer.step()
        get_optimizer_state_dict(model, optimizer)
        assert registration.current().steps == count


def test_a_loss_of_rl_tokens_waits_for_them_where_a_batch_may_hold_distillation_alone(module):
    setup(module, type="default")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    if module.era == "v0.6":
        with pytest.raises(RuntimeError, match="never called in the first optimiser step"):
            step(optimizer)
        return
    for _ in range(9):
        step(optimizer)
    with pytest.raises(
        RuntimeError, match="in the first 10 optimiser steps: no token was sent to the rl loss"
    ):
        step(optimizer)


def offload_module():
    """prime-rl's full CPU offload: chunks step in other threads, and one step is taken when it is made."""
    module = types.ModuleType("prime_rl.trainer.optim.offload")

    class FullCPUOffloadOptimizer:
        def __init__(self, optimizer, chunks):
            self.optimizer, self.chunks = optimizer, chunks
            step(optimizer)

        def step(self, closure=None):
            for _ in range(self.chunks):  # none with the native backend
                step(self.optimizer)

    module.FullCPUOffloadOptimizer = FullCPUOffloadOptimizer
    return module


@pytest.mark.parametrize("chunks", [0, 3])
def test_a_step_of_an_offloaded_optimiser_is_one_step_whatever_it_does_inside(module, chunks):
    offload = offload_module()
    registration.hook_offload(offload)
    registration.hook_offload(offload)  # both roads
    fn = distilling(module, type="sampled_reverse_kl")
    optimizer = offload.FullCPUOffloadOptimizer(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), chunks
    )
    assert registration.current().steps == 0
    for count in (1, 2):
        fn(inputs(module))
        optimizer.step()
        assert registration.current().steps == count and registration.current().calls == 0


def test_a_called_loss_is_counted_and_the_run_goes_on(module, capfd):
    setup(module, type="sampled_reverse_kl")
    getattr(module, SLOT[module.era])(inputs(module))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    step(optimizer)
    assert "called 1 times on 4 tokens" in capfd.readouterr().err
    step(optimizer)
    assert registration.current().calls == 0


def test_a_run_whose_teachers_are_mixed_stops_at_the_first_step_without_the_adapter_in_its_orchestrator(
    module, monkeypatch
):
    monkeypatch.setattr(registration, "_adapter_for", lambda config: lambda inputs: (None, None))
    setup(module, type="sampled_reverse_kl", adapter=True)
    plain, marked = inputs(module), inputs(module)
    getattr(marked, registration.current().era.ref_field)[0] = MARK
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    registration.current()(plain)
    with pytest.raises(RuntimeError, match="the orchestrator runs without it"):
        step(optimizer)
    registration.unregister()
    setup(module, type="sampled_reverse_kl", adapter=True)
    registration.current()(plain)  # one environment's own teacher, another's mixture
    registration.current()(marked)
    step(optimizer)
    assert registration.current().steps == 1


def test_a_schedule_advances_once_per_optimiser_step_with_the_mean_loss(module):
    setup(module, type="sampled_reverse_kl")
    registered, seen = registration.current(), []
    registered.loss.end_step = seen.append
    outs = [registered(inputs(module)).loss.item() for _ in range(2)]
    step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    assert seen == [pytest.approx(sum(outs) / 8)]


def test_two_different_losses_in_one_trainer_are_refused(module):
    setup(module, type="sampled_reverse_kl")
    setup(module, type="sampled_reverse_kl")
    with pytest.raises(ValueError, match="Two losses for one trainer"):
        setup(module, type="sampled_reverse_kl", kl_tau=0.5)


def test_a_missing_teacher_names_the_remedy(module):
    fn = distilling(module, type="sampled_reverse_kl")
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        fn(inputs(module, ref=False))


@pytest.mark.parametrize(
    "value,settings",
    [("", None), ("0", None), ("1", {}), ('{"loss": {"k": 1}}', {"loss": {"k": 1}})],
)
def test_the_switch(monkeypatch, value, settings):
    monkeypatch.setenv("PRIME_COMPOSER", value)
    assert switch() == settings


@pytest.mark.parametrize("value", ["yes", "[1]", '{"los": 1}'])
def test_a_wrong_switch_shows_how_to_write_it(monkeypatch, value):
    monkeypatch.setenv("PRIME_COMPOSER", value)
    with pytest.raises(ValueError, match="topk_reverse_kl"):
        switch()

"""A loss in prime-rl's terms: which tokens it gets, what is refused, and when a step has ended."""

import ast
import json
import math

import pytest
import torch

from prime_composer.backends import answers
from prime_composer.upstream.trainer import hooks, validity
from prime_composer.upstream.trainer.adapter import trainer_adapter
from prime_composer.upstream.versions.records import (
    LOSS_V0_6,
    LOSS_V0_7,
    UnknownSurface,
    probe_contract,
)
from prime_composer.upstream.wire import MARK, NO_ADVANTAGE
from tests.prime_rl_checkout import VERSIONS
from tests.upstream import fake_prime_rl, scheduled_loss

SAMPLED = {"type": "sampled_reverse_kl"}
CONTRACTS = {"v0.6": LOSS_V0_6, "v0.7": LOSS_V0_7}


class Trainer:
    """Calls prime-rl's modules as its train loop does.

    Attributes:
        loss: its loss module, imported already.
        data: its data module, imported already.
        contract: the loss contract of both.
    """

    def __init__(self, monkeypatch, folder, contract):
        self.contract = contract
        self.loss = fake_prime_rl.loss_module(contract.name)
        self.data = fake_prime_rl.data_module(contract.name)
        self._monkeypatch, self._folder = monkeypatch, folder
        self._loader = None
        fake_prime_rl.put(monkeypatch, self.loss, self.data)

    def setup(self, **table):
        """Return what rl tokens are sent to, with the table in [trainer.loss.kwargs]."""
        config = fake_prime_rl.custom(**table)
        setup = getattr(self.loss, self.contract.setup)
        return setup(config)["rl"] if self.contract is LOSS_V0_6 else setup(config)

    def hook(self, settings):
        """Turn the whole-run adapter on, as the finder does when the modules have been loaded."""
        self._monkeypatch.setenv("PRIME_COMPOSER", json.dumps(settings))
        trainer_adapter.cache_clear()
        hooks.hook_loss(self.loss)
        hooks.hook_data(self.data)

    @property
    def slot(self):
        """What distillation tokens are sent to."""
        return getattr(self.loss, self.contract.slot)

    def inputs(self, n=6, ref=True):
        """Return prime-rl's inputs of one sequence, with four trained tokens of six."""
        generator = torch.Generator().manual_seed(0)
        rows = [-torch.rand(n, generator=generator) for _ in range(3)]
        rows[0].requires_grad_()
        mask = torch.arange(n) % 3 != 0
        return self.loss.LossInputs(*rows[:2], rows[2] if ref else None, torch.ones(n), mask)

    def next_batch(self, kinds="-"):
        """Ask for the next batch, which has these sequences (``fake_prime_rl.micro_batch``)."""
        if self._loader is None:
            self._loader = self.data.DataLoader(self._folder, 1)
        self._loader.micro_batches = [fake_prime_rl.micro_batch(self.contract.name, kinds)]
        return self._loader.get_batch()

    def train(self, calls=1):
        """Do one step, with as many sequences for the distillation loss."""
        self.next_batch("d" * calls)
        return [self.slot(self.inputs()) for _ in range(calls)]


@pytest.fixture(params=CONTRACTS)
def trainer(request, monkeypatch, tmp_path):
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    yield Trainer(monkeypatch, tmp_path, CONTRACTS[request.param])
    trainer_adapter.cache_clear()


@pytest.fixture
def newer_trainer(monkeypatch, tmp_path):
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    yield Trainer(monkeypatch, tmp_path, LOSS_V0_7)
    trainer_adapter.cache_clear()


@pytest.mark.parametrize("table", [{**SAMPLED, "dialect": "v0_7"}, {"type": "default"}])
def test_setup_binds_a_loss_to_its_own_tokens(trainer, table, capfd):
    before = trainer.slot
    rl_loss = trainer.setup(**table)
    distils = table["type"] != "default"
    # prime-rl's own distillation stays in place where the loss is none.
    assert (trainer.slot is before) is not distils
    out = (trainer.slot if distils else rl_loss)(trainer.inputs())
    assert type(out) is trainer.loss.LossOutputs
    assert out.loss.shape == () and out.loss.requires_grad
    assert all(not value.requires_grad for value in out.metrics.values())
    shapes = {name: value.shape for name, value in out.metrics.items() if value.shape}
    assert shapes == ({"distillation/kl": (4,)} if distils else {})
    assert trainer_adapter().calls == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "registered" in line)
    assert table["type"] in line and "v0." not in line  # head is no v0.7


def test_rl_tokens_of_a_distilling_loss_are_refused(trainer):
    rl_loss = trainer.setup(**SAMPLED, dialect="v0_7")
    if trainer.contract is LOSS_V0_6:  # one training_mode per run
        assert rl_loss(trainer.inputs()).loss.requires_grad
        return
    # In a bin with distillation samples, prime-rl fills the scores of an rl sample with 0.0.
    filled = trainer.inputs()
    filled.ref_logprobs = torch.zeros(6)
    with pytest.raises(ValueError, match='algo.type = "opd".*PRIME_COMPOSER='):
        rl_loss(filled)
    filled.loss_mask = torch.zeros(6, dtype=torch.bool)  # what pads the ranks' batches
    assert rl_loss(filled).loss.item() == 0


def test_loss_weights_reach_the_loss(newer_trainer):
    newer_trainer.setup(**SAMPLED)
    one, two = newer_trainer.inputs(), newer_trainer.inputs()
    two.loss_weights = torch.full((6,), 2.0)
    fn = newer_trainer.slot
    assert fn(two).loss.item() == pytest.approx(2 * fn(one).loss.item(), rel=1e-6)


OF_THE_ADAPTER = {
    "a support": ({"type": "topk_reverse_kl"}, "needs support, .*--engine prime-rl.*PRIME_COMP"),
    "ids": ({**SAMPLED, "special_tokens": {"ids": [1]}}, "needs token_ids, .*PRIME_COMPOSER=1"),
    "stops": ({**SAMPLED, "stops": {"ids": [1]}}, "needs (stops|support), .*PRIME_COMPOSER=1"),
    "a mixture": ({**SAMPLED, "adapter": True}, "adapter = true.*PRIME_COMPOSER=1 in front"),
    "who asks": ({**SAMPLED, "asked_by": "trainer"}, "asked_by = .trainer. .*PRIME_COMPOSER=1"),
    "tokenizers": ({**SAMPLED, "teacher_tokenizers": {"t": "t"}},
                   "teacher_tokenizers .*PRIME_COMPOSER=1 in front"),
    "prompts": ({**SAMPLED, "teacher_prompts": {"t": {"tokenizer": "t"}}},
                "teacher_prompts .*PRIME_COMPOSER=1 in front"),
}  # fmt: skip
"""What the five lines alone do not have: a loss table, and the key and the remedy that are said."""


@pytest.mark.parametrize("name", OF_THE_ADAPTER)
def test_plain_launcher_refuses_what_the_adapter_has(trainer, name):
    """prime-rl alone would train something else, without any error."""
    before, (table, words) = trainer.slot, OF_THE_ADAPTER[name]
    with pytest.raises(ValueError, match=rf"^\[trainer.loss.kwargs\] .*{words}"):
        trainer.setup(**table)
    assert trainer.slot is before
    trainer.setup(**SAMPLED, adapter=False)


def test_plain_launcher_refuses_rewards_and_teacher_by_kind(trainer):
    """Where the kinds are separate, only the adapter's orchestrator gives one token both."""
    if trainer.contract is LOSS_V0_6:
        trainer.setup(**SAMPLED, dialect="v0_6")
        return
    with pytest.raises(ValueError, match='needs advantages.*PRIME_COMPOSER=1.*dialect = "v0_7"'):
        trainer.setup(**SAMPLED, dialect="v0_6")


BOTH = {**SAMPLED, "dialect": "v0_7", "rl_mix": {"form": "add", "kd": 0.5}}


def test_advantage_of_zero_sent_as_a_mark_is_zero_in_the_loss(newer_trainer):
    newer_trainer.hook({"loss": BOTH})
    rl_loss = newer_trainer.setup(**BOTH)
    given, objective = [], trainer_adapter().loss.objective

    class Spy:
        config, section = objective.config, objective.section

        def __call__(self, inputs):
            given.append(inputs)
            return objective(inputs)

    trainer_adapter().loss.objective = Spy()
    inputs = newer_trainer.inputs()
    inputs.advantages = torch.tensor([NO_ADVANTAGE, 0.5] * 3)
    rl_loss(inputs)
    assert given[0].advantages.tolist() == [0.0, 0.5] * 3
    assert torch.tensor(NO_ADVANTAGE, dtype=torch.bfloat16).float() == NO_ADVANTAGE != 0


def test_rewards_and_teacher_refuse_distillation_tokens(newer_trainer):
    """They show that the orchestrator has no adapter, which would have made them rl tokens."""
    newer_trainer.hook({"loss": BOTH})
    newer_trainer.setup(**BOTH)
    with pytest.raises(ValueError, match="rewards and a teacher .* runs without the adapter. Set"):
        newer_trainer.slot(newer_trainer.inputs())


def test_rewards_and_teacher_refuse_tokens_that_no_teacher_scored(newer_trainer):
    """The orchestrator marks them with NaN. Padding has NaN as well, and trains nothing."""
    newer_trainer.hook({"loss": BOTH})
    rl_loss = newer_trainer.setup(**BOTH)
    inputs = newer_trainer.inputs()
    inputs.ref_logprobs = torch.full((6,), math.nan)
    with pytest.raises(ValueError, match=r'no teacher has scored .* position 1 .*type = "opd"'):
        rl_loss(inputs)
    inputs.loss_mask = torch.zeros(6, dtype=torch.bool)
    assert rl_loss(inputs).loss.item() == 0


def test_trainer_that_asks_has_to_know_the_teachers(newer_trainer):
    """A trainer that was started by hand."""
    newer_trainer.hook({"loss": {"type": "topk_reverse_kl", "k": "full"}})
    with pytest.raises(ValueError, match=r"does not know them.*\"teachers\": \[\{\"url\""):
        newer_trainer.next_batch("d")


OTHERS = "the first 10 batches had no token for it .* on {} tokens"
PATIENCE = {  # Contract, roads, loss, sequences of a batch -> what ends the run, and when
    "five lines": ("v0.7", "setup", SAMPLED, "-", r"the first batch .*\[orchestrator.algo\]"),
    "rl tokens of v0.6": ("v0.6", "setup", {"type": "default"}, "d", "the first batch had no "),
    "beside an rl loss": ("v0.7", "hook", SAMPLED, "rr-", OTHERS.format("distillation")),
    "rewards and teacher": ("v0.7", "hook setup", BOTH, "d-", OTHERS.format("rl")),
    "rewards and teacher beside": ("v0.7", "hook", BOTH, "d-", "on rl .*trainer.loss. names"),
}  # fmt: skip


@pytest.mark.parametrize("name", PATIENCE)
def test_batches_without_tokens_for_the_loss_end_the_run(monkeypatch, tmp_path, capfd, name):
    """Before the first is trained, or the tenth where a batch may have tokens for another loss."""
    contract, roads, table, kinds, words = PATIENCE[name]
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    trainer = Trainer(monkeypatch, tmp_path, CONTRACTS[contract])
    if "hook" in roads:
        trainer.hook({"loss": table})
    if "setup" in roads:
        trainer.setup(**table)
    patience = 10 if "first 10" in words else 1
    for _ in range(patience - 1):
        trainer.next_batch(kinds)
    with pytest.raises(RuntimeError, match=words):
        trainer.next_batch(kinds)
    said = "has no token in the batch of step 3 (the run ends after 10" in capfd.readouterr().err
    assert said is (patience == 10)
    trainer_adapter.cache_clear()


def test_loss_beside_an_rl_loss_may_lack_tokens_later(newer_trainer):
    newer_trainer.hook({"loss": SAMPLED})
    for _ in range(3):
        newer_trainer.next_batch("r")
    newer_trainer.train()
    for _ in range(20):
        newer_trainer.next_batch("r")


def test_data_hook_counts_a_batch_once_on_both_roads(newer_trainer):
    """The adapter hooks the loader, and the plain launcher finds it hooked."""
    newer_trainer.hook({"loss": SAMPLED})
    newer_trainer.setup(**SAMPLED)
    newer_trainer.train()
    newer_trainer.train()
    assert trainer_adapter().steps == 2


def test_batch_with_a_sampling_mask_is_refused_untrained(newer_trainer):
    """With a support. A loss of the sampled token compares the distribution that was sampled."""
    for loss in (SAMPLED, {"type": "topk_reverse_kl", "k": 2}):
        newer_trainer.hook({"loss": loss})
        loader = newer_trainer.data.DataLoader("", 1)
        loader.micro_batches[1]["sampling_mask"] = None
        loader.get_batch()
        loader.micro_batches[1]["sampling_mask"] = torch.ones(1, 6, 3)
        trainer_adapter().called()
        if loss is SAMPLED:
            loader.get_batch()
            continue
        with pytest.raises(ValueError, match="The batch carries sampling_mask: .*Set top_p = 1"):
            loader.get_batch()


def test_kl_of_a_token_is_logged_by_environment(newer_trainer):
    """prime-rl joins metrics of one dimension end to end, so that their mean is that of tokens."""
    newer_trainer.hook({"loss": SAMPLED})
    (batch,) = batches = newer_trainer.next_batch("dd")
    batch["env_names"] = ["sums"] * 6 + ["chains"] * 6
    sequences = [newer_trainer.inputs(), newer_trainer.inputs()]
    sequences[1].loss_mask = torch.arange(6) == 5
    for _ in batches:
        trainer_adapter().micro_batch.place([one.trainer_logprobs for one in sequences])
        metrics = [newer_trainer.slot(one).metrics for one in sequences]
    for name, one, own in zip(("sums", "chains"), sequences, metrics, strict=True):
        gap = one.trainer_logprobs - getattr(one, newer_trainer.contract.ref_field)
        expected = gap[one.loss_mask].tolist()
        assert own["distillation/kl"].tolist() == pytest.approx(expected)
        assert own[f"distillation/kl/{name}"].tolist() == pytest.approx(expected)
    assert "distillation/kl/chains" not in metrics[0]


def test_mixture_stops_without_the_orchestrators_mark(newer_trainer):
    """Before the batch is trained. One marked sequence is enough: others may have one teacher."""
    newer_trainer.hook({"loss": SAMPLED, "k": 0, "teachers_mixed": True})
    loader = newer_trainer.data.DataLoader("", 1)
    with pytest.raises(RuntimeError, match="adapter = true.*the orchestrator runs without it"):
        loader.get_batch()
    loader.micro_batches[1][newer_trainer.contract.ref_field][0, 0] = MARK
    loader.get_batch()
    assert trainer_adapter().loss.seen


def test_schedule_advances_once_per_step_by_the_mean_loss(trainer):
    trainer.setup(type=scheduled_loss.NAME)
    outs = [out.loss.item() for out in trainer.train(calls=2)]
    state = trainer_adapter().loss.objective.state_dict()
    assert state == {"means": []}
    trainer.train(calls=1)
    assert trainer_adapter().loss.objective.state_dict() == {
        "means": [pytest.approx(sum(outs) / 8, rel=1e-6)]
    }


def test_two_different_losses_are_refused(trainer):
    trainer.setup(**SAMPLED)
    trainer.setup(**SAMPLED)
    with pytest.raises(ValueError, match="Two losses.*keep one"):
        trainer.setup(**SAMPLED, kl_tau=0.5)


@pytest.mark.parametrize("value", [0.3, -9999.0])
def test_wrong_log_prob_of_the_teacher_is_not_trained(trainer, value):
    """On the plain launcher too, where nobody of ours has seen the server's answer."""
    trainer.setup(**SAMPLED)
    inputs = trainer.inputs()
    ref_logprobs = getattr(inputs, trainer.contract.ref_field)
    ref_logprobs[3] = value  # masked
    trainer.slot(inputs)
    ref_logprobs[4] = value
    with pytest.raises(ValueError, match=f"log-prob of the token at position 4 .* is {value:.6g},"):
        trainer.slot(inputs)


def test_trainer_has_the_validators_tolerances():
    ours = (validity.LOGPROB_TOLERANCE, validity.MASS_TOLERANCE, validity.IMPOSSIBLE)
    assert ours == (answers.LOGPROB_TOLERANCE, answers.MASS_TOLERANCE, answers.IMPOSSIBLE)


@pytest.mark.parametrize("version", VERSIONS)
def test_train_loop_asks_for_one_batch_per_step(trees, version):
    """Our definition of a step: prime-rl's loop calls ``get_batch`` once, unconditionally."""
    source = (trees(version) / "src/prime_rl/trainer/rl/train.py").read_text()
    assert source.count(".get_batch") == source.count("dataloader.wait_for_batch()") == 1
    assert source.index("dataloader.wait_for_batch()") < source.index("dataloader.get_batch()")
    loops = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.While) and ast.unparse(node.test) == "True"
    ]
    statements = [ast.unparse(statement) for loop in loops for statement in loop.body]
    assert statements.count("micro_batches = dataloader.get_batch()") == 1
    assert statements.count("optimizer.step()") == 1


def test_probe_contract_refuses_halves_of_two_contracts():
    """The newer setup function with the older fields is no version that ever was."""
    loss = fake_prime_rl.loss_module("v0.7")
    loss.LossInputs = fake_prime_rl.LossInputsV06
    with pytest.raises(UnknownSurface, match="setup_rl_loss_fn with LossInputs.*559b4477"):
        probe_contract(loss)

"""A loss outside the package: named by module:function, and as good as a built-in one."""

import dataclasses
import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from prime_composer.losses import LOSS_FNS, LOSS_TYPES, AnyLoss, loss_type, parse_loss, register
from prime_composer.losses import setup_loss_fn as setup
from tests.builders import packed_inputs
from tests.fork_server import REPO, ForkServer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch: pytest.MonkeyPatch):
    """Forget the losses and modules of each test."""
    modules, losses, fns = set(sys.modules), dict(LOSS_TYPES), dict(LOSS_FNS)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for table, before in ((LOSS_TYPES, losses), (LOSS_FNS, fns)):
        table.clear()
        table.update(before)
    for name in sys.modules.keys() - modules:
        if not name.startswith("prime_composer"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a module, found by import."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(name: str, source: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        return path

    return module


HEAD = """
from typing import Literal
from prime_composer import LossInputs, LossOutputs
from prime_composer.losses import LossConfig
"""


def config_source(name: str, head: str = HEAD) -> str:
    return f"""{head}
class C(LossConfig):
    type: Literal[{name!r}] = {name!r}
"""


def test_the_example_is_the_huber_loss_by_hand():
    """Gaps of 0.5 and 3 at delta = 1: 0.125 and 2.5. The third token is masked."""
    inputs = packed_inputs(LOSS_TYPES["sft"](), seq=3, mask=torch.tensor([True, True, False]))
    inputs.loss_weights = None
    inputs.ref_logprobs = torch.tensor([-1.0, -4.0, torch.nan], dtype=torch.float64)
    student = torch.tensor([-0.5, -7.0, -1.0], dtype=torch.float64, requires_grad=True)
    inputs.trainer_logprobs = student
    out = setup(parse_loss({"type": "my_loss:huber"}))(inputs)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.125 + 2.5)
    assert student.grad.tolist() == pytest.approx([0.5, -1.0, 0.0])
    metrics = {name: value.item() for name, value in out.metrics.items()}
    assert metrics == pytest.approx({"my_loss:huber/gap": 3.5 / 2, "my_loss:huber/linear": 0.5})


@pytest.fixture(scope="module")
def contract(
    tmp_path_factory: pytest.TempPathFactory, torch_forks: ForkServer
) -> dict[str, dict[str, str]]:
    """Module of a loss -> case of the contract suite -> outcome, for both losses in one run.

    Every case of the example, and of its broken copy those that tell.
    """
    folder = tmp_path_factory.mktemp("losses")
    example = (EXAMPLES / "my_loss.py").read_text()
    broken = example.replace("loss=per_token.sum()", "loss=per_token.mean()")
    assert broken != example
    (folder / "broken_loss.py").write_text(broken.replace("my_loss:huber", "broken_loss:huber"))
    words = ["-m", "pytest", "-vv", "-n", "0", "-p", "no:cacheprovider", "tests/test_contract.py"]
    for loss in ("my_loss:huber", "broken_loss:huber"):
        words += ["--loss", loss]
    words += ["-k", "my_loss or sum_of_its_sequences"]
    env = os.environ | {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{folder}"}
    done = torch_forks.run(*words, cwd=REPO, env=env)
    outcomes: dict[str, dict[str, str]] = {"my_loss": {}, "broken_loss": {}}
    for line in done.stdout.splitlines():
        case = re.match(r"tests/test_contract\.py::(\w+)\[(\w+):(\S*).*\] ([A-Z]+)", line)
        if case is not None:
            name, module, rest, outcome = case.groups()
            outcomes[module][f"{name}[{rest}"] = outcome
    assert all(outcomes.values()), done.stdout[-3000:] + done.stderr[-1000:]
    return outcomes


def test_the_contract_suite_runs_on_the_example(contract):
    """Every case is a case of this loss: three examples of it, and none skipped."""
    assert len(contract["my_loss"]) >= 40
    assert set(contract["my_loss"].values()) == {"PASSED"}


def test_the_contract_suite_fails_a_loss_that_breaks_it(contract):
    """A mean in place of the sum is not the sum over a pack."""
    cases = contract["broken_loss"]
    sums = [outcome for case, outcome in cases.items() if "sum_of_its_sequences" in case]
    assert sums == ["FAILED"] * 3


def test_an_outside_loss_works_wherever_a_loss_is_parsed():
    """Its name is imported on first use, and a wrong knob is an error at its place."""
    adapter = TypeAdapter(dict[str, AnyLoss])
    assert "my_loss" not in sys.modules
    tables = adapter.validate_python({"loss": {"type": "my_loss:huber", "delta": 0.5}})
    assert tables["loss"].delta == 0.5 and tables["loss"].needs == {"ref_logprobs"}
    assert adapter.dump_python(tables)["loss"]["delta"] == 0.5
    with pytest.raises(ValidationError) as error:
        adapter.validate_python({"loss": {"type": "my_loss:huber", "delt": 0.5}})
    assert error.value.errors()[0]["loc"] == ("loss", "delt")
    assert error.value.errors()[0]["type"] == "extra_forbidden"


def test_postponed_annotations_are_read(write):
    write(
        "later",
        "from __future__ import annotations\n"
        + config_source("later:fn")
        + "def fn(inputs: LossInputs, config: C) -> LossOutputs:\n"
        + "    return LossOutputs(loss=inputs.trainer_logprobs.sum() * 0, metrics={})\n",
    )
    assert loss_type("later:fn").__name__ == "C"
    assert setup(parse_loss({"type": "later:fn"}))(packed_inputs(LOSS_TYPES["sft"]())).loss == 0


SCHEDULED = (
    config_source("moving:fn")
    + """
    start: float
    examples = ({"start": 0.5}, {"start": 2.0, "special_tokens": {"ids": [1]}})

    def make_state(self):
        return Schedule(self.start)


class Schedule:
    def __init__(self, start):
        self.factor = start

    def end_step(self, mean_loss):
        self.factor += mean_loss

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor = state["factor"]


def fn(inputs: LossInputs, config: C, state: Schedule) -> LossOutputs:
    from prime_composer.losses.shared.reductions import masked_sum

    nll = masked_sum(-inputs.trainer_logprobs, inputs.loss_mask, inputs.loss_weights)
    factor = inputs.trainer_logprobs.new_tensor(state.factor)
    return LossOutputs(loss=factor * nll, metrics={"factor": factor})
"""
)


def test_an_outside_loss_with_a_schedule_keeps_its_state(write):
    """The factor grows by the step's loss per token, and survives a checkpoint."""
    write("moving", SCHEDULED)
    config = parse_loss({"type": "moving:fn", "start": 0.5})
    inputs = packed_inputs(config, mask=torch.ones(12, dtype=torch.bool))
    inputs.loss_weights = None
    nll = -inputs.trainer_logprobs.mean().item()
    loss = setup(config)
    assert loss.stateful and loss(inputs).metrics["moving:fn/factor"] == 0.5
    loss.end_step()
    assert loss(inputs).metrics["moving:fn/factor"].item() == pytest.approx(0.5 + 0.5 * nll)
    resumed = setup(config)
    resumed.load_state_dict(json.loads(json.dumps(loss.state_dict())))
    assert resumed(inputs).loss.item() == loss(inputs).loss.item()


def test_a_metric_with_a_graph_is_logged_without_it(write):
    """A function may write ``gap.mean()`` without ``no_grad``: the wrapper cuts the graph off."""
    source = """
    def fn(inputs: LossInputs, config: C) -> LossOutputs:
        kept = inputs.trainer_logprobs[inputs.loss_mask]
        return LossOutputs(loss=-kept.sum(), metrics={"nll": -kept.mean()})
    """
    write("plain", config_source("plain:fn") + textwrap.dedent(source))
    config = parse_loss({"type": "plain:fn"})
    inputs = packed_inputs(config)
    out = setup(config)(inputs)
    assert out.loss.requires_grad and not out.metrics["plain:fn/nll"].requires_grad
    expected = -inputs.trainer_logprobs[inputs.loss_mask].mean().item()
    assert out.metrics["plain:fn/nll"].item() == expected


FAR = """
from typing import Literal
import torch
from prime_composer import LossInputs, LossOutputs
from prime_composer.divergences import outcomes
from prime_composer.losses import SupportLossConfig
from prime_composer.losses.shared.support_divergence import support_divergence


class ByRows(SupportLossConfig):
    type: Literal["far:by_rows"] = "far:by_rows"
    normalization: Literal["full", "tail"] = "tail"
    examples = ({"k": 8}, {"k": "full"})


class ByTensors(SupportLossConfig):
    type: Literal["far:by_tensors"] = "far:by_tensors"
    examples = ({"k": 8}, {"k": "full"})


def hellinger(log_p, log_q, *, normalization):
    log_p, log_q = outcomes(log_p, log_q, normalization)
    return 1 - torch.exp((log_p + log_q) / 2).sum(-1)


def by_rows(inputs: LossInputs, config: ByRows) -> LossOutputs:
    return support_divergence(inputs, config, hellinger)


def by_tensors(inputs: LossInputs, config: ByTensors) -> LossOutputs:
    support = inputs.support.masked(inputs.loss_mask)
    p, q = support.student_logprobs, support.teacher_logprobs
    value = hellinger(p, q, normalization="full" if config.k == "full" else "tail")
    value = torch.where(inputs.loss_mask, value, 0.0)
    if inputs.loss_weights is not None:
        value = value * torch.where(inputs.loss_mask, inputs.loss_weights, 1.0)
    return LossOutputs(loss=value.sum(), metrics={"distance": value.detach().sum()})
"""


@pytest.mark.parametrize("name", ["far:by_rows", "far:by_tensors"])
def test_an_outside_loss_compares_whole_vocabularies(write, name):
    """From hidden states alone, by rows or by all tensors, and with its gradient."""
    write("far", FAR)
    config = parse_loss({"type": name, "k": "full"})
    assert config.needs == {"hidden_states"} and config.support_size == 0
    inputs = dataclasses.replace(packed_inputs(config), support=None)
    student, teacher = (side.hidden for side in inputs.hidden_states.sides)
    overlap = ((student.log_softmax(-1) + teacher.detach().log_softmax(-1)) / 2).exp().sum(-1)
    expected = ((1 - overlap) * inputs.loss_weights.detach())[inputs.loss_mask].sum()
    (wanted,) = torch.autograd.grad(expected, student)
    loss = setup(config)(inputs).loss
    (found,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


FN = "def fn(inputs: LossInputs, config: C) -> LossOutputs: ...\n"
WRITE = r"Write def fn\(.*LossConfig that has type: Literal\['bad:fn'\] = 'bad:fn'"
FORM = "name a loss of your own as 'my_package.my_module:my_loss'"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "no_such_module:fn", "'no_such_module' cannot be imported .*PYTHONPATH"),
        ("x = 1 / 0", "bad:fn", r"'bad' cannot be imported \(ZeroDivisionError"),
        (None, "bad:", FORM),
        (HEAD, "bad:fn", WRITE),
        ("class fn: pass", "bad:fn", WRITE),
        ("class L:\n    def loss(self, inputs): ...\nfn = L()", "bad:fn", WRITE),
        (HEAD + "def fn(inputs: LossInputs, config: dict) -> LossOutputs: ...", "bad:fn", WRITE),
        (
            HEAD + "def fn(inputs: LossInputs, config: 'Missing') -> LossOutputs: ...",
            "bad:fn",
            f"NameError.* {WRITE}",
        ),
        (config_source("bad:other") + FN, "bad:fn", f"C of type = 'bad:other'.* {WRITE}"),
        (HEAD + "class C(LossConfig):\n    type: str = 'bad:fn'\n" + FN, "bad:fn", WRITE),
    ],
)
def test_an_error_says_what_is_wrong_and_what_to_write(write, source, name, message):
    if source is not None:
        write("bad", source)
    with pytest.raises(ValueError, match=message) as error:
        parse_loss({"type": name})
    assert not isinstance(error.value, ValidationError)
    assert name in str(error.value)
    assert name not in LOSS_TYPES
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyLoss).validate_python({"type": name})


def test_two_outside_losses_cannot_share_a_config(write):
    write("twins", config_source("twins:fn") + FN + FN.replace("def fn", "def twin"))
    loss_type("twins:fn")
    with pytest.raises(ValueError, match=r"C of type = 'twins:fn'.* Write def twin\("):
        loss_type("twins:twin")


def test_a_taken_type_cannot_be_registered():
    cls = LOSS_TYPES["sft"]
    with pytest.raises(ValueError, match="type = 'sft' is taken by prime_composer.losses.sft"):
        register(cls)(LOSS_FNS[cls])

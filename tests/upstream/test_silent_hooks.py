"""A prime-rl that goes past our hooks: no step is trained on another loss, and no run ends well."""

import json
import os
import shutil
import types

import pytest
import torch

from prime_composer.upstream.silent_hook import SilentHook
from prime_composer.upstream.trainer import hooks
from prime_composer.upstream.trainer.adapter import trainer_adapter
from tests.fork_server import REPO
from tests.stand_in import free_port
from tests.upstream import fake_prime_rl
from tests.upstream.fake_prime_rl import micro_batch

SAMPLED = {"type": "sampled_reverse_kl", "dialect": "v0_7"}
CLASS = "\nclass RefKL:\n    def loss(self, inputs): return _own(inputs)\n_own = ref_kl_loss_fn\n"
TABLE = "\n_TABLE = {'ref_kl': ref_kl_loss_fn}\n"
ELSEWHERE = {"class": (CLASS, "RefKL().loss"), "table": (TABLE, "_TABLE['ref_kl']")}
"""How a prime-rl may take its distillation loss: what its module has, and what it calls."""

FAKE_CALL, REAL_CALL = "(ref_kl_loss_fn, ref_kl_weights", "run_loss_fn(ref_kl_loss_fn,"


class Host:
    """A process of prime-rl's trainer, with or without the whole-run adapter."""

    def __init__(self, monkeypatch, folder, whole_run, edits=(), loop_edits=(), table=SAMPLED):
        self.loss = fake_prime_rl.loss_module("v0.7", *edits)
        self.data = fake_prime_rl.data_module()
        fake_prime_rl.put(monkeypatch, self.loss, self.data)
        if whole_run:
            switch = json.dumps({"loss": table}) if table is SAMPLED else "1"
            monkeypatch.setenv("PRIME_COMPOSER", switch)
            trainer_adapter.cache_clear()
            hooks.hook_loss(self.loss)
            hooks.hook_data(self.data)
        self.loop = fake_prime_rl.loop_module(*loop_edits)
        self.loader = self.data.DataLoader(folder, 1)
        self.table = table

    def train(self, *batches):
        """Train one step on each list of micro-batches."""
        left = list(batches)
        self.loader.wait_for_batch = lambda: setattr(self.loader, "micro_batches", left.pop(0))
        config = fake_prime_rl.custom(**self.table)
        return self.loop.train(config, self.loader, len(batches))


@pytest.fixture(params=[True, False], ids=["adapter", "plain"])
def host(request, monkeypatch, tmp_path):
    """Return a function that starts a host, whose sources have some edits."""
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)

    def start(**edits):
        return Host(monkeypatch, tmp_path, request.param, **edits)

    yield start
    trainer_adapter.cache_clear()


def taken_from(name):
    """Return the edits of a fake loss module that takes its distillation loss from elsewhere."""
    more, call = ELSEWHERE[name]
    return [
        (FAKE_CALL, FAKE_CALL.replace("ref_kl_loss_fn", call)),
        ("def compute_loss", f"{more}def compute_loss"),
    ]


def test_loss_by_its_name_trains_and_is_reported(host, capfd):
    one = host()
    losses = one.train([micro_batch(), micro_batch(kinds="dd-")], [micro_batch(kinds="-")])
    assert len(losses) == 3 and losses[2] == 0
    assert (
        capfd.readouterr().err.count("was called for the first time, in step 1, which has 12") == 1
    )
    trainer_adapter().judge_last_batch()


@pytest.mark.parametrize("form", ELSEWHERE)
def test_loss_taken_from_elsewhere_ends_a_run_of_one_step(host, form):
    """Where compute_loss returns: no gradient of prime-rl's own loss reaches the weights."""
    one = host(edits=taken_from(form))
    with pytest.raises(SilentHook, match="8 tokens of this rank's batch 1 .* prime-rl has not cal"):
        one.train([micro_batch(kinds="d-d")])


def test_loss_taken_from_elsewhere_ends_the_run_at_its_tokens(host):
    """Batches without a token for it end nothing; a first micro-batch without one neither."""
    one = host(edits=taken_from("table"))
    trainer_adapter().register(SAMPLED)
    trainer_adapter().loss.seen = True
    with pytest.raises(SilentHook, match="4 tokens of this rank's batch 2 "):
        one.train([micro_batch(kinds="--")], [micro_batch(kinds="-"), micro_batch(kinds="d")])


def test_loss_called_on_the_first_micro_batch_alone_ends_the_run(host):
    """A call on one does not count for the next one."""
    once = FAKE_CALL.replace("ref_kl_loss_fn", "(_own if _c else _c.append(1) or ref_kl_loss_fn)")
    before = ("def compute_loss", "_c, _own = [], ref_kl_loss_fn\ndef compute_loss")
    one = host(edits=[(FAKE_CALL, once), before])
    with pytest.raises(SilentHook, match="4 tokens of this rank's batch 1 "):
        one.train([micro_batch(), micro_batch()])


ANOTHER = ("compute_loss(*first, *more)", "another_loss(*first, *more)")
OWN = ("def train(", "def another_loss(*rows): return rows[0][0].sum().detach(), {}\ndef train(")


def test_loop_with_a_loss_of_its_own_ends_at_the_next_batch(host):
    """compute_loss is hooked, and the loop computes the loss by another function."""
    one = host(loop_edits=[ANOTHER, OWN])
    with pytest.raises(SilentHook, match="4 tokens of this rank's batch 1 "):
        one.train([micro_batch()], [micro_batch()])


AT_EXIT = """
import sys
import pytest
from tests.upstream import test_silent_hooks as here
edits, whole_run, code = {"loop_edits": [here.ANOTHER, here.OWN]}, *sys.argv[1:]
host = here.Host(pytest.MonkeyPatch(), "", whole_run == "True", **edits)
exec(code)
"""


@pytest.mark.parametrize("whole_run", [True, False])
@pytest.mark.parametrize(
    "code,status",
    [
        ("host.train([here.micro_batch()])", 1),
        ("host.train([here.micro_batch(kinds='d-')]); sys.exit(0)", 1),
        ("here.trainer_adapter().register(here.SAMPLED); here.trainer_adapter().loss.seen = True\n"
         "host.train([here.micro_batch(kinds='-')])", 0),
    ],
)  # fmt: skip
def test_last_batch_of_a_run_is_judged_at_its_end(torch_forks, tmp_path, whole_run, code, status):
    """No hook but get_batch ran, so nothing could be judged before."""
    done = torch_forks.run("-c", AT_EXIT, whole_run, code, cwd=REPO)
    assert done.returncode == status, done.stderr
    assert ("4 tokens of this rank's batch 1 are for this loss" in done.stderr) is (status == 1)


@pytest.mark.parametrize(
    "fails",
    [
        "host.loop.another_loss = lambda *rows: 1 / 0",
        "host.loop.sum = lambda rows: len(list(rows)) / 0",
        "here.trainer_adapter()._ask_teachers = lambda batches: 1 / 0",
    ],
    ids=["in its loss", "between its two loops", "before its first loop"],
)
def test_step_that_fails_is_not_judged_at_the_end(torch_forks, fails):
    """The error of the step is the run's, and its status too: nothing says that a loss is gone."""
    code = f"{fails}\nhost.train([here.micro_batch()])"
    done = torch_forks.run("-c", AT_EXIT, True, code, cwd=REPO)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert "are for this loss" not in done.stderr


def test_loop_past_the_data_loader_is_named(host):
    """The loss is called, and DataLoader.get_batch was never asked."""
    own = ("batches = loader.get_batch()", "batches = loader.micro_batches")
    one = host(loop_edits=[own])
    trainer_adapter().model = object()
    with pytest.raises(SilentHook, match="on no micro-batch that get_batch of"):
        one.train([micro_batch()])


RANK = """
import json, sys
import torch
import pytest
from tests.upstream import test_silent_hooks as here
rank, port = map(int, sys.argv[1:])
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
)
host = here.Host(pytest.MonkeyPatch(), "", True, here.taken_from("class"))
try:
    host.train([here.micro_batch(kinds="-" if rank == 0 else "d")])
    said = "trained"
except here.SilentHook as error:
    said = str(error)
print("\\n" + json.dumps(said))
torch.distributed.destroy_process_group()
"""


def test_silent_loss_is_judged_by_the_rank_with_tokens(torch_forks):
    """The other rank has padding alone: it neither waits for the first one nor complains."""
    port = free_port()
    ranks = [torch_forks.start("-c", RANK, rank, port, cwd=REPO) for rank in (0, 1)]
    said = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        said.append(json.loads(out.splitlines()[-1]))
    assert said[0] == "trained" and "4 tokens of this rank's batch 1" in said[1]


K, D, V, N = 3, 8, 20, 6


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_head_renamed_is_named_before_its_numbers_are_used(monkeypatch, tmp_path, seen, labels):
    """Also a head of ours that prime-rl calls without labels."""
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    host = Host(monkeypatch, tmp_path, True)
    state = trainer_adapter()
    state.k = K
    name = "ChunkedOutputLinear" if labels else "VanillaOutputLinear"
    head = fake_prime_rl.head_module(name=name)(D, V, bias=False)
    model = types.SimpleNamespace(lm_head=head)
    state.model = model if seen else None
    batch = micro_batch()
    log_q = torch.full((N, K), -3.0)
    batch["routed_experts"] = torch.stack(
        [torch.arange(K).int().expand(N, K), log_q.view(torch.int32)], dim=1
    )[None]
    host.loader.micro_batches = [batch]
    (_,) = batches = host.loader.get_batch()
    for tensors in batches:
        head(torch.randn(1, N, D), tensors["input_ids"] if labels else None, torch.ones(1, N))
        row = torch.full((N,), -1.5)
        state.micro_batch.place([row])
        name = type(head).__name__ if seen else "a head that could not be seen"
        with pytest.raises(SilentHook, match=f"model ran .*{name}. Use a loss of the sampled"):
            state.aligned(row)
    trainer_adapter.cache_clear()


REAL = """
import importlib.util, json, sys, types
sys.path.insert(0, sys.argv[1] + "/tests/parity")
from driver import stand_ins
stand_ins()
spec = importlib.util.spec_from_file_location(
    "prime_composer_autoload", "prime_composer/upstream/autoload.py"
)
autoload = importlib.util.module_from_spec(spec)
spec.loader.exec_module(autoload)
if sys.argv[2] == "adapter":
    autoload.install()
import torch
import prime_rl.trainer.rl.loss
from prime_rl.configs.trainer import CustomLossConfig
from tests.upstream import fake_prime_rl
from prime_composer.upstream.trainer import hooks
data = fake_prime_rl.data_module()
sys.modules[data.__name__] = data
hooks.hook_data(data)
loop = fake_prime_rl.loop_module()
config = CustomLossConfig(
    type="custom", import_path="prime_composer.upstream.loss_fn", kwargs=json.loads(sys.argv[3])
)
print("losses", loop.train(config, data.DataLoader("", 1), 1))
"""


@pytest.mark.parametrize("road", ["adapter", "plain"])
@pytest.mark.parametrize("form", ["by name", "class"])
def test_real_loss_module_edited_ends_a_run_of_one_step(trees, torch_forks, tmp_path, form, road):
    """prime-rl's own sources, in which the distillation loss is taken from elsewhere."""
    tree = trees("head")
    sources = tree / "src"
    if form != "by name":
        sources = shutil.copytree(sources, tmp_path / "src")
        file = sources / "prime_rl/trainer/rl/loss.py"
        assert file.read_text().count(REAL_CALL) == 1
        more, call = ELSEWHERE[form]
        called = REAL_CALL.replace("ref_kl_loss_fn", call)
        file.write_text(file.read_text().replace(REAL_CALL, called) + more)
    path = [sources, tree / "packages/prime-rl-configs/src", REPO]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PRIME_COMPOSER": ""}
    if road == "adapter":
        env["PRIME_COMPOSER"] = json.dumps({"loss": SAMPLED})
    done = torch_forks.run("-c", REAL, REPO, road, json.dumps(SAMPLED), cwd=REPO, env=env)
    if form == "by name":
        assert done.returncode == 0 and "losses [" in done.stdout, done.stderr
        return
    assert done.returncode == 1 and "losses" not in done.stdout
    assert "4 tokens of this rank's batch 1 are for this loss" in done.stderr

"""What prime-rl's losses and ours return: live in one prime-rl tree, recorded, or ours alone."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.fork_server import new_process
from tests.parity import cases
from tests.prime_rl_checkout import pythonpath

Run = Callable[..., subprocess.CompletedProcess[str]]
HERE = Path(__file__).parent
GOLDENS = HERE / "goldens.json"


def tree_env(tree, *more, **variables):
    """Return the environment of a process that imports prime-rl from ``tree``."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PRIME_COMPOSER", "PYTHONPATH")
    }
    return {**clean, "PYTHONPATH": pythonpath(tree, *more), "TORCHDYNAMO_DISABLE": "1", **variables}


def live(tree, version, folder, run: Run = new_process):
    """Return what the driver wrote in this tree; an error's text where the driver failed."""
    path = folder / f"{version}.pt"
    words = ("-m", "driver", cases.CONTRACTS[version], path)
    done = run(*words, cwd=folder, env=tree_env(tree, HERE))
    if done.returncode:
        return done.stderr[-4000:]
    return torch.load(path, weights_only=True)


def recorded(version):
    """Return what goldens.json contains of a version: {(kind, case name): outcome}."""
    table = json.loads(GOLDENS.read_text())["versions"][version]
    return {(kind, name): row for kind, by_case in table.items() for name, row in by_case.items()}


def check_recorded(outcome, golden, dtype, name):
    """Compare with a record, which another processor may have made.

    Its ``exp`` and its order of a sum move a number by some epsilons. A token on the other side of
    a trust region, or a computation in another dtype, is far beyond that.
    """
    rel, zero = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-13)
    grad = outcome["grad"][0].tolist()
    assert grad == pytest.approx(golden["grad"], rel=rel, abs=zero), name
    assert outcome["loss"].item() == pytest.approx(golden["loss"], rel=rel, abs=zero), name
    # A share of tokens is float32, whatever the loss is computed in.
    found = {metric: outcome["metrics"][metric].item() for metric in golden["metrics"]}
    assert found == pytest.approx(golden["metrics"], rel=1e-5, abs=1e-6), name


def ours(table, case, kind):
    """Return the outcome of our loss, called directly in this process."""
    values = cases.tensors(case.rows, case.dtype)
    config = LOSS_TYPES[table["type"]].model_validate({**table, **case.knobs(kind)})
    outputs = setup_loss_fn(config)(
        LossInputs(
            trainer_logprobs=values["trainer"],
            inference_logprobs=values["inference"],
            ref_logprobs=values["ref"],
            advantages=values["advantages"],
            loss_mask=values["mask"],
            loss_weights=values["weights"],
        )
    )
    outputs.loss.backward()
    return {
        "loss": outputs.loss.detach(),
        "grad": [values["trainer"].grad],
        "metrics": cases.plain_metrics(outputs.metrics),
    }

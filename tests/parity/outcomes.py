"""What prime-rl's losses and ours return: live in one prime-rl tree, recorded, or ours alone."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.fork_server import new_process
from tests.parity import cases
from tests.parity.tolerance import SHARES
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
    versions = json.loads(GOLDENS.read_text())["versions"]
    table = versions[version]
    by_name = cases.cases(cases.CONTRACTS[version])
    outcomes = {}
    for kind, by_case in table.items():
        for name, row in by_case.items():
            dtype = by_name[name].dtype
            outcomes[kind, name] = {
                "loss": torch.tensor(row["loss"], dtype=dtype),
                "grad": [torch.tensor(row["grad"], dtype=dtype)],
                "metrics": {
                    # A share of tokens is float32, whatever the loss is computed in.
                    metric: torch.tensor(value, dtype=torch.float32 if metric in SHARES else dtype)
                    for metric, value in row["metrics"].items()
                },
            }
    return outcomes


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

"""Run prime-rl's losses, and ours through its own setup and compute_loss, inside one tree.

PYTHONPATH=<the tree's sources and this folder> python -m driver CONTRACT OUTPUT.pt
"""

import sys
import types

import cases
import torch


def stand_ins():
    """Replace two optional imports of prime-rl's config classes where they are not installed.

    v0.6 imports ``renderers`` for two type names. Logging to W&B is not needed here.
    """
    import importlib.util

    from pydantic import BaseModel

    if importlib.util.find_spec("renderers") is None:
        module = types.ModuleType("renderers")
        module.RendererConfig = module.AutoRendererConfig = type(
            "AutoRendererConfig", (BaseModel,), {}
        )
        sys.modules["renderers"] = module
    if importlib.util.find_spec("wandb") is None:
        sys.modules["wandb"] = types.ModuleType("wandb")


def outcome(loss, metrics, leaves):
    loss.backward()
    return {
        "loss": loss.detach(),
        "grad": [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves],
        "metrics": {name: value.detach() for name, value in cases.plain_metrics(metrics).items()},
    }


class Tree:
    """prime-rl's loss module of one tree, with its distillation loss as upstream wrote it."""

    def __init__(self, contract):
        import prime_rl.trainer.rl.loss as loss
        from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig, IPOLossConfig

        self.contract, self.loss, self.custom = contract, loss, CustomLossConfig
        self.configs = {"default": DefaultLossConfig, "ipo": IPOLossConfig}
        self.slot = "opd_loss_fn" if contract == "v0.6" else "ref_kl_loss_fn"
        self.upstream_slot = getattr(loss, self.slot)

    def inputs(self, values):
        reference = "teacher_logprobs" if self.contract == "v0.6" else "ref_logprobs"
        fields = {
            "trainer_logprobs": values["trainer"],
            "inference_logprobs": values["inference"],
            "advantages": values["advantages"],
            "loss_mask": values["mask"],
            reference: values["ref"],
        }
        if self.contract != "v0.6":
            fields["loss_weights"] = values["weights"]
        return self.loss.LossInputs(**fields)

    def setup(self, config):
        """Call prime-rl's own setup. Return its RL loss and what it gives to compute_loss."""
        if self.contract == "v0.6":
            losses = self.loss.setup_loss_fns(config)
            return losses["rl"], losses
        rl = self.loss.setup_rl_loss_fn(config)
        return rl, rl

    def theirs(self, kind, knobs):
        """Return prime-rl's own loss of this name, with these settings."""
        name = f"{kind}_loss_fn"
        function = self.upstream_slot if name == self.slot else getattr(self.loss, name)
        if kind not in self.configs:
            return function
        config = self.configs[kind](**knobs)
        return lambda inputs: function(inputs, config)

    def restore(self):
        """Take our loss out of the tree."""
        from prime_composer.upstream.trainer.adapter import trainer_adapter

        trainer_adapter.cache_clear()
        setattr(self.loss, self.slot, self.upstream_slot)

    def ours(self, table):
        """Register our loss as a user does. Return what ``setup`` returns then."""
        self.restore()
        return self.setup(self.custom(import_path="prime_composer.upstream.loss_fn", kwargs=table))

    def our_function(self, table):
        """Return our loss as prime-rl holds it: in the distillation slot, or as the RL loss."""
        rl, _ = self.ours(table)
        distills = table["type"] == "sampled_reverse_kl"
        slot = getattr(self.loss, self.slot)
        assert (slot is not self.upstream_slot) is distills
        return slot if distills else rl

    def compute(self, kind, losses, pack):
        """Run prime-rl's compute_loss over a pack in which every token is a distillation token.

        "rl": every token is an RL token. "mixed": every other sequence is one of an RL
        environment, whose teacher log-probs prime-rl fills with 0.0.
        """
        leaves = [values["trainer"] for values in pack]
        common = {
            "trainer_logprobs": leaves,
            "inference_logprobs": [values["inference"] for values in pack],
            "advantages": [values["advantages"] for values in pack],
            "loss_mask": [values["mask"] for values in pack],
        }
        refs = [values["ref"] for values in pack]
        if self.contract == "v0.6":
            loss, metrics = self.loss.compute_loss(
                **common, teacher_logprobs=refs, loss_fns=losses, loss_scale=61, training_mode=kind
            )
            return outcome(loss, metrics, leaves)
        streams = {
            "ref_kl": [values["mask"].float() for values in pack],
            "rl": [torch.zeros_like(leaf) for leaf in leaves],
        }
        if kind == "rl":
            streams = {"ref_kl": None, "rl": None}
        if kind == "mixed":
            for i in range(1, len(pack), 2):
                refs[i] = torch.zeros_like(refs[i])
                streams["ref_kl"][i] = pack[i]["mask"] * 0.0
                streams["rl"][i] = pack[i]["mask"] * 1.0
        loss, metrics = self.loss.compute_loss(
            **common, ref_logprobs=refs, rl_weights=streams["rl"], ce_weights=None,
            ref_kl_weights=streams["ref_kl"], rl_loss_fn=losses, rl_scale=61, ce_scale=1,
            ref_kl_scale=61,
        )  # fmt: skip
        return outcome(loss, metrics, leaves)


def run(function, tree, case):
    values = cases.tensors(case.rows, case.dtype)
    outputs = function(tree.inputs(values))
    assert type(outputs) is tree.loss.LossOutputs, type(outputs)
    return outcome(outputs.loss, outputs.metrics, [values["trainer"]])


def functions(tree):
    """Return {(kind, case): both sides}, each loss called on one sequence."""
    results = {}
    for kind, table in cases.KINDS[tree.contract].items():
        for name, case in cases.cases(tree.contract).items():
            knobs = case.knobs(kind)
            tree.restore()
            theirs = run(tree.theirs(kind, knobs), tree, case)
            ours = run(tree.our_function({**table, **knobs}), tree, case)
            results[kind, name] = {"theirs": theirs, "ours": ours}
    return results


def packs(tree):
    """Return {kind: both sides}, each loss called by prime-rl's compute_loss on a pack."""
    results = {}
    distilling = "opd" if tree.contract == "v0.6" else "ref_kl"
    for kind, mode in ((distilling, distilling), ("default", "rl"), ("ipo", "rl")):
        tree.restore()
        _, losses = tree.setup(tree.configs.get(kind, tree.configs["default"])())
        theirs = tree.compute(mode, losses, [cases.tensors(rows) for rows in cases.packed()])
        _, losses = tree.ours(cases.KINDS[tree.contract][kind])
        ours = tree.compute(mode, losses, [cases.tensors(rows) for rows in cases.packed()])
        results[kind] = {"theirs": theirs, "ours": ours}
    return results


def mixed(tree):
    """Return both sides of a pack with RL sequences, and how a custom RL loss is refused.

    "ours": our loss is named in the environment, ``[trainer.loss]`` stays prime-rl's RL loss.
    """
    from prime_composer.upstream.trainer.adapter import trainer_adapter

    def pack():
        return [cases.tensors(rows) for rows in cases.mixed()]

    table = cases.KINDS[tree.contract]["ref_kl"]
    tree.restore()
    _, default = tree.setup(tree.configs["default"]())
    row = {"theirs": tree.compute("mixed", default, pack())}
    trainer_adapter().register(table)
    row["ours"] = tree.compute("mixed", default, pack())
    _, losses = tree.ours(table)
    try:
        tree.compute("mixed", losses, pack())
    except ValueError as error:
        row["refused"] = str(error)
    return row


def main(contract, path):
    stand_ins()
    tree = Tree(contract)
    results = {"functions": functions(tree), "compute_loss": packs(tree)}
    if contract != "v0.6":
        results["compute_loss"]["mixed"] = mixed(tree)
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""Runs inside one prime-rl tree (PYTHONPATH): its own losses, and ours through its own setup and compute_loss.

usage: driver.py ERA OUTPUT.pt
"""

import sys
import types

import cases
import torch


def stand_ins():
    """v0.6.0's config classes import ``renderers`` for two type names; logging to wandb is not needed here."""
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
        "metrics": {name: value.detach() for name, value in metrics.items()},
    }


class Tree:
    def __init__(self, era):
        import prime_rl.trainer.rl.loss as loss
        from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig, IPOLossConfig

        self.era, self.loss, self.custom = era, loss, CustomLossConfig
        self.configs = {"default": DefaultLossConfig(), "ipo": IPOLossConfig()}
        self.slot = "opd_loss_fn" if era == "v0.6" else "ref_kl_loss_fn"
        self.upstream_slot = getattr(loss, self.slot)

    def inputs(self, t, ref=True):
        fields = {
            "trainer_logprobs": t["trainer"],
            "inference_logprobs": t["inference"],
            "advantages": t["advantages"],
            "loss_mask": t["mask"],
            ("teacher_logprobs" if self.era == "v0.6" else "ref_logprobs"): t["ref"]
            if ref
            else None,
        }
        if self.era == "v0.7":
            fields["loss_weights"] = t["weights"]
        return self.loss.LossInputs(**fields)

    def setup(self, config):
        """prime-rl's own setup: its rl loss, and what distillation tokens go to after it."""
        if self.era == "v0.6":
            fns = self.loss.setup_loss_fns(config)
            return fns["rl"], fns["opd"], fns
        rl = self.loss.setup_rl_loss_fn(config)
        return rl, getattr(self.loss, self.slot), rl

    def theirs(self, kind):
        name = f"{kind}_loss_fn"
        fn = self.upstream_slot if name == self.slot else getattr(self.loss, name)
        return (lambda inputs: fn(inputs, self.configs[kind])) if kind in self.configs else fn

    def ours(self, table):
        from prime_composer.upstream import registration

        registration.unregister()
        setattr(self.loss, self.slot, self.upstream_slot)
        return self.setup(self.custom(import_path="prime_composer.upstream.loss_fn", kwargs=table))

    def compute(self, kind, fns, bin_):
        """prime-rl's compute_loss over a packed bin, every token a distillation token; "mixed": every other sequence is one of
        an rl environment, whose teacher's log-probs prime-rl has filled with 0.0."""
        leaves = [t["trainer"] for t in bin_]
        common = {
            "trainer_logprobs": leaves,
            "inference_logprobs": [t["inference"] for t in bin_],
            "advantages": [t["advantages"] for t in bin_],
            "loss_mask": [t["mask"] for t in bin_],
        }
        refs = [t["ref"] for t in bin_]
        if self.era == "v0.6":
            loss, metrics = self.loss.compute_loss(
                **common, teacher_logprobs=refs, loss_fns=fns, loss_scale=61, training_mode=kind
            )
        else:
            streams = {
                "ref_kl": [t["mask"].float() for t in bin_],
                "rl": [torch.zeros_like(leaf) for leaf in leaves],
            }
            if kind == "rl":
                streams = {"ref_kl": None, "rl": None}
            if kind == "mixed":
                for i, t in enumerate(bin_):
                    if i % 2:
                        refs[i], streams["ref_kl"][i], streams["rl"][i] = (
                            torch.zeros_like(t["ref"]),
                            t["mask"] * 0.0,
                            t["mask"] * 1.0,
                        )
            loss, metrics = self.loss.compute_loss(
                **common, ref_logprobs=refs, rl_weights=streams["rl"], ce_weights=None,
                ref_kl_weights=streams["ref_kl"], rl_loss_fn=fns, rl_scale=61, ce_scale=1, ref_kl_scale=61,
            )  # fmt: skip
        return outcome(loss, metrics, leaves)


def main(era, path):
    stand_ins()
    from prime_composer.losses import LOSS_TYPES

    tree = Tree(era)
    results = {"functions": {}, "compute_loss": {}, "missing": []}
    for kind, table in cases.KINDS[era].items():
        known = table["type"] in LOSS_TYPES
        if not known:
            results["missing"].append(table["type"])
        for name, rows in cases.cases(era).items():
            t = cases.tensors(rows)
            out = tree.theirs(kind)(tree.inputs(t))
            row = {"theirs": outcome(out.loss, out.metrics, [t["trainer"]])}
            if known:
                rl, slot, _ = tree.ours(table)
                distils = table["type"] == "sampled_reverse_kl"
                assert (slot is not tree.upstream_slot) is distils
                t = cases.tensors(rows)
                out = (slot if distils else rl)(tree.inputs(t))
                assert type(out) is tree.loss.LossOutputs, type(out)
                row["ours"] = outcome(out.loss, out.metrics, [t["trainer"]])
            results["functions"][kind, name] = row
    distilling = "opd" if era == "v0.6" else "ref_kl"
    for kind, mode in ((distilling, distilling), ("default", "rl"), ("ipo", "rl")):
        table = cases.KINDS[era][kind]
        tree.ours({"type": "sampled_reverse_kl"})
        setattr(tree.loss, tree.slot, tree.upstream_slot)
        *_, fns = tree.setup(tree.configs.get(kind, tree.configs["default"]))
        row = {"theirs": tree.compute(mode, fns, [cases.tensors(rows) for rows in cases.packed()])}
        if table["type"] in LOSS_TYPES:
            *_, fns = tree.ours(table)
            row["ours"] = tree.compute(mode, fns, [cases.tensors(rows) for rows in cases.packed()])
        results["compute_loss"][kind] = row
    if era == "v0.7":  # our loss is named in the environment, [trainer.loss] stays the rl loss
        from prime_composer.upstream import registration

        registration.unregister()
        setattr(tree.loss, tree.slot, tree.upstream_slot)
        default = tree.setup(tree.configs["default"])[-1]
        row = {
            "theirs": tree.compute(
                "mixed", default, [cases.tensors(rows) for rows in cases.mixed()]
            )
        }
        registration.register(cases.KINDS[era]["ref_kl"])
        row["ours"] = tree.compute(
            "mixed", default, [cases.tensors(rows) for rows in cases.mixed()]
        )
        *_, fns = tree.ours(cases.KINDS[era]["ref_kl"])
        try:
            tree.compute("mixed", fns, [cases.tensors(rows) for rows in cases.mixed()])
        except ValueError as error:
            row["refused"] = str(error)
        results["compute_loss"]["mixed"] = row
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

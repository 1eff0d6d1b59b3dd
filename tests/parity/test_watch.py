"""Every upstream name and signature that this package touches, read from the source of each version.

Fails with the list of what changed: the hooks of prime_composer/upstream are then to be looked at. Read with ``ast``, so
that nothing of prime-rl has to be importable.
"""

import ast
from pathlib import Path

import pytest

from prime_composer.upstream.versions import LOSS_V0_6, LOSS_V0_7
from tests.prime_rl_checkout import VERSIONS

SRC = "src/prime_rl/"
CONFIGS = "packages/prime-rl-configs/src/prime_rl/"
ALL = tuple(VERSIONS)
NEWER = ALL[1:]
HEAD = "self hidden_states labels temperature"
TOUCHED = [
    (("v0.6.0",), SRC + "trainer/rl/loss.py", "setup_loss_fns", "loss_config"),
    (("v0.6.0",), SRC + "trainer/rl/loss.py", "opd_loss_fn", "inputs"),
    (("v0.6.0",), SRC + "trainer/rl/loss.py", "compute_loss", " ".join(LOSS_V0_6.compute_loss)),
    (("v0.6.0",), SRC + "trainer/rl/loss.py", "LossInputs", " ".join(LOSS_V0_6.inputs)),
    (NEWER, SRC + "trainer/rl/loss.py", "setup_rl_loss_fn", "loss_config"),
    (NEWER, SRC + "trainer/rl/loss.py", "ref_kl_loss_fn", "inputs"),
    (NEWER, SRC + "trainer/rl/loss.py", "compute_loss", " ".join(LOSS_V0_7.compute_loss)),
    (NEWER, SRC + "trainer/rl/loss.py", "LossInputs", " ".join(LOSS_V0_7.inputs)),
    (ALL, SRC + "trainer/rl/loss.py", "LossOutputs", "loss metrics"),
    (ALL, SRC + "trainer/rl/data.py", "DataLoader.get_batch", "self"),
    (
        ("v0.6.0",),
        SRC + "trainer/rl/data.py",
        "DataLoader.__init__",
        "self output_dir start_step dp_world_size seq_len pad_to_multiple_of tokenizer bin_cost config",
    ),
    (
        ("v0.7.0", "v0.8.0"),
        SRC + "trainer/rl/data.py",
        "DataLoader.__init__",
        "self output_dir start_step dp_world_size seq_len pad_to_multiple_of bin_cost config",
    ),
    (
        ("newest",),
        SRC + "trainer/rl/data.py",
        "DataLoader.__init__",
        "self output_dir start_step dp_world_size config",
    ),
    (("newest",), SRC + "trainer/optim/offload.py", "FullCPUOffloadOptimizer.step", "self closure"),
    (ALL, SRC + "trainer/models/layers/lm_head.py", "FusedOutputLinear.forward", HEAD),
    (ALL, SRC + "trainer/models/layers/lm_head.py", "VanillaOutputLinear.forward", HEAD),
    (ALL, SRC + "trainer/models/layers/lm_head_gemma.py", "GemmaFusedOutputLinear.forward", HEAD),
    (ALL, SRC + "trainer/models/layers/lm_head_gemma.py", "GemmaVanillaOutputLinear.forward", HEAD),
    (ALL, SRC + "utils/utils.py", "import_object", "dotted_path"),
    (
        ("v0.6.0", "v0.7.0"),
        SRC + "utils/cp.py",
        "setup_cp_params",
        "input_ids position_ids cp_rank cp_world_size cp_group cp_style",
    ),
    (
        ("v0.8.0", "newest"),
        SRC + "utils/cp.py",
        "setup_cp_params",
        "input_ids position_ids cp_rank cp_world_size cp_group seq_lens cp_style",
    ),
    (
        ("v0.6.0",),
        SRC + "orchestrator/utils.py",
        "compute_teacher_logprobs",
        "clients model_name samples",
    ),
    (NEWER, SRC + "utils/client.py", "prefill_logprobs", "openai model token_ids"),
    (
        ("v0.7.0", "v0.8.0"),
        SRC + "orchestrator/algo/opd.py",
        "OPDAlgorithm.score_rollout",
        "self rollout",
    ),
    (
        ("v0.7.0", "v0.8.0"),
        SRC + "orchestrator/algo/opsd.py",
        "OPSDAlgorithm.score_rollout",
        "self rollout",
    ),
    (("newest",), SRC + "orchestrator/algo/opd.py", "OPDAlgorithm.score_episode", "self episode"),
    (("newest",), SRC + "orchestrator/algo/opsd.py", "OPSDAlgorithm.score_episode", "self episode"),
    (
        ("newest",),
        SRC + "orchestrator/algo/routing.py",
        "assign_reference_logprobs",
        "branch values",
    ),
    (
        NEWER,
        SRC + "orchestrator/trajectories.py",
        "trace_to_samples",
        "trace env_name mm_token_type_ids_mapping",
    ),
    (
        ("v0.6.0", "v0.7.0", "v0.8.0"),
        SRC + "transport/types.py",
        "RoutedExperts",
        "data shape dtype",
    ),
    (("newest",), SRC + "transports/rollouts/types.py", "RoutedExperts", "data shape dtype"),
    (ALL, CONFIGS + "configs/trainer.py", "CustomLossConfig", "type import_path kwargs"),
]
HAS = [
    (
        ("v0.6.0",),
        SRC + "transport/types.py",
        "TrainingSample",
        "prompt_ids completion_ids env_name teacher_logprobs routed_experts",
    ),
    (
        ("v0.7.0", "v0.8.0"),
        SRC + "transport/types.py",
        "TrainingSample",
        "token_ids ref_logprobs routed_experts",
    ),
    (
        ("newest",),
        SRC + "transports/rollouts/types.py",
        "TrainingSample",
        "token_ids ref_logprobs routed_experts",
    ),
    (
        ALL,
        SRC + "trainer/rl/data.py",
        "TensorMicroBatch",
        "input_ids loss_mask temperatures routed_experts",
    ),
    (NEWER, SRC + "trainer/rl/data.py", "TensorMicroBatch", "rl_weights ref_kl_weights"),
    (ALL, CONFIGS + "configs/shared.py", "ClientConfig", "headers"),
]
"""Fields that hooks read, among others."""
IMPORTED = [
    (ALL, CONFIGS + "utils/config.py", "cli"),
    (("v0.6.0",), SRC + "orchestrator/utils.py", "setup_openai_client"),
    (("v0.6.0",), SRC + "orchestrator/orchestrator.py", "compute_teacher_logprobs"),
    (("newest",), SRC + "orchestrator/algo/opd.py", "assign_reference_logprobs"),
    (("newest",), SRC + "orchestrator/algo/opsd.py", "assign_reference_logprobs"),
    (NEWER, SRC + "orchestrator/train_sink.py", "trace_to_samples"),
    (ALL, SRC + "trainer/rl/train.py", "compute_loss"),
    (ALL, SRC + "trainer/rl/train.py", "setup_cp_params"),
    (ALL, SRC + "trainer/rl/train.py", "DataLoader"),
]


def signature(source, name):
    """Parameters of a function or method, fields of a class, "missing" where it is gone."""
    body = ast.parse(source).body
    for part in name.split("."):
        found = [
            n
            for n in body
            if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and n.name == part
        ]
        if not found:
            return "missing"
        node, body = found[0], found[0].body
    if isinstance(node, ast.ClassDef):
        return " ".join(n.target.id for n in body if isinstance(n, ast.AnnAssign))
    args = node.args
    return " ".join(a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs])


def imported(source):
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("version", ALL)
def test_what_the_hooks_touch_is_unchanged(trees, version):
    tree: Path = trees(version)
    changed = []
    for versions, file, name, wanted in TOUCHED:
        if version in versions:
            path = tree / file
            there = signature(path.read_text(), name) if path.exists() else "file is gone"
            if there != wanted:
                changed.append(f"{file} {name}: ({wanted}) -> ({there})")
    for versions, file, name, wanted in HAS:
        if version in versions:
            there = signature((tree / file).read_text(), name) if (tree / file).exists() else ""
            gone = set(wanted.split()) - set(there.split())
            if gone:
                changed.append(f"{file} {name} lost {', '.join(sorted(gone))}")
    for versions, file, name in IMPORTED:
        if version in versions:
            path = tree / file
            if not path.exists() or name not in imported(path.read_text()):
                changed.append(f"{file} no longer imports {name} by name")
    assert not changed, "\n".join(changed)

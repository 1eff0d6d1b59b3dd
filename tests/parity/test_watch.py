"""Check every upstream name and signature that this package touches, in each version's source.

A failure lists what changed and therefore which hooks of prime_composer/upstream to look at. The
sources are read with ``ast``, so nothing of prime-rl has to be importable.
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
    (("v0.6",), SRC + "trainer/rl/loss.py", "setup_loss_fns", "loss_config"),
    (("v0.6",), SRC + "trainer/rl/loss.py", "opd_loss_fn", "inputs"),
    (("v0.6",), SRC + "trainer/rl/loss.py", "compute_loss", " ".join(LOSS_V0_6.compute_loss)),
    (("v0.6",), SRC + "trainer/rl/loss.py", "LossInputs", " ".join(LOSS_V0_6.inputs)),
    (NEWER, SRC + "trainer/rl/loss.py", "setup_rl_loss_fn", "loss_config"),
    (NEWER, SRC + "trainer/rl/loss.py", "ref_kl_loss_fn", "inputs"),
    (NEWER, SRC + "trainer/rl/loss.py", "compute_loss", " ".join(LOSS_V0_7.compute_loss)),
    (NEWER, SRC + "trainer/rl/loss.py", "LossInputs", " ".join(LOSS_V0_7.inputs)),
    (ALL, SRC + "trainer/rl/loss.py", "LossOutputs", "loss metrics"),
    (ALL, SRC + "trainer/rl/data.py", "DataLoader.get_batch", "self"),
    (ALL, SRC + "trainer/rl/data.py", "DataLoader.wait_for_batch", "self"),
    (
        ("v0.6",),
        SRC + "trainer/rl/data.py",
        "DataLoader.__init__",
        "self output_dir start_step dp_world_size seq_len pad_to_multiple_of tokenizer bin_cost "
        "config",
    ),
    (
        ("v0.7", "v0.8"),
        SRC + "trainer/rl/data.py",
        "DataLoader.__init__",
        "self output_dir start_step dp_world_size seq_len pad_to_multiple_of bin_cost config",
    ),
    (
        ("head",),
        SRC + "trainer/rl/data.py",
        "DataLoader.__init__",
        "self output_dir start_step dp_world_size config",
    ),
    (ALL, SRC + "trainer/models/layers/lm_head.py", "FusedOutputLinear.forward", HEAD),
    (ALL, SRC + "trainer/models/layers/lm_head.py", "VanillaOutputLinear.forward", HEAD),
    (ALL, SRC + "trainer/models/layers/lm_head_gemma.py", "GemmaFusedOutputLinear.forward", HEAD),
    (ALL, SRC + "trainer/models/layers/lm_head_gemma.py", "GemmaVanillaOutputLinear.forward", HEAD),
    (
        ("v0.6", "v0.7"),
        SRC + "trainer/model.py",
        "forward",
        "model input_ids position_ids labels temperature routed_experts mm_kwargs "
        "mm_token_type_ids",
    ),
    (
        ("v0.8", "head"),
        SRC + "trainer/model.py",
        "forward",
        "model input_ids position_ids seq_lens labels temperature routed_experts mm_kwargs "
        "mm_token_type_ids seq_lens_are_pre_shard",
    ),
    (ALL, CONFIGS + "configs/orchestrator.py", "EnvConfig.resolved_name", "self"),
    (ALL, SRC + "utils/utils.py", "import_object", "dotted_path"),
    (
        ("v0.6", "v0.7"),
        SRC + "utils/cp.py",
        "setup_cp_params",
        "input_ids position_ids cp_rank cp_world_size cp_group cp_style",
    ),
    (
        ("v0.8", "head"),
        SRC + "utils/cp.py",
        "setup_cp_params",
        "input_ids position_ids cp_rank cp_world_size cp_group seq_lens cp_style",
    ),
    (
        ("v0.6",),
        SRC + "orchestrator/utils.py",
        "compute_teacher_logprobs",
        "clients model_name samples",
    ),
    (NEWER, SRC + "utils/client.py", "prefill_logprobs", "openai model token_ids"),
    (
        ("v0.7", "v0.8"),
        SRC + "orchestrator/algo/opd.py",
        "OPDAlgorithm.score_rollout",
        "self rollout",
    ),
    (
        ("v0.7", "v0.8"),
        SRC + "orchestrator/algo/opsd.py",
        "OPSDAlgorithm.score_rollout",
        "self rollout",
    ),
    (("head",), SRC + "orchestrator/algo/opd.py", "OPDAlgorithm.score_episode", "self episode"),
    (("head",), SRC + "orchestrator/algo/opsd.py", "OPSDAlgorithm.score_episode", "self episode"),
    (
        ("head",),
        SRC + "orchestrator/algo/routing.py",
        "assign_reference_logprobs",
        "branch values",
    ),
    *(
        (versions, SRC + f"orchestrator/algo/{file}.py", f"{cls}.score_group", parameters)
        for versions, parameters in ((("v0.7", "v0.8"), "self group"), (("head",), "self episodes"))
        for file, cls in (("base", "Algorithm"), ("grpo", "GRPOAlgorithm"))
    ),
    (NEWER, SRC + "orchestrator/algo/grpo.py", "GRPOAlgorithm.__init__", "self config policy_pool"),
    (
        NEWER,
        SRC + "orchestrator/algo/routing.py",
        "stamp_loss_routing",
        "sample action_loss_type",
    ),
    (
        NEWER,
        SRC + "orchestrator/trajectories.py",
        "trace_to_samples",
        "trace env_name mm_token_type_ids_mapping",
    ),
    (
        ("v0.6", "v0.7", "v0.8"),
        SRC + "transport/types.py",
        "RoutedExperts",
        "data shape dtype",
    ),
    (("head",), SRC + "transports/rollouts/types.py", "RoutedExperts", "data shape dtype"),
    (ALL, CONFIGS + "configs/trainer.py", "CustomLossConfig", "type import_path kwargs"),
]
HAS = [
    (
        ("v0.6",),
        SRC + "transport/types.py",
        "TrainingSample",
        "prompt_ids completion_ids env_name teacher_logprobs routed_experts",
    ),
    (
        ("v0.7", "v0.8"),
        SRC + "transport/types.py",
        "TrainingSample",
        "token_ids ref_logprobs routed_experts rl_weights",
    ),
    (
        ("head",),
        SRC + "transports/rollouts/types.py",
        "TrainingSample",
        "token_ids ref_logprobs routed_experts rl_weights",
    ),
    (
        ALL,
        SRC + "trainer/rl/data.py",
        "TensorMicroBatch",
        "input_ids loss_mask temperatures routed_experts env_names sequence_lengths",
    ),
    (NEWER, SRC + "trainer/rl/data.py", "TensorMicroBatch", "rl_weights ref_kl_weights"),
    (
        ALL,
        CONFIGS + "configs/shared.py",
        "ClientConfig",
        "headers headers_from_env base_url api_key_var",
    ),
    (NEWER, CONFIGS + "configs/algorithm.py", "FrozenModelConfig", "name"),
    (NEWER, CONFIGS + "configs/algorithm.py", "OPDAlgoConfig", "type teacher"),
    (("v0.6",), CONFIGS + "configs/orchestrator.py", "RolloutModelConfig", "model client"),
]
"""Fields that hooks read, among others."""
IMPORTED = [
    (ALL, CONFIGS + "utils/config.py", "cli"),
    (("v0.6",), SRC + "orchestrator/utils.py", "setup_openai_client"),
    (("v0.6",), SRC + "orchestrator/orchestrator.py", "compute_teacher_logprobs"),
    (("head",), SRC + "orchestrator/algo/opd.py", "assign_reference_logprobs"),
    (("head",), SRC + "orchestrator/algo/opsd.py", "assign_reference_logprobs"),
    (NEWER, SRC + "orchestrator/train_sink.py", "trace_to_samples"),
    (("v0.7", "v0.8"), SRC + "orchestrator/algo/base.py", "stamp_loss_routing"),
    (("head",), SRC + "orchestrator/train_sink.py", "stamp_loss_routing"),
    (NEWER, SRC + "orchestrator/algo/grpo.py", "GRPOAlgoConfig"),
    (ALL, SRC + "trainer/rl/train.py", "compute_loss"),
    (ALL, SRC + "trainer/rl/train.py", "setup_cp_params"),
    (ALL, SRC + "trainer/rl/train.py", "DataLoader"),
]


def signature(source, name):
    """Return the parameters of a function or the fields of a class; "missing" where it is gone."""
    body = ast.parse(source).body
    for part in name.split("."):
        definitions = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == part
        ]
        if not definitions:
            return "missing"
        node, body = definitions[0], definitions[0].body
    if isinstance(node, ast.ClassDef):
        return " ".join(field.target.id for field in body if isinstance(field, ast.AnnAssign))
    args = node.args
    return " ".join(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs])


def imported(source):
    """Return the names that a source imports with ``from ... import``."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("version", ALL)
def test_names_that_the_hooks_touch_are_unchanged(trees, version):
    tree: Path = trees(version)
    changed = []
    for versions, file, name, expected in TOUCHED:
        if version in versions:
            path = tree / file
            actual = signature(path.read_text(), name) if path.exists() else "file is gone"
            if actual != expected:
                changed.append(f"{file} {name}: ({expected}) -> ({actual})")
    for versions, file, name, expected in HAS:
        if version in versions:
            actual = signature((tree / file).read_text(), name) if (tree / file).exists() else ""
            lost = set(expected.split()) - set(actual.split())
            if lost:
                changed.append(f"{file} {name} lost {', '.join(sorted(lost))}")
    for versions, file, name in IMPORTED:
        if version in versions:
            path = tree / file
            if not path.exists() or name not in imported(path.read_text()):
                changed.append(f"{file} no longer imports {name} by name")
    assert not changed, "\n".join(changed)

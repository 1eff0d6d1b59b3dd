"""What does not go together inside prime-rl: rules that yield a sentence for each breach.

A rule is told once, by the first process that can know it. prime-rl's launcher applies all of them
to its own config before it starts a process, and the export to the table that it writes, which has
the same keys. A process that was started by hand has no config, and applies the others.
``AdapterSettings.derived`` is their one caller.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prime_composer.extras import requirement
from prime_composer.losses import LossConfig
from prime_composer.losses.needs import missing_inputs
from prime_composer.upstream.keys import IMPORT_PATH, SECTION, SWITCH, TOKENIZERS_KEY
from prime_composer.upstream.versions.records import LOSS_V0_7
from prime_composer.upstream.versions.toml_shapes import at

EXPERTS, KEPT_IDS = "enable_return_routed_experts", "enable_return_sampling_mask"

NOT_IN_A_MIXTURE = (
    "has ids without a probability, which are missing from a mixture: route each environment to "
    "one teacher."
)
"""Of a teacher with a tokenizer of its own."""

UNCUT = {"top_p": (None, 1), "top_k": (None, -1, 0), "min_p": (None, 0)}
"""Settings that cut the sampled distribution, and the values with which they do not."""


class LaunchedRun(NamedTuple):
    """What the rules read."""

    loss: LossConfig
    settings: Any  # ``AdapterSettings`` with what follows from the loss
    config: Any = None  # prime-rl's: the launcher's object, or tables of a TOML; None: none is here
    section: str = SECTION  # table that has the loss, for messages
    names_loss: bool = True  # whether [trainer.loss] of the config names our loss
    replays: bool = False  # whether this prime-rl's trainer replays what sampling has cut off

    @property
    def label(self) -> str:
        """The loss by section and type, as sentences begin."""
        return f"[{self.section}] type = {self.loss.type!r}"

    def at(self, path: str) -> Any:
        """Return a value of the config, None where there is none."""
        return at(self.config, path)

    def active(self, *paths: str) -> str:
        """Return those of the paths that are turned on, joined by "and"."""
        return " and ".join(path for path in paths if self.at(path))

    def train_tables(self) -> Iterator[tuple[str, Any]]:
        """Yield [orchestrator.train] and each of its sources, by their paths."""
        path = "orchestrator.train"
        sources = self.at(f"{path}.source")
        yield path, self.at(path)
        for index, source in enumerate(sources if isinstance(sources, list) else ()):
            yield f"{path}.source[{index}]", source


def refuse(run: LaunchedRun) -> None:
    """Raise ``ValueError`` with the first sentence of any rule."""
    for rule in RULES:
        for sentence in rule(run):
            raise ValueError(sentence)


def inputs(run: LaunchedRun) -> Iterator[str]:
    """A loss may read what no version of prime-rl has."""
    provided = LOSS_V0_7.provides(run.loss, adapter=True)
    yield from missing_inputs(run.loss, provided, "prime_rl", run.section)


def place_of_the_loss(run: LaunchedRun) -> Iterator[str]:
    """rl tokens have a loss of their own, and one of both kinds is called on rl tokens."""
    loss = run.loss
    if not run.names_loss and (loss.reads_rewards_and_teacher or not loss.compares_with_teacher):
        yield (
            f"{SWITCH} names {run.loss.type!r}, a loss of rl tokens. Those are set in "
            '[trainer.loss]: write type = "custom", import_path = '
            f'"{IMPORT_PATH}", and the table in [{run.section}].'
        )


def rewards(run: LaunchedRun) -> Iterator[str]:
    """A loss of both trains on tokens without an advantage too."""
    for path, table in run.train_tables() if run.loss.reads_rewards_and_teacher else ():
        if least := at(table, "min_abs_advantage"):
            yield (
                f"{run.label} reads rewards and a teacher, and {path}.min_abs_advantage = {least} "
                "takes tokens with small advantages out of it, the teacher's part with them: set "
                "it to 0."
            )


def asker(run: LaunchedRun) -> Iterator[str]:
    """The process that asks has to have what the question needs."""
    settings = run.settings
    if run.loss.reads_hidden_states and settings.asked_by == "orchestrator":
        yield (
            f"{run.label} reads the teacher's hidden states, which the orchestrator has no room "
            'for in a sample: leave asked_by out, or set it to "trainer".'
        )
    if not settings.trainer_asks:
        return
    give_k = 'leave asked_by = "trainer" and k = "full" out, and give the loss a number k.'
    if settings.teacher_tokenizers:
        yield (
            f'{TOKENIZERS_KEY} (of a recipe: tokenizer = "own"): a teacher reads its own tokens of '
            f"messages, which the trainer has not: {give_k}"
        )
    of_all = run.at("orchestrator.train.algo") or run.at("orchestrator.algo")
    every, *sources = run.train_tables()
    for path, table in sources or [every]:
        if at(at(table, "algo") or of_all, "type") == "opsd":
            yield (
                f"{path} has the algorithm opsd, whose teacher reads a hint, and the trainer, "
                f"which asks here, has no hints: {give_k}"
            )


def tokenizers(run: LaunchedRun) -> Iterator[str]:
    """A teacher with a tokenizer of its own has no score of some tokens and ids."""
    if not run.settings.teacher_tokenizers:
        return
    own = (
        'A teacher with a tokenizer of its own (teacher_tokenizers, of a recipe tokenizer = "own")'
    )
    if run.loss.reads_rewards_and_teacher:
        yield (
            f"{own} has no score of some tokens, and {run.label} reads rewards and a teacher for "
            "each of them: use a loss of the teacher alone."
        )
    if run.settings.teachers_mixed:
        yield f"{own} {NOT_IN_A_MIXTURE}"


def offloading(run: LaunchedRun) -> Iterator[str]:
    """The output head's weight stays on the trainer's device.

    A loss of whole vocabularies multiplies with it between prime-rl's forward and backward. Two
    options keep it on the CPU between its uses, and were not run with such a loss:
    ``fsdp_cpu_offload`` (559b4477 trainer/model.py, ``setup_fsdp``) and ``full_offload`` (559b4477
    trainer/optim/offload.py). Offloading of optimizer states or of activations leaves it there.
    """
    active = run.active("trainer.model.fsdp_cpu_offload", "trainer.model.full_offload")
    if run.loss.reads_hidden_states and active:
        yield (
            f"{run.label} multiplies with the output head after the forward, and {active} keeps it "
            "on the CPU: set trainer.model.optim_cpu_offload = true in its place, or give the loss "
            "a number k."
        )


def router_replay(run: LaunchedRun) -> Iterator[str]:
    """The support is sent in the field of router replay, where the orchestrator asks."""
    active = run.active(
        "trainer.enable_router_replay", f"inference.{EXPERTS}", f"inference.vllm.{EXPERTS}"
    )
    if run.settings.k and not run.settings.trainer_asks and active:
        yield (
            f"{run.label} needs the teacher's top-{run.settings.k} support, which is sent in the "
            f'field of router replay: set asked_by = "trainer" in [{run.section}], which sends '
            f"none, or {active} = false."
        )


def sampling_replay(run: LaunchedRun) -> Iterator[str]:
    """prime-rl's trainer normalizes its log-probs as the teacher's are: over the whole vocabulary.

    From September 2026 on they are over the ids that top-p or top-k has kept, which a sampler
    replays. Before, a sampling in ``extra_body`` decides only which tokens are compared.
    """
    active = [run.active(f"inference.{KEPT_IDS}", f"inference.vllm.{KEPT_IDS}")]
    for path, table in run.train_tables():
        for below in ("sampling", "sampling.extra_body") if run.replays else ("sampling",):
            cuts = [key for key, off in UNCUT.items() if at(table, f"{below}.{key}") not in off]
            active += [f"{path}.{below}.{key}" for key in cuts]
    if run.loss.compares_with_teacher and any(active):
        yield (
            f"{run.label} compares log-probs over the whole vocabulary, and this prime-rl's "
            "trainer renormalizes its own over the ids that sampling kept: leave out "
            f"{', '.join(filter(None, active))} (top_p of a recipe is rollout.top_p)."
        )


def job_script(run: LaunchedRun) -> Iterator[str]:
    """`uv sync` in a job keeps what prime-rl locks alone, and removes this package."""
    slurm = run.at("slurm")
    path = at(slurm, "template_path")
    if path is None or isinstance(run.config, Mapping):  # a TOML lacks prime-rl's defaults
        return
    template, lock = Path(path), Path(slurm.project_dir) / "uv.lock"
    lines = (line.partition("#")[0] for line in template.read_text("utf-8").splitlines())
    if all("uv sync" not in line or "--inexact" in line for line in lines):
        return
    if lock.is_file() and 'name = "prime-composer"' in lock.read_text("utf-8"):
        return
    own, everywhere = slurm.pre_run_command or "", getattr(slurm, "shared_fs", True)
    if not re.search(r"\b(pip install|uv add)\b", own) or not (everywhere or "srun" in own):
        where = "" if everywhere else "srun --ntasks-per-node=1 "
        yield (
            f"[slurm] the job script {template.name} runs `uv sync`, which removes this package, "
            "and the job would train prime-rl's own loss. Let it be installed again: "
            f'pre_run_command = "{where}uv pip install {requirement()}"'
        )


Rule = Callable[[LaunchedRun], Iterator[str]]

RULES: tuple[Rule, ...] = (
    *(inputs, rewards, place_of_the_loss, asker, tokenizers),
    *(offloading, router_replay, sampling_replay, job_script),
)

"""Find or build the models under a recipe's ``[*.prepare]``, and cache them.

A model that comes with the package (``shipped/``) is found by its cache key and never trained,
unless the user asks for it. Two generated models of one recipe get the same tokenizer whenever
their ``vocab_size`` agrees: a byte-level BPE trained on the recipe's own data.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_composer.backends.errors import os_error
from prime_composer.backends.model_files import cache_root, fingerprint, unusable
from prime_composer.extras import pip_install
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import prompt_text
from prime_composer.recipe.prepare import AnyPrepare, DamagedConfig, PrepareConfig
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import ModelConfig, Recipe
from prime_composer.tiny_models.transcripts import CHAT_TEMPLATE

Progress = Callable[[int, int, float], None]  # Steps done, total steps, loss

FORMAT = 1  # Part of the cache key. Raise it when the same description builds another model.

ROUNDING = 2  # The same for a model whose weights are rounded

DESCRIPTION = "prepare.json"  # Beside the weights, how they were made

WEIGHTS = "model.safetensors"

SHIPPED = Path(__file__).parent / "shipped"
"""Models that come with the package: a folder by cache key, its weights in half precision. The
first one is trained by ``python -m tests.studies.ship``."""


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Within the block, turn an error of the file system at the cache folder into one sentence."""
    try:
        yield
    except Exception as error:
        refused = os_error(error)
        if refused is None:
            raise
        raise unusable(folder, refused.strerror or str(refused)) from error


def cache_key(config: AnyPrepare, problems: ProblemSet) -> str | None:
    """Return a readable name and a hash of all that decides what the model is.

    Contents count, not paths. None: the source is not on this machine.
    """
    if isinstance(config, DamagedConfig):
        content = fingerprint(config.source)
        return None if content is None else _key_of_damaged(config, content)
    description = [FORMAT, config.model_dump(mode="json", exclude_none=True)]
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for problem in problems.worked:
        transcript = problems.transcript(problem)
        if transcript is None:
            texts = [prompt_text(problem, problems.config_of(problem)), problem.answer]
        else:
            texts = [CHAT_TEMPLATE, transcript]
        if config.environments is not None:
            texts.append(str(problem.environment in config.environments))
        digest.update(json.dumps(texts).encode())
    return f"qwen3-{config.layers}x{config.hidden_size}-{digest.hexdigest()[:16]}"


def _key_of_damaged(config: DamagedConfig, content: str) -> str:
    """Return the cache key of a damaged model, given its source's fingerprint."""
    dropped, quantize = sorted(config.drop_layers), config.quantize
    settings: list[Any] = [FORMAT if quantize is None else ROUNDING, content]
    names = []
    if dropped:
        settings.append({"drop_layers": dropped})
        names.append(f"without-{len(dropped)}")
    if quantize is not None:
        settings.append(quantize.model_dump(mode="json"))
        names.append(f"rounded-{quantize.bits}bit-{quantize.group}")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    return "-".join([*names, digest.hexdigest()[:16]])


def model_path(config: AnyPrepare, problems: ProblemSet) -> Path | None:
    """Return the folder of a prepared model, built or not; None where ``cache_key`` is None."""
    key = cache_key(config, problems)
    if key is None:
        return None
    return cached_path(config, problems) or cache_root() / "models" / key


def cached_path(
    config: AnyPrepare, problems: ProblemSet, cache_dir: Path | None = None
) -> Path | None:
    """Return the prepared model's folder if there is one, else None. Import nothing heavy.

    A model of the package comes before one of the cache, unless that one was rebuilt. A pruned
    model counts only if it was pruned from the model that is found for the same description.
    """
    key = cache_key(config, problems)
    if key is None:
        return None
    path = (cache_dir or cache_root()) / "models" / key
    with _cache_errors(path.parent):
        if not path.is_dir():
            return _shipped(key)
        shipped = _shipped(key)
        if shipped is not None and not _description(path).get("rebuilt"):
            return shipped
        if isinstance(config, PrepareConfig) and config.prune:
            unpruned = cached_path(_unpruned(config), problems, cache_dir)
            if unpruned is not None and _description(path).get("unpruned") != digest(unpruned):
                return None
        return path


def is_shipped(folder: Path) -> bool:
    """Return whether a prepared model comes with the package."""
    return folder.parent == SHIPPED


def _shipped(key: str) -> Path | None:
    """Return the package's model of a cache key, None where it has none."""
    folder = SHIPPED / key
    if not folder.is_dir():
        return None
    if digest(folder) != _description(folder)["sha256"]:
        raise ValueError(f"{folder / WEIGHTS} is damaged; install prime-composer again")
    return folder


def digest(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weights, None where they are missing."""
    try:
        return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _description(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _unpruned(config: PrepareConfig) -> PrepareConfig:
    return config.model_copy(update={"prune": 0.0})


def prepare_configs(recipe: Recipe) -> dict[str, tuple[str, AnyPrepare]]:
    """Return table -> display name and description of every model under a ``[*.prepare]``."""
    models: list[tuple[str, str, ModelConfig]] = [
        (teacher.table, teacher.display, config)
        for teacher, config in Routing.of_recipe(recipe).opened.items()
    ]
    models.append(("student", "student", recipe.student))
    return {
        table: (display, model.prepare)
        for table, display, model in models
        if model.prepare is not None
    }


def model_folders(recipe: Recipe, problems: ProblemSet) -> dict[str, Path]:
    """Return the folder of every prepared model of a recipe, built or not, by table."""
    return {
        table: path
        for table, (_, config) in prepare_configs(recipe).items()
        if (path := model_path(config, problems)) is not None
    }


def prepare_models(
    recipe: Recipe,
    problems: ProblemSet,
    rebuild: bool = False,
    progress: Callable[[str, int], Progress] | None = None,
) -> dict[str, Path]:
    """Find or build every model under a ``[*.prepare]`` table; return their folders by table.

    ``rebuild`` trains again, and replaces what is cached. ``progress`` is called before a model is
    built, with its display name and its steps of fine-tuning, and returns the callback for these.
    """
    paths: dict[str, Path] = {}
    for table, (display, config) in prepare_configs(recipe).items():
        path = None if rebuild else cached_path(config, problems)
        if path is None:
            steps = config.sft_steps if isinstance(config, PrepareConfig) else 0
            callback = None if progress is None else progress(display, steps)
            path = prepare_model(
                config, problems, rebuild=rebuild, progress=callback, rebuilt=paths.values()
            )
        paths[table] = path
    return paths


def prepare_model(
    config: AnyPrepare,
    problems: ProblemSet,
    cache_dir: Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
    rebuilt: Collection[Path] = (),
) -> Path:
    """Return the folder of a model and its tokenizer: cached, or built now.

    No reader ever finds half a model, and runs that need the same one wait for the first to finish
    it. A pruned model is made from the unpruned one of the same description, which is cached too.
    ``rebuilt`` names what this command has trained, which ``rebuild`` leaves as it is.
    """
    models = (cache_dir or cache_root()) / "models"
    key = cache_key(config, problems)
    if key is None:
        key = _key_of_download(config, problems)
    path = models / key
    rebuild = rebuild and path not in rebuilt
    if not rebuild and (found := cached_path(config, problems, cache_dir)) is not None:
        return found
    with _cache_errors(models):
        models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{key}.lock"):
        if not rebuild and (found := cached_path(config, problems, cache_dir)) is not None:
            return found
        with _cache_errors(models):
            unfinished = models / f"{key}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if isinstance(config, DamagedConfig):
                _damage(config, unfinished)
            elif config.prune:
                unpruned = prepare_model(
                    _unpruned(config), problems, cache_dir, rebuild, progress, rebuilt
                )
                _prune(config, problems, unpruned, unfinished, progress or _silent)
            else:
                _build(config, problems, unfinished, progress or _silent, rebuild)
            replaced = models / f"{key}.replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            if path.is_dir():
                path.rename(replaced)
            unfinished.rename(path)
            shutil.rmtree(replaced, ignore_errors=True)
    return path


def _build(
    config: PrepareConfig, problems: ProblemSet, folder: Path, progress: Progress, rebuilt: bool
) -> None:
    """Train the model, and write it with its tokenizer and description into ``folder``."""
    loss = _training().build_model(config, problems, folder, progress)
    _describe(config, problems, folder, loss=loss, **({"rebuilt": True} if rebuilt else {}))


def _prune(
    config: PrepareConfig, problems: ProblemSet, unpruned: Path, folder: Path, progress: Progress
) -> None:
    """Write a pruned copy of a model, with its tokenizer and description, into ``folder``."""
    loss = _description(unpruned)["loss"]
    _training().prune_model(unpruned, config.prune, folder)
    progress(config.sft_steps, config.sft_steps, loss)
    _describe(config, problems, folder, loss=loss, unpruned=digest(unpruned))


def _damage(config: DamagedConfig, folder: Path) -> None:
    """Write a damaged copy of a model, with its tokenizer and description, into ``folder``."""
    with _libraries():
        from prime_composer.tiny_models.damage import damage_model

        counts = damage_model(config, folder)
    _write_description(folder, config, counts._asdict())


def _key_of_download(config: AnyPrepare, problems: ProblemSet) -> str:
    """Return the cache key of a damaged model whose source is on the hub: its config is fetched."""
    assert isinstance(config, DamagedConfig)
    with _libraries():
        from prime_composer.backends.hf_model import read_config

        read_config(config.source)
    key = cache_key(config, problems)
    if key is None:
        raise ValueError(f"{config.source}: the Hugging Face cache (HF_HOME) cannot be used")
    return key


def _training() -> ModuleType:
    with _libraries():
        from prime_composer.tiny_models import training
    return training


@contextmanager
def _libraries() -> Iterator[None]:
    """Within the block, turn a missing library into one sentence."""
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"preparing a model on the spot needs {error.name}: {pip_install('local')}"
        ) from error


def _describe(config: PrepareConfig, problems: ProblemSet, folder: Path, **details: Any) -> None:
    data = {name: data.model_dump(mode="json") for name, data in problems.sources.items()}
    _write_description(folder, config, {"data": data, **details})


def _write_description(folder: Path, config: AnyPrepare, details: dict[str, Any]) -> None:
    description = {"format": FORMAT, "prepare": config.model_dump(mode="json"), **details}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _silent(done: int, steps: int, loss: float) -> None:
    pass


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock file. The operating system releases it if the process dies."""
    import fcntl

    with _cache_errors(path.parent):
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

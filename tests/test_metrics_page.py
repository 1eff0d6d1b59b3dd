"""The page of every metric is generated from the code, and has what a run logs."""

import re
from pathlib import Path

from docs import metrics
from prime_composer.local.tracker import read_metrics
from tests.local.helpers import run
from tests.local.test_several_teachers import raw

PAGE = Path(__file__).parents[1] / "recipes" / "metrics.md"


def test_metrics_page_is_current() -> None:
    """recipes/metrics.md is renewed with --write after a metric changes."""
    assert metrics.main(["--check", str(PAGE)]) == 0


def test_metrics_page_has_every_number_of_a_run(tmp_path: Path) -> None:
    """Of a run with two environments, a reward channel, and evaluations."""
    rl = {"loss": {"type": "default"}, "weight": 0.1}
    loss = {"type": "topk_reverse_kl", "k": 8}
    table = raw(trainer__steps=1, rollout__group_size=2)
    table["loss"] = {
        "type": "compose",
        "rl": rl,
        "distillation": {"kd": {"weight": 1.0, "loss": loss}},
    }
    run(table, tmp_path)
    names = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    shown = "|".join(re.escape(name).replace("NAME", r"[\w/.=]+") for name in names)
    logged = {name for record in read_metrics(tmp_path) for name in record} - {"step"}
    assert {"distillation/kl", "distillation/kl/sums", "compose/kd/kl_mass"} <= logged
    form = rf"(?:compose/(?:kd|rl)/)?(?:{shown})(?:/(?:sums|chains))?|distillation/kl"
    assert [name for name in sorted(logged) if not re.fullmatch(form, name)] == []

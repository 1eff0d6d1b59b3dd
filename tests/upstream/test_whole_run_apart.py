"""Whole runs of an unmodified prime-rl whose teacher has a tokenizer of its own.

As in test_whole_run.py, whose functions and stand-ins these are.
"""

import json

import pytest

from tests.upstream import test_whole_run as whole_run
from tests.upstream.e2e import cpu_recipe
from tests.upstream.test_whole_run import TOP_K, K, mean, newest

models = whole_run.models

APART = {"apart": True, "plugin": True, "words": True}


@newest
def test_whole_run_has_a_teacher_with_own_tokenizer(trees, models, tmp_path):
    """The divergence of the first step is that of sums in float64, in the teacher's template."""
    check(whole_run.run(trees, models, tmp_path, TOP_K, **APART))


@newest
def test_whole_run_ends_at_an_undeclared_tokenizer(trees, models, tmp_path):
    """It trained to its end, with losses like any others: no id was outside of the vocabulary."""
    with pytest.raises(pytest.fail.Exception, match="other tokens than the student"):
        whole_run.run(trees, models, tmp_path, TOP_K, apart=True, declared=False)
    assert not [*tmp_path.rglob("broadcasts/step_1")]


def check(result):
    """Check the numbers of a run against float64."""
    expected = reference(result)
    rows = whole_run.metric_rows(result)
    assert expected["asked"] and len(expected["tail_kl"]) == cpu_recipe.BATCH
    # bfloat16 models: the logits of both sides are rounded to 8 bits.
    assert whole_run.first_value(rows, "topk_reverse_kl/kl/mean") == pytest.approx(
        mean(expected["tail_kl"]), abs=5e-3
    )
    assert whole_run.first_value(rows, "optim/grad_norm") > 0
    assert whole_run.last_update(result)["tensors"] > 10


def reference(result):
    """Return the float64 numbers of the first batch that the teacher scored."""
    student, teacher = (
        whole_run.generate_requests(result, role) for role in ("student", "teacher")
    )
    requests = {
        "student": [[r["in"], r["out"]] for r in student],
        "teacher": [r["in"] for r in teacher if "start" in r],
        "batch": cpu_recipe.BATCH,
    }
    file = result["folder"] / "requests.json"
    file.write_text(json.dumps(requests))
    folders = [result["models"] / role for role in ("student", "teacher")]
    return json.loads(whole_run.script(result["python"], "reference_apart.py", *folders, K, file))

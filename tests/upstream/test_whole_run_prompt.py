"""A whole run of an unmodified prime-rl whose teacher reads a prompt of its own.

As in test_whole_run.py, whose functions and stand-ins these are.
"""

import json

from prime_composer.backends.hf_model import load_tokenizer
from tests.upstream import test_whole_run as whole_run
from tests.upstream.e2e import cpu_recipe
from tests.upstream.test_whole_run import TOP_K, K, other

models = whole_run.models

SYSTEM = "You are kind, and answer in one letter."


@other
def test_whole_run_has_a_teacher_with_its_own_prompt(trees, models, tmp_path):
    """The divergence of the first step is that of the models alone, each behind its own prompt."""
    prompt = {"system": SYSTEM, "chat_template": True}
    result = whole_run.run(trees, models, tmp_path, TOP_K, prompt=prompt, words=True)
    expected, update = reference(result)
    rows = whole_run.metric_rows(result)
    whole_run.check_kl(whole_run.first_value(rows, "topk_reverse_kl/kl/mean"), expected)
    whole_run.check_update(expected, update)


def reference(result):
    """Return float64's numbers of the first batch that the teacher read, by its own prompts."""
    tokenizer = load_tokenizer(result["models"] / "teacher")
    read = {}
    for request in whole_run.generate_requests(result, "student"):
        question = tokenizer.decode(request["in"]).split("user\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        own = tokenizer.encode(text, add_special_tokens=False)
        read[json.dumps(own + request["out"])] = request["in"], request["out"], own
    asked = [json.dumps(one["in"]) for one in whole_run.generate_requests(result, "teacher")]
    # The beginning of the first one is asked for again.
    known = [one for one in dict.fromkeys(asked) if one in read]
    assert len(known) >= cpu_recipe.BATCH
    weights = {str(result["models"] / "teacher"): 1.0}
    sequences = [
        [[*before, *out], len(before), weights, own]
        for before, out, own in (read[one] for one in known[: cpu_recipe.BATCH])
    ]
    file = result["folder"] / "sequences.json"
    file.write_text(json.dumps(sequences))
    update = whole_run.last_update(result)
    broadcast = max(
        (result["folder"] / "outputs").rglob("broadcasts/step_*"), key=whole_run.step_of
    )
    words = result["models"] / "student", K, file, broadcast
    return json.loads(whole_run.script(result["python"], "reference.py", *words)), update

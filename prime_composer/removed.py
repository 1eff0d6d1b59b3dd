"""What earlier versions had, and what to do instead.

This file imports no other file of the package. It may go at 1.0.
"""

REMOVED: dict[str, str] = {
    "stages": "begin another run with the checkpoint of the first one, as student.model",
    "rollout.growth": "leave the table out; each step samples up to rollout.max_tokens",
    "loss.type=topd": "choose sampled_reverse_kl",
    "loss.type=distillm2": "choose skewed_kl, or generalized_jsd on the answers of both",
    **dict.fromkeys(
        ("loss.type=rlsd", "loss.type=rlrt", "loss.type=rlcsd", "loss.type=sdar"),
        "put self_distillation beside an RL loss, by [loss.rl_mix] or compose",
    ),
    **dict.fromkeys(("loss.type=cispo", "loss.type=ppo"), "choose default, ipo or icepop"),
    **dict.fromkeys(
        ("loss.type=dpo", "loss.type=simpo", "loss.replay", "replay"),
        "leave it out; no loss reads pairs",
    ),
    **dict.fromkeys(("loss.clamp", "loss.repetition"), "leave the table out"),
    **dict.fromkeys(("loss.type=amid", "loss.type=adaptive_kl"), "choose generalized_jsd"),
    "teacher.policy.wrong_hints": "leave it out, as no loss reads wrong hints",
    "teacher.head": "leave it out; a server sends its own output head, which is kept",
    "diloco.min_replicas": "leave it out; an outer step takes a majority of the islands",
    **dict.fromkeys(("eval.samples", "eval.temperatures"), "leave it out; answers are greedy"),
    **dict.fromkeys(("data.answer_check", "environments.NAME.answer_check"), "call it metric"),
    "environments.NAME.api": "leave it out; each is of verifiers' API v1",
    "PRIME_COMPOSER.rewards": "leave it out; for one loss of both use compose, or [loss.rl_mix]",
    "PRIME_COMPOSER.scores": "leave it out; a teacher gives the ids that are most probable to it",
}
"""Key of a recipe (NAME: any), ``loss.type=NAME``, ``VARIABLE.KEY`` of its JSON -> what instead."""

"""Numbers to spell in one or several turns, for verifiers' v0 API. Its id is "tiny-turns-v0"."""

import verifiers as vf
from datasets import Dataset


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"again {len(state['trajectory'])}"}]


def load_environment(turns=1, first=0):
    rows = [
        {"prompt": [{"role": "user", "content": f"spell {first + i}"}], "answer": "", "task": "t"}
        for i in range(8)
    ]

    def spelled(completion, **_):
        return float(len(str(completion[-1])) % 2)

    data = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[spelled])
    return Turns(dataset=data, eval_dataset=data, rubric=rubric, max_turns=turns)

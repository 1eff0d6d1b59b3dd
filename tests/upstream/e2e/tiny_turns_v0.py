"""Numbers to spell, for verifiers' v0 API; tiny_turns.py explains. The id is "tiny-turns-v0"."""

import verifiers as vf
from datasets import Dataset


class Turns(vf.MultiTurnEnv):
    @vf.stop
    async def spelled_in_time(self, state):
        return len(state["trajectory"]) >= int(state["answer"])

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"again {len(state['trajectory'])}"}]


def load_environment(turns=1, first=0):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"spell {n}"}],
            "answer": str(1 if n % 2 else turns),
        }
        for n in range(first, first + 8)
    ]

    def spelled(completion, **_):
        return float(len(str(completion[-1])) % 2)

    data = Dataset.from_list(rows)
    return Turns(dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[spelled]))

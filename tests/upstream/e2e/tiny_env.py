"""Eight sums, for the verifiers of prime-rl v0.6."""

import verifiers as vf
from datasets import Dataset


def load_environment(**_):
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+{i}="}], "answer": str(2 * i), "task": "sums"}
        for i in range(8)
    ]

    def correct(completion, answer, **_):
        return float(answer in str(completion))

    data = Dataset.from_list(rows)
    return vf.SingleTurnEnv(dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[correct]))

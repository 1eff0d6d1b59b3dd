"""vLLM's two model runners: each answers marked requests where it has a batch's hidden states.

The first keeps a request's progress with the request. The second has an object of its own for
prompt log-probs, which ``name_weights`` gives its runner to.
"""

import secrets
from types import ModuleType
from typing import Any

from torch import Tensor

from prime_composer.scoring.worker import Prefill, Progress, RowsRequest, answer_batch, uint8

FINGERPRINT = "_prime_composer_fingerprint"  # of a runner: its process and last load of weights
_RUNNER = "_prime_composer_runner"  # of the second runner's object for prompt log-probs
_MARKED = "_prime_composer_marked"  # of the same: the marked requests that it has, by name


def name_weights(runner: Any) -> None:
    """Give the weights of a runner, which may be others now, a name of their own."""
    setattr(runner, FINGERPRINT, secrets.token_hex(8))
    second = getattr(runner, "prompt_logprobs_worker", None)
    if second is not None:
        setattr(second, _RUNNER, runner)


def tensors_of(progress: Progress, runner: Any) -> Any:
    """Return the rows of a request in the place of vLLM's tensors."""
    from vllm.v1.outputs import LogprobsTensors

    fingerprint = getattr(runner, FINGERPRINT)
    return LogprobsTensors(*progress.payload(), uint8(fingerprint.encode()))


def patch_first_runner(module: ModuleType) -> None:
    """Let ``GPUModelRunner`` answer marked requests itself; all others are vLLM's."""
    runner_class: Any = module.GPUModelRunner
    theirs = runner_class._get_prompt_logprobs_dict

    def _get_prompt_logprobs_dict(
        self: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        pending: dict[str, int] = self.num_prompt_logprobs
        rows_requests = {
            request_id: rows_request
            for request_id in pending
            if (rows_request := RowsRequest.of(self.requests[request_id].sampling_params))
            is not None
        }
        if not rows_requests:
            return theirs(self, hidden_states, num_scheduled_tokens)
        held = {request_id: pending.pop(request_id) for request_id in rows_requests}
        found = theirs(self, hidden_states, num_scheduled_tokens) if pending else {}
        done = answer_first(self, rows_requests, hidden_states, num_scheduled_tokens)
        pending.update({name: count for name, count in held.items() if name not in done})
        return found | {name: tensors_of(progress, self) for name, progress in done.items()}

    runner_class._get_prompt_logprobs_dict = _get_prompt_logprobs_dict


def answer_first(
    runner: Any,
    rows_requests: dict[str, RowsRequest],
    hidden_states: Tensor,
    scheduled: dict[str, int],
) -> dict[str, Progress]:
    """Compute one batch's rows in the first runner; return the requests that are complete."""
    prefills: dict[str, Prefill] = {}
    for request_id, rows_request in rows_requests.items():
        if request_id not in scheduled:
            continue
        request = runner.requests[request_id]
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = Progress(rows_request)
        index = runner.input_batch.req_id_to_index[request_id]
        prefills[request_id] = Prefill(
            request.in_progress_prompt_logprobs_cpu,
            request.prompt_token_ids,
            before=request.num_computed_tokens,
            count=scheduled[request_id],
            begin=runner.query_start_loc.np[index].item(),
        )
    done = answer_batch(
        runner.model.compute_logits, runner.model_config.get_vocab_size(), hidden_states, prefills
    )
    for request_id in done:
        runner.requests[request_id].in_progress_prompt_logprobs_cpu = None
    return done


def patch_second_runner(module: ModuleType) -> None:
    """Let ``PromptLogprobsWorker`` answer marked requests itself; all others are vLLM's."""
    second: Any = module.PromptLogprobsWorker
    add, remove = second.add_request, second.remove_request
    compute = second.compute_prompt_logprobs

    def add_request(self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
        add(self, req_id, req_idx, sampling_params)
        rows_request = RowsRequest.of(sampling_params)
        if rows_request is not None:
            self.uses_prompt_logprobs[req_idx] = False
            vars(self).setdefault(_MARKED, {})[req_id] = Progress(rows_request)

    def remove_request(self: Any, req_id: str) -> None:
        vars(self).get(_MARKED, {}).pop(req_id, None)
        remove(self, req_id)

    def compute_prompt_logprobs(
        self: Any, head: Any, hidden_states: Tensor, batch: Any, ids: Tensor, *more: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = compute(self, head, hidden_states, batch, ids, *more)
        marked: dict[str, Progress] = vars(self).get(_MARKED, {})
        prefills: dict[str, Prefill] = {}
        for index, req_id in enumerate(batch.req_ids if marked else ()):
            if req_id in marked:
                prefills[req_id] = Prefill(
                    marked[req_id],
                    ids[batch.idx_mapping_np[index]],
                    before=batch.num_computed_prefill_tokens_np[index].item(),
                    count=batch.num_scheduled_tokens[index].item(),
                    begin=batch.query_start_loc_np[index].item(),
                )
        if not prefills:
            return found
        runner = getattr(self, _RUNNER)
        vocab_size = runner.model_config.get_vocab_size()
        done = answer_batch(head, vocab_size, hidden_states, prefills)
        for req_id in done:
            del marked[req_id]
        return found | {name: tensors_of(progress, runner) for name, progress in done.items()}

    second.add_request, second.remove_request = add_request, remove_request
    second.compute_prompt_logprobs = compute_prompt_logprobs

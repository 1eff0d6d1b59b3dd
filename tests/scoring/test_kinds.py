"""Each kind of answer against float64, and the worker's book-keeping with a stand-in for vLLM's
runner."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prime_composer.scoring import worker
from prime_composer.scoring.kinds import (
    GIVEN,
    HIDDEN,
    KINDS,
    SAMPLED,
    TOP_K,
    HeadFailed,
    HiddenRows,
    KindRequest,
)
from prime_composer.scoring.runners import answer_first
from prime_composer.scoring.worker import Progress, RowsRequest, read_payload

V, D = 300, 16
OWN = KindRequest("sampled")


def top(k):
    return KindRequest("top_k", k)


@pytest.fixture(scope="module")
def weight():
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def hidden_of(ids):
    """A hidden state per position that depends on its token and place."""
    states = [torch.randn(D, generator=torch.Generator().manual_seed(7 * p + i)) for p, i in ids]
    return torch.stack(states)


def exact(weight, tokens):
    """log q of the whole vocabulary in float64: row i is for token i + 1."""
    hidden = hidden_of(enumerate(tokens)).double()
    return (hidden @ weight.double().T).log_softmax(-1)[:-1]


def test_kinds_equal_a_float64_log_softmax(weight):
    tokens = [5, 9, 2, 250, 0, 7]
    logprobs = exact(weight, tokens)
    given = torch.tensor([[1, 2], [299, 0], [4, 4], [9, 8], [3, 5]])
    hidden = hidden_of(enumerate(tokens))[:-1]
    rows = HiddenRows(hidden, torch.tensor(tokens[1:]), lambda h: h @ weight.T)
    found = {
        **SAMPLED.arrays(rows, OWN, None),
        **TOP_K.arrays(rows, top(4), None),
        **GIVEN.arrays(rows, GIVEN.of(given), given.int()),
        **HIDDEN.arrays(rows, KindRequest("hidden"), None),
    }
    best = logprobs.topk(4)
    assert found["top_ids"].tolist() == best.indices.tolist()
    assert found["top_ids"].dtype == torch.int32
    for name, expected in {
        "sampled": logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0],
        "top_logprobs": best.values,
        "given": logprobs.gather(1, given),
    }.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), expected, atol=5e-6, rtol=0)
    assert torch.equal(found["hidden"], hidden)


class FirstRunner:
    """What is read of vLLM's first runner, for requests that come in pieces.

    ``test_served.py`` asks servers with each runner.

    Args:
        weight: of the output head.
        requests: name -> tokens and rows_request.
    """

    def __init__(self, weight, requests):
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden @ weight.T)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: V)
        self.rows_requests = {name: rows_request for name, (_, rows_request) in requests.items()}
        self.requests = {
            name: SimpleNamespace(
                prompt_token_ids=tokens,
                num_computed_tokens=0,
                in_progress_prompt_logprobs_cpu=None,
            )
            for name, (tokens, _) in requests.items()
        }

    def step(self, scheduled):
        """Run a batch: name -> its next tokens. Returns the requests that are complete."""
        states, starts = [], [0]
        for name, count in scheduled.items():
            request = self.requests[name]
            first = request.num_computed_tokens
            positions = range(first, first + count)
            states.append(hidden_of((p, request.prompt_token_ids[p]) for p in positions))
            starts.append(starts[-1] + count)
        done = self.answer(torch.cat(states), scheduled, np.array(starts))
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        for name in done:
            del self.rows_requests[name]
        return done

    def answer(self, states, scheduled, starts):
        self.input_batch = SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(scheduled)}
        )
        self.query_start_loc = SimpleNamespace(np=starts)
        return answer_first(self, dict(self.rows_requests), states, scheduled)

    def preempt(self, name):
        self.requests[name].num_computed_tokens = 0
        assert answer_first(self, dict(self.rows_requests), torch.zeros(0, D), {}) == {}


def check(progress: Progress, weight, tokens, rows_request):
    at = torch.cat([torch.arange(*both) for both in rows_request.ranges])
    arrays = read_payload(*progress.payload(), len(at))
    rows = exact(weight, tokens)[at - 1]
    own = rows.gather(1, torch.tensor(tokens)[at, None])[:, 0]
    torch.testing.assert_close(arrays["sampled"].double(), own, atol=5e-6, rtol=0)
    k = rows_request.requests[-1].k
    if k:
        best = rows.topk(k)
        assert arrays["top_ids"].tolist() == best.indices.tolist()
        torch.testing.assert_close(arrays["top_logprobs"].double(), best.values, atol=5e-6, rtol=0)


@pytest.mark.parametrize("block_bytes", [1, 4 * V * 3, 2**26])
def test_prompts_in_pieces_are_answered_whole(weight, block_bytes, monkeypatch):
    """Starts, gaps, K and lengths of all sizes in one batch, pieces too, and blocks of few rows."""
    monkeypatch.setitem(worker.BLOCK_BYTES, "cpu", block_bytes)
    generator = np.random.default_rng(0)
    requests = {}
    for index in range(12):
        tokens = generator.integers(0, V, int(generator.integers(2, 40))).tolist()
        start = int(generator.integers(1, len(tokens)))
        k = int(generator.choice([0, 1, 8]))
        inner = np.arange(start + 1, len(tokens))
        edges = np.sort(generator.choice(inner, len(inner) // 4 * 2, replace=False)).tolist()
        skip = tuple(zip(edges[::2], edges[1::2], strict=True))
        kinds = (OWN, top(k)) if k else (OWN,)
        requests[f"r{index}"] = tokens, RowsRequest(start, len(tokens), kinds, skip)
    runner, done = FirstRunner(weight, requests), {}
    while len(done) < len(requests):
        scheduled = {}
        for name, (tokens, _) in requests.items():
            left = len(tokens) - runner.requests[name].num_computed_tokens
            if left and generator.random() < 0.7:
                scheduled[name] = int(generator.integers(1, min(left, 9) + 1))
        if scheduled:
            done |= runner.step(scheduled)
    for name, (tokens, rows_request) in requests.items():
        check(done[name], weight, tokens, rows_request)


def test_preempted_prompt_starts_over(weight):
    tokens, rows_request = list(range(10)), RowsRequest(2, 10, (OWN,))
    runner = FirstRunner(weight, {"r": (tokens, rows_request)})
    assert runner.step({"r": 6}) == {}
    runner.preempt("r")
    check(runner.step({"r": 10})["r"], weight, tokens, rows_request)


def test_rows_in_a_prefix_cache_are_noticed(weight):
    """The cache had the first 5 tokens: with a start before 6, rows are missing."""
    tokens = list(range(10))
    for start, is_whole in ((6, True), (5, False), (1, False)):
        runner = FirstRunner(weight, {"r": (tokens, RowsRequest(start, 10, (OWN,)))})
        runner.requests["r"].num_computed_tokens = 5
        (progress,) = runner.step({"r": 5}).values()
        assert progress.is_whole is is_whole
        if not is_whole:
            with pytest.raises(ValueError, match="left rows"):
                read_payload(*progress.payload(), len(tokens) - start)


def test_kind_that_fails_costs_its_own_requests_alone(weight, monkeypatch):
    """The other requests of the batch get their rows, and the engine goes on."""
    calls = []

    def failing(rows, request, numbers):
        calls.append(rows.logits)
        raise torch.OutOfMemoryError("3 GiB")

    monkeypatch.setitem(KINDS, "top_k", SimpleNamespace(arrays=failing, scratch=lambda _: 0))
    monkeypatch.setitem(worker.BLOCK_BYTES, "cpu", 1)
    tokens = list(range(10))
    rows_requests = {"r": RowsRequest(2, 10, (top(4),)), "s": RowsRequest(2, 10, (OWN,))}
    runner = FirstRunner(
        weight, {name: (tokens, rows_request) for name, rows_request in rows_requests.items()}
    )
    done = runner.step({"r": 10, "s": 10})
    check(done["s"], weight, tokens, rows_requests["s"])
    with pytest.raises(ValueError, match="OutOfMemoryError: 3 GiB"):
        read_payload(*done["r"].payload(), 8)
    # All workers run the head together, so that it runs for every block.
    assert len(calls) == 8


def test_head_that_fails_is_vllms_own_error(weight):
    def head(hidden):
        raise RuntimeError("a worker is gone")

    runner = FirstRunner(weight, {"r": ([1, 2, 3], RowsRequest(1, 3, (OWN,)))})
    runner.model.compute_logits = head
    with pytest.raises(HeadFailed):
        runner.step({"r": 3})


def test_given_ids_follow_their_rows(weight):
    tokens = list(range(20, 30))
    given = np.arange(7 * 3, dtype=np.int32).reshape(7, 3)
    rows_request = RowsRequest(3, 10, (OWN, KindRequest("given", 3, numbers=given.tobytes())))
    runner = FirstRunner(
        weight, {"r": (tokens, rows_request), "s": (tokens, RowsRequest(1, 10, (OWN,)))}
    )
    runner.step({"r": 4, "s": 10})
    (progress,) = runner.step({"r": 6}).values()
    expected = exact(weight, tokens)[2:].gather(1, torch.from_numpy(given).long())
    found = read_payload(*progress.payload(), 7)["given"]
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("extra", [None, {"prime_composer": "text"}])
def test_other_requests_are_not_marked(extra):
    """What a JSON body can hold is no mark: reading it would end the engine."""
    assert RowsRequest.of(SimpleNamespace(extra_args=extra)) is None

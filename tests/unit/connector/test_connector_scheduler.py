"""The scheduler side: who is tracked, which blocks go out with which step, and what is held and said at the end."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.metadata import HandoffMetadata
from connector.scheduler import PROMPT_TAIL
from handoff.claim import CLAIM_KEY, to_params
from handoff.messages import Abort, Final
from handoff.prompt import digest, packed
from tests.kit.handoff import signed
from tests.kit.scheduling import BLOCK, FIRST, Cached, Daemon, New, Output, Request, Status, chunks


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    here = Daemon()
    yield here
    here.close()


def test_a_prompt_in_one_step_goes_out_whole(daemon: Daemon) -> None:
    request, claim = daemon.request(10)
    step = daemon.step(request, 10, new=[7, 3, 5])
    assert [(o.request_id, o.claim, o.prompt_tokens) for o in step.openings] == [(request.request_id, claim, 10)]
    assert chunks(step) == [(0, (7, 3, 5), True)]
    told = {"first_token": FIRST, "prompt_tail": list(range(10)), "prompt_digest": digest(packed(range(10))), "serving": {}}
    assert daemon.finish(request) == {CLAIM_KEY: told}
    assert daemon.heard() == [Final(claim, packed(range(10)), FIRST, finished=False)]


def test_the_worker_is_told_whether_the_step_computes_anything(daemon: Daemon) -> None:
    assert not daemon.build(Output()).computes
    assert daemon.build(Output(num_scheduled_tokens={"never-claimed": 1})).computes
    request, _ = daemon.request(10)
    assert daemon.step(request, 10, new=[7, 3, 5]).computes
    assert not daemon.build(Output()).computes


def test_only_the_end_of_a_long_prompt_goes_to_the_gateway(daemon: Daemon) -> None:
    request, _ = daemon.request(100)
    daemon.step(request, 100, new=list(range(25)))
    assert daemon.finish(request)[CLAIM_KEY]["prompt_tail"] == list(range(100 - PROMPT_TAIL, 100))


def test_a_first_token_that_ends_the_answer_says_so(daemon: Daemon) -> None:
    request, _ = daemon.request(4)
    daemon.step(request, 4, new=[1])
    assert daemon.finish(request, Status.FINISHED_STOPPED) is not None
    (final,) = daemon.heard()
    assert isinstance(final, Final)
    assert final.finished


def test_each_chunk_sends_the_blocks_that_it_has_filled(daemon: Daemon) -> None:
    request, _ = daemon.request(18)
    steps = [
        daemon.step(request, 6, new=[10, 11]),
        daemon.step(request, 1, computed=6),
        daemon.step(request, 5, computed=7, more=[12]),
        daemon.step(request, 6, computed=12, more=[13, 14]),
        daemon.step(request, 1, computed=18, more=[15]),  # a step beyond the prompt, which asynchronous scheduling may take
    ]
    assert chunks(*steps) == [(0, (10,), False), (1, (11, 12), False), (3, (13, 14), True)]
    assert sum(len(step.openings) for step in steps) == 1
    assert daemon.finish(request) is not None


def test_cached_prefix_blocks_are_sent_too(daemon: Daemon) -> None:
    request, _ = daemon.request(14)
    step = daemon.step(request, 2, new=[30, 31, 32, 33], computed=8)
    assert chunks(step) == [(0, (30, 31), False)]
    assert chunks(daemon.step(request, 4, computed=10)) == [(2, (32, 33), True)]


def test_lookahead_blocks_neither_go_out_nor_end_the_prompt_early(daemon: Daemon) -> None:
    request, _ = daemon.request(10)
    first = daemon.step(request, 4, new=[1, 2, 3, 4])
    second = daemon.step(request, 4, computed=4, more=[5])
    third = daemon.step(request, 2, computed=8)
    assert chunks(first, second, third) == [(0, (1,), False), (1, (2,), False), (2, (3,), True)]
    assert daemon.finish(request) is not None


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_way_to_schedule_a_prompt_sends_each_of_its_blocks_once_and_in_order(data: st.DataObject) -> None:
    daemon = Daemon()
    try:
        tokens = data.draw(st.integers(1, 40))
        request, _ = daemon.request(tokens)
        computed = data.draw(st.integers(0, (tokens - 1) // BLOCK)) * BLOCK  # a cached prefix
        ids = data.draw(st.permutations(range(1, 40)))
        steps: list[HandoffMetadata] = []
        held = 0
        while computed < tokens:
            scheduled = data.draw(st.integers(1, tokens - computed))
            needed = -(-(computed + scheduled) // BLOCK) + data.draw(st.integers(0, 2))
            more = ids[held : max(held, needed)]
            held += len(more)
            if not steps:
                steps.append(daemon.step(request, scheduled, new=more, computed=computed))
            else:
                steps.append(daemon.step(request, scheduled, more=more or None, computed=computed))
            computed += scheduled
        sent = chunks(*steps)
        due = -(-tokens // BLOCK)
        assert [block for _, blocks, _ in sent for block in blocks] == ids[:due]
        assert [first for first, _, _ in sent] == [sum(len(b) for _, b, _ in sent[:i]) for i in range(len(sent))]
        assert [last for _, _, last in sent] == [False] * (len(sent) - 1) + [True]
        assert chunks(steps[-1])[-1][2]  # not before the whole prompt has been computed
        assert daemon.finish(request) is not None
    finally:
        daemon.close()


def test_fewer_blocks_than_are_due_give_the_handoff_up(daemon: Daemon) -> None:
    request, claim = daemon.request(10)
    step = daemon.step(request, 10, new=[1, 2])
    assert chunks(step) == []
    assert daemon.finish(request) is None
    assert daemon.heard() == [Abort(claim, "2 blocks where 3 are due")]


def test_more_than_one_group_of_blocks_is_given_up_before_the_worker_hears_of_it(daemon: Daemon) -> None:
    request, claim = daemon.request(10)
    output = Output([New(request.request_id, ([1, 2, 3], [4, 5, 6]), 0)], num_scheduled_tokens={request.request_id: 10})
    assert daemon.build(output) == HandoffMetadata()
    assert daemon.finish(request) is None
    assert daemon.heard() == [Abort(claim, "2 KV cache groups are not supported")]


def test_a_request_whose_blocks_vllm_moves_goes_on_as_an_ordinary_one(daemon: Daemon) -> None:
    request, _ = daemon.request(12)
    daemon.step(request, 8, new=[1, 2])
    moved = daemon.build(Output(block_table_updates={request.request_id: [7, 8]}))
    assert moved.withdrawn == [request.request_id]
    assert not daemon.step(request, 4, computed=8, more=[9]).chunks


@pytest.mark.parametrize("how", ["told", "resumed at once"])
def test_a_preempted_request_is_fenced_and_goes_on_as_an_ordinary_one(daemon: Daemon, how: str) -> None:
    request, claim = daemon.request(12)
    name = request.request_id
    daemon.step(request, 8, new=[1, 2])
    if how == "told":
        step = daemon.build(Output(preempted_req_ids={name, "another"}))
        assert step.preempted == [name]
        assert daemon.build(Output(preempted_req_ids={name})).preempted == []
        # vLLM's second model runner resumes a request as if it were new.
        again = daemon.step(request, 12, new=[4, 5, 6])
    else:
        again = daemon.build(Output([], Cached([name], {name}, [([4, 5, 6],)], [0]), {name: 12}))
        assert again.preempted == [name]
    assert not again.openings
    assert not again.chunks
    assert daemon.finish(request) is None
    assert daemon.heard() == [Abort(claim, "preempted")]


def test_a_request_aborted_before_it_ran_holds_nothing(daemon: Daemon) -> None:
    request, claim = daemon.request(10)
    assert daemon.finish(request, Status.FINISHED_ABORTED, first=None) is None
    assert daemon.heard() == [Abort(claim, "aborted")]


@pytest.mark.parametrize(
    ("status", "first", "reason"),
    [
        (Status.FINISHED_ABORTED, None, "aborted"),
        (Status.FINISHED_ABORTED, FIRST, "aborted"),
        (Status.FINISHED_ERROR, FIRST, "error"),
        (Status.FINISHED_LENGTH_CAPPED, None, "no first token"),
        (Status.FINISHED_STOPPED, None, "no first token"),
    ],
)
def test_a_prefill_that_ended_badly_is_withdrawn_and_held_until_the_worker_reports(
    daemon: Daemon, status: Status, first: int | None, reason: str
) -> None:
    request, claim = daemon.request(10)
    daemon.step(request, 10, new=[1, 2, 3])
    assert daemon.finish(request, status, first) is None
    assert daemon.heard() == [Abort(claim, reason)]


def test_a_prompt_that_was_not_sent_whole_is_never_called_whole(daemon: Daemon) -> None:
    request, claim = daemon.request(10)
    daemon.step(request, 8, new=[1, 2, 3])
    assert daemon.finish(request) is None
    assert daemon.heard() == [Abort(claim, "2 blocks were sent of a prompt of 10 tokens")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora_request": object()}, "computed with a LoRA adapter"),
        ({"prompt_embeds": object()}, "computed from embeddings"),
        ({"prompt_token_ids": None}, "computed from embeddings"),
    ],
)
def test_kv_that_is_not_that_of_the_prompts_ids_never_leaves(daemon: Daemon, change: dict[str, Any], reason: str) -> None:
    claim = signed(port=daemon.port)
    request = Request("r", [1, 2], to_params(claim))
    for name, value in change.items():
        setattr(request, name, value)
    for _ in range(2):
        daemon.side.consider(request)
    assert daemon.step(request, 2, new=[1]) == HandoffMetadata()
    assert daemon.finish(request) is None
    assert daemon.heard() == [Abort(claim, reason)]


def test_one_request_that_ends_leaves_the_others_alone(daemon: Daemon) -> None:
    requests = [daemon.request(8, name=f"r{index}") for index in range(10)]
    for request, _ in requests:
        daemon.step(request, 4, new=[1, 2])
    victim = requests[4][0]
    daemon.finish(victim, Status.FINISHED_ABORTED, first=None)
    others = [request for request, _ in requests if request is not victim]
    for request in others:
        assert chunks(daemon.step(request, 4, computed=4)) == [(1, (2,), True)]
        assert daemon.finish(request) is not None
    kinds = [type(message) for message in daemon.heard()]
    assert kinds == [Abort] + [Final] * 9


@pytest.mark.parametrize("host", ["no such host", "a/b", "", "no-such-host.invalid", "::1", "\ud800"])
def test_a_daemon_that_cannot_be_addressed_harms_nobody(daemon: Daemon, host: str) -> None:
    request, _ = daemon.request(4, claim=signed(host=host, port=daemon.port))
    daemon.step(request, 4, new=[1])
    daemon.finish(request)
    good, _ = daemon.request(4, name="good")
    daemon.step(good, 4, new=[1])
    assert daemon.finish(good) is not None
    assert [type(message) for message in daemon.heard()] == [Final]


def test_a_daemon_that_is_away_delays_nobody(daemon: Daemon) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        away = socket.bind_to_random_port("tcp://127.0.0.1")
    for index in range(1_200):  # more than its queue holds
        claim = signed(port=away)
        daemon.announcer.send(claim.claim, Abort(claim, str(index)))


def test_vllms_own_objects_are_understood(daemon: Daemon) -> None:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.request import Request as VllmRequest
    from vllm.v1.request import RequestStatus

    claim = signed(port=daemon.port)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": to_params(claim)})
    request = VllmRequest("cmpl-1-a7f3", list(range(10)), sampling, None)
    daemon.side.consider(request)

    def output(new: list[NewRequestData], cached: CachedRequestData, scheduled: int) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: scheduled},
            total_num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    first = daemon.side.build(output([NewRequestData.from_request(request, ([5, 6],))], CachedRequestData.make_empty(), 8))
    later = CachedRequestData([request.request_id], set(), [], {}, [([7],)], [8], [0])
    second = daemon.side.build(output([], later, 2))
    assert chunks(first, second) == [(0, (5, 6), False), (2, (7,), True)]
    request.append_output_token_ids(FIRST)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    told = {"first_token": FIRST, "prompt_tail": list(range(10)), "prompt_digest": digest(packed(range(10))), "serving": {}}
    assert daemon.side.finished(request) == (True, {CLAIM_KEY: told})
    (final,) = daemon.heard()
    assert isinstance(final, Final)
    assert (final.claim, final.first_token, final.finished, len(final.prompt)) == (claim, FIRST, False, 40)

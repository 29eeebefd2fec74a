"""The queue of steps and the errors of the coordinator, by themselves: no cluster."""

import types

import pytest
import tensorflow as tf

from tfdist.cluster import PeersUnreachable, ServerLost
from tfdist.strategies import _coordinator
from tfdist.strategies._coordinator import Coordinator, Queue, StepClosure


def closure(delivered, **settings):
    """A closure that nobody runs."""
    made = object.__new__(StepClosure)
    made.__dict__.update(
        deliver=lambda results, worker: delivered.append((worker, results)),
        num_steps=1,
        worker=None,
        reads=False,
        attempt=None,
        is_accepted=False,
        tag=None,
    )
    made.__dict__.update(settings)
    return made


@pytest.fixture
def revoked():
    return []


@pytest.fixture
def queue(revoked):
    made = Queue(2, None, lambda *what: revoked.append(what), step_timeout=0.0)
    yield made
    made.stop()


def as_worker(number):
    _coordinator._current.worker = number


def test_result_counts_once_where_a_step_was_given_to_another_worker(queue, revoked):
    delivered = []
    queue.put(closure(delivered))
    first = queue.get(tag=0)
    assert queue.give_hanging_to_others() == [0]
    assert revoked == [(0, first.attempt)]
    again = queue.get(tag=1)
    assert again.attempt != first.attempt
    queue.accept(again, 1, ["result"])
    as_worker(1)
    queue.mark_finished()
    queue.accept(first, 0, ["late result"])  # worker 0 wakes
    as_worker(0)
    queue.mark_finished()
    assert delivered == [(1, ["result"])]
    assert queue.done()


def test_step_that_moves_to_another_worker_is_not_finished(queue):
    outstanding = []
    queue._revoke = lambda *what: outstanding.append(queue.num_outstanding)
    queue.put(closure([]))
    queue.get(tag=0)
    queue.give_hanging_to_others()
    assert outstanding == [1]  # while the attempt is revoked, which takes a moment


def test_step_of_a_dead_worker_is_first_in_line(queue, revoked):
    delivered = []
    for _ in range(3):
        queue.put(closure(delivered))
    lost = queue.get(tag=0)
    as_worker(0)
    queue.put_back(lost)
    assert revoked == [(0, lost.attempt)]
    assert queue.usable_workers() == [1]
    assert queue.get(tag=1).attempt == 3  # a new attempt, before the two that wait
    assert queue.num_outstanding == 3


def test_worker_that_is_done_is_not_taken_for_a_late_one(queue, revoked):
    closures = [closure([], worker=0), closure([], worker=1)]
    for each in closures:
        queue.put(each)
    running = [queue.get(tag=0), queue.get(tag=1)]
    queue.accept(running[0], 0, [])  # has not said yet that it has finished
    queue.drop(closures)
    assert revoked == [(1, running[1].attempt)]
    assert queue.usable_workers() == [0]


def test_chief_gives_up_where_no_worker_is_left(queue):
    queue.put(closure([]))
    for worker in range(2):
        queue.clocks.leave(worker)
    with pytest.raises(PeersUnreachable, match="No worker has answered for 0 s"):
        queue.wait(timeout=0.1)


def test_data_that_has_ended_on_all_workers_leaves_no_step_behind(queue):
    for _ in range(4):
        queue.put(closure([], reads=True))
    for worker in range(2):
        step = queue.get(tag=worker)
        queue.accept(step, worker, None)
        as_worker(worker)
        queue.mark_finished()
    assert queue.is_read_out()
    queue.put(closure([], reads=True))
    assert queue.done()
    queue.start_reading()
    assert queue.usable_workers() == [0, 1]


@pytest.mark.parametrize(
    ("is_colocated", "task", "label"), [(False, "ps", "ps 1"), (True, "worker", "worker 1")]
)
def test_lost_server_is_named(is_colocated, task, label):
    coordinator = object.__new__(Coordinator)
    coordinator._cluster = types.SimpleNamespace(stop=lambda: None)
    extended = types.SimpleNamespace(is_colocated=is_colocated)
    coordinator._strategy = types.SimpleNamespace(extended=extended)
    coordinator._address_of = lambda job, index: f"{job}-{index}.example:2222"
    message = f"GRPC error information from remote target /job:{task}/replica:0/task:1"
    where = rf"{label} \({task}-1.example:2222\)"
    with pytest.raises(ServerLost, match=where), coordinator.translating():
        raise tf.errors.UnavailableError(None, None, message)
    with pytest.raises(tf.errors.InvalidArgumentError), coordinator.translating():
        raise tf.errors.InvalidArgumentError(None, None, "shapes differ")

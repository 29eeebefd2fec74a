"""Which worker runs which step, on the chief: TensorFlow's coordinator with clocks.

TensorFlow's coordinator hands closures to whichever worker asks, and runs one again where a worker
dies. Here a closure's result counts once, a worker waits where it would get too far ahead, a step
may be meant for one worker, and one that hangs is given to another.
"""

import collections
import contextlib
import re
import threading
import time

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.eager import context, executor
from tensorflow.python.framework import ops
from tensorflow.python.util import nest

from tfdist.cluster import PeersUnreachable, ServerLost
from tfdist.staleness import Clocks

_PATIENCE_SECONDS = 0.5  # between looks at the clock


class StepClosure(cluster_coordinator.Closure):
    """Some steps to run on a worker.

    Args:
        function: a concrete function; its first argument holds the number of the attempt and
            ``serial``, int64 [2], and its results are tensors.
        serial: number of the first of the steps.
        args: its other arguments.
        deliver: ``deliver(results, worker)``, called once, with a flat list of numpy arrays.
        num_steps: how many steps it runs.
        worker: the worker that must run it; None for any.
        reads: whether the worker reads its own data for it.
    """

    def __init__(
        self,
        function,
        cancellation_mgr,
        serial,
        args,
        deliver,
        num_steps=1,
        worker=None,
        reads=False,
    ):
        super().__init__(function, cancellation_mgr, args=args)
        self.serial = serial
        self.deliver = deliver
        self.num_steps = num_steps
        self.worker = worker
        self.reads = reads
        self.attempt = None
        self.is_accepted = False  # whether its results were taken over
        self.tag = None

    def copy(self):
        """The same steps, to be tried again."""
        twin = object.__new__(StepClosure)
        twin.__dict__.update(self.__dict__)
        return twin

    def execute_on(self, worker):
        """Runs the steps and brings the results to the chief."""
        args = cluster_coordinator._select_worker_slice(worker.worker_index, self._args)
        error = cluster_coordinator._get_error_from_remote_values(args)
        if error:
            if not isinstance(error, cluster_coordinator.ClosureInputError):
                error = cluster_coordinator.ClosureInputError(error)
            raise error
        queue = worker._cluster.closure_queue
        # Made here, not on the worker: making a constant there holds Python's lock for as long as
        # the worker does not answer.
        with ops.device("/job:chief/replica:0/task:0/device:CPU:0"):
            call = tf.constant([self.attempt, self.serial], tf.int64)
        with (
            ops.device(worker.device_name),
            coordinator_context.with_dispatch_context(worker),
        ):
            args = nest.map_structure(coordinator_context.maybe_get_remote_value, args)
            try:
                outputs = self._function(call, *args)
            except tf.errors.OutOfRangeError:
                results = None  # the data that this worker reads has ended
            else:
                flat = tf.nest.flatten(outputs, expand_composites=True)
                results = [tensor.numpy() for tensor in flat]
        queue.accept(self, worker.worker_index, results)

    def mark_cancelled(self):
        """Nothing waits for the result alone."""


class Queue(cluster_coordinator._CoordinatedClosureQueue):
    """Closures that wait for a worker, and those that are run.

    Args:
        num_workers: how many workers there are.
        bound: see :class:`tfdist.staleness.Stale`.
        revoke: ``revoke(worker, attempt)`` makes what an attempt pushes from now on void.
        step_timeout: seconds after which a closure is given to another worker.
    """

    def __init__(self, num_workers, bound, revoke, step_timeout):
        super().__init__()
        self.clocks = Clocks(num_workers, bound)
        self.step_timeout = step_timeout
        self.log = None  # a list gets (worker, steps finished, steps of the slowest) at each start
        self._revoke = revoke
        self._ready = collections.deque()
        self._own = [collections.deque() for _ in range(num_workers)]
        self._running = {}  # worker -> (closure, when it began)
        self.busy_seconds = [0.0] * num_workers  # that its accepted closures took
        self._abandoned = set()  # workers whose closure was given to others
        self._read_out = set()  # workers whose own data has ended
        self._num_moving = 0  # closures on their way from a worker that hangs to another one
        self._num_attempts = 0
        self._none_live_since = None

    # ------------------------------------------------------------------- the chief's side

    @property
    def num_outstanding(self):
        """Closures that are neither finished nor cancelled."""
        with self._queue_lock:
            return self._num_outstanding()

    def _num_outstanding(self):
        waiting = len(self._ready) + sum(map(len, self._own))
        return waiting + self._num_moving + self._inflight_closure_count

    def put(self, closure, tag=None):
        """Queues a closure; raises the error of one that failed, if any has."""
        if tag is not None:
            super().put(closure, tag)
            return
        with self._put_wait_lock, self._queue_lock:
            self._raise_if_error()
            if not (closure.reads and self._all_have_read()):
                self._enqueue(closure)

    def _enqueue(self, closure):
        closure.attempt = self._num_attempts
        self._num_attempts += 1
        line = self._ready if closure.worker is None else self._own[closure.worker]
        line.append(closure)
        self._closures_queued_condition.notify_all()

    def wait_until(self, is_done, timeout=None):
        """Waits until ``is_done()``, which is called with the lock held, or a closure failed.

        Raises:
            PeersUnreachable: no worker has been alive for ``timeout`` seconds.
        """
        with self._put_wait_lock, self._queue_lock:
            while not self._error and not is_done():
                self._stop_waiting_condition.wait(_PATIENCE_SECONDS)
                self._raise_if_alone(timeout)
            self._raise_if_error()

    def wait(self, timeout=None):
        self.wait_until(lambda: self._num_outstanding() == 0, timeout)
        return True

    def done(self):
        with self._queue_lock:
            self._raise_if_error()
            return self._num_outstanding() == 0

    def drop(self, closures):
        """Forgets closures, and makes void what those that are run will push."""
        revoked = []
        with self._queue_lock:
            for closure in closures:
                for line in (self._ready, *self._own):
                    with contextlib.suppress(ValueError):
                        line.remove(closure)
            for worker, (closure, _) in list(self._running.items()):
                is_running = closure in closures and not closure.is_accepted
                if is_running and worker not in self._abandoned:
                    self._abandon(worker)
                    revoked.append((worker, closure.attempt))
            self._stop_waiting_condition.notify_all()
        for worker, attempt in revoked:
            self._revoke(worker, attempt)

    def reset_clocks(self):
        with self._queue_lock:
            self.clocks.reset()
            self._closures_queued_condition.notify_all()

    def usable(self):
        """The numbers of the workers that live and don't hang; the lock is held."""
        return sorted(self.clocks.live - self._abandoned)

    def usable_workers(self):
        """The numbers of the workers that live and don't hang."""
        with self._queue_lock:
            return self.usable()

    # Where workers read their own data:

    def start_reading(self):
        """All workers have data again."""
        with self._queue_lock:
            for worker in self._read_out:
                self.clocks.join(worker)
            self._read_out.clear()

    def is_read_out(self):
        """Whether no live worker has data left."""
        with self._queue_lock:
            return self._all_have_read()

    def _all_have_read(self):
        return bool(self._read_out) and self._read_out >= self.clocks.live

    def note_read_out(self, worker):
        """A worker's data has ended; the lock is held."""
        self._read_out.add(worker)
        self.clocks.leave(worker)
        if self._all_have_read():
            self._ready.clear()

    def _raise_if_alone(self, timeout):
        if self.clocks.live - self._abandoned or timeout is None:
            self._none_live_since = None
            return
        now = time.monotonic()
        self._none_live_since = self._none_live_since or now
        if now - self._none_live_since > timeout:
            raise PeersUnreachable(
                f"No worker has answered for {timeout:.0f} s; all of them died or hang. Start them "
                "again at their addresses, or the whole job.",
                [f"worker {i}" for i in range(len(self._own))],
            )

    # ----------------------------------------------------------------- the workers' side

    def get(self, timeout=None, tag=None):
        worker = tag
        with self._queue_lock:
            if worker not in self._read_out:
                self.clocks.join(worker)
            while True:
                if not self._should_process_closures:
                    return None
                if not self._tagged_queue[worker].empty():
                    return self._tagged_queue[worker].get(block=False)
                closure = self._next(worker)
                if closure is not None:
                    break
                if not self._closures_queued_condition.wait(timeout=timeout):
                    return None
            self.inflight_closure_count += 1
            self._running[worker] = (closure, time.monotonic())
            if self.log is not None:
                slowest = min(self.clocks.finished(w) for w in self.clocks.live)
                self.log.append((worker, self.clocks.finished(worker), slowest))
            return closure

    def _next(self, worker):
        if self._own[worker]:
            return self._own[worker].popleft()
        if self._ready and self._ready[0].reads and worker in self._read_out:
            return None
        if self._ready and self.clocks.may_start(worker, self._ready[0].num_steps):
            return self._ready.popleft()
        return None

    def accept(self, closure, worker, results):
        """Takes over a closure's results, unless it was given to another worker."""
        with self._queue_lock:
            if worker in self._abandoned:
                return
            if results is None:
                self.note_read_out(worker)
                return
            self.clocks.finish(worker, closure.num_steps)
            _, began = self._running[worker]
            self.busy_seconds[worker] += time.monotonic() - began
            closure.is_accepted = True
            closure.deliver(results, worker)
            self._stop_waiting_condition.notify_all()

    def mark_finished(self):
        self._end_of(_this_worker())

    def put_back(self, closure):
        worker = _this_worker()
        self._revoke_quietly(worker, closure.attempt)
        with self._queue_lock:
            self.clocks.leave(worker)
            if worker not in self._abandoned and not self._error:
                self._enqueue_again(closure)
        self._end_of(worker)

    def mark_failed(self, e):
        with self._queue_lock:
            if _this_worker() not in self._abandoned and self._error is None:
                self._error = e
        self._end_of(_this_worker())

    def _end_of(self, worker):
        with self._queue_lock:
            self._running.pop(worker, None)
            if worker in self._abandoned:
                self._abandoned.discard(worker)  # it was taken off the count already
            else:
                self.inflight_closure_count -= 1
            if self._inflight_closure_count == 0:
                self._no_inflight_closure_condition.notify_all()
            self._stop_waiting_condition.notify_all()
            self._closures_queued_condition.notify_all()

    def _enqueue_again(self, closure):
        twin = closure.copy()
        twin.attempt = self._num_attempts
        self._num_attempts += 1
        line = self._ready if twin.worker is None else self._own[twin.worker]
        line.appendleft(twin)
        self._closures_queued_condition.notify_all()

    def _abandon(self, worker):
        self._abandoned.add(worker)
        self.clocks.leave(worker)
        self.inflight_closure_count -= 1
        if self._inflight_closure_count == 0:
            self._no_inflight_closure_condition.notify_all()
        self._stop_waiting_condition.notify_all()
        self._closures_queued_condition.notify_all()

    def _revoke_quietly(self, worker, attempt):
        # Where the server is gone, nothing can be pushed either.
        with contextlib.suppress(tf.errors.OpError):
            self._revoke(worker, attempt)

    # ---------------------------------------------------------------------- hanging steps

    def give_hanging_to_others(self):
        """Gives closures that have run for too long to other workers; returns these workers."""
        now = time.monotonic()
        with self._queue_lock:
            late = [
                (worker, closure)
                for worker, (closure, began) in self._running.items()
                if now - began > self.step_timeout and worker not in self._abandoned
            ]
            self._num_moving += len(late)
            for worker, _ in late:
                self._abandon(worker)
        for worker, closure in late:
            self._revoke_quietly(worker, closure.attempt)  # before another one may begin
            with self._queue_lock:
                self._num_moving -= 1
                if not self._error:
                    self._enqueue_again(closure)
        return [worker for worker, _ in late]

    def _cancel_all_closures(self):
        for line in (self._ready, *self._own):
            line.clear()
        super()._cancel_all_closures()


def _leave_default_executor():
    """Gives this thread an executor of its own, for as long as the result is kept.

    What is dropped of results on a worker waits for the worker's answer in the executor that all
    threads have by default; and whoever uses that one, to read a dataset for instance, waits for
    all that is in it. So a worker that hangs would hold up the chief and, through it, everybody.
    """
    own = executor.new_executor(enable_async=False)
    context.context().executor = own
    return own


_current = threading.local()


def _this_worker():
    return _current.worker


class _Worker(cluster_coordinator.Worker):
    def _process_queue(self):
        _current.worker = self.worker_index
        context.context().executor = self.executor  # see _leave_default_executor
        super()._process_queue()

    def _on_closure_failure(self, closure, e):
        self._cluster.on_worker_lost(self.worker_index)
        super()._on_closure_failure(closure, e)


class _NoRecovery(cluster_coordinator.WorkerPreemptionHandler):
    """Where workers hold the parameters, one that dies takes its part along."""

    def _validate_preemption_failure(self, e):
        raise e


class _Cluster(cluster_coordinator.Cluster):
    """TensorFlow's, with our queue and workers."""

    def __init__(self, strategy, queue, on_worker_lost):
        self._queue = queue
        self._is_colocated = strategy.extended.is_colocated
        self.on_worker_lost = on_worker_lost
        super().__init__(strategy)

    @property
    def closure_queue(self):
        return self._queue

    @closure_queue.setter
    def closure_queue(self, stock):
        stock.stop()

    @property
    def failure_handler(self):
        return self._failure_handler

    @failure_handler.setter
    def failure_handler(self, stock):
        if self._is_colocated:
            stock.__class__ = _NoRecovery
        self._failure_handler = stock


class Coordinator(cluster_coordinator.ClusterCoordinator):
    """Schedules steps on the workers of a ``ParameterServerStrategy``.

    Args:
        strategy: the strategy.
        bound: see :class:`tfdist.staleness.Stale`.
        revoke: see :class:`Queue`.
        step_timeout: seconds after which a closure is given to another worker.
        patience: seconds after which the chief gives up where no worker is alive.
        address_of: ``address_of(job, index)``, for messages.
    """

    def __new__(cls, strategy, **_):
        return object.__new__(cls)

    def __init__(self, strategy, *, bound, revoke, step_timeout, patience, address_of):
        self._strategy = strategy
        self._patience = patience
        self._address_of = address_of
        strategy.extended._used_with_coordinator = True
        self.lost_workers = []  # the workers that died or hung, in order
        self.queue = Queue(strategy._num_workers, bound, revoke, step_timeout)
        self._cluster = _made_of(_Worker, strategy, self.queue, self._on_worker_lost)
        self._has_initialized = True
        self._is_joining = threading.Lock()
        self._executor = _leave_default_executor()
        threading.Thread(target=self._watch, name="tfdist step limits", daemon=True).start()

    def submit(
        self, function, serial, args, deliver, *, num_steps=1, worker=None, reads=False, most=None
    ):
        """Queues steps for a worker.

        Args:
            function, serial: see :class:`StepClosure`.
            most: waits until fewer than so many closures are outstanding.

        Raises:
            ServerLost: a server is gone.
        """
        with self.translating():
            if most is not None:
                queue = self.queue
                queue.wait_until(lambda: queue._num_outstanding() < most, self._patience)
            closure = StepClosure(
                function,
                self.queue._cancellation_mgr,
                serial,
                args,
                deliver,
                num_steps,
                worker,
                reads,
            )
            self.queue.put(closure)
            return closure

    def wait_until(self, is_done):
        """Waits until ``is_done()``."""
        with self.translating():
            self.queue.wait_until(is_done, self._patience)

    def join(self):
        """Waits until all that was submitted is finished."""
        with self.translating():
            self.queue.wait(self._patience)

    def _on_worker_lost(self, worker):
        self.lost_workers.append(worker)

    def _watch(self):
        pause = min(5.0, self.queue.step_timeout / 4)
        while True:
            time.sleep(pause)
            for worker in self.queue.give_hanging_to_others():
                self._on_worker_lost(worker)
                print(
                    f"tfdist: worker {worker} ({self._address_of('worker', worker)}) has not ended "
                    f"its step within {self.queue.step_timeout:.0f} s; the step goes to another "
                    "worker.",
                    flush=True,
                )

    @contextlib.contextmanager
    def translating(self):
        """Context that turns the error of a server that is gone into :class:`ServerLost`."""
        try:
            yield
        except tf.errors.OpError as error:
            lost = self._lost_server(error)
            if lost is None:
                raise
            raise ServerLost(
                f"{lost} ({self._address_of(*_split_label(lost))}), which holds parameters, is "
                "gone: the training can't go on. Start the job again; with a callback that saves "
                "(keras.callbacks.BackupAndRestore, for instance) it goes on from there."
            ) from error

    def _lost_server(self, error):
        if not isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
            is_restart = isinstance(error, tf.errors.InvalidArgumentError) and (
                "unknown device" in str(error).lower() or "relevant tensor" in str(error)
            )
            if not is_restart:
                return None
        job = "worker" if self._strategy.extended.is_colocated else "ps"
        found = re.search(rf"/job:{job}/replica:0/task:(\d+)", str(error))
        return f"{job} {found.group(1)}" if found else None


def _split_label(label):
    job, index = label.split()
    return job, int(index)


def _made_of(worker_class, strategy, queue, on_worker_lost):
    """A :class:`_Cluster` whose workers are of ``worker_class``, from their first moment."""
    stock = cluster_coordinator.Worker
    cluster_coordinator.Worker = worker_class
    try:
        return _Cluster(strategy, queue, on_worker_lost)
    finally:
        cluster_coordinator.Worker = stock

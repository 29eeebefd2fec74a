"""How the workers get on: their speed, their memory, and which of them holds up the others."""

import contextlib
import statistics
import sys
import time

import keras
import tensorflow as tf

from tfdist.staleness import histogram


class WorkerMonitor(keras.callbacks.Callback):
    """Adds what the workers did to the logs of each epoch, under every strategy and without one.

    ================================  =============================================================
    ``examples_per_second``           rows of the global batches, by the count of the loss metric;
                                      absent where a ``train_step`` of one's own updates none
    ``step_seconds``                  mean time of a step, with all that is between steps;
                                      validation is not in it
    ``memory_megabytes``              resident memory of the process (10^6 bytes) at the end of the
                                      epoch, the largest of all workers. Where the system does not
                                      tell that (it is not Linux), the most it ever was
    ``device_memory_megabytes``       the most that TensorFlow ever had on one GPU, the largest of
                                      all; absent without GPUs
    ================================  =============================================================

    With several workers, also, as lists by worker:

    ================================  =============================================================
    ``busy_seconds_by_worker``        mean time of a step in which the worker did not wait for
                                      others: what is not between its last gradient and the last
                                      sum; under a ``ParameterServerStrategy``, from the moment at
                                      which it gets a step. Absent where that can't be measured:
                                      eager steps, gradients that are all sparse
    ``memory_megabytes_by_worker``    as above (not under a ``ParameterServerStrategy``)
    ``straggler``                     int, the number of the worker that takes longer per step than
                                      ``straggler_ratio`` times the median of the others; -1 if
                                      there is none. The chief prints its name when it is the
                                      same one in two epochs in a row
    ================================  =============================================================

    And under a ``ParameterServerStrategy``:

    ================================  =============================================================
    ``staleness_mean``                of the gradients applied in the epoch: how many others were
                                      applied between reading the weights and applying it; and the
    ``staleness_max``                 largest of it
    ``staleness_histogram``           list of int: how many gradients had staleness 0, 1, 2, ...
    ``steps_by_worker``               list of int: the steps that each worker has finished
    ``lost_workers``                  list of int: the workers that died, or hung
    ================================  =============================================================

    Under a ``ParameterServerStrategy`` the memory is the chief's. Where workers ask one another at
    each step whether there is data left (input of unknown length), a worker that waits there for
    one with slow input counts as busy.

    ``History`` keeps all of them. Put the callback before ``CSVLogger``, after
    ``TensorBoard`` (which knows no lists), and before callbacks that call ``evaluate``.

    Args:
        log_dir: folder to which a histogram of the staleness is written for TensorBoard; None for
            none.
        straggler_ratio: float above 1.

    Raises:
        ValueError: ``straggler_ratio`` is something else.
    """

    def __init__(self, log_dir=None, *, straggler_ratio=1.5):
        super().__init__()
        is_number = isinstance(straggler_ratio, int | float)
        if not is_number or not straggler_ratio > 1:
            raise ValueError(
                f"WorkerMonitor: straggler_ratio must be above 1, got {straggler_ratio!r}."
            )
        self._log_dir = log_dir
        self._ratio = straggler_ratio
        self._writer = None
        self._training = None  # how the steps of this epoch went, once they are over
        self._straggler = -1  # of the epoch before

    def set_model(self, model):
        super().set_model(model)
        watch = getattr(model.distribute_strategy, "watch_communication", None)
        is_watched = getattr(model.distribute_strategy.extended, "is_watched", True)
        if self._board() is not None and watch is not None and not is_watched:
            watch()
            model.train_function = None  # one traced before keeps no statistics

    def on_epoch_begin(self, epoch, logs=None):
        servers = self._servers()
        if servers is not None:
            servers.read_staleness()
            self._steps = list(servers.steps_by_worker)
            self._busy = list(servers.coordinator.queue.busy_seconds)
            self._num_lost = len(servers.coordinator.lost_workers)
        self._exchange = self._read_exchange()
        self._num_steps = 0
        self._training = None
        self._began = self._ended = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        # The last execution of an epoch may have fewer steps than its number says.
        self._num_steps = min(batch + 1, self.params.get("steps") or batch + 1)
        self._ended = time.perf_counter()

    def on_test_begin(self, logs=None):
        # Validation counts its rows where training does, and keeps the workers busy, too.
        if self._training is None and getattr(self, "_num_steps", 0):
            self._training = self._read_training()

    def on_epoch_end(self, epoch, logs=None):
        training = self._training or self._read_training()
        self._num_steps = 0
        if logs is None or not training["steps"]:
            return
        logs["step_seconds"] = training["seconds"] / training["steps"]
        if training["rows"]:
            logs["examples_per_second"] = training["rows"] / training["seconds"]
        self._log_memory(logs)
        self._log_busy(logs, training)
        if self._servers() is not None:
            self._log_servers(epoch, logs)

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # ------------------------------------------------------------------------- what is read

    def _read_training(self):
        servers = self._servers()
        if servers is not None:
            servers.join()
            self._ended = time.perf_counter()
        read = {
            "steps": self._num_steps,
            "seconds": self._ended - self._began,
            "rows": _rows_of(self.model),
            "busy": None,
        }
        if servers is not None:
            steps = _differences(self._steps, servers.steps_by_worker)
            busy = _differences(self._busy, servers.coordinator.queue.busy_seconds)
            pairs = zip(busy, steps, strict=True)
            read["busy"] = [seconds / count if count else None for seconds, count in pairs]
            return read
        before, now = self._exchange, self._read_exchange()
        if now is not None:
            seconds, count = before or (0.0, 0.0)
            seconds, count = now[0] - seconds, now[1] - count
            if count:
                read["busy"] = (read["seconds"] - seconds) / self._num_steps
        return read

    def _read_exchange(self):
        """Seconds in exchanges and their number, since the training began; or None."""
        if self._board() is None:
            return None
        optimizer = getattr(self.model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        exchange = getattr(optimizer, "gradient_exchange", None)
        return None if exchange is None else exchange.read_times()

    # ----------------------------------------------------------------------- what is logged

    def _log_memory(self, logs):
        mine = {"memory": _resident_bytes() / 1e6, "device": _device_bytes()}
        board = self._board()
        everyone = [mine] if board is None else board.gather("worker memory", mine)
        logs["memory_megabytes"] = max(theirs["memory"] for theirs in everyone)
        devices = [theirs["device"] for theirs in everyone if theirs["device"] is not None]
        if devices:
            logs["device_memory_megabytes"] = max(devices) / 1e6
        if board is not None:
            logs["memory_megabytes_by_worker"] = [theirs["memory"] for theirs in everyone]

    def _log_busy(self, logs, training):
        board, busy = self._board(), training["busy"]
        if board is not None:
            busy = board.gather("worker busy", busy)
        if busy is None or all(seconds is None for seconds in busy) or len(busy) < 2:
            return
        busy = [float("nan") if seconds is None else seconds for seconds in busy]
        logs["busy_seconds_by_worker"] = busy
        logs["straggler"], times = straggler(busy, self._ratio)
        last, self._straggler = self._straggler, logs["straggler"]
        if last == self._straggler >= 0 and (board is None or board.rank == 0):
            number = self._straggler
            label = f"worker {number}" if board is None else board.labels[number]
            print(
                f"tfdist: {label} is slow: {busy[number]:.3g} s of work in a step, {times:.1f} "
                "times the median of the others.",
                flush=True,
            )

    def _log_servers(self, epoch, logs):
        servers = self._servers()
        staleness = servers.read_staleness()
        if staleness:
            logs["staleness_mean"] = sum(staleness) / len(staleness)
            logs["staleness_max"] = float(max(staleness))
        logs["staleness_histogram"] = histogram(staleness)
        logs["steps_by_worker"] = _differences(self._steps, servers.steps_by_worker)
        logs["lost_workers"] = servers.coordinator.lost_workers[self._num_lost :]
        if self._log_dir is not None and staleness:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(str(self._log_dir))
            with self._writer.as_default():
                tf.summary.histogram("staleness", staleness, step=epoch)
            self._writer.flush()

    def _servers(self):
        """The strategy, if it is one with parameter servers."""
        strategy = self.model.distribute_strategy
        return strategy if hasattr(strategy, "read_staleness") else None

    def _board(self):
        return getattr(self.model.distribute_strategy, "board", None)


def straggler(busy_seconds, ratio):
    """The worker that takes much longer for a step than the others.

    Args:
        busy_seconds: list of float, of each worker; NaN where it is not known (a worker that has
            finished no step).
        ratio: how many times the median of the others it must take.

    Returns:
        ``(number, times)``: -1 if there is none; how many times the others' median it takes.
    """
    known = {n: seconds for n, seconds in enumerate(busy_seconds) if seconds == seconds}
    if len(known) < 2:
        return -1, 1.0
    number = max(known, key=known.get)
    slowest = known.pop(number)
    median = statistics.median(known.values())
    if slowest <= ratio * median:
        return -1, 1.0
    return number, slowest / median if median else float("inf")


def _differences(before, after):
    return [b - a for a, b in zip(before, after, strict=True)]


def _rows_of(model):
    """The rows that the metric of the loss has counted since it was reset; 0 if there is none."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return float(keras.ops.convert_to_numpy(metric.count))
    return 0.0


def _resident_bytes():
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _device_bytes():
    """The most that was in use on one GPU of this process; None without any."""
    peaks = []
    for number in range(len(tf.config.list_physical_devices("GPU"))):
        with contextlib.suppress(ValueError):  # one that TensorFlow was told not to use
            peaks.append(tf.config.experimental.get_memory_info(f"GPU:{number}")["peak"])
    return max(peaks, default=None)

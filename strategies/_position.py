"""Where the input of a ``fit`` is, and how another ``fit`` gets there.

The position is counted in passes (iterators that Keras has made) and in batches of the current one.
Who goes on skips as many batches of an iterator that yields the same ones: arrays and PyDatasets
are shuffled by a seed that is part of the position; a dataset with ``shuffle(seed=...)`` draws
another order in each pass, so that passes are gone through, too, without reading them.
"""

import contextlib
import random
import threading

import tensorflow as tf

_thread = threading.local()


class Position:
    """The position of the input of one ``fit``.

    Attributes:
        seed: int, of the orders in which arrays and PyDatasets are read.
        passes: int, the iterators made so far, in this process or before.
        batch_size: rows of a global batch, None where that is unknown.
        steps_per_execution: int.
        is_reproducible: False where another process would read the rows in another order.
        logs: dict, those of the last batch before this process; for an epoch that ended there.
    """

    def __init__(self):
        self.seed = random.randrange(2**31)
        self.passes = 0
        self.batch_size = None
        self.is_reproducible = True
        self.logs = None
        self._epoch_iterator = None
        self._source = None
        self._order = None
        self._py_dataset = None
        self._has_orders = False  # whether the dataset draws another order in each pass
        self._pending = None  # (passes, batches of the last one, steps of this epoch)

    # ------------------------------------------------------------------------ in Keras' fit

    @contextlib.contextmanager
    def of_next_input(self):
        """The next input that Keras makes in this context and thread is that of the fit."""
        _thread.position = self
        try:
            yield
        finally:
            _thread.position = None

    def bind(self, epoch_iterator, source, dataset=None, order=None, py_dataset=None):
        """Is told what the input is.

        Args:
            epoch_iterator: Keras' iterator over an epoch's steps.
            source: what is iterated over, which has ``before_epoch``.
            dataset: the ``tf.data.Dataset`` behind it, or None.
            order: an int64 variable [2] that decides on the order of arrays: seed, pass.
            py_dataset: a shuffled PyDataset, with ``seed`` and ``number``.
        """
        self._epoch_iterator = epoch_iterator
        self._source = source
        self._order, self._py_dataset = order, py_dataset
        if order is None and py_dataset is None and isinstance(dataset, tf.data.Dataset):
            seeds = list(_seeds_of_shuffles(dataset))
            self._has_orders = bool(seeds)
            self.is_reproducible = (0, 0) not in seeds
        source.before_epoch = self._before_pass

    def _before_pass(self):
        if self._order is not None:
            self._order.assign([self.seed, self.passes])
        self.passes += 1

    @property
    def steps_per_execution(self):
        return int(self._epoch_iterator.steps_per_execution)

    @property
    def num_batches(self):
        """The steps of an epoch, None while that is unknown."""
        return self._epoch_iterator.num_batches

    # --------------------------------------------------------------------------- for a file

    def get(self):
        """The position now, between two executions: a dict that can be written as JSON."""
        if self._pending is not None:
            passes, batches, _ = self._pending
        else:
            passes, batches = self.passes, self._epoch_iterator._steps_seen
            # The last execution of an epoch may have had fewer steps than it could.
            batches = min(batches, self._epoch_iterator._num_batches or batches)
        number = None if self._py_dataset is None else self._py_dataset.number
        return {"seed": self.seed, "passes": passes, "batches": batches, "py_dataset": number}

    def set(self, saved, steps, logs):
        """Lets the next epoch start where another ``fit`` was.

        Args:
            saved: what :meth:`get` returned there.
            steps: the steps of the epoch that were trained, 0 at its start.
            logs: dict, those of the last of them.

        Raises:
            ValueError: ``steps`` does not fit ``steps_per_execution``.
        """
        each = self.steps_per_execution
        if steps % each and steps != self.num_batches:
            raise ValueError(
                f"The checkpoint was saved after step {steps} of an epoch, which is not a multiple "
                f"of steps_per_execution={each}. Resume with one that divides {steps}, for "
                "instance 1."
            )
        self.seed = saved["seed"]
        if self._py_dataset is not None:
            self._py_dataset.seed = self.seed
            if saved["py_dataset"] is not None:
                self._py_dataset.number = saved["py_dataset"]
            self._py_dataset.reorder()
        continues = steps > 0 or self._epoch_iterator.steps_per_epoch
        self._pending = saved["passes"], saved["batches"] if continues else 0, steps
        self.logs = logs if steps else None

    @property
    def is_pending(self):
        """Whether the next epoch starts at a position that was set."""
        return self._pending is not None

    def resume(self, steps):
        """The steps of the first epoch: those that remain.

        Args:
            steps: Keras' generator of ``(first step, last step, iterator)``.
        """
        passes, batches, steps_done = self._pending
        self._pending = None
        epoch_iterator = self._epoch_iterator
        ahead = passes - 1 if batches else passes
        if self._has_orders:
            while self.passes < ahead:
                iter(self._source)
        self.passes = ahead
        if batches:
            iterator = iter(self._source)
            self._skip(iterator, batches)
            if epoch_iterator.steps_per_epoch:
                epoch_iterator._current_iterator = iterator
                epoch_iterator._steps_seen = batches - steps_done
            else:
                _hand_over(epoch_iterator, iterator)
        for _ in range(-(-steps_done // self.steps_per_execution)):
            next(steps, None)
        for step in steps:
            yield step
            # It has logs of its own. (Where the data has ended, Keras does not come back.)
            self.logs = None

    def _skip(self, iterator, batches):
        done = 0
        try:
            while done < batches:
                iterator.skip() if hasattr(iterator, "skip") else next(iterator)
                done += 1
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            # An execution in which data of unknown length has ended counts in full.
            if done <= batches - self.steps_per_execution:
                raise ValueError(
                    f"The checkpoint was saved after {batches} batches of the input, but the input "
                    f"has {done} now. Resume with the same data and batch size."
                ) from error


class Source:
    """What Keras iterates over where no strategy of tfdist is: a dataset that says so first."""

    def __init__(self, dataset):
        self._dataset = dataset
        self.before_epoch = None

    @property
    def element_spec(self):
        """The nest of ``tf.TypeSpec`` of a batch."""
        return self._dataset.element_spec

    def __iter__(self):
        self.before_epoch()
        return iter(self._dataset)


def take_position():
    """The :class:`Position` that the input that is being made belongs to, once; else None."""
    position, _thread.position = getattr(_thread, "position", None), None
    return position


def _hand_over(epoch_iterator, iterator):
    """Keras asks once more for an iterator at the start of the epoch: it gets this one."""

    class Made:
        def __iter__(self):
            del epoch_iterator._get_iterator  # the method is there again
            return iterator

    epoch_iterator._get_iterator = Made


def _seeds_of_shuffles(dataset):
    pending = [dataset]
    while pending:
        node = pending.pop()
        pending.extend(node._inputs())
        if type(node).__name__ == "_ShuffleDataset":
            yield int(node._seed), int(node._seed2)

"""What a worker of a parameter-server strategy does in one step, while it is traced.

Pull: a variable is read from its server at most once in a step (rows of a sparse one, as often as
they are looked up), in the dtype that the strategy pulls in. Push: gradients go to the variables'
servers, compressed if so asked, and are applied there, unless the chief has given the step to
another worker in the meantime.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import gen_resource_variable_ops

from tfdist.strategies._step import Step


class WorkerStep(Step):
    """One replica's view of one step on a worker.

    Args:
        strategy: the strategy.
        rows: scalar integer tensor, this replica's rows.
        total_rows: scalar integer tensor, the rows by whose number losses are weighted.
        transport: the strategy's :class:`~tfdist.strategies._transport.Transport`.
        attempt: scalar int64, the number of this attempt to run these steps.
        serial: scalar int64, the number of the step, for seeds.
    """

    def __init__(self, strategy, rows, total_rows, transport, attempt, serial):
        super().__init__(strategy, rows, total_rows)
        self.graph = ops.get_default_graph()
        # Steps of one function must not share copies: nothing would order what they do with them.
        self.name = self.graph.unique_name("tfdist_step")
        self.transport = transport
        self.attempt = attempt
        self.serial = serial
        # Asked for here: inside of a branch, the coordinator would not fill it in.
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        self.worker = tf.cast(index, tf.int32)
        replica = tf.distribute.get_replica_context()
        self.replica = replica._replica_id if replica is not None else 0
        self.is_first_replica = self.replica == 0
        self.deferred = []  # (optimizer, gradients, variables) that the servers apply later
        self.is_deferring = False
        self.is_first_part = True  # of the batch
        self.is_pushing = False
        self.version = None  # of the weights, when the step began
        self.gradients_are_there = None  # an operation that comes after the last of a push
        self.num_pushes = 0
        self.staleness = None  # of the last push
        self.staleness_now = None  # inside of a push
        self._pulled, self._written = {}, set()
        self._copies = {}
        if strategy.num_replicas_in_sync == 1:
            self.has_rows = tf.constant(True)  # a step without rows is never scheduled
            if rows is total_rows:
                self.share = tf.constant(1.0)

    # -------------------------------------------------------------------------------- pull

    def pulled(self, variable):
        """The value of a ``ServerVariable`` that this step works with."""
        if id(variable) in self._written:
            return self.transport.pull(variable, self)
        if id(variable) not in self._pulled:
            self._pulled[id(variable)] = self.transport.pull(variable, self)
        return self._pulled[id(variable)]

    def where_to_read(self, variable):
        """Context in which a variable is read: that of the step, also in a branch or a loop.

        So that it travels once, and gradients find it. What this step has written is read anew.
        """
        is_written = id(variable) in self._written
        return contextlib.nullcontext() if is_written else _outermost(self.graph)

    def forget(self, variable):
        """Notes that the step has written the variable."""
        self._written.add(id(variable))

    # ------------------------------------------------------------------------------ copies

    def copy_of(self, variable):
        """This step's :class:`Copy` of a variable, made on first use."""
        if id(variable) not in self._copies:
            # Also where the first use is in a branch of a tf.cond.
            with _outermost(self.graph), record.stop_recording():
                copy = Copy(variable, f"{self.name}/{variable._unique_id}")
                copy.first = tf.identity(variable.initial_in_step(self))
                copy.assign(copy.first)
                copy.is_written = False
            self._copies[id(variable)] = copy
        return self._copies[id(variable)]

    def all_rows(self):
        """The rows of all replicas of this worker, a float."""
        (rows,) = self.sum([self.rows])
        return rows

    def copies(self, kind):
        """The copies of variables of a class that this step has made, in order."""
        return [copy for copy in self._copies.values() if isinstance(copy.of, kind)]


@contextlib.contextmanager
def _outermost(graph):
    if ops.get_default_graph() is graph or not isinstance(graph, func_graph.FuncGraph):
        yield
        return
    with graph.as_default():
        yield


class Copy:
    """A variable on the worker that lives as long as the worker does, and is set by each step."""

    def __init__(self, variable, name):
        self.of = variable
        self.first = None
        self.is_written = False
        self._dtype, self._shape = variable.dtype, variable.shape
        self._handle = gen_resource_variable_ops.var_handle_op(
            dtype=variable.dtype, shape=variable.shape, shared_name=name
        )

    def read(self):
        value = gen_resource_variable_ops.read_variable_op(self._handle, self._dtype)
        value.set_shape(self._shape)
        return value

    def assign(self, value):
        self.is_written = True
        value = tf.cast(tf.convert_to_tensor(value), self._dtype)
        return gen_resource_variable_ops.assign_variable_op(self._handle, value)

    def assign_add(self, value):
        return self.assign(self.read() + tf.cast(value, self._dtype))

    def assign_sub(self, value):
        return self.assign(self.read() - tf.cast(value, self._dtype))

"""The order in which a stage takes up its micro-batches.

TensorFlow starts what is ready, in any order. Forward passes that overtake one another make the
next stage wait for the one that it needs first. So control edges keep the order of the schedule.
"""

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from tfdist.schedules import Task, schedule

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class Order:
    """What must have ended before a stage may begin with a task.

    A forward pass waits for what the schedule puts before it. So does a backward pass, where
    :meth:`close` finds that it can be made to.

    Args:
        name: of the schedule, see :func:`tfdist.schedules.schedule`.
        num_stages: int.
        num_micro_batches: int.
    """

    def __init__(self, name, num_stages, num_micro_batches):
        self._tasks = schedule(name, num_stages, num_micro_batches)
        self._ends = {}  # operations with which a task ends, by (stage, task)
        self._begins = {}  # and begins; of backward passes alone
        self._backward_ops = []

    def before_forward(self, stage, micro_batch):
        """The operations that the forward pass of a micro-batch waits for."""
        tasks = self._tasks[stage]
        earlier = tasks[: tasks.index(Task(True, micro_batch))]
        # The last of each kind waits for those before it.
        last = {task.is_forward: task for task in earlier}
        return [op for task in last.values() for op in self._ends.get((stage, task), ())]

    def note_forward(self, stage, micro_batch, results):
        """Notes (part of) a forward pass."""
        self._note(self._ends, stage, Task(True, micro_batch), results)

    def note_backward(self, stage, micro_batch, given, found):
        """Notes (part of) a backward pass: the gradients that it begins and ends with."""
        self._note(self._begins, stage, Task(False, micro_batch), given)
        self._note(self._ends, stage, Task(False, micro_batch), found)

    def _note(self, where, stage, task, nest):
        if tf.executing_eagerly():
            return
        tensors = [t for t in tf.nest.flatten(nest, expand_composites=True) if tf.is_tensor(t)]
        if where is self._begins:
            where.setdefault((stage, task), []).extend(tensor.op for tensor in tensors)
        elif tensors:
            where.setdefault((stage, task), []).append(tf.group(*tensors))

    def note_operations(self, backward):
        """Notes all operations that backward passes have made."""
        self._backward_ops += backward

    def close(self, made):
        """Makes backward passes wait for the forward passes that the schedule puts before them.

        Those are made after them, so nothing may wait the other way round: TensorFlow runs what
        has side effects in the order in which it is made. If backward passes hold anything of the
        kind (a collective, a ``tf.print``), they stay as they are.

        Args:
            made: list of all operations made since the first forward pass.
        """
        if not _may_wait_for_later_ones(self._backward_ops, made):
            return
        for stage, tasks in enumerate(self._tasks):
            for before, task in zip(tasks, tasks[1:], strict=False):
                if before.is_forward and not task.is_forward:
                    for op in self._begins.get((stage, task), ()):
                        op._add_control_inputs(self._ends.get((stage, before), []))


def _may_wait_for_later_ones(operations, made):
    stateful = [op for op in made if auto_control_deps.op_is_stateful(op)]
    changed = {
        tensor.name
        for op in stateful
        if op.type not in _READS
        for tensor in op.inputs
        if tensor.dtype == tf.resource
    }
    return all(
        op.type in _READS and op.inputs[0].name not in changed
        for op in operations
        if auto_control_deps.op_is_stateful(op)
    )

"""PowerSGD: gradients of matrices as products of two thin matrices."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.collectives import bucketed_sum
from tfdist.compression._compressor import non_finite_mark, require_positive, working_dtype
from tfdist.compression._exchange import Exchange, all_reduce_bytes


class MatrixState(NamedTuple):
    """State for one matrix of n rows and m columns."""

    start: tf.Tensor  # [m, rank], the right factor of the last step
    residual: tf.Tensor  # [n, m], or [0, 0] without error feedback


class PowerState(NamedTuple):
    """State of :func:`power_sgd` for all gradients."""

    matrices: list[MatrixState]
    step: tf.Tensor  # scalar int32


def power_sgd(rank, *, error_feedback=True):
    """Sends a matrix of n rows and m columns as ``rank`` (n + m) numbers.

    M = G + residual;  P = orthogonalised sum of M Q;  Q = sum of M^T P;  the sum is P Q^T

    Each step does one step of power iteration, which starts from the last step's Q. Kernels of
    more than two dimensions become matrices whose columns are the last dimension. What this would
    not shorten (biases, norms, thin matrices) is summed uncompressed, together with the P's. So a
    step has two all-reduces, one after the other.

    Args:
        rank: the number of columns of P and Q, at least 1. The paper uses 1 to 4.
        error_feedback: False forgets what is not sent.

    Returns:
        An Exchange.

    Reference: Vogels et al. 2019, arXiv:1905.13727, Alg. 1 and 2. (Gradients, not updates, are fed
    back, so that any optimizer may follow; P is orthogonalised by a Cholesky factorisation.)
    """
    require_positive("power_sgd", "rank", rank)

    def init(specs, world_size):
        del world_size
        matrices = []
        for number, (_, (rows, columns), dtype) in enumerate(_matrices(specs, rank)):
            residual = [rows, columns] if error_feedback else [0, 0]
            start = tf.constant(_start(number, columns, rank), working_dtype(dtype))
            matrices.append(MatrixState(start, tf.zeros(residual, dtype)))
        return PowerState(matrices, tf.zeros([], tf.int32))

    def apply(gradients, state, collective, specs):
        chosen = _matrices(specs, rank)
        numbers = [number for number, _, _ in chosen]
        rest = [i for i in range(len(gradients)) if i not in numbers]
        matrices, lefts = [], []
        for (i, shape, dtype), own in zip(chosen, state.matrices, strict=True):
            matrix = tf.reshape(gradients[i], shape)
            matrix = matrix + own.residual if error_feedback else matrix
            matrix = tf.cast(matrix, working_dtype(dtype))
            matrices.append(matrix)
            lefts.append(tf.matmul(matrix, own.start))
        sums = _packed_sum(lefts + [gradients[i] for i in rest], collective)
        lefts = [_orthogonalised(left) for left in sums[: len(lefts)]]
        rights = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, lefts, strict=True)]
        results = dict(zip(rest, sums[len(lefts) :], strict=True))
        rights = _packed_sum(rights, collective)
        new = []
        for k, (i, _, dtype) in enumerate(chosen):
            total = tf.matmul(lefts[k], rights[k], transpose_b=True)
            results[i] = tf.reshape(tf.cast(total, dtype), gradients[i].shape)
            residual = state.matrices[k].residual
            if error_feedback:
                residual = tf.cast(matrices[k] - total / collective.world_size, dtype)
            new.append(MatrixState(_next_start(rights[k], k, state.step), residual))
        sums = [results[i] for i in range(len(gradients))]
        return sums, PowerState(new, state.step + 1)

    def sent_bytes(specs, world_size):
        chosen = {i: shape for i, shape, _ in _matrices(specs, rank)}
        total = 0
        for i, spec in enumerate(specs):
            if i in chosen:
                total += sum(chosen[i]) * rank * working_dtype(spec.dtype).size
            else:
                total += spec.shape.num_elements() * spec.dtype.size
        return all_reduce_bytes(total, world_size)

    def resize(states, specs, world_size):
        del specs
        matrices = []
        for same in zip(*(state.matrices for state in states), strict=True):
            total = sum(np.asarray(m.residual).astype("float64") for m in same)
            residual = (total / world_size).astype(np.asarray(same[0].residual).dtype)
            matrices.append(MatrixState(np.asarray(same[0].start), residual))
        return [PowerState(matrices, np.asarray(states[0].step))] * world_size

    name = f"power_sgd({rank}{'' if error_feedback else ', error_feedback=False'})"
    return Exchange(name, init, apply, sent_bytes, resize)


def _matrices(specs, rank):
    """The number, the shape as a matrix and the dtype of each gradient that becomes shorter."""
    found = []
    for i, spec in enumerate(specs):
        if spec.shape.rank < 2 or 0 in spec.shape.as_list():
            continue
        columns = spec.shape[-1]
        rows = spec.shape.num_elements() // columns
        if (rows + columns) * rank < rows * columns:
            found.append((i, (rows, columns), spec.dtype))
    return found


def _start(number, columns, rank):
    return np.random.default_rng([number, columns, rank]).standard_normal((columns, rank))


def _next_start(right, number, step):
    """The right factor, scaled; where a gradient was zero, random numbers again."""
    largest = tf.reduce_max(tf.abs(right))
    scaled = right / tf.where(largest > 0, largest, 1)
    fresh = tf.random.stateless_normal(right.shape, [number, step], dtype=right.dtype)
    # A column of zeros would stay zero for ever.
    is_dead = tf.reduce_all(scaled == 0, 0, keepdims=True)
    return tf.where(is_dead, fresh, scaled)


def _orthogonalised(left):
    """The columns made orthonormal: P L^-T with L L^T = P^T P."""
    # Scaled first: squares of large elements overflow. NaN and infinities must survive.
    largest = tf.reduce_max(tf.abs(left))
    scaled = left / tf.where(largest > 0, largest, 1) + non_finite_mark(left)
    gram = tf.matmul(scaled, scaled, transpose_a=True)
    small = 1e-6 * tf.linalg.trace(gram) + 1e-20
    gram += tf.eye(gram.shape[0], dtype=gram.dtype) * small
    factor = tf.linalg.cholesky(gram)
    return tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(scaled)))


def _packed_sum(tensors, collective):
    return bucketed_sum(tensors, lambda vector, _: collective.sum(vector))

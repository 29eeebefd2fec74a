"""Exchanges made of others: another one for each variable, or for each part of the training."""

import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compression._compressor import require_fraction, require_positive
from tfdist.compression._exchange import Exchange, as_exchange, compressor_for, through
from tfdist.compression._sparsifiers import dgc_compressor


def by_size(min_size, small, large):
    """Variables of fewer than ``min_size`` elements go through ``small``, others through ``large``.

    Args:
        min_size: number of elements.
        small: None (uncompressed), a Compressor or an Exchange.
        large: the same.
    """
    require_positive("by_size", "min_size", min_size)
    parts = as_exchange(small), as_exchange(large)
    name = f"by_size({min_size}, {parts[0].name}, {parts[1].name})"
    return _choice(name, parts, lambda spec: int(spec.shape.num_elements() >= min_size))


def by_variable(patterns):
    """The first pattern that is found in a variable's path decides; without any, uncompressed.

    Gradients that are ``tf.IndexedSlices`` (of embeddings) are not concerned: they travel as
    they are.

    Args:
        patterns: dict from a regular expression, searched in ``variable.path`` such as
            ``"sequential/dense_1/kernel"``, to None, a Compressor or an Exchange.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    if not isinstance(patterns, dict) or not patterns:
        raise ValueError(
            "by_variable: expected a dict from a regular expression to a compressor, such as "
            f"{{'kernel': power_sgd(4), 'bias': fp16()}}. Received: {patterns!r}."
        )
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, TypeError) as error:
            raise ValueError(
                f"by_variable: {pattern!r} is no regular expression ({error})."
            ) from error
    parts = [as_exchange(part) for part in patterns.values()] + [as_exchange(None)]

    def choose(spec):
        found = [i for i, pattern in enumerate(compiled) if pattern.search(spec.name or "")]
        return found[0] if found else len(parts) - 1

    listed = ", ".join(f"{p!r}: {part.name}" for p, part in zip(patterns, parts, strict=False))
    return _choice(f"by_variable({{{listed}}})", parts, choose)


def dgc(fraction, *, momentum=0.9, warmup_steps=0):
    """Deep gradient compression: :func:`top_k` with the optimizer's momentum taken over.

    Each replica keeps the velocity of what it has not sent, and forgets it where it sends. So use
    plain ``SGD`` with ``momentum=0``; another momentum after this one would count twice.

    Args:
        fraction: how many of all elements are sent, in (0, 1].
        momentum: in [0, 1).
        warmup_steps: steps over which the fraction falls, in five stages, from 1/4 by a factor of
            4 each, to ``fraction``. The paper warms up for 4 epochs.

    Returns:
        A Compressor; with a warm-up an Exchange.

    Reference: Lin et al. 2017, arXiv:1712.01887. (Gradients are not clipped here; the largest of
    each block of neighbours is sent instead of the largest of a tensor.)
    """
    require_fraction("dgc", fraction)
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"dgc: momentum must be a number in [0, 1), got {momentum!r}.")
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(
            f"dgc: warmup_steps must be a whole number from 0 up, got {warmup_steps!r}."
        )
    if not warmup_steps:
        return dgc_compressor(fraction, momentum)
    fractions = [max(fraction, 4.0**-i) for i in range(1, 5)]
    stages = [through(dgc_compressor(f, momentum)) for f in [*fractions, fraction]]
    name = f"dgc({fraction}, momentum={momentum}, warmup_steps={warmup_steps})"
    return _in_stages(name, stages, warmup_steps)


# ------------------------------------------------------------------------------------------


def _choice(name, parts, choose):
    """An exchange that gives each gradient to one of ``parts``, by ``choose(spec) -> index``.

    The choice depends on the specs alone.
    """

    def split(specs):
        members = [[] for _ in parts]
        for i, spec in enumerate(specs):
            members[choose(spec)].append(i)
        return members

    def init(specs, world_size):
        return [
            part.init([specs[i] for i in group], world_size)
            for part, group in zip(parts, split(specs), strict=True)
        ]

    def apply(gradients, state, collective, specs):
        sums, new_state = [None] * len(gradients), []
        for part, group, own in zip(parts, split(specs), state, strict=True):
            own_specs = [specs[i] for i in group]
            totals, own = part.apply([gradients[i] for i in group], own, collective, own_specs)
            new_state.append(own)
            for i, total in zip(group, totals, strict=True):
                sums[i] = total
        return sums, new_state

    def sent_bytes(specs, world_size):
        return sum(
            part.sent_bytes([specs[i] for i in group], world_size)
            for part, group in zip(parts, split(specs), strict=True)
        )

    def resize(states, specs, world_size):
        resized = []
        for number, (part, group) in enumerate(zip(parts, split(specs), strict=True)):
            own = [state[number] for state in states]
            resized.append(part.resize(own, [specs[i] for i in group], world_size))
        return [list(parts_of_one) for parts_of_one in zip(*resized, strict=True)]

    def compressor_of(spec):
        return compressor_for(parts[choose(spec)], spec)

    return Exchange(name, init, apply, sent_bytes, resize, compressor_of=compressor_of)


class _Staged(NamedTuple):
    step: tf.Tensor  # scalar int32
    inner: Any


def _in_stages(name, stages, num_steps):
    """The exchanges ``stages`` one after the other, evenly over ``num_steps``; then the last.

    All must have states of the same structure and shapes, which are handed on.
    """

    def init(specs, world_size):
        return _Staged(tf.zeros([], tf.int32), stages[-1].init(specs, world_size))

    def apply(gradients, state, collective, specs):
        last = len(stages) - 1
        stage = tf.minimum(state.step // max(1, num_steps // last), last)
        branches = [
            lambda part=part: part.apply(gradients, state.inner, collective, specs)
            for part in stages
        ]
        sums, inner = tf.switch_case(stage, branches)
        return sums, _Staged(state.step + 1, inner)

    def resize(states, specs, world_size):
        inner = stages[-1].resize([state.inner for state in states], specs, world_size)
        return [_Staged(np.asarray(states[0].step), one) for one in inner]

    return Exchange(name, init, apply, stages[-1].sent_bytes, resize)

"""A latency-bandwidth model of a training step with N workers: arithmetic, nothing else.

A step is what it computes, and then what it takes to exchange the gradients: to encode and decode
them, to handle them (buckets, copies, updates, residuals), the messages that its collectives are
made of, and the bytes on the link. Nothing of that is taken to overlap: with one thread for each
worker, as measured here, little does.

Reference: the model is Hockney's (1994, "The communication challenge for MPP: Intel Paragon and
Meiko CS-2"): alpha + beta * bytes for each message; ring all-reduce: Patarasuk and Yuan 2009.
"""

from typing import NamedTuple

GOODPUT = 1448 / 1514
"""Payload of a full TCP segment over its Ethernet frame, which is what a link's rate counts."""

LANES = 4
"""Collectives of one step that may be under way at once."""


class Link(NamedTuple):
    """What joins the workers: bits per second in each direction, one-way delay in seconds."""

    rate: float
    delay: float = 0.0


class Codec(NamedTuple):
    """Seconds for each byte of gradient: to encode it, and to decode a payload of it."""

    encode: float = 0.0
    decode: float = 0.0


class Messages(NamedTuple):
    """Processor seconds of a worker for a collective: ``fixed + each * messages``, by primitive."""

    fixed: dict[str, float]
    each: dict[str, float]


class Traffic(NamedTuple):
    """What one worker does in a step to exchange its gradients.

    ``collectives``: how many there are of each primitive ("sum", "gather", "scatter").
    ``sent_bytes``: by one worker. ``encoded_bytes``, ``decoded_bytes``: of gradient.
    """

    gradient_bytes: float
    sent_bytes: float
    collectives: dict[str, int]
    encoded_bytes: float = 0.0
    decoded_bytes: float = 0.0


def num_messages(primitive, workers):
    """The messages that a worker sends in a collective, one after the other.

    An all-reduce goes twice around the ring, an all-gather once; an all-to-all sends to each.
    """
    return {"sum": 2, "gather": 1, "scatter": 1}[primitive] * (workers - 1)


def of_bucket(way, payload_bytes, bucket_bytes, workers):
    """The traffic of one bucket; see ``tfdist.compression.through`` for the ways.

    Args:
        way: "sum", "gather", "parts" or "dense".
        payload_bytes: what a worker sends for it.
    """
    collectives = {"parts": {"scatter": 1, "gather": 1}, "gather": {"gather": 1}}
    # Parts are encoded twice: one by one, and the own part of the sum; so they are decoded.
    encoded = bucket_bytes * (1 + (1 / workers if way == "parts" else 0))
    decoded = bucket_bytes * {"gather": workers, "parts": 2}.get(way, 1)
    return Traffic(bucket_bytes, payload_bytes, collectives.get(way, {"sum": 1}), encoded, decoded)


def together(traffics):
    """The traffic of several buckets."""
    collectives = {}
    for traffic in traffics:
        for primitive, count in traffic.collectives.items():
            collectives[primitive] = collectives.get(primitive, 0) + count
    return Traffic(
        sum(t.gradient_bytes for t in traffics),
        sum(t.sent_bytes for t in traffics),
        collectives,
        sum(t.encoded_bytes for t in traffics),
        sum(t.decoded_bytes for t in traffics),
    )


def step_parts(compute, traffic, workers, link, codec, messages, handling):
    """Seconds of a step, by what they go to; their sum is the step.

    Args:
        compute: seconds of a step without exchange.
        link: a :class:`Link`; a rate of 0 has no limit.
        codec: a :class:`Codec`.
        messages: a :class:`Messages`.
        handling: seconds for each byte of gradient.
    """
    counts = traffic.collectives.items()
    each = {primitive: num_messages(primitive, workers) for primitive in traffic.collectives}
    waits = sum(-(-count // LANES) * each[primitive] for primitive, count in counts)
    return {
        "compute": compute,
        "codec": traffic.encoded_bytes * codec.encode + traffic.decoded_bytes * codec.decode,
        "handling": traffic.gradient_bytes * handling,
        "messages": sum(
            count * (messages.fixed[p] + messages.each[p] * each[p]) for p, count in counts
        ),
        "delay": waits * 2 * link.delay,  # a message is asked for, and comes
        "bytes": 8 * traffic.sent_bytes / (link.rate * GOODPUT) if link.rate else 0.0,
    }


def fit_messages(points):
    """What messages cost: a line for each primitive, by least squares of the relative errors.

    Args:
        points: list of ``(primitive, workers, processor seconds of a collective)``, of at least
            two numbers of workers for each.
    """
    fixed, each = {}, {}
    for primitive in dict.fromkeys(primitive for primitive, _, _ in points):
        pairs = [(num_messages(p, n), seconds) for p, n, seconds in points if p == primitive]
        weights = [1 / seconds**2 for _, seconds in pairs]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, pairs, strict=True)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, pairs, strict=True)) / total
        covariance = sum(
            w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, pairs, strict=True)
        )
        variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, pairs, strict=True))
        each[primitive] = covariance / variance
        fixed[primitive] = max(0.0, mean_y - each[primitive] * mean_x)
    return Messages(fixed, each)


def fit_handling(points):
    """The seconds of handling for each byte of gradient, by least squares of the relative errors.

    Args:
        points: list of ``(measured seconds, seconds without handling, bytes of gradient)``.
    """
    above = sum((m - rest) * size / m**2 for m, rest, size in points)
    return max(0.0, above / sum((size / m) ** 2 for m, _, size in points))

"""How fast one core encodes and decodes gradients, without any network."""

import argparse
import statistics
import time

import compressors
import link
import numpy as np
import tensorflow as tf

from tfdist.collectives import bucket_specs
from tfdist.compression import Compressor
from tfdist.compression._exchange import COMPRESSED_BUCKET_BYTES

MATRICES = [(2048, 2048), (2048, 1077)]  # 25.6 MB


class OneMember:
    """The Collective of a world of one: what is sent comes back at once."""

    world_size = 1

    def sum(self, tensor):
        return tensor

    def gather(self, tensor):
        return tensor[None]

    def scatter(self, tensor):
        return tensor


def seconds_per_pass(function, arguments, repeats):
    """The median and the least time of ``function`` over all ``arguments``, after a warm-up.

    Args:
        function: takes an element of ``arguments``, returns what takes its place.
        arguments: a list; all of it is one pass.
    """
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        arguments = [function(*each) for each in arguments]
        times.append(time.perf_counter() - start)
    return {"median": statistics.median(times[1:]), "min": min(times[1:])}


def compressor_times(compressor, vectors, repeats):
    """Encodes and decodes buckets, compiled as in the library's exchange."""
    encode = tf.function(compressor.encode, jit_compile=True, autograph=False)
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in vectors]
    decoders = {spec: _decoder(compressor, spec) for spec in specs}

    def encode_again(vector, state):
        return vector, encode(vector, state)[1]

    def decode_again(spec, payload):
        decoders[spec](payload)
        return spec, payload

    states = [compressor.init(spec) for spec in specs]
    encoding = seconds_per_pass(encode_again, list(zip(vectors, states, strict=True)), repeats)
    payloads = [tuple(encode(v, s)[0]) for v, s in zip(vectors, states, strict=True)]
    decoding = seconds_per_pass(decode_again, list(zip(specs, payloads, strict=True)), repeats)
    num_bytes = sum(map(compressor.payload_bytes, specs))
    return {"encode": encoding, "decode": decoding, "payload_bytes": num_bytes}


def _decoder(compressor, spec):
    return tf.function(
        lambda payload: compressor.decode(payload, spec), jit_compile=True, autograph=False
    )


def exchange_times(exchange, gradients, repeats):
    """A whole exchange, which can't be taken apart into encode and decode, in a world of one."""
    specs = [tf.TensorSpec(g.shape, g.dtype) for g in gradients]

    @tf.function(autograph=False)
    def apply(gradients, state):
        _, state = exchange.apply(gradients, state, OneMember(), specs)
        return gradients, state

    state = exchange.init(specs, OneMember.world_size)
    num_bytes = exchange.sent_bytes(specs, 2)  # of two workers each sends the payload once
    encoding = seconds_per_pass(apply, [(gradients, state)], repeats)
    return {"encode": encoding, "payload_bytes": num_bytes}


def times_of(compression, gradients, repeats):
    if not isinstance(compression, Compressor):
        return exchange_times(compression, gradients, repeats)
    flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)
    sizes = [spec.shape[0] for spec in bucket_specs([flat], COMPRESSED_BUCKET_BYTES)]
    return compressor_times(compression, tf.split(flat, sizes), repeats)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--gradients", type=int, choices=link.HIDDEN, help="those of a model")
    parser.add_argument("--plain", action="store_true", help="without error feedback, too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    options, _ = parser.parse_known_args()
    shapes = MATRICES
    if options.gradients:
        widths = (784, *link.HIDDEN[options.gradients], 10)
        shapes = link.shapes(widths)
    rng = np.random.default_rng(0)
    gradients = [
        tf.constant(rng.standard_normal(shape, dtype=np.float32) * np.float32(1e-3))
        for shape in shapes
    ]
    results = {"bytes": 4 * sum(int(np.prod(shape)) for shape in shapes)}
    link.meet(options.rank, options.world_size)
    for name in options.contenders.split(","):
        results[name] = times_of(compressors.make(name), gradients, options.repeats)
        if options.plain and name in compressors.WITH_ERROR_FEEDBACK:
            without = compressors.make(name, error_feedback=False)
            results[name]["encode_plain"] = times_of(without, gradients, options.repeats)["encode"]
    link.report(results)
    link.stay()


if __name__ == "__main__":
    main()

"""The cases of the conformance suite with the model split over devices, and over two workers."""

import dataclasses

import input_cases
import metric_cases
import model_cases
import training_cases

# Models of other shapes (subclasses of keras.Model have no stages of their own) are left out.
_TRIED = """
    functional sequential_deferred shared_layers regularizers constraints embedding
    generator_uneven_first_batch sample_weights class_weights validation_settings
    uneven_last_batch metrics_binary predict_3_steps_per_execution
    sgd adam momentum adamw clipnorm clipvalue global_clipnorm
    ema ema_overwrite accumulation schedule mixed_float16 mixed_bfloat16
    execution_3_steps on_batch fit_twice_and_recompile warmed_up
""".split()  # noqa: SIM905
_ON_WORKERS = {"adam", "functional", "global_clipnorm", "uneven_last_batch", "execution_3_steps"}
_IN_PROCESSES = {"adam", "embedding", "global_clipnorm", "uneven_last_batch", "execution_3_steps"}
_COMPRESSED = {"adam", "clipnorm", "functional"}


def _topologies(name):
    workers = ["split_workers"] if name in _ON_WORKERS else []
    processes = ["split_processes"] if name in _IN_PROCESSES else []
    compressed = ["split_compressed"] if name in _COMPRESSED else []
    return ("split_stages", "split_all", *workers, *processes, *compressed)


CASES = [
    dataclasses.replace(case, topologies=_topologies(case.name), check=None)
    for table in (model_cases, input_cases, metric_cases, training_cases)
    for case in table.CASES
    if case.compare and case.name in _TRIED
]

"""Two workers over a longer run, and when one of them is stuck or dies."""

import os
import subprocess
import sys
import textwrap

PREAMBLE = """
    import os, signal, sys, time
    import keras, numpy as np, tensorflow as tf, tfdist

    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=8)
    strategy = tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    rank = strategy.board.rank
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.zeros((640, 8), "float32"), np.zeros((640,), "float32")

    def fit(at_batch, **arguments):
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=at_batch)
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[callback], **arguments)
"""


def run_two(tmp_path, script):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(script))
    command = [sys.executable, "-m", "tfdist.launch", "run", "-n", "2", str(path)]
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )


def test_steps_leave_no_threads_behind(tmp_path):
    """TensorFlow's own time limit starts two threads for each collective."""
    script = """
        counts = {}

        def count(batch, logs):
            counts[len(counts)] = len(os.listdir("/proc/self/task"))

        fit(count, epochs=3)  # 120 steps with two collectives each
        print("threads", counts[20], counts[119])
        assert counts[119] <= counts[20] + 20, counts
    """
    done = run_two(tmp_path, script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("threads") == 2


def test_a_stuck_worker_is_not_waited_for_without_end(tmp_path):
    script = """
        def stop_answering(batch, logs):
            if rank == 1 and batch == 3:
                time.sleep(60)

        try:
            fit(stop_answering)
        except tf.errors.DeadlineExceededError as error:
            print("raised", error, flush=True)
            os._exit(7)
    """
    done = run_two(tmp_path, script)
    assert done.returncode == 7, done.stdout[-3000:] + done.stderr[-3000:]
    assert "tfdist: a step did not end within 8 s" in done.stdout


def test_a_frozen_worker_is_noticed_by_its_peer(tmp_path):
    script = """
        def freeze(batch, logs):
            if rank == 1 and batch == 3:
                os.kill(os.getpid(), signal.SIGSTOP)

        began = time.monotonic()
        try:
            fit(freeze)
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError) as error:
            print("noticed after", time.monotonic() - began, flush=True)
            os._exit(7)
    """
    done = run_two(tmp_path, script)
    assert done.returncode == 7, done.stdout[-3000:] + done.stderr[-3000:]
    assert "noticed after" in done.stdout


def test_compressions_that_differ_are_refused(tmp_path):
    """At the start, on both workers, with both named."""
    path = tmp_path / "train.py"
    path.write_text(
        "import json, os, tfdist\n"
        "from tfdist import compression\n"
        "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "made = compression.top_k(0.01) if rank else compression.fp16()\n"
        "tfdist.MultiWorkerMirroredStrategy(compression=made)\n"
    )
    command = [sys.executable, "-m", "tfdist.launch", "run", "-n", "2", str(path)]
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "strategy: compression must be the same on all workers, but it differs" in output
    assert "error_feedback(fp16())" in output
    assert "error_feedback(top_k(0.01))" in output

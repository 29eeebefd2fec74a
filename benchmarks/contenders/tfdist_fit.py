"""tfdist: Keras 3's ``model.fit`` under ``tfdist.MultiWorkerMirroredStrategy``."""

import harness
import keras

from tfdist import MultiWorkerMirroredStrategy

run = harness.Run()
run.mark("import")
strategy = MultiWorkerMirroredStrategy()
run.mark("cluster")
harness.fit(run, keras, strategy)

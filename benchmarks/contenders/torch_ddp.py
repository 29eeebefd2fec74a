"""PyTorch's ``DistributedDataParallel`` over gloo, with its defaults."""

import itertools
import json
import os

import harness
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

run = harness.Run()
run.mark("import")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
config = json.loads(os.environ["TF_CONFIG"])
workers, rank = config["cluster"]["worker"], config["task"]["index"]
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers)
)
run.mark("cluster")

widths = (harness.FEATURES, *run.hidden)
layers = itertools.chain.from_iterable(
    (nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in itertools.pairwise(widths)
)
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(widths[-1], harness.CLASSES)))
optimizer = torch.optim.SGD(model.parameters(), harness.LEARNING_RATE, harness.MOMENTUM)
loss_of = nn.CrossEntropyLoss()
dataset = TensorDataset(*map(torch.from_numpy, run.data()))
loader = DataLoader(
    dataset,
    batch_size=run.batch_size // len(workers),
    sampler=DistributedSampler(dataset, shuffle=False),
    drop_last=not run.finite,
)
batches = itertools.chain.from_iterable(itertools.repeat(loader))

for epoch in range(run.epochs):
    total = 0.0
    for features, labels in loader if run.finite else itertools.islice(batches, run.steps):
        optimizer.zero_grad()
        loss = loss_of(model(features), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        run.step()
    print(f"epoch {epoch + 1}: loss {float(total) / run.steps:.4f}")
run.report(sum(p.numel() for p in model.parameters()), float(total) / run.steps)

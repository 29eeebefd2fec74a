"""PyTorch's ``DistributedDataParallel`` over gloo, with one of its communication hooks or none."""

import itertools
import json
import math
import os

import harness
import link
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK, START = 4, 2  # of PowerSGD: of the matrices; the first steps, which are uncompressed
LEAST_RATE = 2  # PowerSGDState's default min_compression_rate


def with_hook(model, contender):
    """The model in DDP, and what a worker gives to all-reduce in a step, in bytes."""
    ddp = DistributedDataParallel(model)
    shapes = [tuple(p.shape) for p in model.parameters()]
    dense = 4 * sum(map(math.prod, shapes))
    if contender == "torch_fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return ddp, dense // 2
    if contender == "torch_power_sgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=START
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp, 4 * sum(map(power_sgd_numbers, shapes))
    return ddp, dense


def power_sgd_numbers(shape):
    """How many numbers PyTorch's hook sends of a gradient."""
    low_rank = sum(shape) * min(RANK, *shape) if len(shape) == 2 else math.inf
    return low_rank if low_rank * LEAST_RATE < math.prod(shape) else math.prod(shape)


run = link.Run()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
layers = itertools.chain.from_iterable(
    (nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in itertools.pairwise(run.widths)
)
model = nn.Sequential(*list(layers)[:-1])
num_parameters = sum(p.numel() for p in model.parameters())
if run.is_alone:
    run.describe(num_parameters, 0)
else:
    workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{workers[0]}", rank=run.rank, world_size=run.world_size
    )
    model, num_bytes = with_hook(model, run.contender)
    run.describe(num_parameters, link.all_reduce_bytes(num_bytes, run.world_size))
optimizer = torch.optim.SGD(model.parameters(), harness.LEARNING_RATE)
loss_of = nn.CrossEntropyLoss()
features, labels = map(torch.from_numpy, run.data())
first = 0 if run.is_alone else run.rank * run.batch_size
batches = [
    (features[start : start + run.batch_size], labels[start : start + run.batch_size])
    for start in range(first, len(features), run.global_batch_size)
]

for batch, targets in itertools.islice(itertools.cycle(batches), run.num_steps):
    optimizer.zero_grad()
    loss_of(model(batch), targets).backward()
    optimizer.step()
    run.step()
link.stay()

"""Job of test_cluster.py: every rank swaps words with its mirror image, rank 0 writes down what all of them got."""

import json
import os
import socket
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
mirror = size - 1 - rank
word = world.sendrecv(f"{rank} on {socket.gethostname()}", dest=mirror, source=mirror)
library = MPI.Get_library_version().split()[0]
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
lines = world.gather([sys.argv[2], socket.gethostname(), library, gpus, word])
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(lines, file)

"""A rank whose memory is full of remains when MPI starts: `python dirty_heap.py [plain]`; prints the world's size."""

import ctypes
import os
import sys

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = []
for size in [1 << n for n in range(6, 18)] * 101:
    block = libc.malloc(size)
    ctypes.memmove(block, os.urandom(size), size)
    blocks.append(block)
for block in blocks[::2]:  # the others keep the holes apart, so that they are used again as they are
    libc.free(block)
if "plain" in sys.argv:
    from mpi4py import MPI

    print("size", MPI.COMM_WORLD.Get_size(), flush=True)
else:
    from areal_hpc.codec import Codec
    from areal_hpc.comm import World
    from areal_hpc.messages import MESSAGE_TYPES

    world = World(Codec(MESSAGE_TYPES), 1)
    print("size", world.size, flush=True)
    world.close(30)

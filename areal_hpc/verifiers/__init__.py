"""Reward functions that decide by computing: each module has one `reward(prompt, completion, metadata)`.

They run in the processes of `areal_hpc.rewards`. Neither torch nor MPI is imported here.
"""

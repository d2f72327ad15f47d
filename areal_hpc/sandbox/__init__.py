"""Runs one untrusted program under limits, apart from the user's files, processes and network.

`box.Sandbox` is the side of the caller; `init` and whatever it imports run inside, on the standard library alone.
`python -m areal_hpc.sandbox` says what isolation this machine offers.
"""

"""`areal-hpc sweep`: many runs, submitted, watched and tabulated."""

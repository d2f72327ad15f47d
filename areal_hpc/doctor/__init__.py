"""`areal-hpc doctor`: would this allocation carry a run?"""

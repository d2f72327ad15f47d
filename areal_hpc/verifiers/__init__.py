"""Reward functions for answers that can be checked."""

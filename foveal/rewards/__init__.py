"""Ready-made reward functions, named as `foveal.rewards.MODULE:NAME`."""

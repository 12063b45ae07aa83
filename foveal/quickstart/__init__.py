"""A tiny model, a generated picture task, a supervised warm-up, and GRPO on top: `foveal quickstart`."""

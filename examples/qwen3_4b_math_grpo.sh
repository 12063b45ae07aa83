#!/usr/bin/env bash
# GRPO on text mathematics.
# Run from the checkout's root; further KEY=VALUE arguments override what stands here.

set -x

export PYTHONUNBUFFERED=1

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}  # hub id or local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path="${MODEL_PATH}" \
    trainer.experiment_name=qwen3_4b_math_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"

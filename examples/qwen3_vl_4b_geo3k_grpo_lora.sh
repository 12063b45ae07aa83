#!/usr/bin/env bash
# GRPO on Geometry3k with LoRA, 1 GPU.
# Run from the checkout's root; further KEY=VALUE arguments override what stands here.

set -x

export PYTHONUNBUFFERED=1

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-VL-4B-Instruct}  # hub id or local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.model.lora.rank=64 \
    worker.actor.model.lora.alpha=64 \
    worker.actor.optim.lr=1e-5 \
    worker.rollout.tensor_parallel_size=1 \
    trainer.experiment_name=qwen3_vl_4b_geo_grpo_lora \
    trainer.n_gpus_per_node=1 \
    "$@"

#!/usr/bin/env bash
# CISPO on Geometry3k. clip_ratio_low=0 keeps importance ratios within [1, 5]; 1 means no lower bound.
# Run from the checkout's root; further KEY=VALUE arguments override what stands here.

set -x

export PYTHONUNBUFFERED=1

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # hub id or local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.loss_type=cispo \
    worker.actor.clip_ratio_low=0 \
    worker.actor.clip_ratio_high=4 \
    trainer.experiment_name=qwen2_5_vl_7b_geo_cispo \
    trainer.n_gpus_per_node=8 \
    "$@"

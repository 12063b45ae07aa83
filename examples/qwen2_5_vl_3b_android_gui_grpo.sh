#!/usr/bin/env bash
# GRPO on screenshots of a phone: which of three answers to press, 2 GPUs.
# Run from the checkout's root; further KEY=VALUE arguments override what stands here.

set -x

export PYTHONUNBUFFERED=1

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # hub id or local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=yuehua-s/numbergame@train \
    data.val_files=yuehua-s/numbergame@test \
    data.max_prompt_length=3072 \
    data.max_response_length=64 \
    data.rollout_batch_size=32 \
    data.val_batch_size=60 \
    data.format_prompt=./examples/format_prompt/android_gui.jinja \
    algorithm.kl_coef=4e-2 \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.global_batch_size=32 \
    worker.actor.max_grad_norm=0.1 \
    worker.actor.optim.lr=1e-5 \
    worker.actor.optim.weight_decay=0.1 \
    worker.actor.optim.lr_warmup_ratio=0.05 \
    worker.rollout.n=8 \
    worker.rollout.limit_images=1 \
    worker.rollout.tensor_parallel_size=1 \
    worker.reward.reward_function=./examples/reward_function/android_gui.py:compute_score \
    trainer.total_epochs=3 \
    trainer.experiment_name=qwen2_5_vl_3b_android_gui_grpo \
    trainer.n_gpus_per_node=2 \
    "$@"

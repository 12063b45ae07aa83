"""`foveal merge`. PyTorch is imported once its options are known to be right: `--help` answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from foveal.errors import CheckpointError
from foveal.track.console import note


def merge_command(argv: list[str]) -> int:
    """`foveal merge` and `scripts/model_merger.py`.

    Returns:
        0

    Raises:
        CheckpointError: as `export` and `upload`.
    """
    parser = argparse.ArgumentParser(prog="foveal merge", description="Turn a checkpoint into a Hugging Face folder.")
    parser.add_argument(
        "--local_dir", type=Path, required=True, help="the folder global_step_N/actor of a run, of EasyR1 too"
    )
    parser.add_argument("--target", type=Path, help="folder to write (default: LOCAL_DIR/huggingface)")
    parser.add_argument("--dtype", metavar="TYPE", help="bf16, fp16 or fp32 (default: that of the source model)")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, for peft (default folder: LOCAL_DIR/lora_adapter)"
    )
    parser.add_argument(
        "--lora_alpha", type=float, metavar="ALPHA", help="of adapters that EasyR1 trained, if its files don't tell"
    )
    parser.add_argument("--hf_upload_path", metavar="ID", help="Hugging Face repository to push the folder to")
    options = parser.parse_args(argv)

    from foveal.train.checkpoint import actor_folder
    from foveal.train.easyr1_export import export_easyr1, export_easyr1_adapter
    from foveal.train.export import export, export_adapter
    from foveal.train.hf_folder import DTYPES
    from foveal.train.rank_files import has_rank_files

    if options.dtype not in (None, *DTYPES):
        parser.error(f"--dtype {options.dtype}: allowed are {', '.join(DTYPES)}")
    actor = actor_folder(options.local_dir)
    if has_rank_files(actor):
        write_easyr1 = export_easyr1_adapter if options.adapter else export_easyr1
        folder = write_easyr1(actor, options.target, options.dtype, lora_alpha=options.lora_alpha)
    else:
        write = export_adapter if options.adapter else export
        folder = write(actor, options.target, options.dtype)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    note(
        f"saved {size / 1e9:.3g} GB of weights{'' if options.adapter else ', tokenizer'} and configuration to {folder}"
    )
    if options.hf_upload_path:
        note(f"uploaded to {upload(folder, options.hf_upload_path)}")
    return 0


def upload(folder: Path, repo_id: str) -> str:
    """Pushes a Hugging Face folder to the Hub, making the repository when it is absent; returns its address.

    Raises:
        CheckpointError: the Hub cannot be reached or refuses; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo_id, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder)
    except Exception as error:  # the HTTP client's own errors share no base with the Hub's
        raise CheckpointError(
            f"--hf_upload_path {repo_id}: the upload failed ({type(error).__name__}: {error}). The model lies in "
            f"{folder}; log in with `hf auth login` and repeat, or push it with `hf upload {repo_id} {folder}`."
        ) from error
    return str(address)

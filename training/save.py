"""Writes the pipeline in half precision, so that it loads in single."""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import torch
from diffusers import QwenImagePipeline


def save(pipe: QwenImagePipeline, folder: Path, archive: Path | None = None) -> None:
    """The folder for `from_pretrained`, and the same as one file, for machines that give back only a few."""
    small = {name: copy.deepcopy(getattr(pipe, name)).to("cpu", torch.float16) for name in ("transformer", "vae", "text_encoder")}
    QwenImagePipeline(scheduler=pipe.scheduler, tokenizer=pipe.tokenizer, **small).save_pretrained(folder)
    # diffusers loads in float32 unless told otherwise; transformers in what its config says
    for part in small:
        config = folder / part / "config.json"
        told = single(json.loads(config.read_text()))
        told.pop("_name_or_path", None)  # of the folder that `--start` named
        config.write_text(json.dumps(told, indent=2) + "\n")
    tokens = folder / "tokenizer" / "tokenizer.json"
    tokens.write_text(json.dumps(json.loads(tokens.read_text("utf-8")), ensure_ascii=False, separators=(",", ":")), "utf-8")
    for file in folder.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    if archive:
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, arcname=folder.name)


def single(config: dict) -> dict:
    """The config with every dtype in it, of parts too, float32."""
    return {k: "float32" if k == "dtype" else single(v) if isinstance(v, dict) else v for k, v in config.items()}

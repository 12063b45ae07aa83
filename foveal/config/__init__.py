"""Every key of a run, with EasyR1's names: schema, reading, checking, printing. Imports no torch, no transformers."""

from foveal.config.load import load_config, render
from foveal.config.schema import Config

__all__ = ["Config", "load_config", "render"]

"""A model loader of vLLM that streams the weights of a checkpoint: import it, and pass load_format="tstore".

    from vllm import LLM

    import vllm_loader
    LLM("config-and-tokenizer/", load_format="tstore",
        model_loader_extra_config={"url": "s3://bucket/run", "group": "model"})

The folder has the configuration and the tokenizer; the tensors have the names that Hugging Face gives them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import tstore.sync as tstore


@register_model_loader("tstore")
class Loader(BaseModelLoader):
    """Loads the weights of the newest step; `model_loader_extra_config` has a url, and options of `stream`."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self._url = options.pop("url")
        self._options = options

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: weights are streamed from the store."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Hand each tensor to the model while the next ones are read."""
        model.load_weights(tstore.torch.stream(self._url, **self._options))
